"""Streams on a CPU: the calling thread, or, for tests and benchmarks, a thread for each."""

from __future__ import annotations

import atexit
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from muonloom.device.backend import Event, Stream

Delays = Callable[[str, str], float]
_Queue = SimpleQueue[Callable[[], None] | None]

# A copy that starts this little after the last one ended was waiting for it: sleeping overshoots.
_LATENESS_S = 1e-3
_EXIT_PATIENCE_S = 5.0
_SIGNAL_PATIENCE_S = 0.5


def seeded_delays(seed: int, most_s: float) -> Delays:
    """Return delays for `ThreadedBackend`: half of them zero, the rest anything up to `most_s` seconds.

    A delay depends on `seed`, the stream's name and how many delays that stream had before, so that
    a schedule can be had again.
    """
    generators: dict[str, random.Random] = {}

    def delay(stream: str, label: str) -> float:
        if stream not in generators:
            generators[stream] = random.Random(f"{seed} {stream}")
        return most_s * max(0.0, 2 * generators[stream].random() - 1)

    return delay


class _Done:
    """The event of a stream whose work is done when `submit` returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Ticket:
    """An event in the queue of a worker: done when the worker comes to it."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def complete(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        # A signal wakes the main thread, but one that comes just before it blocks does not: look again.
        while not self._done.wait(_SIGNAL_PATIENCE_S):
            pass


_DONE = _Done()


class SynchronousStream:
    """Work in the calling thread, done when `submit` returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, work: Callable[[], None], label: str) -> None:
        """Call `work`; what it raises comes out here."""
        work()

    def record(self) -> Event:
        """Return an event that is done."""
        return _DONE

    def wait(self, event: Event) -> None:
        """Block the calling thread until `event` is done."""
        event.synchronize()

    def uses(self, tensor: Tensor) -> None:
        """Do nothing: the work is done."""


class SynchronousBackend:
    """A CPU for users: no threads, every event is done at birth, and exceptions come out of `submit`."""

    def __init__(self) -> None:
        self._caller = SynchronousStream("caller")
        self._streams: dict[str, SynchronousStream] = {}

    def caller(self) -> Stream:
        """Return the calling thread."""
        return self._caller

    def stream(self, name: str) -> Stream:
        """Return the stream of that name: the calling thread too."""
        if name not in self._streams:
            self._streams[name] = SynchronousStream(name)
        return self._streams[name]

    def thread(self, name: str) -> HostThread:
        """Return a new thread."""
        return HostThread(name)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, of the same shape."""
        target.copy_(source)

    def pin(self, memory: Tensor) -> None:
        """Do nothing: a CPU reads any memory."""

    def unpin(self, memory: Tensor) -> None:
        """Do nothing."""

    @property
    def failed(self) -> bool:
        """False: failures came out of `submit`."""
        return False

    def settle(self) -> BaseException | None:
        """Return None: nothing is pending, and failures came out of `submit`."""
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class _Breaker:
    """Keeps the first failure. While it has one, and after `close`, streams drop their work."""

    def __init__(self) -> None:
        self.tripped = False
        self._closed = False
        self._first: BaseException | None = None
        self._lock = threading.Lock()

    def keep(self, failure: BaseException) -> None:
        with self._lock:
            if self._first is None:
                self._first = failure
            self.tripped = True

    def reset(self) -> BaseException | None:
        with self._lock:
            first, self._first, self.tripped = self._first, None, self._closed
        return first

    def close(self) -> None:
        # No lock: a garbage collection may call this inside `keep`.
        self._closed = self.tripped = True


class Link:
    """One direction of a bus: copies in turn, at a given rate or as fast as memory goes.

    Attributes:
        free_at_s: when its last copy ends, on the clock of `time.perf_counter`. Zero before the first,
            and where there is no rate.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_at_s = 0.0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, then sleep until the link would have done it."""
        if self._bytes_per_s is None:
            target.copy_(source)
            return
        start = time.perf_counter()
        if start - self.free_at_s < _LATENESS_S:
            start = self.free_at_s
        target.copy_(source)
        copied = time.perf_counter()
        self.free_at_s = max(copied, start + target.nbytes / self._bytes_per_s)
        time.sleep(self.free_at_s - copied)


_thread = threading.local()  # .link: the link of the worker that this thread is


class _CallerStream(SynchronousStream):
    """The calling thread, beside workers: drops work after a failure of theirs, and they after its own."""

    def __init__(self, breaker: _Breaker, delays: Delays | None) -> None:
        super().__init__("caller")
        self._breaker = breaker
        self._delays = delays

    def submit(self, work: Callable[[], None], label: str) -> None:
        if self._breaker.tripped:
            return
        _pause(self._delays, self.name, label)
        try:
            work()
        except BaseException as failure:
            self._breaker.keep(failure)
            raise


