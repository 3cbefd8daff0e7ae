"""A writer is done before its slot is used again, and the hazard checker sees what it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom
from engines.support import Recorder, assert_equal, build, held, masters, recorders, register, run
from muonloom import HostPlacement
from muonloom.device import SynchronousBackend, ThreadedBackend, seeded_delays
from muonloom.device.hazards import CheckedBackend, Hazard
from muonloom.engine import Engine
from muonloom.places import StagedPlaces
from staging.support import Named, engine_of, give_gradients, on_backend

CROWDED = HostPlacement(slot_bytes=8000, num_slots=2)
PAUSE_S = 1e-3
WEIGHTS = ("q.weight", "gate_up", "norm.weight")


# -- slow writers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slow_writer_finishes_before_its_slot_is_used_again(num_slots: int):
    plain, opt, _ = run("device", writers=False)
    placement = HostPlacement(slot_bytes=8000, num_slots=num_slots)
    with on_backend(lambda: ThreadedBackend(delays=seeded_delays(1, 5e-4))):
        named, other, writers = run(placement, recorder={"pause_s": PAUSE_S})
        assert_equal(masters(opt, plain), masters(other, named))
        assert_equal(masters(opt, plain), held(writers))


class Late(Recorder):
    """Reads the master that it is given when the one after comes: that is not allowed."""

    pending: list[tuple[Tensor, Tensor]]

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        for target, values in self.pending:
            target.copy_(values)
        self.pending.clear()
        target = self.data if self.data.ndim == 0 else self.data[rows]
        self.pending.append((target, master))

    def finish(self) -> None:
        for target, values in self.pending:
            target.copy_(values)
        self.pending.clear()


def late_writers(named: Named) -> dict[str, Any]:
    pending: list[tuple[Tensor, Tensor]] = []  # one for all: a writer's master is read in the next
    writers = {}
    for name, parameter in named:
        writers[name] = Late(name, parameter)
        writers[name].pending = pending
    return writers


def test_a_writer_that_reads_its_master_later_reads_something_else():
    named, opt = build(HostPlacement(slot_bytes=8000, num_slots=1))
    writers = late_writers(named)
    register(opt, named, writers)
    for step in range(2):
        give_gradients(named, step)
        opt.step()
    next(iter(writers.values())).finish()
    right, wrong = masters(opt, named), held(writers)
    assert any(not torch.equal(wrong[name], right[name]) for name in right)


# -- what the checker sees --------------------------------------------------------------------------


@contextmanager
def started(
    **options: Any,
) -> Iterator[tuple[Named, muonloom.Muon, dict[str, Recorder], CheckedBackend]]:
    with on_backend(lambda: CheckedBackend(SynchronousBackend())) as made:
        named, opt = build(CROWDED, **options)
        writers = recorders(named)
        register(opt, named, writers)
        for step in range(2):
            give_gradients(named, step)
            opt.step()
        (backend,) = made
        assert isinstance(backend, CheckedBackend)
        assert not backend.hazards
        yield named, opt, writers, backend


def touches(
    opt: muonloom.Muon, backend: CheckedBackend, tensors: dict[str, Tensor]
) -> set[tuple[str, str, bool]]:
    """Return for one step (kind of task, name, whether it wrote) of what touched these tensors."""
    places = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
    seen: set[tuple[str, str, bool]] = set()
    genuine = backend._history.note

    def note(line: Any, label: str, op: str, pairs: list[tuple[Tensor, bool]]) -> None:
        for tensor, write in pairs:
            name = places.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                seen.add((label, name, write))
        genuine(line, label, op, pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._history, "note", note)
        opt.step()
        opt.drain()
    return seen


def test_the_tensors_of_writers_are_written_by_compute_tasks():
    with started() as (named, opt, writers, backend):
        give_gradients(named, 3)
        data = {name: writer.data for name, writer in writers.items()}
        seen = touches(opt, backend, data)
        own = touches(opt, backend, {name: p.detach() for name, p in named})
    for name, _ in named:
        label = "adamw" if name in ("embed.weight", "norm.weight", "gain") else "update"
        assert (label, name, True) in seen
        assert not any(write for _, n, write in own if n == name), "the parameter is left alone"
        assert not any(n == name for what, n, _ in seen if "load" in what or "store" in what)


def test_whoever_reads_a_writers_tensors_too_early_is_found():
    def reads(wait: bool) -> set[tuple[str, str]]:
        with started() as (named, opt, writers, backend):
            opt._assembly.awaited = frozenset(p for _, p in named)
            for step in range(3):
                give_gradients(named, step)
                opt.step()
                if wait:
                    engine_of(opt).wait_for_weights()
                with backend.watch("forward"):
                    for name in WEIGHTS:
                        writers[name].data.sum()
            return {(hazard.first.label, hazard.second.label) for hazard in backend.hazards}

    assert {("update", "forward"), ("adamw", "forward")} <= reads(wait=False)
    assert not reads(wait=True)


Plant = Callable[[muonloom.Muon, pytest.MonkeyPatch], None]


def found_with(plant: Plant) -> list[Hazard]:
    with started() as (named, opt, _, backend), pytest.MonkeyPatch.context() as patch:
        plant(opt, patch)
        for step in (3, 4):
            give_gradients(named, step)
            opt.step()
        opt.drain()
        return list(backend.hazards)


def in_a_writer(use: Callable[[muonloom.Muon, Tensor], object]) -> Plant:
    def plant(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
        genuine = Recorder.write

        def write(self: Recorder, param: Tensor, master: Tensor, rows: slice) -> None:
            genuine(self, param, master, rows)
            use(opt, master)

        patch.setattr(Recorder, "write", write)

    return plant


def read_another_slot(opt: muonloom.Muon, master: Tensor) -> None:
    staging = engine_of(opt)._staging
    assert staging is not None
    for slot in staging.slots:
        if slot.untyped_storage().data_ptr() != master.untyped_storage().data_ptr():
            slot.sum()


def read_the_slab(opt: muonloom.Muon, master: Tensor) -> None:
    for state in opt.state.values():
        state["master_weight"].sum()


@pytest.mark.parametrize("use", [read_another_slot, read_the_slab], ids=lambda use: use.__name__)
def test_what_a_writer_may_not_touch_is_found(use: Callable[[muonloom.Muon, Tensor], object]):
    labels = {
        name for h in found_with(in_a_writer(use)) for name in (h.first.label, h.second.label)
    }
    assert labels & {"update", "adamw"}


def after_the_task(opt: muonloom.Muon, patch: pytest.MonkeyPatch) -> None:
    """Have writers called one task late: after the event by which their slot may go home."""
    waiting: list[Callable[[], None]] = []
    genuine, load = Recorder.write, Engine._load

    def write(self: Recorder, param: Tensor, master: Tensor, rows: slice) -> None:
        waiting.append(lambda: genuine(self, param, master, rows))

    def load_then_write(self: Engine, *arguments: Any) -> int:
        moved = load(self, *arguments)
        if waiting and self._backend is not None:
            now = list(waiting)
            waiting.clear()
            self._backend.caller().submit(lambda: [call() for call in now] and None, "late writer")
        return moved

    patch.setattr(Recorder, "write", write)
    patch.setattr(Engine, "_load", load_then_write)


def test_a_writer_outside_its_task_is_found():
    labels = {name for h in found_with(after_the_task) for name in (h.first.label, h.second.label)}
    assert "late writer" in labels


def test_without_a_plant_there_is_nothing_to_find():
    assert not found_with(lambda opt, patch: None)


def test_the_store_comes_after_the_writer(monkeypatch: pytest.MonkeyPatch):
    """What goes home is only what has been written: `wrote` is told after the writer returns."""
    order: list[str] = []
    genuine = StagedPlaces.wrote

    def wrote(self: StagedPlaces, unit: int, part: int) -> None:
        order.append("wrote")
        genuine(self, unit, part)

    monkeypatch.setattr(StagedPlaces, "wrote", wrote)
    named, opt = build(CROWDED)
    register(opt, named, recorders(named, order=order))
    order.clear()
    give_gradients(named, 0)
    opt.step()
    opt.drain()
    assert order[1::2] == ["wrote"] * (len(order) // 2)
    assert "wrote" not in order[::2]
