"""Split masters: BF16 weight and INT16 give the FP32 master back, whatever its bits and strides."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from muonloom.math.split import has_overflow, join_, low_halves, settle_ties_

# Upper halves of positive masters: zero and the denormals, around 2**-126, around 1, the largest finite.
UPPER_HALVES = [
    *(0x0000, 0x0001, 0x0002, 0x007E, 0x007F, 0x0080, 0x0081),
    *(0x3F7F, 0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x7F00, 0x7F7E, 0x7F7F),
]
UNITS = {
    "contiguous": lambda flat: flat,
    "transposed": lambda flat: flat.view(512, -1).t(),
    "rows": lambda flat: flat.view(512, -1)[1::2],
    "columns": lambda flat: flat.view(512, -1)[:, 3:17:2],
    "three axes": lambda flat: flat.view(64, 8, -1).permute(2, 0, 1)[1:, ::3],
    "one": lambda flat: flat[0x8000],
    "none": lambda flat: flat[:0],
}


def from_bits(bits: Tensor) -> Tensor:
    """FP32 numbers from unsigned 32-bit patterns in INT64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def masters_of(upper_half: int) -> Tensor:
    """All 65536 masters with this upper half, and their negatives."""
    positive = (upper_half << 16) + torch.arange(1 << 16)
    return from_bits(torch.cat((positive, positive + (1 << 31))))


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def split_and_join(master: Tensor) -> tuple[Tensor, Tensor]:
    """Settle `master` in place; return its weight, and what is joined again."""
    settle_ties_(master)
    weight = master.to(torch.bfloat16)
    low = torch.empty_like(weight, dtype=torch.int16)
    low_halves(master, low)
    out = torch.full_like(master, math.nan)
    join_(weight, low, out)
    return weight, out


@pytest.mark.parametrize("upper_half", UPPER_HALVES, ids=hex)
def test_every_master_comes_back_bit_for_bit(upper_half: int) -> None:
    master = masters_of(upper_half)
    rounded_before = master.to(torch.bfloat16)

    weight, joined = split_and_join(master)

    assert torch.equal(bits_of(joined), bits_of(master))
    assert torch.equal(bits_of(weight), bits_of(rounded_before))


@pytest.mark.parametrize("upper_half", UPPER_HALVES, ids=hex)
def test_the_low_half_is_the_masters_bits_less_the_weights(upper_half: int) -> None:
    master = masters_of(upper_half)
    settle_ties_(master)
    low = torch.empty(master.shape, dtype=torch.int16)

    low_halves(master, low)

    high = bits_of(master.to(torch.bfloat16)).to(torch.int64) << 16
    difference = bits_of(master).to(torch.int64) - high
    assert torch.equal(difference, low.to(torch.int64))


@pytest.mark.parametrize("upper_half", UPPER_HALVES, ids=hex)
def test_settling_moves_only_ties_that_round_down_and_those_once(upper_half: int) -> None:
    master = masters_of(upper_half)
    before = bits_of(master).clone()

    settle_ties_(master)
    moved = (bits_of(master) != before).nonzero().flatten().tolist()
    settled = bits_of(master).clone()
    settle_ties_(master)

    ties = [0x8000, 0x18000] if upper_half % 2 == 0 else []
    assert moved == ties
    assert (before - settled)[ties].tolist() == [1] * len(ties)
    assert torch.equal(bits_of(master), settled)


def test_an_unsettled_tie_does_not_come_back() -> None:
    tie = from_bits(torch.tensor([0x3F808000]))
    weight, low, out = tie.to(torch.bfloat16), torch.empty(1, dtype=torch.int16), torch.empty(1)

    low_halves(tie, low)
    join_(weight, low, out)

    assert not torch.equal(out, tie)


def test_zeros_and_infinities_keep_their_signs() -> None:
    master = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    before = bits_of(master).clone()

    weight, joined = split_and_join(master)

    assert torch.equal(bits_of(joined), before)
    assert torch.equal(bits_of(weight), (before >> 16).to(torch.int16))


@pytest.mark.parametrize("sign", [0, 1 << 31], ids=["positive", "negative"])
def test_a_nan_stays_a_nan(sign: int) -> None:
    master = from_bits(sign + 0x7F800000 + torch.arange(1, 1 << 23, 127))

    weight, joined = split_and_join(master)

    assert bool(master.isnan().all())
    assert bool(weight.isnan().all())
    assert bool(joined.isnan().all())


