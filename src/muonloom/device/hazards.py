"""A race detector for streams: what real torch operations touch, against the order that events give.

It wraps any backend. Order is kept in vector clocks (Lamport 1978; FastTrack, Flanagan and Freund 2009)
that move when work is submitted, recorded and waited for, never when it runs: a missing wait is found
however lucky the timing was. Accesses come from a `TorchDispatchMode` inside the work.

Not seen: what goes around torch's dispatcher (`Tensor.tolist`, `Tensor.numpy`, writes through `mmap`),
sparse tensors, and the reuse of device memory by a caching allocator.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from muonloom.device.backend import Backend, Event, HostWorker, Stream
from muonloom.device.history import Clock, Hazard, History, Line, Signature, tensors_in


class HazardError(RuntimeError):
    """Accesses that nothing orders."""


class CheckedBackend:
    """Any backend, with every access of the work on its streams checked.

    One host thread drives it. `submit` does not order the caller's operations before the work, as on an
    accelerator. `Event.query` orders nothing: wait or synchronize.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._history = History()
        self._ticks = itertools.count(1)
        self._indices = itertools.count()
        self._host = self._line("host")
        self._caller = _CheckedStream(inner.caller(), self, self._line(inner.caller().name))
        self._streams: dict[str, _CheckedStream] = {}

    @property
    def hazards(self) -> list[Hazard]:
        """All that was found, in the order of submission."""
        return self._history.hazards()

    def check(self) -> None:
        """Pass if there is no hazard.

        Raises:
            HazardError: there is; names both accesses of the first.
        """
        if found := self.hazards:
            others = f" ({len(found) - 1} more)" if len(found) > 1 else ""
            raise HazardError(f"No event orders these accesses. {found[0]}{others}")

    @contextmanager
    def watch(self, label: str, *, host: bool = False) -> Iterator[None]:
        """Check what the calling thread does inside as an access of its own.

        Args:
            label: for the report.
            host: False: operations of the caller's stream. True: of the host itself, on host memory.
                These come before all work that is submitted later, and after work that was
                synchronized with, but not after work that the caller's stream only waits for.
        """
        line = self._host if host else self._caller.line
        line.join(self._host.clock)
        line.tick()
        with _Recorder(self._history, line, label):
            yield

    def caller(self) -> Stream:
        """Return the checked caller's stream."""
        return self._caller

    def stream(self, name: str) -> Stream:
        """Return the checked stream of that name."""
        if name not in self._streams:
            self._streams[name] = _CheckedStream(self._inner.stream(name), self, self._line(name))
        return self._streams[name]

    def thread(self, name: str) -> HostWorker:
        """Return a checked thread: a line of its own."""
        return _CheckedThread(self._inner.thread(name), self, self._line(name))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy by the wrapped backend."""
        self._inner.copy(target, source)

    def pin(self, memory: Tensor) -> None:
        """Pin by the wrapped backend."""
        self._inner.pin(memory)

    def unpin(self, memory: Tensor) -> None:
        """Unpin by the wrapped backend."""
        self._inner.unpin(memory)

    @property
    def failed(self) -> bool:
        """Whether work failed on the wrapped backend."""
        return self._inner.failed

    def settle(self) -> BaseException | None:
        """Settle the wrapped backend: all until now comes before all from now on."""
        failure = self._inner.settle()
        self._history.forget()
        return failure

    def close(self) -> None:
        """Close the wrapped backend; hazards can still be read."""
        self._inner.close()
        self._history.forget()

    def _line(self, name: str) -> Line:
        return Line(next(self._indices), name, self._ticks)

    def _submitted(self, line: Line, work: Callable[[], None], label: str) -> Callable[[], None]:
        line.join(self._host.clock)
        line.tick()
        # What the host does from now on is not before this work.
        self._host.tick()
        recorder = _Recorder(self._history, copy.copy(line), label)

        def checked() -> None:
            with recorder:
                work()

        return checked

    def _synchronized(self, clock: Clock) -> None:
        self._host.join(clock)
        self._caller.line.join(clock)


class _CheckedStream:
    def __init__(self, inner: Stream, backend: CheckedBackend, line: Line) -> None:
        self.name = inner.name
        self.line = line
        self._inner = inner
        self._backend = backend

    def submit(self, work: Callable[[], None], label: str) -> None:
        self._inner.submit(self._backend._submitted(self.line, work, label), label)

    def record(self) -> Event:
        event = _CheckedEvent(self._inner.record(), self._backend, self.line.clock)
        # A watched caller goes on: its next accesses are not before this event.
        self.line.tick()
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CheckedEvent)
        self._inner.wait(event.inner)
        self.line.join(event.clock)

    def uses(self, tensor: Tensor) -> None:
        self._inner.uses(tensor)


class _CheckedThread(_CheckedStream):
    def __init__(self, inner: HostWorker, backend: CheckedBackend, line: Line) -> None:
        super().__init__(inner, backend, line)
        self._worker = inner

    @property
    def failed(self) -> bool:
        return self._worker.failed

    def finish(self) -> BaseException | None:
        failure = self._worker.finish()
        self._backend._synchronized(self.line.clock)
        return failure


class _CheckedEvent:
    def __init__(self, inner: Event, backend: CheckedBackend, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock
        self._backend = backend

    def query(self) -> bool:
        return self.inner.query()

    def synchronize(self) -> None:
        self.inner.synchronize()
        self._backend._synchronized(self.clock)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the history what every operation of one piece of work touches."""

    def __init__(self, history: History, line: Line, label: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history
        self._line = line
        self._label = label

    # The base class keeps process-wide flags that threads entering and leaving in turn leave wrong,
    # and torch.compile reads them. The stack of modes itself belongs to the thread.
    def __enter__(self) -> _Recorder:
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Else worker threads would import the compiler.

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):  # type: ignore[attr-defined]
            return NotImplemented  # The subclass unwraps it; its inner operations come here.
        if torch.is_inference_mode_enabled() and not self._history.dispatching.taken:
            # Autograd, which takes composite operations apart, is not there to do it.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        signature = self._history.signature(func)
        if signature.silent or self._history.dispatching.taken:
            return func(*args, **kwargs)
        return self._dispatch(func, signature, args, kwargs)

    def _dispatch(
        self, func: Any, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        touches = [] if signature.factory else list(signature.touches(args, kwargs))
        self._note(signature, touches)
        self._history.dispatching.taken = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._history.dispatching.taken = False
        known = {tensor.untyped_storage()._cdata for tensor, _ in touches}
        fresh = (t for t in tensors_in(result) if t.untyped_storage()._cdata not in known)
        written = [(tensor, True) for tensor in fresh]
        if signature.resizes:
            written += [touch for touch in touches if touch[1]]
        if written:
            self._note(signature, written)
        return result

    def _note(self, signature: Signature, touches: Sequence[tuple[Tensor, bool]]) -> None:
        self._history.note(self._line, self._label, signature.name, touches)
