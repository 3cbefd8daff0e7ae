"""What was accessed so far, by real memory: finds pairs of accesses that nothing orders."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

_MOST_RUNS = 4096
_KEPT_ENTRIES = 256
_KEPT_REGIONS = 1024

# They look at shapes or give another view, and their schemas do not say so.
_SILENT = frozenset(
    {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
    | {"is_pinned", "is_same_size", "record_stream"}
)
_RESIZING = frozenset({"resize_", "resize_as_"})
_FACTORIES = ("empty", "zeros", "ones", "full", "rand")
_GRADIENT_SCALERS = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})


Clock = Mapping[int, int]
"""By index of a stream: the last of its ticks that comes before."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """One side of a hazard.

    Attributes:
        label: what `submit` or `watch` was given.
        stream: the stream's name.
        kind: "write" also where the operation reads too.
        op: the torch operation, as in "aten.copy_.default".
        order: grows in the order of submission.
    """

    label: str
    stream: str
    kind: Literal["read", "write"]
    op: str
    order: int

    def __str__(self) -> str:
        return f"{self.kind} by {self.op} in {self.label!r} on stream {self.stream!r}"


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """Two accesses to the same bytes, at least one a write, that no event orders.

    Attributes:
        first: the one that was submitted first.
        second: the other.
        start: first byte of the range that both reach into, counted from the start of the storage.
        stop: the byte after the last. Of strided tensors, not each byte between is shared.
    """

    first: Access
    second: Access
    start: int
    stop: int

    def __str__(self) -> str:
        return f"bytes {self.start} to {self.stop}: {self.first}; {self.second}"


class Line:
    """A stream's, or the host's, place in the order. The host thread moves it; clocks are replaced."""

    def __init__(self, index: int, name: str, ticks: Iterator[int]) -> None:
        self.index = index
        self.name = name
        self._ticks = ticks
        self.clock: Clock = {}
        self.tick()

    def tick(self) -> None:
        """Begin something that is not before what was recorded until now."""
        self.clock = {**self.clock, self.index: next(self._ticks)}

    def join(self, other: Clock) -> None:
        """Come after all that `other` comes after."""
        later = {index: tick for index, tick in other.items() if tick > self.clock.get(index, 0)}
        self.clock = {**self.clock, **later}


class _Dispatching(threading.local):
    """Whether a recorder of this thread has the operation: those below it must not take it for theirs."""

    taken = False


class Signature:
    """What the schema of an operation says about its arguments."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        short = schema.name.partition("::")[2]
        moves_view = torch.Tag.inplace_view in func.tags and short not in {*_RESIZING, "set_"}
        arguments = list(enumerate(schema.arguments))
        self.name = str(func)
        self.silent = func.is_view or moves_view or short in _SILENT
        self.factory = short.startswith("new_") or (
            short.endswith("_like") and short.startswith(_FACTORIES)
        )
        self.resizes = torch.Tag.out in func.tags or short in _RESIZING
        self._scales_gradients = short in _GRADIENT_SCALERS
        written = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
        self._written = {key for keys in written for key in keys}

    def touches(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield each tensor, and whether it is written."""
        written = self._written
        if self._scales_gradients and kwargs.get("grad_scale") is None:
            written = written - {1, "grads"}
        for key, value in itertools.chain(enumerate(args), kwargs.items()):
            for tensor in tensors_in(value):
                yield tensor, key in written


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in an argument or result of an operation."""
    if isinstance(value, Tensor):
        return (value,) if value.layout is torch.strided else ()
    if isinstance(value, list | tuple):
        return (t for t in value if isinstance(t, Tensor) and t.layout is torch.strided)
    return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Footprint:
    """The bytes of a tensor, from its first: runs of `run` bytes at each of the sorted `starts`."""

    run: int
    starts: Sequence[int]
    span: int

    def meets(self, other: _Footprint, shift: int) -> bool:
        """Whether it shares a byte with `other`, which begins `shift` bytes later."""
        if len(self.starts) < len(other.starts):
            return other.meets(self, -shift)
        for start in other.starts:
            before = bisect_left(self.starts, start + shift + other.run) - 1
            if before >= 0 and self.starts[before] + self.run > start + shift:
                return True
        return False


def _runs(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, Sequence[int]]:
    """Return the length of the runs and where they start; for too many, one run: the hull."""
    run = itemsize
    outer: list[tuple[int, int]] = []
    axes = zip(strides, shape, strict=True)
    for stride, size in sorted((s * itemsize, n) for s, n in axes if s > 0 and n > 1):
        if stride <= run:
            run += stride * (size - 1)
        elif outer and stride == prod(outer[-1]):
            outer[-1] = (outer[-1][0], outer[-1][1] * size)
        else:
            outer.append((stride, size))
    if len(outer) == 1:
        (stride, size) = outer[0]
        return run, range(0, stride * size, stride)
    if prod(size for _, size in outer) > _MOST_RUNS:
        return run + sum(stride * (size - 1) for stride, size in outer), range(1)
    starts = {0}
    for stride, size in outer:
        starts = {start + stride * i for start in starts for i in range(size)}
    return run, tuple(sorted(starts))


_Key = tuple[int, int, _Footprint, bool]


class _Entry(NamedTuple):
    line: int
    stream: str
    clock: Clock
    label: str
    op: str
    tick: int
    low: int
    footprint: _Footprint
    write: bool

    def access(self) -> Access:
        kind: Literal["read", "write"] = "write" if self.write else "read"
        return Access(label=self.label, stream=self.stream, kind=kind, op=self.op, order=self.tick)


class _Track:
    """What one stream did to a region, in order.

    A stream's entry is dropped for a later one of its own with the same bytes that is as strong: what
    meets the first unordered meets the second unordered. So no verdict depends on it, only which pairs
    are named, and that only in tracks that have grown long.
    """

    def __init__(self) -> None:
        self.entries: dict[_Key, _Entry] = {}
        self._limit = _KEPT_ENTRIES

    def add(self, key: _Key, entry: _Entry) -> None:
        self.entries[key] = entry
        if len(self.entries) > self._limit:
            self._compact()

    def merge(self, other: _Track) -> None:
        both = [*self.entries.items(), *other.entries.items()]
        self.entries = dict(sorted(both, key=lambda item: item[0][0]))

    def _compact(self) -> None:
        kept = []
        seen: set[tuple[int, _Footprint, bool]] = set()
        for key, entry in reversed(self.entries.items()):
            place = (entry.low, entry.footprint)
            if (*place, True) not in seen and (*place, entry.write) not in seen:
                kept.append((key, entry))
            seen.add((*place, entry.write))
        self.entries = dict(reversed(kept))
        self._limit = max(_KEPT_ENTRIES, 2 * len(kept))


@dataclass(eq=False, kw_only=True)
class _Region:
    """Addresses of one or more storages that overlap, and what happened to them."""

    start: int
    stop: int
    members: dict[int, _Member] = field(default_factory=dict)
    tracks: dict[int, _Track] = field(default_factory=dict)

    def prune(self) -> bool:
        """Let go of dead storages; return whether any is left."""
        self.members = {key: member for key, member in self.members.items() if member.lives()}
        return bool(self.members)

    def absorb(self, other: _Region) -> None:
        self.start = min(self.start, other.start)
        self.stop = max(self.stop, other.stop)
        self.members |= other.members
        for member in other.members.values():
            member.region = self
        for line, track in other.tracks.items():
            self.tracks.setdefault(line, _Track()).merge(track)


@dataclass(eq=False, kw_only=True)
class _Member:
    """A storage in a region.

    Memory that torch allocated is gone with its storage, and so is all that could still meet what was
    done to it: a weak reference will do. Memory from elsewhere (`torch.frombuffer` over a map) lives on
    when its storage dies, and may come back in another: it is held, so that its addresses stay its own.
    """

    start: int
    stop: int
    keeper: UntypedStorage | StorageWeakRef
    region: _Region

    def lives(self) -> bool:
        if isinstance(self.keeper, UntypedStorage):
            return True
        storage: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self.keeper.cdata)
        return storage is not None and _place(storage) == (self.start, self.stop)


