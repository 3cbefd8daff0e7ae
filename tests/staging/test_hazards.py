"""No event is missing and none is needless: real accesses of whole steps, checked against their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom
import muonloom.places
from choosing import mostly_slow
from muonloom import HostPlacement
from muonloom.compute import StepCompute
from muonloom.device import SynchronousBackend, ThreadedBackend, seeded_delays
from muonloom.device.hazards import CheckedBackend, Hazard
from muonloom.engine import Engine
from muonloom.plan import Run
from muonloom.schedule import Op, Schedule
from staging.support import (
    Case,
    Named,
    assert_same_bits,
    engine_of,
    give_gradients,
    layout,
    model,
    on_backend,
    random_case,
    staging_of,
    train,
)

NUM_PLANS = 210
NUM_PLANS_EACH_TIME = 60
MUTATED = (1, 5, 7, 9, 13, 15, 21, 24, 27, 30, 34, 38)
MUTATED_EACH_TIME = (1, 7, 9, 13, 24, 34)
THREADED_EVERY = 6
HOSTILE = range(10)

CROWDED = HostPlacement(slot_bytes=8000, num_slots=3)


def checked(seed: int) -> CheckedBackend:
    """Mostly without threads: the checker goes by events, not by luck."""
    if seed % THREADED_EVERY:
        return CheckedBackend(SynchronousBackend())
    return CheckedBackend(ThreadedBackend(delays=seeded_delays(seed, 2e-4)))


@contextmanager
def started(case: Case, *, steps: int = 2) -> Iterator[tuple[Named, muonloom.Muon, CheckedBackend]]:
    """Give an optimizer in its stride: state exists, and the last step's loads are issued ahead."""
    with on_backend(lambda: CheckedBackend(SynchronousBackend())) as backends:
        named, opt = case.build(case.placement)
        for step in range(steps):
            give_gradients(named, step)
            opt.step()
        (backend,) = backends
        assert isinstance(backend, CheckedBackend)
        assert not backend.hazards
        yield named, opt, backend


# -- schedules as they are ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", mostly_slow(range(NUM_PLANS), but=range(NUM_PLANS_EACH_TIME)))
def test_random_plans_have_no_hazard_and_the_bits_of_device_placement(seed: int):
    case = random_case(seed)
    with on_backend(lambda: checked(seed)) as backends:
        staged = case.train(case.placement)
    (backend,) = backends
    assert isinstance(backend, CheckedBackend)
    assert not backend.hazards
    assert_same_bits(case.train("device"), staged)


@pytest.mark.parametrize("num_plans", [NUM_PLANS_EACH_TIME, NUM_PLANS])
def test_random_plans_have_all_that_staging_knows(num_plans: int):
    """Or the test above would prove less than it seems to."""
    cases = [random_case(seed) for seed in range(num_plans)]
    for name, count in {"num_slots": 4, "slot_bytes": 4, "master_layout": 2}.items():
        assert len({getattr(case.placement, name) for case in cases}) == count
    assert len({frozenset(case.dtypes.values()) for case in cases}) == 3
    assert any(case.absent_share for case in cases)


@pytest.mark.parametrize("seed", mostly_slow(HOSTILE, but=HOSTILE[:4]))
def test_hostile_delays_change_no_bit(seed: int, device_bits: dict[str, Tensor]):
    delays = seeded_delays(seed, 2e-3)
    with on_backend(lambda: ThreadedBackend(delays=delays)):
        assert_same_bits(device_bits, train(CROWDED, ns_batch_bytes=2000))


@pytest.fixture(scope="module")
def device_bits() -> dict[str, Tensor]:
    return train("device", ns_batch_bytes=2000)


# -- the checker sees what happens --------------------------------------------------------------------


def test_the_checker_sees_every_place_that_a_task_touches():
    """Slots, rooms, slabs, weights and gradients, read and written by the tasks that do so."""
    case = replace(random_case(3), options={"lr": 0.02, "adamw_lr": 0.01}, placement=CROWDED)
    case = replace(case, dtypes=dict.fromkeys(case.shapes, torch.bfloat16))
    with started(case) as (named, opt, backend):
        seen = touched_by_label(named, opt, backend)
    assert seen["orthogonalize"].keys() >= {("other", False), ("other", True)}
    assert seen["load momentum"].keys() >= {("slab", False), ("room", True)}
    assert seen["load"].keys() >= {("slab", False), ("slot", True)}
    assert seen["direction"].keys() >= {("room", False), ("gradient", False), ("other", True)}
    assert seen["update"].keys() >= {("room", True), ("slot", True), ("weight", True)}
    assert seen["adamw"].keys() >= {("slot", True), ("weight", True), ("gradient", False)}
    assert seen["store"].keys() >= {("slot", False), ("slab", True)}
    assert seen["store momentum"].keys() >= {("room", False), ("slab", True)}
    for label in ("direction", "orthogonalize", "update", "adamw"):
        assert not any(place == "slab" for place, _ in seen[label])


