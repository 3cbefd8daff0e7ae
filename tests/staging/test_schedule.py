"""Staged schedules as data: each byte moves once each way, and places are never shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import muonloom
from muonloom import BlockSpec, HostPlacement
from muonloom.host import PIECE_ALIGNMENT
from muonloom.plan import Batch
from muonloom.planning import build_plan
from muonloom.schedule import (
    Op,
    Piece,
    Schedule,
    StagedState,
    resident_schedule,
    staged_schedule,
)
from staging.examples import MOMENTS, example, matrix, muon_state, scalar
from staging.support import give_gradients

SEEDS = range(100)


def named(schedule: Schedule) -> Iterator[tuple[Op, int]]:
    return ((task.op, task.unit) for task in schedule.tasks)


# -- what is in a schedule ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_every_unit_moves_once_each_way_around_its_work(seed: int):
    schedule = example(seed).schedule
    counts = Counter(named(schedule))
    assert set(counts.values()) <= {1} or {op for (op, _), n in counts.items() if n > 1} == {
        Op.ORTHOGONALIZE
    }
    position = {key: i for i, key in enumerate(named(schedule))}
    whole = {t.work: i for i, t in enumerate(schedule.tasks) if t.op is Op.ORTHOGONALIZE}
    assert whole.keys() == {w for w, x in enumerate(schedule.works) if isinstance(x, Batch)}
    wanted = []
    for u, unit in enumerate(schedule.units):
        chain = [Op.ADAMW]
        if isinstance(schedule.works[unit.work], Batch):
            chain = [Op.DIRECTION, Op.UPDATE]
            assert position[Op.DIRECTION, u] < whole[unit.work] < position[Op.UPDATE, u]
        if unit.room:
            room = [Op.LOAD_MOMENTUM, Op.DIRECTION, Op.UPDATE, Op.STORE_MOMENTUM]
            assert_in_order([position[op, u] for op in room])
        if unit.slot:
            assert_in_order([position[op, u] for op in (Op.LOAD, chain[-1], Op.STORE)])
        chain += [Op.LOAD_MOMENTUM, Op.STORE_MOMENTUM] if unit.room else []
        chain += [Op.LOAD, Op.STORE] if unit.slot else []
        wanted += [(op, u) for op in chain]
    assert Counter(wanted) == Counter(key for key in named(schedule) if key[1] >= 0)


def assert_in_order(positions: Sequence[int]) -> None:
    assert list(positions) == sorted(positions)


@pytest.mark.parametrize("seed", SEEDS)
def test_units_hold_all_parts_and_all_bytes(seed: int):
    found = example(seed)
    schedule = found.schedule
    for w, work in enumerate(schedule.works):
        parts = [part for _, unit in schedule.units_of(w) for part in unit.parts]
        assert parts == list(work.runs if isinstance(work, Batch) else work.spans)
    for unit in schedule.units:
        for kind, pieces in (("room", unit.room), ("slot", unit.slot)):
            got = {(piece.part, piece.key): piece.nbytes for piece in pieces}
            assert len(got) == len(pieces)
            assert got == {
                (index, key): part.numel * itemsize
                for index, part in enumerate(unit.parts)
                for key, itemsize in getattr(found.staged[part.parameter], kind)
            }


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_lie_apart_and_inside(seed: int):
    schedule = example(seed).schedule
    for unit in schedule.units:
        assert_apart(unit.slot, schedule.slot_bytes)
        assert (unit.slot_index in range(schedule.num_slots)) == bool(unit.slot)
    for w in range(len(schedule.works)):
        units = [unit for _, unit in schedule.units_of(w)]
        assert_apart([piece for unit in units for piece in unit.room], schedule.room_bytes)
        rooms = {unit.room_index for unit in units if unit.room}
        assert rooms <= set(range(schedule.num_rooms))
        assert len(rooms) <= 1


def assert_apart(pieces: Sequence[Piece], most: int) -> None:
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        assert piece.offset % PIECE_ALIGNMENT == 0
        assert piece.offset >= end
        end = piece.offset + piece.nbytes
    assert end <= most


@pytest.mark.parametrize("seed", SEEDS)
def test_no_place_holds_two_at_a_time(seed: int):
    schedule = example(seed).schedule
    slots: dict[int, int] = {}
    rooms: dict[int, set[int]] = {}
    for task in schedule.tasks:
        unit = schedule.units[task.unit]
        present = rooms.setdefault(unit.room_index, set())
        if task.op is Op.LOAD:
            assert unit.slot_index not in slots
            slots[unit.slot_index] = task.unit
        elif task.op is Op.STORE:
            assert slots.pop(unit.slot_index) == task.unit
        elif task.op is Op.LOAD_MOMENTUM:
            present.add(task.unit)
            assert {schedule.units[other].work for other in present} == {task.work}
        elif task.op is Op.STORE_MOMENTUM:
            present.remove(task.unit)
    assert not slots
    assert not any(rooms.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_prefetch_is_all_loads_that_come_first(seed: int):
    schedule = example(seed).schedule
    streams = [task.op.stream for task in schedule.tasks]
    assert set(streams[: schedule.prefetch]) <= {"load"}
    assert streams[schedule.prefetch] == "compute"
    momentum = [t for t in schedule.tasks[: schedule.prefetch] if t.op is Op.LOAD_MOMENTUM]
    assert bool(momentum) == any(unit.room for unit in schedule.units)


def test_device_placement_waits_for_nothing_and_moves_nothing():
    for seed in range(20):
        plan = example(seed).plan
        schedule = resident_schedule(plan)
        assert not any(task.waits for task in schedule.tasks)
        assert {task.op.stream for task in schedule.tasks} == {"compute"}
        assert not any(unit.slot or unit.room for unit in schedule.units)
        compute = [t.op for t in schedule.tasks if t.op is Op.ORTHOGONALIZE]
        assert len(compute) == len(plan.batches)


# -- bytes of a real step -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize(
    ("master_layout", "momentum_dtype", "bytes_an_element"),
    [
        ("full", torch.float32, 8),
        ("full", torch.bfloat16, 6),
        ("split", torch.float32, 6),
        ("split", torch.bfloat16, 4),
    ],
)
def test_bytes_of_a_step_are_those_of_the_state(
    master_layout: str, momentum_dtype: torch.dtype, bytes_an_element: int, num_slots: int
):
    shapes = [(16, 8), (8, 16), (16, 8), (24, 8)]
    params = [torch.nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in shapes]
    named_params = [(f"layers.{i}.w.weight", p) for i, p in enumerate(params)]
    opt = muonloom.Muon(
        named_params,
        momentum_dtype=momentum_dtype,
        ns_batch_bytes=1024,
        placement=HostPlacement(master_layout=master_layout, slot_bytes=2048, num_slots=num_slots),
    )
    for step in range(3):
        give_gradients(named_params, step)
        opt.step()
        report: Any = opt.last_step
        numel = sum(p.numel() for p in params)
        assert report["bytes_in"] == report["bytes_out"] == bytes_an_element * numel
    params[0].grad = None
    opt.step()
    assert opt.last_step["bytes_out"] == bytes_an_element * (numel - params[0].numel())


# -- limits -------------------------------------------------------------------------------------------


def one_matrix(slot_bytes: int, state: StagedState, num_slots: int = 3) -> Schedule:
    plan = build_plan([matrix(0, (16, 4), BlockSpec.whole())], [], slot_bytes=slot_bytes)
    return staged_schedule(plan, {0: state}, slot_bytes=slot_bytes, num_slots=num_slots)


@pytest.mark.parametrize(
    ("state", "needed"),
    [
        (muon_state(4, {"master_weight": 4}), 256),
        (muon_state(2, {"master_low": 2}), 128),
        (muon_state(4, {}), 256),
    ],
)
def test_a_matrix_larger_than_a_slot_is_an_error_with_name_and_bytes(
    state: StagedState, needed: int
):
    assert one_matrix(needed, state).slot_bytes == needed
    with pytest.raises(ValueError, match=rf"^p0: .*16×4 matrix.*{needed} bytes.*slot_bytes=") as e:
        one_matrix(needed - 1, state)
    assert f"slot_bytes to {needed} or more" in str(e.value)


def test_a_span_larger_than_a_slot_is_an_error_with_name_and_bytes():
    plan = build_plan([], [scalar(0, (100,))], slot_bytes=100)
    state = {0: StagedState(slot=tuple({**MOMENTS, "master_weight": 4}.items()))}
    with pytest.raises(ValueError, match=r"^p0: .*span.* 768 bytes.*slot_bytes=100"):
        staged_schedule(plan, state, slot_bytes=100)


def test_an_automatic_slot_holds_the_largest_matrix():
    plan = build_plan([matrix(0, (2048, 1024), BlockSpec.whole())], [])
    schedule = staged_schedule(plan, {0: muon_state(4, {"master_weight": 4})})
    assert schedule.slot_bytes == 2048 * 1024 * 4


@pytest.mark.parametrize("seed", range(10))
def test_one_slot_is_legal_and_serial(seed: int):
    found = example(seed)
    schedule = staged_schedule(found.plan, found.staged, num_slots=1)
    assert (schedule.num_slots, schedule.num_rooms) == (1, min(1, len(found.plan.batches)))
    held = 0
    for task in schedule.tasks:
        held += {Op.LOAD: 1, Op.STORE: -1}.get(task.op, 0)
        assert held in (0, 1)


def test_a_model_of_nothing_has_an_empty_schedule():
    assert staged_schedule(build_plan([], []), {}).tasks == ()


def test_more_slots_let_more_loads_be_issued_ahead():
    plan = build_plan([], [scalar(i, (64,), pool=i) for i in range(8)])
    states = {i: StagedState(slot=tuple(MOMENTS.items())) for i in range(8)}
    ahead = [staged_schedule(plan, states, num_slots=n).prefetch for n in (1, 2, 3, 8, 9)]
    assert ahead == [1, 2, 3, 8, 8]
