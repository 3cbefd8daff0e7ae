"""What a writer is given in a step: every row once, finished masters, and the bits of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom
from choosing import pairwise
from engines.support import (
    PLACEMENTS,
    SHAPES,
    SPLIT,
    Blind,
    Recorder,
    assert_equal,
    bits_of,
    build,
    held,
    masters,
    model,
    recorders,
    register,
    row_ends,
    run,
)
from muonloom import BFloat16Writer, HostPlacement
from muonloom.device.hazards import CheckedBackend
from staging.support import BACKENDS, give_gradients, on_backend

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
BLOCKED = {"q.weight": 24, "embed.weight": 32, "norm.weight": 5, "down": 2}


def assert_each_row_once(writers: dict[str, Recorder], written: set[str]) -> None:
    """Check the writes of one step."""
    for name, writer in writers.items():
        assert not writer.problems, (name, writer.problems)
        length = SHAPES[name][0] if SHAPES[name] else 1
        rows = [row for start, stop in writer.writes for row in range(start, stop)]
        assert sorted(rows) == (list(range(length)) if name in written else [])
        ends = {row for pair in writer.writes for row in pair}
        assert ends <= row_ends(name, writer.block_rows), name


def watched_steps(named: Any, opt: muonloom.Muon, writers: dict[str, Recorder], steps: int) -> None:
    for step in range(steps):
        for writer in writers.values():
            writer.writes.clear()
        give_gradients(named, step)
        opt.step()
        opt.drain()
        assert_each_row_once(writers, set(SHAPES))
        assert_equal(held(writers), masters(opt, named))


@pytest.mark.parametrize(
    ("placement", "dtype", "strided"), pairwise(PLACEMENTS, DTYPES, [False, True])
)
def test_every_row_is_written_once_with_its_finished_master(
    placement: str, dtype: str, strided: bool
):
    named, opt = build(PLACEMENTS[placement], named=model(DTYPES[dtype], strided=strided))
    before = {name: bits_of(parameter) for name, parameter in named}
    writers = recorders(named)
    for name, rows in BLOCKED.items():
        writers[name].block_rows = rows
    register(opt, named, writers)
    watched_steps(named, opt, writers, 3)
    assert all(writer.prepared == 1 for writer in writers.values())
    assert_equal(before, {name: bits_of(parameter) for name, parameter in named})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_writers_change_no_bit_of_masters_and_momentum(placement: str, dtype: str):
    plain, opt, _ = run(PLACEMENTS[placement], named=model(DTYPES[dtype]), writers=False)
    named, other, writers = run(PLACEMENTS[placement], named=model(DTYPES[dtype]))
    assert_equal(masters(opt, plain), held(writers))
    for (_, one), (_, two) in zip(plain, named, strict=True):
        own, others = opt.state[one], other.state[two]
        assert others.keys() - own.keys() <= {"master_weight"}
        assert_equal(dict(own), {key: others[key] for key in own})


CROWDED = [(name, 3) for name in BACKENDS] + [("checked", 1), ("hostile", 1)]


@pytest.mark.parametrize(("backend", "num_slots"), CROWDED)
def test_on_every_backend(backend: str, num_slots: int):
    placement = HostPlacement(slot_bytes=8000, num_slots=num_slots)
    plain, opt, _ = run("device", writers=False)
    with on_backend(BACKENDS[backend]) as made:
        named, other, writers = run(placement)
        assert_equal(masters(opt, plain), masters(other, named))
        assert_equal(masters(opt, plain), held(writers))
    for found in made:
        assert not isinstance(found, CheckedBackend) or not found.hazards


@pytest.fixture(scope="module")
def without_writers() -> dict[str, Tensor]:
    plain, opt, _ = run("device", writers=False)
    return masters(opt, plain)


@pytest.mark.parametrize("slot_bytes", [6144, 10_000, 20_000, "auto"])
@pytest.mark.parametrize("ns_batch_bytes", [4096, 7000, "auto"])
def test_sizes_of_slots_and_batches_change_nothing(
    slot_bytes: Any, ns_batch_bytes: Any, without_writers: dict[str, Tensor]
):
    placement = HostPlacement(slot_bytes=slot_bytes)
    named, other, writers = run(placement, ns_batch_bytes=ns_batch_bytes)
    for writer in writers.values():
        writer.writes.clear()
    assert_equal(without_writers, held(writers))
    watched_steps(named, other, writers, 1)


def test_large_atoms_and_spans_are_cut_where_they_may_be():
    """An embedding's spans cross packs, and experts go one by one where a slot holds no more."""
    named, _, writers = run(HostPlacement(slot_bytes=6144), steps=1)
    assert len(writers["embed.weight"].writes) > 8
    assert writers["gate_up"].writes == [(0, 1), (1, 2), (2, 3)]
    _, _, writers = run("device", steps=1)
    assert writers["embed.weight"].writes == [(0, 300)]
    del named