class WorkerStream:
    """Work in a thread of its own, in order.

    Made by `ThreadedBackend.stream`. The thread ends with that backend, so keep the backend as long.
    """

    def __init__(self, name: str, breaker: _Breaker, link: Link, delays: Delays | None) -> None:
        self.name = name
        self.link = link
        self.queue: _Queue = SimpleQueue()
        self._attempt = partial(_attempt, breaker, delays, name)
        # The thread knows neither stream nor backend, so that both can be collected while it waits.
        self.thread = threading.Thread(
            target=_serve, args=(self.queue, breaker, link), name=f"muonloom-{name}", daemon=True
        )
        self.thread.start()

    def submit(self, work: Callable[[], None], label: str) -> None:
        """Put `work` in the queue and return."""
        self.queue.put(partial(self._attempt, work, label))

    def record(self) -> Event:
        """Return an event that is done when the worker comes to it."""
        ticket = _Ticket()
        self.queue.put(ticket.complete)
        return ticket

    def wait(self, event: Event) -> None:
        """Let the worker block until `event` is done."""
        self.queue.put(event.synchronize)

    def uses(self, tensor: Tensor) -> None:
        """Do nothing: on a CPU, work holds what it reads."""


class HostThread(WorkerStream):
    """A thread beside all streams, with failures of its own, until `finish` or the last reference."""

    def __init__(self, name: str, *, delays: Delays | None = None) -> None:
        self._breaker = _Breaker()
        super().__init__(name, self._breaker, Link(None), delays)
        weakref.finalize(self, self.queue.put, None).atexit = False

    @property
    def failed(self) -> bool:
        """Whether work has failed."""
        return self._breaker.tripped

    def finish(self) -> BaseException | None:
        """Wait until all work is done, or dropped after a failure; end; return the first failure."""
        self.queue.put(None)
        self.thread.join()
        return self._breaker.reset()


class ThreadedBackend:
    """A CPU whose streams are threads, so that a schedule meets real concurrency. For tests and benchmarks.

    Copies and torch operations release the interpreter's lock, so streams do overlap. Work runs under
    `torch.no_grad`, except on the caller's stream.
    """

    def __init__(
        self, *, copy_bytes_per_s: float | None = None, delays: Delays | None = None
    ) -> None:
        """Start without threads: each comes with its stream.

        Args:
            copy_bytes_per_s: the rate of `copy` on each stream. Streams do not share it: a load and a
                store are the two directions of one bus. None: as fast as memory goes.
            delays: given a stream's name and a label, seconds to sleep before that work.
        """
        self._breaker = _Breaker()
        self._copy_bytes_per_s = copy_bytes_per_s
        self._delays = delays
        self._caller = _CallerStream(self._breaker, delays)
        self._caller_link = Link(copy_bytes_per_s)
        self._streams: dict[str, WorkerStream] = {}
        self._queues: list[_Queue] = []
        weakref.finalize(self, _halt, self._breaker, self._queues).atexit = False
        _living.add(self)

    def caller(self) -> Stream:
        """Return the calling thread: `wait` blocks it, and what its work raises comes out of `submit`."""
        return self._caller

    def stream(self, name: str) -> WorkerStream:
        """Return the stream of that name; the first call starts its thread."""
        if name not in self._streams:
            link = Link(self._copy_bytes_per_s)
            stream = WorkerStream(name, self._breaker, link, self._delays)
            self._queues.append(stream.queue)
            self._streams[name] = stream
        return self._streams[name]

    def thread(self, name: str) -> HostThread:
        """Return a new thread, with delays of its own."""
        return HostThread(name, delays=self._delays)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, of the same shape, at the rate of the stream that this runs on."""
        link: Link = getattr(_thread, "link", self._caller_link)
        link.copy(target, source)

    def pin(self, memory: Tensor) -> None:
        """Do nothing: a CPU reads any memory."""

    def unpin(self, memory: Tensor) -> None:
        """Do nothing."""

    @property
    def failed(self) -> bool:
        """Whether streams drop their work."""
        return self._breaker.tripped

    def settle(self) -> BaseException | None:
        """Wait until all queues are empty; return and forget the first failure, the caller's too."""
        for event in [stream.record() for stream in self._streams.values()]:
            event.synchronize()
        return self._breaker.reset()

    def close(self) -> None:
        """Drop work that has not begun, and wait for the threads to end."""
        self._end(patience_s=None)

    def _end(self, *, patience_s: float | None) -> None:
        _halt(self._breaker, self._queues)
        for stream in self._streams.values():
            stream.thread.join(patience_s)
        self._streams.clear()


# weakref.finalize would stop the threads at exit, but not wait for them. A daemon thread that comes
# back from C++ when the interpreter is gone takes the process down.
_living: weakref.WeakSet[ThreadedBackend] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for backend in list(_living):
        backend._end(patience_s=_EXIT_PATIENCE_S)


def _halt(breaker: _Breaker, queues: Sequence[_Queue]) -> None:
    breaker.close()
    for queue in queues:
        queue.put(None)


def _serve(queue: _Queue, breaker: _Breaker, link: Link) -> None:
    _thread.link = link
    with torch.no_grad():
        while (item := queue.get()) is not None:
            try:
                item()
            except BaseException as failure:
                breaker.keep(failure)
            # The item may hold the backend, which has to be collectable while this thread waits.
            del item


def _attempt(
    breaker: _Breaker, delays: Delays | None, name: str, work: Callable[[], None], label: str
) -> None:
    if not breaker.tripped:
        _pause(delays, name, label)
        work()


def _pause(delays: Delays | None, name: str, label: str) -> None:
    if delays is not None:
        time.sleep(delays(name, label))
