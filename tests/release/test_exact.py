"""What was released comes back bit for bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import functools
from itertools import product

import pytest
import torch
from torch import Tensor

from muonloom.hollow import is_hollow
from release.support import (
    ARRANGEMENTS,
    DTYPES,
    NAMES,
    PLACEMENTS,
    SPLITTABLE,
    Run,
    build,
    everything_but_state,
    has_storage,
)
from staging.support import BACKENDS, assert_same_bits, on_backend

CASES = [
    (dtypes, placement)
    for dtypes, placement in product(DTYPES, PLACEMENTS)
    if "split" not in placement or dtypes in SPLITTABLE
]
WRITTEN = [
    *(
        (arrangement, "bf16", placement)
        for arrangement in ARRANGEMENTS
        for placement in ("device", "host")
    ),
    *((arrangement, "all three", "host") for arrangement in ARRANGEMENTS),
    # An FP8 weight is no half of a master; for engines see test_engines.py.
    *(
        (arrangement, "bf16", "split")
        for arrangement in ("bf16 in place", "bf16 alone", "bf16 beside")
    ),
]


@functools.cache
def untouched(
    dtypes: str, placement: str, arrangement: str | None, seeds: tuple[int, ...]
) -> dict[str, Tensor]:
    """The contents after the same steps without any release."""
    return build(dtypes, placement, arrangement).step(*seeds).contents()


def cycle(run: Run, *, spoil: bool = True) -> None:
    """Release and resume; check that all went, and that all came back."""
    before = run.contents()
    tensors = list(everything_but_state(run))
    looks = [(id(t), type(t), t.shape, t.stride(), t.dtype) for t in tensors]
    report = run.opt.release(model=run.model)
    assert report.kept_weights == ()
    assert not any(has_storage(tensor) for tensor in tensors)
    if spoil:
        junk = [
            torch.full((4096,), 7.0) for _ in range(8)
        ]  # what freed memory is used for meanwhile
        del junk
    run.opt.resume()
    assert [(id(t), type(t), t.shape, t.stride(), t.dtype) for t in tensors] == looks
    assert not any(is_hollow(tensor) for tensor in tensors)
    assert_same_bits(before, run.contents())


@pytest.mark.parametrize(("dtypes", "placement"), CASES)
def test_weights_state_and_what_follows(dtypes: str, placement: str) -> None:
    run = build(dtypes, placement).step(0, 1)
    cycle(run)
    run.step(2)
    cycle(run)
    run.step(3)
    assert_same_bits(untouched(dtypes, placement, None, (0, 1, 2, 3)), run.contents())


@pytest.mark.parametrize(("arrangement", "dtypes", "placement"), WRITTEN)
def test_weights_that_writers_write(arrangement: str, dtypes: str, placement: str) -> None:
    run = build(dtypes, placement, arrangement).step(0, 1)
    cycle(run)
    run.step(2)
    assert_same_bits(untouched(dtypes, placement, arrangement, (0, 1, 2)), run.contents())


BOTH_KINDS = [
    *((arrangement, "device") for arrangement in (None, "bf16 alone", "fp8 alone")),
    *((arrangement, "host") for arrangement in (None, "fp8 alone")),
    *((arrangement, "split") for arrangement in (None, "bf16 alone")),
]


@pytest.mark.parametrize(("arrangement", "placement"), BOTH_KINDS)
def test_before_the_first_step(arrangement: str | None, placement: str) -> None:
    run = build("bf16 and fp32", placement, arrangement)
    cycle(run)
    run.step(0, 1)
    wanted = untouched("bf16 and fp32", placement, arrangement, (0, 1))
    assert_same_bits(wanted, run.contents())


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_parameters_that_get_their_first_gradient_afterwards(placement: str) -> None:
    runs = [build("bf16 and fp32", placement) for _ in range(2)]
    for run, released in zip(runs, (True, False), strict=True):
        run.step(0, without=("idle", "up", "norm", "scale"))
        if released:
            cycle(run)
        run.step(1, without=("stack",)).step(2, without=())
    assert_same_bits(runs[1].contents(), runs[0].contents())


@pytest.mark.parametrize(("arrangement", "placement"), BOTH_KINDS)
def test_after_a_checkpoint_was_loaded(arrangement: str | None, placement: str) -> None:
    source = build("bf16", placement, arrangement).step(0, 1)
    run = build("bf16", placement, arrangement, seed=1)
    for name, param in run.params.items():
        if has_storage(param):
            param.data.copy_(source[name])
    for name, writer in run.writers.items():
        for target, values in zip(writer.tensors(), source.writers[name].tensors(), strict=True):
            target.copy_(values)
    run.opt.load_state_dict(copy.deepcopy(source.opt.state_dict()))
    cycle(run)
    assert_same_bits(source.step(2).state(), run.step(2).state())


def test_a_checkpoint_loaded_between_two_releases_is_what_comes_back() -> None:
    source = build("bf16", "device").step(0, 1)
    run = build("bf16", "device").step(5)
    cycle(run)
    run.model.load_state_dict(source.model.state_dict())
    run.opt.load_state_dict(copy.deepcopy(source.opt.state_dict()))
    cycle(run)
    assert_same_bits(source.step(2).contents(), run.step(2).contents())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("placement", ["host", "split"])
def test_release_waits_for_what_still_moves(backend: str, placement: str) -> None:
    """No drain before it: the last units of the step are still on their way."""
    with on_backend(BACKENDS[backend]):
        run = build("bf16 and fp32", placement)
        for seed in (0, 1, 2):
            run.give_gradients(seed)
            run.opt.step()
            run.opt.release()
            run.opt.resume()
        contents = run.contents()
    wanted = untouched("bf16 and fp32", placement, None, (0, 1, 2))
    assert_same_bits(wanted, contents)


def test_momentum_in_bf16_and_many_cycles() -> None:
    options = {"momentum_dtype": torch.bfloat16}
    run = build("bf16", "device", **options)
    other = build("bf16", "device", **options).step(0, 1, 2, 3)
    for seed in range(4):
        cycle(run.step(seed))
    assert_same_bits(other.contents(), run.contents())


def test_without_weights_the_model_works_and_training_goes_on() -> None:
    run = build("bf16 and fp32", "device").step(0, 1)
    before = {name: param.detach().clone() for name, param in run.params.items()}
    where = {name: param.data_ptr() for name, param in run.params.items()}
    run.opt.release(weights=False, model=run.model)
    assert all(run.opt.memory()[key] == 0 for key in ("device_state", "gradients"))
    assert_same_bits(before, {name: run[name].detach() for name in NAMES})
    run.model(torch.ones(2, 24))
    run.opt.resume()
    assert {name: param.data_ptr() for name, param in run.params.items()} == where
    run.step(2)
    assert_same_bits(untouched("bf16 and fp32", "device", None, (0, 1, 2)), run.contents())


@pytest.mark.parametrize("dtypes", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", ["device"])
def test_inside_inference_mode(placement: str, dtypes: str) -> None:
    run = build(dtypes, placement).step(0, 1)
    with torch.inference_mode():
        run.opt.release(model=run.model)
        run.opt.resume()
    run.step(2)
    assert_same_bits(untouched(dtypes, placement, None, (0, 1, 2)), run.contents())


def test_parking_made_inside_inference_mode_serves_later() -> None:
    run = build("fp32", "host").step(0, 1)
    with torch.inference_mode():
        run.opt.release()
        run.opt.resume()
    cycle(run)