# -- who is written ---------------------------------------------------------------------------------


def missing(name: str, step: int) -> bool:
    return (step + list(SHAPES).index(name)) % 2 == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parameter_without_gradient_is_not_written(placement: str):
    plain, opt, _ = run(PLACEMENTS[placement], steps=0, writers=False)
    named, other, writers = run(PLACEMENTS[placement], steps=0)
    for step in range(3):
        for writer in writers.values():
            writer.writes.clear()
        for trained, owner in ((plain, opt), (named, other)):
            give_gradients(trained, step, absent=missing)
            owner.step()
            owner.drain()
        assert_each_row_once(writers, {name for name in SHAPES if not missing(name, step)})
    assert_equal(masters(opt, plain), held(writers))


@pytest.mark.parametrize("idle", ["update", "skip"])
@pytest.mark.parametrize("placement", ["device", "tiny"])
def test_idle_experts_keep_their_rows(placement: str, idle: str):
    named, opt, writers = run(PLACEMENTS[placement], steps=2, idle_matrices=idle)
    give_gradients(named, 2)
    experts = dict(named)["gate_up"]
    assert experts.grad is not None
    experts.grad[1] = 0
    before = writers["gate_up"].data.clone()
    opt.step()
    opt.drain()
    after = writers["gate_up"].data
    same = [torch.equal(before[e], after[e]) for e in range(3)]
    assert same == [False, idle == "skip", False]
    assert_equal(held(writers), masters(opt, named))


@pytest.mark.parametrize("placement", ["device", "tiny"])
def test_a_skipped_step_writes_nothing(placement: str):
    named, opt, writers = run(PLACEMENTS[placement], steps=1)
    before, counts = held(writers), {name: len(w.writes) for name, w in writers.items()}
    give_gradients(named, 1)
    grad = dict(named)["down"].grad
    assert grad is not None
    grad[0, 0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="down"):
        opt.step()
    opt.drain()
    assert_equal(before, held(writers))
    assert counts == {name: len(writer.writes) for name, writer in writers.items()}


@pytest.mark.parametrize("placement", ["device", "tiny"])
def test_some_parameters_with_writers_and_others_without(placement: str):
    plain, opt, _ = run(PLACEMENTS[placement], writers=False)
    named, other = build(PLACEMENTS[placement])
    own = {
        name: Recorder(name, p) for name, p in named if name in ("down", "norm.weight", "q.weight")
    }
    register(other, named, own)
    for step in range(3):
        give_gradients(named, step)
        other.step()
    assert_equal(masters(opt, plain), masters(other, named))
    for (name, one), (_, two) in zip(plain, named, strict=True):
        assert torch.equal(one, two) == (name not in own)
        assert name not in own or torch.equal(own[name].data.bfloat16(), one)


def test_a_plan_that_changes_under_way():
    def outcome(writers: bool) -> dict[str, Tensor]:
        named, opt, _ = run(PLACEMENTS["tiny"], steps=1, writers=writers)
        opt.param_groups[0]["ns_steps"] = 3
        for step in (1, 2):
            give_gradients(named, step)
            opt.step()
        return masters(opt, named)

    assert_equal(outcome(True), outcome(False))


