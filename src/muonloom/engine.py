"""Carry a schedule out. The engine decides nothing: what to do, where, and after what is in the tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from muonloom.bound import Bound
from muonloom.collectives import Ranks, ranks_of
from muonloom.compute import StepCompute
from muonloom.device import Backend, Event, Stream
from muonloom.places import ResidentPlaces, StagedPlaces
from muonloom.plan import Plan
from muonloom.schedule import Op, Schedule, Task
from muonloom.sharing import WeightSharing
from muonloom.snapshot import Snapshot
from muonloom.staging import Source, Staging
from muonloom.state import storage_bytes
from muonloom.telemetry import PhaseClock, StepRecord
from muonloom.workspace import Workspaces

Sources = Sequence[Source]


class Engine:
    """Runs one schedule, step after step; owns workspaces, slots and rooms, and the streams' events.

    Attributes:
        schedule: what it runs.
        snapshot: what a save still reads of the state; asked before parts of a task change what lasts.
        sharing: what gives updated weights to ranks that did not update them.
        ready: by parameter, the task after which this rank's part of the weight is written.

    Args:
        plan: of the step.
        schedule: of that plan.
        torn: gets the names of parameters that a failed step left half written.
        backend: the device's streams; None in device placement, where all work goes to the caller's.
        sources: returns all parameters' state, as it is then.
        memory_of: see `Staging`.
        overlaps_forward: whether `run` returns before the weights are in order for the caller, who asks
            for each by `wait_for`.
        ranks_of: returns the group of some ranks.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        *,
        torn: list[str],
        backend: Backend | None = None,
        sources: Callable[[], Sources] = list,
        memory_of: Callable[[Tensor], Tensor] | None = None,
        overlaps_forward: bool = False,
        ranks_of: Callable[[tuple[int, ...]], Ranks] = ranks_of,
    ) -> None:
        self.schedule = schedule
        self.sharing: WeightSharing | None = None
        self._ranks_of = ranks_of
        self.snapshot: Snapshot | None = None
        self._torn = torn
        self._plan = plan
        self._backend = backend
        self._sources = sources
        self._overlaps_forward = overlaps_forward
        self._workspaces = Workspaces(plan)
        self._staging: Staging | None = None
        self._places: ResidentPlaces | StagedPlaces = ResidentPlaces(schedule)
        if backend is not None:
            device = next((work.device for work in schedule.works), torch.device("cpu"))
            assert memory_of is not None
            self._staging = Staging(schedule, device, memory_of)
            self._places = StagedPlaces(schedule, self._staging)
        self._events: list[Event | None] = [None] * len(schedule.tasks)
        self._last_computed: Event | None = None
        self._compute: StepCompute | None = None
        self._ahead = 0  # how many of the first tasks have been issued for the next step
        self._last_load = max((i for i, t in enumerate(schedule.tasks) if _is_load(t)), default=-1)
        self.ready = _last_writers(schedule)
        self._readied: dict[int, list[int]] = {}
        for parameter, task in self.ready.items():
            self._readied.setdefault(task, []).append(parameter)

    @property
    def workspace_bytes(self) -> int:
        """The bytes of all workspaces and rooms, as allocated."""
        rooms = self._staging.rooms if self._staging is not None else ()
        buckets = 0 if self.sharing is None else self.sharing.nbytes
        return self._workspaces.nbytes + storage_bytes(rooms) + buckets

    @property
    def slot_bytes(self) -> int:
        """The bytes of all slots, as allocated."""
        return storage_bytes(self._staging.slots) if self._staging is not None else 0

    @torch.no_grad()
    def prefetch(self) -> None:
        """Issue the loads that need not wait for the step, as far as that has not been done."""
        if self._staging is not None and self._ahead < self.schedule.prefetch:
            self._load_ahead(self._sources(), done=len(self.schedule.tasks))

    def _load_ahead(self, sources: Sources, *, done: int) -> None:
        """Issue first loads of the next step, as far as tasks before `done` are all that they wait for.

        They stand behind all loads of this step, so that none of these waits in line for their places.
        """
        assert self._staging is not None
        while self._ahead < self.schedule.prefetch:
            task = self.schedule.tasks[self._ahead]
            if any(wait >= done for wait in task.waits):
                return
            parts = self._staging.parts_with_state(task.unit, sources)
            self._load(self._ahead, task, sources, parts)
            self._ahead += 1

    @torch.no_grad()
    def run(
        self,
        bounds: Sequence[Bound | None],
        record: StepRecord,
        clock: PhaseClock,
        *,
        free_gradients: bool,
        after: Callable[[], None],
    ) -> None:
        """Do one step; return when the new weights are in order for the caller, unless forward overlaps.

        Args:
            bounds: indexed as the plan's parameters; None for one that has no part in this step.
            record: gets what was done.
            clock: gets when.
            free_gradients: set ``.grad`` to None as soon as a parameter's gradient was last read.
            after: called when the weights are written, also where the step failed in the middle.

        Raises:
            Exception: what failed in between, after all that had been begun was brought to an end.
        """
        compute = StepCompute(
            self.schedule,
            self._places,
            bounds,
            record,
            workspaces=self._workspaces,
            uses=self._plan.gradient_uses() if free_gradients else None,
            ranks_of=self._ranks_of,
        )
        self._places.bind(bounds)
        if free_gradients:  # of what this rank has no part of nothing is read
            for index, bound in enumerate(bounds):
                if bound is not None and index not in self.ready:
                    bound.gradient = bound.parameter.grad = None

        def finish() -> None:
            compute.drop_gradients()
            after()
            clock.enter("end")

        def drop(index: int) -> None:
            # By the caller's thread: torch does not bear two that set one gradient.
            for parameter in self._readied.get(index, ()) if free_gradients else ():
                bound = bounds[parameter]
                if bound is not None:
                    bound.parameter.grad = None

        try:
            self._run(compute, bounds, record, clock, finish, drop)
        except BaseException as failure:
            self._recover(compute, failure)
            finish()
            raise

    def _run(
        self,
        compute: StepCompute,
        bounds: Sequence[Bound | None],
        record: StepRecord,
        clock: PhaseClock,
        finish: Callable[[], None],
        drop: Callable[[int], None],
    ) -> None:
        if self.sharing is not None:
            self.sharing.begin(frozenset(i for i, bound in enumerate(bounds) if bound is not None))
        if self._staging is None or self._backend is None:
            for index, task in enumerate(self.schedule.tasks):
                if self.snapshot is not None and task.unit >= 0:
                    clock.enter("save")
                    self.snapshot.before_write(index, compute.present_parts(task.unit))
                _do(compute, task, clock)
                drop(index)
                self._share(index, clock)
            self._share(None, clock)
            finish()
            return
        self._compute = compute
        sources = self._sources()
        caller = self._backend.caller()
        stream = self._backend.stream("compute") if self._overlaps_forward else caller
        for event in (caller.record(), self._last_computed):
            if event is not None:
                stream.wait(event)  # gradients are there; and the caller may have changed streams
        ahead, self._ahead = self._ahead, 0
        for index, task in enumerate(self.schedule.tasks):
            present = compute.present_parts(task.unit) if task.unit >= 0 else frozenset()
            if task.op.stream == "compute":
                if task.waits and not self._overlaps_forward:
                    clock.enter("wait")
                self._wait(task, stream)
                self._wait_for_save(index, stream, present)
                stream.submit(partial(_do, compute, task, clock), task.op.value)
                if self.sharing is not None and self.sharing.is_due(index):
                    stream.submit(partial(self._share, index, clock), "share")
                self._events[index] = stream.record()
                drop(index)
            elif task.op.stream == "store":
                record.bytes_out += self._store(index, task, sources, present)
            elif index >= ahead or not self._staging.is_requested(task, sources, present):
                record.bytes_in += self._load(index, task, sources, present)
            else:
                record.bytes_in += self._staging.requested_bytes(task)
            if index >= self._last_load:
                self._load_ahead(sources, done=index + 1)
        if self._overlaps_forward:
            for gradient in compute.gradients():
                stream.uses(gradient)
        if self.sharing is not None:
            stream.submit(partial(self._share, None, clock), "share")
        stream.submit(finish, "finish")
        self._last_computed = stream.record()
        if not self._overlaps_forward:
            self.wait_for_weights()
        self.check()

    def _share(self, index: int | None, clock: PhaseClock) -> None:
        """Give other ranks the weights that are complete after a task; None: all, and take theirs."""
        if self.sharing is None:
            return
        clock.enter("share")
        if index is None:
            self.sharing.finish()
        else:
            self.sharing.advance(index)

    def wait_for_weights(self) -> None:
        """Have the caller's next operations wait for all weights of the last step."""
        if self._backend is not None and self._last_computed is not None:
            self._backend.caller().wait(self._last_computed)

    def wait_for(self, parameters: Iterable[int]) -> None:
        """Have the caller's next operations wait for the weights of these parameters."""
        assert self._backend is not None
        if self.sharing is not None:  # others' parts come at the end
            self.wait_for_weights()
        caller = self._backend.caller()
        for task in {self.ready[p] for p in parameters if p in self.ready}:
            event = self._events[task]
            if event is not None:
                caller.wait(event)

    def check(self) -> None:
        """Raise what has failed by now, after all that had been begun was brought to an end."""
        if self._backend is not None and self._backend.failed:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until the slabs hold the last step, and nothing moves.

        Raises:
            Exception: what failed in between, after all that had been begun was brought to an end.
        """
        if self._backend is None:
            return
        failure = self._backend.settle()
        if failure is not None:
            self._recover(self._compute, failure)
            raise failure

    def forget(self) -> None:
        """Drop what was loaded ahead: somebody is about to change the slabs, or has."""
        self.settle()
        if self._staging is not None:
            self._staging.forget()
        self._ahead = 0

    # -- tasks --------------------------------------------------------------------------------------

    def _wait(self, task: Task, stream: Stream) -> None:
        for wait in task.waits:
            event = self._events[wait]
            if event is not None:
                stream.wait(event)

    def _wait_for_save(self, index: int, stream: Stream, parts: frozenset[int]) -> None:
        if self.snapshot is not None:
            copied = self.snapshot.before_write(index, parts)
            if copied is not None:
                stream.wait(copied)

    def _load(self, index: int, task: Task, sources: Sources, parts: frozenset[int]) -> int:
        """Issue a load; return its bytes."""
        assert self._staging is not None
        moves = self._staging.request(task, sources, parts)
        return self._move(index, task, [(move.device, move.host) for move in moves])

    def _store(self, index: int, task: Task, sources: Sources, parts: frozenset[int]) -> int:
        """Issue a store; return its bytes."""
        assert self._backend is not None
        assert self._staging is not None
        self._wait_for_save(index, self._backend.stream(task.op.stream), parts)
        moves = self._staging.dismiss(task, sources, parts)
        return self._move(index, task, [(move.host, move.device) for move in moves])

    def _move(
        self,
        index: int,
        task: Task,
        copies: Sequence[tuple[Tensor, Tensor]],
    ) -> int:
        backend, staging = self._backend, self._staging
        assert backend is not None
        assert staging is not None

        def work() -> None:
            with record_function(f"muonloom {task.op.value}"):
                for target, source in copies:
                    backend.copy(target, source)
            staging.moved(task)

        stream = backend.stream(task.op.stream)
        self._wait(task, stream)
        stream.submit(work, task.op.value)
        self._events[index] = stream.record()
        return sum(target.nbytes for target, _ in copies)

    # -- failures -----------------------------------------------------------------------------------

    def _recover(self, compute: StepCompute | None, failure: BaseException) -> None:
        """Bring home what is whole in slots and rooms; name what is not.

        Parts that were not begun stay as they were: their slabs and weights are untouched.
        """
        if self._backend is not None and self._staging is not None:
            self._backend.settle()
            if self.snapshot is not None:
                self.snapshot.wait()  # what is brought home now was not asked for as a store
            for unit, part, target, source in self._staging.unsaved():
                try:
                    target.copy_(source)
                except Exception:
                    self._tear(unit, part)
            self._staging.forget()
            self._ahead = 0
        if compute is not None:
            for unit, part in compute.begun - compute.written:
                self._tear(unit, part)
        if self._torn and hasattr(failure, "add_note"):
            failure.add_note(f"Left half written: {', '.join(self._torn)}. Load a checkpoint.")

    def _tear(self, unit: int, part: int) -> None:
        name = self._plan.names[self.schedule.units[unit].parts[part].parameter]
        if name not in self._torn:
            self._torn.append(name)


def _do(compute: StepCompute, task: Task, clock: PhaseClock) -> None:
    clock.enter(task.op.value)
    with record_function(f"muonloom {task.op.value}"):
        compute.do(task)


def _is_load(task: Task) -> bool:
    return task.op in (Op.LOAD, Op.LOAD_MOMENTUM)


def _last_writers(schedule: Schedule) -> dict[int, int]:
    """Return for each parameter the task after which its weight is ready."""
    return {
        part.parameter: index
        for index, task in enumerate(schedule.tasks)
        if task.op in (Op.UPDATE, Op.ADAMW)
        for part in schedule.units[task.unit].parts
    }
