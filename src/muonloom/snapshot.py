"""A state that is saved while training goes on: what a step is about to change is saved or copied first.

The tensors are cut into *segments* of rows. A thread reads them one by one, in the order in which the next
step will change them. Before a task of the step changes one, the engine asks `Snapshot.before_write`: a
segment that the thread has read is free; of one that it has not, a copy is taken, as long as there is room
for copies; else the step waits for the thread to read it. Since a step changes all of the state, saving
that takes longer than a step has to hold the loop, but for as long as the copies last::

    held ≈ max(0, seconds to save - seconds until the state is changed - room for copies / rate of the disk)
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from muonloom.device import Backend, Event
from muonloom.host import HostArena, check_host_bytes, padded, read_limits
from muonloom.schedule import Schedule
from muonloom.segments import (
    LEAST_SEGMENT_BYTES,
    SEGMENT_BYTES,
    Change,
    Segment,
    SnapshotTensor,
    changes_of,
    cut_up,
)

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

Write = Callable[[Segment, memoryview, Tensor], None]


@dataclass(kw_only=True)
class Held:
    """What a save has cost the loop so far.

    Attributes:
        copied_bytes: copied because a step was about to change them.
        seconds: that steps waited.
    """

    copied_bytes: int = 0
    seconds: float = 0.0


class Snapshot:
    """The state of one moment, until all of it is read.

    Attributes:
        tensors: see `Args`.
        segments: of all of them, in the order in which they are read.
        held: what it has cost the loop.
        is_written: whether all is read, written and done.

    Args:
        tensors: of the state, which nothing is changing.
        schedule: of the steps to come; None: there is none, and none may run until all is read.
        is_staged: whether state is on the host.
        backend: of the device: the stream that copies are taken on, and the thread that reads.
        extra_bytes: room for copies.
    """

    def __init__(
        self,
        tensors: Sequence[SnapshotTensor],
        schedule: Schedule | None,
        *,
        is_staged: bool,
        backend: Backend,
        extra_bytes: int,
    ) -> None:
        self.held = Held()
        self.is_written = False
        self.tensors: Sequence[SnapshotTensor] = tensors
        self._backend = backend  # where it is nobody else's, it lives as long as this
        self._thread = backend.thread("save")
        self._caller = backend.caller()
        self._extra_bytes = extra_bytes
        # Pages are taken as they are touched; a system that refuses them refuses the save, not a step.
        self._copies: HostArena | None = HostArena(extra_bytes)
        self._end = 0
        self._lock = threading.Lock()
        self._last: Event | None = None
        changes: list[Change] = []
        if schedule is not None:
            changes += changes_of(schedule, tensors, is_staged=is_staged)
        most = max(LEAST_SEGMENT_BYTES, min(SEGMENT_BYTES, extra_bytes // 2))
        self.segments, self._touched = cut_up(tensors, changes, segment_bytes=most)

    def start(
        self,
        write: Write,
        done: Callable[[], None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Have the thread read all segments.

        Args:
            write: called on it with each segment and its bytes, as memory and as a 1-D uint8 tensor, which
                are not to be kept.
            done: called on it when all are written.
            failed: called on it with what went wrong, which drops the rest.
        """
        room = bytearray(max((segment.nbytes for segment in self.segments), default=0))
        self._memory = memoryview(room)
        self._bounce = _tensor_over(room)
        self._write, self._done, self._failed = write, done, failed or _ignore
        self._unwritten = len(self.segments)
        self._thread.wait(self._caller.record())  # what the caller has issued may still change it
        for segment in self.segments:
            self._submit(partial(self._read, segment), "read for a save")
            segment.event = self._last = self._thread.record()
            self._submit(partial(self._put, segment), "save")
        if not self.segments:
            self._submit(self._finish, "save")

    def before_write(self, task: int, parts: Iterable[int]) -> Event | None:
        """Return when these parts of a task of the schedule may be changed, as far as copies are concerned.

        Blocks the host until the thread has read what no copy could be taken of.
        """
        if self._last is None:
            return None
        touched = self._touched  # the thread may let go of it at any moment
        if self._last.query():
            self.wait()
            return None
        taken = False
        for segment in [s for part in parts for s in touched.get((task, part), ())]:
            if self._may_copy(segment):
                self._take_copy(segment)
                taken = True
            elif segment.copy is None:
                self._await(segment.event)
        return self._caller.record() if taken else None

    def wait(self) -> None:
        """Block until all is read: somebody is about to change the state other than by a step."""
        self._await(self._last)
        self._last = None

    @property
    def failed(self) -> bool:
        """Whether reading or writing has failed; the rest is dropped."""
        return self._thread.failed

    def finish(self) -> BaseException | None:
        """Wait until all is written, or dropped after a failure, which is returned."""
        failure = self._thread.finish()
        if failure is not None:
            self._forget()
            self._failed = _ignore
            link: BaseException | None = failure
            while link is not None:  # frames hold the state
                traceback.clear_frames(link.__traceback__)
                link = link.__cause__ or link.__context__
        return failure

    # -- on the thread ------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None], label: str) -> None:
        # No closure: `finish` could not clear it, and it would hold a part of the state.
        self._thread.submit(partial(self._attempt, work), label)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:
            self._failed(failure)
            raise

    def _read(self, segment: Segment) -> None:
        with self._lock:
            if segment.copy is not None:
                return
            segment.taken = True
        segment.tensor.read(segment.rows, segment.shaped(self._bounce))

    def _put(self, segment: Segment) -> None:
        if segment.taken:
            self._write_out(segment)

    def _put_copy(self, segment: Segment) -> None:
        assert segment.copy is not None
        self._bounce[: segment.nbytes].copy_(segment.copy)
        self._write_out(segment)

    def _write_out(self, segment: Segment) -> None:
        nbytes = segment.nbytes
        self._write(segment, self._memory[:nbytes], self._bounce[:nbytes])
        self._unwritten -= 1
        if self._unwritten == 0:
            self._finish()

    def _finish(self) -> None:
        done = self._done
        self._forget()
        done()
        self._failed = _ignore
        self.is_written = True

    def _forget(self) -> None:
        """Let go of the state and of all memory: the optimizer knows its last snapshot."""
        self.tensors, self.segments, self._touched, self._copies = (), [], {}, None
        self._memory, self._bounce = memoryview(b""), _NOTHING
        self._write, self._done = _refuse, _nothing

    # -- on the caller's ----------------------------------------------------------------------------

    def _may_copy(self, segment: Segment) -> bool:
        """Reserve room for a copy, unless there is none, or no need."""
        with self._lock:
            fits = self._end + padded(segment.nbytes) <= self._extra_bytes
            if self._copies is None or segment.taken or segment.copy is not None or not fits:
                return False
            segment.copy = self._copies.memory[self._end : self._end + segment.nbytes]
            self._end += padded(segment.nbytes)
            return True

    def _take_copy(self, segment: Segment) -> None:
        assert segment.copy is not None
        values = segment.shaped(segment.copy)
        try:
            self._caller.submit(
                partial(segment.tensor.read, segment.rows, values), "copy for a save"
            )
        except BaseException as failure:
            self._submit(partial(_raise, failure), "save")
            raise
        self._thread.wait(self._caller.record())
        self._submit(partial(self._put_copy, segment), "save")
        self.held.copied_bytes += segment.nbytes

    def _await(self, event: Event | None) -> None:
        if event is not None:
            start = time.perf_counter()
            event.synchronize()
            self.held.seconds += time.perf_counter() - start


def _refuse(*_: object) -> None:
    raise AssertionError("all was written")


def _nothing() -> None:
    pass


def _ignore(failure: BaseException) -> None:
    pass


def _raise(failure: BaseException) -> None:
    raise RuntimeError("The copy of a part of the state failed; nothing was saved.") from failure


def _tensor_over(memory: bytearray) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else _NOTHING


def check_extra_bytes(nbytes: int) -> None:
    """Raise a MemoryError if the host has no room for so many bytes of copies."""
    check_host_bytes(nbytes, what="copies for a save", limits=read_limits())