def test_finite_masters_that_round_to_infinity_come_back_but_are_told() -> None:
    bits = 0x7F7F0000 + torch.arange(1 << 16)
    master = from_bits(bits)

    weight, joined = split_and_join(master)

    infinite = weight.isinf()
    assert torch.equal(infinite, bits >= 0x7F7F8000)
    assert float(master[infinite][0]) == 2.0**128 - 2.0**119
    assert torch.equal(joined, master)
    assert bool(has_overflow(weight[infinite][:1]))
    assert not bool(has_overflow(weight[~infinite]))


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("scratch", [None, torch.float32, torch.int32], ids=str)
def test_any_strides(unit, scratch: torch.dtype | None) -> None:
    flat = masters_of(0x3F80).clone()
    untouched = bits_of(flat).clone()
    master = unit(flat)
    expected = unit(flat.clone()).clone()
    settle_ties_(expected)
    buffer = None if scratch is None else unit(torch.full_like(flat, 5.0).to(scratch))
    weight, low = (unit(torch.full_like(flat, 3).to(d)) for d in (torch.bfloat16, torch.int16))
    out = unit(torch.full_like(flat, math.nan))

    settle_ties_(master, buffer)
    weight.copy_(master)
    low_halves(master, low)
    join_(weight, low, out, buffer)

    assert torch.equal(bits_of(master), bits_of(expected))
    assert torch.equal(bits_of(out), bits_of(expected))
    # What lies between the strides keeps its bits.
    unit(flat).copy_(unit(untouched.view(torch.float32)))
    assert torch.equal(bits_of(flat), untouched)


def cases_of_overflow() -> Iterator[tuple[str, list[float], bool]]:
    largest = float(torch.finfo(torch.bfloat16).max)
    yield "finite", [0.0, -0.0, 1.0, largest, -largest], False
    yield "positive infinity", [1.0, math.inf, 2.0], True
    yield "negative infinity", [-math.inf], True
    yield "both", [math.inf, -math.inf], True
    yield "only a NaN", [math.nan, 1.0], False
    yield "a NaN as well", [math.nan, 1.0, -math.inf], True
    yield "nothing", [], False


@pytest.mark.parametrize(("numbers", "expected"), [c[1:] for c in cases_of_overflow()])
@pytest.mark.parametrize("scratch", [None, torch.bfloat16, torch.int16], ids=str)
def test_overflow_is_an_infinity(
    numbers: list[float], expected: bool, scratch: torch.dtype | None
) -> None:
    weight = torch.tensor(numbers, dtype=torch.bfloat16)
    before = bits_of(weight).clone()

    found = has_overflow(
        weight, None if scratch is None else torch.empty_like(weight, dtype=scratch)
    )

    assert found.dtype == torch.bool
    assert found.shape == ()
    assert bool(found) is expected
    assert torch.equal(bits_of(weight), before)


def test_every_large_bfloat16_is_judged_alone() -> None:
    magnitudes = torch.arange(0x7F00, 0x8000)
    bits = torch.cat((magnitudes, magnitudes - (1 << 15)))
    weights = bits.to(torch.int16).view(torch.bfloat16)
    infinite = [i for i, weight in enumerate(weights.split(1)) if bool(has_overflow(weight))]
    assert infinite == weights.isinf().nonzero().flatten().tolist()


def test_65536_infinities_are_not_counted_away() -> None:
    assert bool(has_overflow(torch.full((1 << 16,), math.inf, dtype=torch.bfloat16)))


def test_nothing_large_is_allocated_where_scratch_is_given() -> None:
    master, scratch, out = torch.randn(3, 1 << 16).unbind()
    weight, low = master.to(torch.bfloat16), torch.empty(1 << 16, dtype=torch.int16)
    small = torch.empty(1 << 16, dtype=torch.int16)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        settle_ties_(master, scratch)
        low_halves(master, low)
        join_(weight, low, out, scratch)
        has_overflow(weight, small)

    allocated = [e.cpu_memory_usage for e in traced.events() if e.cpu_memory_usage > 0]
    assert max(allocated, default=0) <= 64