# -- the kinds of writers ---------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("placement", [*PLACEMENTS, "split"])
def test_a_bfloat16_writer_gives_the_bits_of_no_writer(placement: str, outside: bool):
    own = {**PLACEMENTS, "split": SPLIT}[placement]
    plain, opt, _ = run(own, writers=False, named=model(strided=not outside))
    named, other = build(own, named=model(strided=not outside))
    tensors = {n: p.detach().clone() if outside else p.detach() for n, p in named}
    register(other, named, {n: BFloat16Writer(tensors[n] if outside else None) for n, _ in named})
    first = {name: parameter.detach().clone() for name, parameter in named}
    for step in range(3):
        give_gradients(named, step)
        other.step()
    assert_equal(masters(opt, plain), masters(other, named))
    assert_equal({n: p.detach() for n, p in plain}, tensors)
    if outside:
        assert_equal(first, {n: p.detach() for n, p in named})


@pytest.mark.parametrize("placement", [*PLACEMENTS, "split"])
def test_an_fp32_parameter_with_a_bfloat16_writer_has_the_master_of_none(placement: str):
    """Masters on the tie that has no split form stay there, whoever writes: the parameter is FP32."""
    found = []
    for own in ("device", {**PLACEMENTS, "split": SPLIT}[placement]):
        rates = {"lr": 0.0, "adamw_lr": 0.0, "weight_decay": 0.0}
        named, opt = build(own, named=model(torch.float32), **rates)
        for name, parameter in named:
            with torch.no_grad():
                parameter.view(torch.int32).bitwise_and_(-0x20000).bitwise_or_(0x8000)
            if name in ("down", "embed.weight"):
                opt.register_writer(parameter, BFloat16Writer(parameter.detach().bfloat16()))
        give_gradients(named, 0)
        opt.step()
        found.append(masters(opt, named))
        assert all(
            bool((m.view(torch.int32) & 0x1FFFF == 0x8000).all()) for m in found[-1].values()
        )
    assert_equal(*found)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_writer_that_says_no_more_than_it_must(placement: str):
    plain, opt, _ = run(PLACEMENTS[placement], writers=False)
    named, other = build(PLACEMENTS[placement])
    writers = {name: Blind(parameter) for name, parameter in named}
    register(other, named, writers)
    for step in range(3):
        give_gradients(named, step)
        other.step()
    other.drain()
    assert_equal(masters(opt, plain), {name: writer.data for name, writer in writers.items()})


@pytest.mark.parametrize(
    ("placement", "dtype", "kind"),
    pairwise(["device", "tiny"], ["bf16", "fp32"], [Blind, Recorder]),
)
def test_writers_registered_in_the_middle_of_training(placement: str, dtype: str, kind: type):
    plain, opt, _ = run(PLACEMENTS[placement], named=model(DTYPES[dtype]), writers=False, steps=4)
    named, other, _ = run(PLACEMENTS[placement], named=model(DTYPES[dtype]), writers=False, steps=2)
    writers = {n: kind(p) if kind is Blind else kind(n, p) for n, p in named}
    register(other, named, writers)
    if kind is Recorder:  # it can be asked, and says that BF16 weights are not the masters
        assert_equal(held(writers), masters(other, named))
    for step in (2, 3):
        give_gradients(named, step)
        other.step()
    assert_equal(masters(opt, plain), masters(other, named))
    assert_equal(masters(opt, plain), held(writers))


@pytest.mark.parametrize("name", ["empty.weight", "empty.bias"])
@pytest.mark.parametrize("shape", [(0, 4), (5, 0)])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_parameters_without_elements(placement: str, shape: tuple[int, ...], name: str):
    empty = torch.nn.Parameter(torch.zeros(shape))
    other = torch.nn.Parameter(torch.randn(8, 4))
    opt = muonloom.Muon([("w.weight", other), (name, empty)], placement=placement, adamw_lr=0.1)
    opt.register_writer(empty, Recorder(name, empty))
    opt.register_writer(other, Recorder("w", other))
    for _ in range(2):
        empty.grad, other.grad = torch.zeros_like(empty), torch.ones_like(other)
        opt.step()
    opt.drain()
