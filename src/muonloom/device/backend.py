"""What staging asks of a device: ordered streams of work, events between them, copies, pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Event(Protocol):
    """A point in a stream. Recorded once, and never moved: each `Stream.record` gives another point."""

    def query(self) -> bool:
        """Whether everything that was in the stream before this point is done."""

    def synchronize(self) -> None:
        """Block the host until it is done."""


class Stream(Protocol):
    """Work in order. Streams run beside each other; only events order work of two of them."""

    name: str

    def submit(self, work: Callable[[], None], label: str) -> None:
        """Do `work` after what was submitted before.

        Torch operations inside it go to this stream. An asynchronous stream returns at once. What
        `work` raises comes out here, or, where it runs later, out of `Backend.settle`.

        Args:
            work: called exactly once, or not at all after a failure: see `Backend.settle`.
            label: for traces and reports.
        """

    def record(self) -> Event:
        """Return the point that the stream has come to. It is reached after failures too."""

    def uses(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` until the work submitted so far is done, whoever drops it."""

    def wait(self, event: Event) -> None:
        """Hold back all work submitted from now on until `event` is done."""


class HostWorker(Stream, Protocol):
    """A stream of host work in a thread of its own, beside all others."""

    @property
    def failed(self) -> bool:
        """Whether submitted work has failed; what comes after it is dropped."""

    def finish(self) -> BaseException | None:
        """Wait until all work is done, or dropped after a failure; end; return the first failure."""


class Backend(Protocol):
    """One device. Streams and pinned memory are made once and kept until `close`."""

    def caller(self) -> Stream:
        """Return the stream that the caller's own operations go to: on a CPU, the calling thread."""

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, made at the first call."""

    def thread(self, name: str) -> HostWorker:
        """Return a new thread of the host; `settle` neither waits for it nor returns its failures."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between host and device inside submitted work, without blocking the host where it can."""

    def pin(self, memory: Tensor) -> None:
        """Make page-aligned host memory fit for asynchronous copies."""

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`."""

    @property
    def failed(self) -> bool:
        """Whether submitted work has failed since `settle` was last called, as far as is known by now."""

    def settle(self) -> BaseException | None:
        """Wait until all streams have done, or dropped, their work; return and forget the first failure.

        After a failure that this will return, no stream does later work until it was called: work is
        dropped, events still complete. What came out of `submit` is the caller's to handle; a backend
        may return it here as well.
        """

    def close(self) -> None:
        """Give back streams and threads; work not yet begun may be dropped. A second call does nothing.

        The backend is not used afterwards.
        """