def _place(storage: UntypedStorage) -> tuple[int, int]:
    start = storage.data_ptr()
    return start, start + storage.nbytes()


class _Map:
    """Regions by address; no two overlap."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._regions: list[_Region] = []
        self._limit = _KEPT_REGIONS

    def __iter__(self) -> Iterator[_Region]:
        return iter(self._regions)

    def region(self, storage: UntypedStorage) -> _Region:
        """Return the region that holds `storage`."""
        place = _place(storage)
        member = self._members.get(storage._cdata)
        if member is not None:
            if (member.start, member.stop) == place:
                return member.region
            # It was resized: its old bytes are anyone's.
            del member.region.members[storage._cdata]
        return self._admit(storage, *place)

    def _admit(self, storage: UntypedStorage, start: int, stop: int) -> _Region:
        region = _Region(start=start, stop=stop)
        first = bisect_right(self._regions, start, key=attrgetter("stop"))
        last = bisect_left(self._regions, stop, key=attrgetter("start"))
        for neighbour in self._regions[first:last]:
            for key in neighbour.members:
                del self._members[key]
            if neighbour.prune():
                region.absorb(neighbour)
        self._regions[first:last] = [region]
        keeper = StorageWeakRef(storage) if storage.resizable() else storage  # type: ignore[no-untyped-call]
        member = _Member(start=start, stop=stop, keeper=keeper, region=region)
        region.members[storage._cdata] = member
        self._members |= region.members
        if len(self._regions) > self._limit:
            self._sweep()
        return region

    def _sweep(self) -> None:
        self._regions = [region for region in self._regions if region.prune()]
        self._members = {key: m for region in self._regions for key, m in region.members.items()}
        self._limit = max(_KEPT_REGIONS, 2 * len(self._regions))


class History:
    """All accesses that a later one may still meet, and the hazards so far. Safe for threads."""

    def __init__(self) -> None:
        self.dispatching = _Dispatching()
        self._lock = threading.Lock()
        self._map = _Map()
        self._hazards: dict[Hazard, None] = {}
        self._signatures: dict[Any, Signature] = {}
        self._layouts: dict[tuple[Sequence[int], Sequence[int], int], _Footprint] = {}
        self._footprints: dict[tuple[int, Sequence[int]], _Footprint] = {}
        self._met: dict[tuple[_Footprint, _Footprint, int], bool] = {}

    def hazards(self) -> list[Hazard]:
        """Return all that was found, in the order of submission."""
        with self._lock:
            found = list(self._hazards)
        return sorted(found, key=lambda h: (h.second.order, h.first.order, h.start, str(h)))

    def forget(self) -> None:
        """Drop all accesses, because what comes is ordered after them."""
        with self._lock:
            self._map = _Map()
            self._met.clear()

    def signature(self, func: Any) -> Signature:
        """Return which arguments of an operation are read and written."""
        if func not in self._signatures:
            self._signatures[func] = Signature(func)
        return self._signatures[func]

    def note(self, line: Line, label: str, op: str, touches: Sequence[tuple[Tensor, bool]]) -> None:
        """Compare what an operation touches (tensor, whether written) with all before, and keep it."""
        clock = line.clock
        tick = clock[line.index]
        with self._lock:
            for tensor, write in touches:
                low = tensor.data_ptr() if tensor.numel() else 0
                if not low:
                    continue
                region = self._map.region(tensor.untyped_storage())
                track = region.tracks.setdefault(line.index, _Track())
                key = (tick, low, self._footprint(tensor), write)
                if key not in track.entries:
                    entry = _Entry(line.index, line.name, clock, label, op, *key)
                    self._compare(entry, region)
                    track.add(key, entry)

    def _compare(self, entry: _Entry, region: _Region) -> None:
        for line, track in region.tracks.items():
            if line == entry.line:
                continue
            known = entry.clock.get(line, 0)
            for other in reversed(track.entries.values()):
                if other.tick <= known:
                    break
                ordered = other.clock.get(entry.line, 0) >= entry.tick
                if (entry.write or other.write) and not ordered:
                    self._report_shared(entry, other, region)

    def _report_shared(self, entry: _Entry, other: _Entry, region: _Region) -> None:
        start = max(entry.low, other.low)
        stop = min(entry.low + entry.footprint.span, other.low + other.footprint.span)
        if start >= stop or not self._meet(entry, other):
            return
        first, second = sorted((entry, other), key=attrgetter("tick"))
        hazard = Hazard(
            first=first.access(),
            second=second.access(),
            start=start - region.start,
            stop=stop - region.start,
        )
        self._hazards[hazard] = None

    def _meet(self, entry: _Entry, other: _Entry) -> bool:
        key = (entry.footprint, other.footprint, other.low - entry.low)
        if key not in self._met:
            self._met[key] = entry.footprint.meets(*key[1:])
        return self._met[key]

    def _footprint(self, tensor: Tensor) -> _Footprint:
        layout = (tensor.shape, tensor.stride(), tensor.itemsize)
        if layout not in self._layouts:
            run, starts = _runs(*layout)
            footprint = _Footprint(run=run, starts=starts, span=starts[-1] + run)
            # One object for the same bytes, whatever the shape: entries are compared by identity.
            self._layouts[layout] = self._footprints.setdefault((run, starts), footprint)
        return self._layouts[layout]
