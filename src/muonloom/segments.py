"""How a state is cut for saving: segments of rows, and which parts of which tasks of a step change them."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from muonloom.bound import cut
from muonloom.cuts import flat_views
from muonloom.device import Event
from muonloom.layout import BlockSpec
from muonloom.plan import Run, Span
from muonloom.schedule import Op, Schedule, Task

# Small ones cost Python's time, when saved and when loaded; large ones leave room for copies unused.
SEGMENT_BYTES = 16 << 20
LEAST_SEGMENT_BYTES = 1 << 20

_NEVER = sys.maxsize

WEIGHT = "weight"
"""The source of what is read from a device weight."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank's part of a tensor belongs, and which ranks have parts of it.

    Attributes:
        whole: shape of all of the tensor.
        offsets: where the part begins, in each dimension.
        ranks: that hold parts of it; None: whoever has a tensor of this name has all of it.
        holders: of these, who hold this very part; None: all of them.
        is_equal: whether these hold the same values; else those of the first one count.
        sample: what tells copies apart that should be equal, as far as that is looked at.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    ranks: tuple[int, ...] | None = None
    holders: tuple[int, ...] | None = None
    is_equal: bool = True
    sample: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class SnapshotTensor:
    """One tensor of the state, or this rank's part of it.

    Attributes:
        key: that it is saved under.
        dtype: of the values saved.
        shape: of the part.
        read: called with rows of dimension 0 (a scalar is one row) and a tensor for them, on the CPU.
        parameter: index in the plan; -1: no step changes it.
        sources: keys of the state, or `WEIGHT`, that it is read from.
        spec: how the parameter is cut; None: it is AdamW's.
        is_whole: whether a change of any part writes all of it.
        place: of the part in the whole tensor; None: it is all of it.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slice, Tensor], None]
    parameter: int = -1
    sources: frozenset[str] = frozenset()
    spec: BlockSpec | None = None
    is_whole: bool = False
    place: Place | None = None

    @property
    def home(self) -> Place:
        """Return the place, also of what is all of its tensor."""
        return self.place or Place(whole=self.shape, offsets=(0,) * len(self.shape))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the part."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Return how many rows there are."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(eq=False, kw_only=True)
class Segment:
    """Rows of one tensor, that are read and written together.

    Attributes:
        tensor: that they are of.
        rows: of dimension 0.
        event: when the thread has read them.
        taken: whether the thread has begun to.
        copy: what is saved in place of them.
    """

    tensor: SnapshotTensor
    rows: slice
    event: Event | None = None
    taken: bool = False
    copy: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values saved."""
        return int(self.rows.stop - self.rows.start) * self.tensor.row_bytes

    def shaped(self, memory: Tensor) -> Tensor:
        """Return the first bytes of `memory`, uint8, as values of these rows."""
        rows = (self.rows.stop - self.rows.start, *self.tensor.shape[1:])
        values = memory[: self.nbytes].view(self.tensor.dtype)
        return values.view(rows if self.tensor.shape else ())


@dataclass(frozen=True, kw_only=True)
class Change:
    """Rows of a tensor that part `part` of task `task` changes."""

    task: int
    part: int
    tensor: SnapshotTensor
    rows: slice


def changes_of(
    schedule: Schedule, tensors: Iterable[SnapshotTensor], *, is_staged: bool
) -> Iterator[Change]:
    """Yield what the tasks of a schedule change of these tensors.

    Args:
        schedule: of a step.
        tensors: of the state.
        is_staged: whether state is on the host.
    """
    by_parameter: dict[int, list[SnapshotTensor]] = {}
    for tensor in tensors:
        by_parameter.setdefault(tensor.parameter, []).append(tensor)
    for index, task in enumerate(schedule.tasks):
        if task.unit < 0:
            continue
        for number, part in enumerate(schedule.units[task.unit].parts):
            keys = changed_keys(task, schedule, number, is_staged=is_staged)
            for tensor in by_parameter.get(part.parameter, ()):
                if keys is None or keys & tensor.sources:
                    rows = slice(0, tensor.length)
                    if not tensor.is_whole:
                        rows = rows_of(part, tensor.shape, tensor.spec)
                    yield Change(task=index, part=number, tensor=tensor, rows=rows)


def changed_keys(
    task: Task, schedule: Schedule, part: int, *, is_staged: bool
) -> frozenset[str] | None:
    """Return which state of a part a task changes; None: all of it."""
    unit = schedule.units[task.unit]
    if task.op in (Op.UPDATE, Op.ADAMW):
        return frozenset({WEIGHT}) if is_staged else None
    pieces = {Op.STORE: unit.slot, Op.STORE_MOMENTUM: unit.room}.get(task.op, ())
    return frozenset(piece.key for piece in pieces if piece.part == part)


def rows_of(part: Run | Span, shape: Sequence[int], spec: BlockSpec | None) -> slice:
    """Return the least run of rows of dimension 0 that holds a part of a tensor."""
    if isinstance(part, Span):
        first, last = part.start, part.stop
    else:
        assert spec is not None
        view = cut(flat_views(spec, torch.empty(tuple(shape), device="meta")), part)
        first = int(view.storage_offset())
        steps = zip(view.shape, view.stride(), strict=True)
        last = first + sum(int((n - 1) * stride) for n, stride in steps) + 1
    row = max(1, math.prod(shape[1:]))
    return slice(first // row, -(-last // row))


def cut_up(
    tensors: Sequence[SnapshotTensor], changes: Sequence[Change], *, segment_bytes: int
) -> tuple[list[Segment], Mapping[tuple[int, int], list[Segment]]]:
    """Cut tensors where changes begin and end, and into segments of at most so many bytes, or one row.

    Returns:
        All segments in order of their first change, and those that each part of a task changes.
    """
    own: dict[SnapshotTensor, list[Change]] = {tensor: [] for tensor in tensors}
    for change in changes:
        own[change.tensor].append(change)
    first_task: dict[Segment, int] = {}
    touched: dict[tuple[int, int], list[Segment]] = {}
    for tensor, found in own.items():
        edges = {0, tensor.length}
        edges.update(edge for change in found for edge in (change.rows.start, change.rows.stop))
        segments = list(_segments(tensor, sorted(edges), segment_bytes))
        first_task.update(dict.fromkeys(segments, _NEVER))
        starts = [segment.rows.start for segment in segments]
        for change in found:
            low = bisect_left(starts, change.rows.start)
            for segment in segments[low : bisect_left(starts, change.rows.stop)]:
                first_task[segment] = min(first_task[segment], change.task)
                touched.setdefault((change.task, change.part), []).append(segment)
    return sorted(first_task, key=first_task.__getitem__), touched


def _segments(
    tensor: SnapshotTensor, edges: Sequence[int], segment_bytes: int
) -> Iterator[Segment]:
    if tensor.row_bytes == 0:
        return
    most = max(1, segment_bytes // tensor.row_bytes)
    for start, stop in pairwise(edges):
        for first in range(start, stop, most):
            yield Segment(tensor=tensor, rows=slice(first, min(first + most, stop)))
