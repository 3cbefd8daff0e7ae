"""Streams, events, copies and pinned memory of a CUDA or ROCm device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from muonloom.device.backend import Event, HostWorker, Stream
from muonloom.device.cpu import HostThread
from muonloom.errors import complaint


class _Point:
    """A recorded event. Dropping it gives the device's event back, to be recorded again."""

    __slots__ = ("_free", "raw")

    def __init__(self, raw: torch.Event, free: list[torch.Event]) -> None:
        self.raw = raw
        self._free = free

    def query(self) -> bool:
        return self.raw.query()

    def synchronize(self) -> None:
        self.raw.synchronize()

    def __del__(self) -> None:
        # Streams that still wait for it wait for what was recorded when they were told to.
        self._free.append(self.raw)


class _Points:
    """Makes points, with as few events of the device as are held at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def record(self, stream: torch.Stream) -> _Point:
        raw = self._free.pop() if self._free else torch.Event(self._device, enable_timing=False)
        raw.record(stream)
        return _Point(raw, self._free)


class AcceleratorStream:
    """A stream of the device, or whichever is torch's current one. The calling thread launches its work."""

    def __init__(self, name: str, points: _Points, raw: Callable[[], torch.Stream]) -> None:
        self.name = name
        self._points = points
        self._raw = raw

    def submit(self, work: Callable[[], None], label: str) -> None:
        """Call `work` with this stream as torch's current one; errors of launching come out here."""
        with self._raw():
            work()

    def record(self) -> Event:
        """Return the point after what was launched on this stream."""
        return self._points.record(self._raw())

    def wait(self, event: Event) -> None:
        """Order later work after `event`, without blocking the host unless another backend recorded it."""
        if isinstance(event, _Point):
            event.raw.wait(self._raw())
        else:
            event.synchronize()

    def uses(self, tensor: Tensor) -> None:
        """Tell the caching allocator, which knows only the stream that a tensor was made on."""
        tensor.record_stream(self._raw())


class _DeviceThread(HostThread):
    """A thread of the host, whose operations on tensors of the device go to a stream of their own."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._raw = torch.Stream(device)

    def submit(self, work: Callable[[], None], label: str) -> None:
        super().submit(partial(_inside, self._raw, work), label)


def _inside(raw: torch.Stream, work: Callable[[], None]) -> None:
    with raw:
        work()
    raw.synchronize()  # the thread's events are the host's


class AcceleratorBackend:
    """One CUDA or ROCm device. For calls from one thread."""

    def __init__(self, device: torch.device) -> None:
        """Start without streams.

        Args:
            device: with an index, or the current one of its type.
        """
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._points = _Points(self._device)
        current = partial(torch.accelerator.current_stream, self._device)
        self._caller = AcceleratorStream("caller", self._points, current)
        self._raw: dict[str, torch.Stream] = {}
        self._streams: dict[str, AcceleratorStream] = {}

    def caller(self) -> Stream:
        """Return the stream that is torch's current one at each call of a method."""
        return self._caller

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, made at the first call."""
        if name not in self._streams:
            raw = torch.Stream(self._device)
            self._raw[name] = raw
            self._streams[name] = AcceleratorStream(name, self._points, lambda: raw)
        return self._streams[name]

    def thread(self, name: str) -> HostWorker:
        """Return a new thread; what it does on the device goes to a stream beside all others."""
        return _DeviceThread(name, self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, of the same shape, on torch's current stream.

        The host does not wait where the host's side of it is pinned.
        """
        target.copy_(source, non_blocking=True)

    def pin(self, memory: Tensor) -> None:
        """Register page-aligned host memory of exact size with the device's driver.

        Raises:
            ValueError: the device is neither CUDA nor ROCm.
            RuntimeError: the driver refuses, for one because the process may not lock that much memory.
        """
        if self._device.type != "cuda":
            raise ValueError(
                complaint(
                    "placement",
                    got=f"pinned host memory for a device of type {self._device.type}",
                    wanted="CUDA or ROCm",
                    remedy='Use placement="device".',
                )
            )
        error = self._call_runtime("cudaHostRegister", memory.data_ptr(), memory.nbytes, 0)
        if error is not None:
            raise RuntimeError(
                complaint(
                    "placement",
                    got=f'"{error}" from the driver for {memory.nbytes:,} bytes',
                    wanted="that much pinned host memory",
                    remedy="Raise `ulimit -l` (in a container, its memlock limit), or free host memory.",
                )
            )

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`, after all copies that are under way: whoever drops an optimizer need not drain it.

        Raises:
            RuntimeError: the driver refuses: this memory is not pinned.
        """
        torch.accelerator.synchronize(self._device)  # also what went to streams of the caller
        error = self._call_runtime("cudaHostUnregister", memory.data_ptr())
        if error is not None:
            raise RuntimeError(f'Unpinning {memory.nbytes:,} bytes: "{error}" from the driver.')

    @property
    def failed(self) -> bool:
        """False: what fails comes out of `submit`, or of the device at the next synchronization."""
        return False

    def settle(self) -> BaseException | None:
        """Wait for the named streams; return the device's error, which most devices do not recover from."""
        try:
            for raw in self._raw.values():
                raw.synchronize()
        except RuntimeError as failure:
            return failure
        return None

    def close(self) -> None:
        """Forget the streams, which torch keeps and uses again, and their events."""
        self._raw.clear()
        self._streams.clear()

    def _call_runtime(self, name: str, *arguments: int) -> str | None:
        """Call a function of the CUDA runtime on this device; return its error, or None."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.accelerator.device_index(self._device.index):
            status = getattr(runtime, name)(*arguments)
            if int(status) == 0:
                return None
            # The runtime keeps the error, and the next kernel to be launched would report it as its own.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)
        return str(runtime.cudaGetErrorString(status))