def touched_by_label(
    named: Named, opt: muonloom.Muon, backend: CheckedBackend
) -> dict[str, Counter[tuple[str, bool]]]:
    """Return for one step how often each kind of task read (False) or wrote each kind of place."""
    give_gradients(named, 7)
    staging = staging_of(opt)
    states = [t for own in opt.state.values() for key, t in own.items() if key != "step"]
    kinds = {
        "slot": staging.slots,
        "room": staging.rooms,
        "slab": states,
        "weight": [p for _, p in named],
        "gradient": [p.grad for _, p in named if p.grad is not None],
    }
    places = {t.untyped_storage().data_ptr(): kind for kind, all_ in kinds.items() for t in all_}
    seen: dict[str, Counter[tuple[str, bool]]] = {op.value: Counter() for op in Op}
    genuine = backend._history.note

    def note(line: Any, label: str, op: str, touches: list[tuple[Tensor, bool]]) -> None:
        for tensor, write in touches:
            if label in seen:
                kind = places.get(tensor.untyped_storage().data_ptr(), "other")
                seen[label][kind, write] += 1
        genuine(line, label, op, touches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._history, "note", note)
        opt.step()
        opt.drain()
    return seen


# -- each wait dropped in turn ------------------------------------------------------------------------


@contextmanager
def in_order(engine: Engine) -> Iterator[None]:
    """Have no load issued in the middle of the step before: when that is done, the waits decide."""
    genuine = engine._load_ahead

    def load_ahead(sources: Any, *, done: int) -> None:
        if done == len(engine.schedule.tasks):
            genuine(sources, done=done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_load_ahead", load_ahead)
        yield


def has_hazards(
    named: Named, opt: muonloom.Muon, backend: CheckedBackend, schedule: Schedule
) -> bool:
    """Run two steps by `schedule`, with nothing but its waits between them; stop at the first hazard."""
    engine_of(opt).settle()
    backend._history._hazards.clear()
    engine_of(opt).schedule = schedule
    for step in (8, 9):
        give_gradients(named, step)
        opt.step()
        if backend.hazards:
            return True
    return False


def without(schedule: Schedule, index: int, wait: int) -> Schedule:
    task = schedule.tasks[index]
    left = tuple(other for other in task.waits if other != wait)
    assert len(left) == len(task.waits) - 1
    tasks = (*schedule.tasks[:index], replace(task, waits=left), *schedule.tasks[index + 1 :])
    return replace(schedule, tasks=tasks)


def kind_of(schedule: Schedule, index: int, wait: int) -> tuple[Op, Op, str]:
    when = "same step" if wait < index else "step before"
    return schedule.tasks[index].op, schedule.tasks[wait].op, when


def all_waits(schedule: Schedule) -> list[tuple[int, int]]:
    return [(index, wait) for index, task in enumerate(schedule.tasks) for wait in task.waits]


@pytest.mark.parametrize("seed", mostly_slow(MUTATED, but=MUTATED_EACH_TIME))
def test_every_wait_of_a_schedule_is_needed(seed: int):
    with started(random_case(seed)) as (named, opt, backend), in_order(engine_of(opt)):
        whole = engine_of(opt).schedule
        assert not has_hazards(named, opt, backend, whole)
        needless = [
            kind_of(whole, *pair)
            for pair in all_waits(whole)
            if not has_hazards(named, opt, backend, without(whole, *pair))
        ]
    assert not needless


def test_the_mutated_schedules_have_every_kind_of_wait():
    kinds = set()
    for seed in MUTATED_EACH_TIME:
        case = random_case(seed)
        schedule = engine_of(case.build(case.placement)[1]).schedule
        kinds |= {kind_of(schedule, *pair) for pair in all_waits(schedule)}
    assert kinds >= {
        (Op.DIRECTION, Op.LOAD_MOMENTUM, "same step"),
        (Op.UPDATE, Op.LOAD, "same step"),
        (Op.ADAMW, Op.LOAD, "same step"),
        (Op.STORE, Op.UPDATE, "same step"),
        (Op.STORE, Op.ADAMW, "same step"),
        (Op.STORE_MOMENTUM, Op.UPDATE, "same step"),
        (Op.LOAD, Op.STORE, "same step"),
        (Op.LOAD, Op.STORE, "step before"),
        (Op.LOAD_MOMENTUM, Op.STORE_MOMENTUM, "same step"),
        (Op.LOAD_MOMENTUM, Op.STORE_MOMENTUM, "step before"),
    }


# -- accesses that no schedule declares ---------------------------------------------------------------


Plant = Callable[[muonloom.Muon, pytest.MonkeyPatch], None]


def found_with(plant: Plant) -> list[Hazard]:
    """Run two steps of a crowded model with `plant` in them; return what the checker found."""
    with on_backend(lambda: CheckedBackend(SynchronousBackend())) as backends:
        named = model()
        options = {"lr": 0.02, "adamw_lr": 0.01, "ns_batch_bytes": 2000}
        opt = muonloom.Muon(named, layout=layout(), placement=CROWDED, **options)
        for step in range(4):
            with pytest.MonkeyPatch.context() as patch:
                if step > 1:
                    plant(opt, patch)
                give_gradients(named, step)
                opt.step()
        opt.drain()
    (backend,) = backends
    assert isinstance(backend, CheckedBackend)
    return backend.hazards


def after_update(patch: pytest.MonkeyPatch, extra: Callable[[int], None]) -> None:
    """Have every UPDATE do more, given its unit."""
    genuine = StepCompute._update

    def update(self: StepCompute, batch: Any, task: Any, part: int, run: Run) -> None:
        genuine(self, batch, task, part, run)
        extra(task.unit)

    patch.setattr(StepCompute, "_update", update)


def touch_the_slab(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
    moments = [s["momentum_buffer"] for s in opt.state.values() if "momentum_buffer" in s]

    def extra(unit: int) -> None:
        for moment in moments:
            touch(moment.view(torch.int32))

    after_update(patch, extra)


def touch_the_next_slot(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
    slots, units = staging_of(opt).slots, engine_of(opt).schedule.units
    after_update(patch, lambda unit: touch(slots[(units[unit].slot_index + 1) % len(slots)]))


def touch_the_other_room(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
    rooms, units = staging_of(opt).rooms, engine_of(opt).schedule.units
    after_update(patch, lambda unit: touch(rooms[1 - units[unit].room_index]))


def touch(place: Tensor) -> None:
    """Write a place, and leave its bytes as they are."""
    place.bitwise_or_(0)


def planted_writer(
    opt: muonloom.Muon, patch: pytest.MonkeyPatch, use: Callable[[Tensor], object]
) -> None:
    """Have whatever writes a weight use the slab's memory as well."""
    genuine = muonloom.places.write
    assert opt._assembly._slabs is not None
    (slab,) = opt._assembly._slabs._slabs

    def write(weight: Tensor, master: Tensor) -> None:
        genuine(weight, master)
        use(slab.memory)

    patch.setattr(muonloom.places, "write", write)


def write_the_slab_in_a_writer(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
    planted_writer(opt, patch, touch)


def read_the_slab_in_a_writer(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
    planted_writer(opt, patch, torch.sum)


PLANTED = (
    touch_the_slab,
    touch_the_next_slot,
    touch_the_other_room,
    write_the_slab_in_a_writer,
    read_the_slab_in_a_writer,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_an_undeclared_access_is_found(plant: Plant):
    hazards = found_with(plant)
    assert any("update" in (hazard.first.label, hazard.second.label) for hazard in hazards)


def test_without_a_plant_there_is_nothing_to_find():
    assert not found_with(lambda opt, patch: None)


# -- the caller's stream ------------------------------------------------------------------------------


@contextmanager
def overlapping() -> Iterator[tuple[Named, muonloom.Muon, CheckedBackend]]:
    """An optimizer whose computation runs on a stream of its own, beside the caller's."""
    with on_backend(lambda: CheckedBackend(SynchronousBackend())) as backends:
        named = model()
        opt = muonloom.Muon(named, layout=layout(), placement=CROWDED, lr=0.02, adamw_lr=0.01)
        opt._assembly.awaited = frozenset(p for _, p in named)
        (backend,) = backends
        assert isinstance(backend, CheckedBackend)
        yield named, opt, backend


def train_watched(
    named: Named,
    opt: muonloom.Muon,
    backend: CheckedBackend,
    *,
    wait: Callable[[Engine], None],
) -> set[tuple[str, str]]:
    """Let the caller write gradients in "backward" and read weights in "forward"; return who met whom."""
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    for step in range(4):
        with backend.watch("backward"), torch.no_grad():
            for _, parameter in named:
                assert parameter.grad is not None
                parameter.grad.fill_(float(step + 1))
        with backend.watch("around the tasks"):
            opt.step()
        wait(engine_of(opt))
        with backend.watch("forward"):
            for _, parameter in named:
                parameter.detach().sum()
    return {(hazard.first.label, hazard.second.label) for hazard in backend.hazards}


def test_a_caller_that_waits_meets_nobody():
    with overlapping() as (named, opt, backend):
        assert not train_watched(named, opt, backend, wait=Engine.wait_for_weights)


def test_the_caller_must_wait_for_the_weights():
    with overlapping() as (named, opt, backend):
        met = train_watched(named, opt, backend, wait=lambda engine: None)
    assert {("update", "forward"), ("adamw", "forward")} <= met


def test_computation_must_wait_for_the_gradients(monkeypatch: pytest.MonkeyPatch):
    with overlapping() as (named, opt, backend):
        caller, genuine = backend._caller, backend._caller.record

        def record() -> Any:
            event: Any = genuine()
            event.clock = {}
            return event

        monkeypatch.setattr(caller, "record", record)
        met = train_watched(named, opt, backend, wait=Engine.wait_for_weights)
    assert {("backward", "direction"), ("backward", "adamw")} <= met
