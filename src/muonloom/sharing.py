"""Updated weights of parameters that all ranks hold, given by each rank that updated a part to all others.

What a rank has updated is one stream of bytes, parameter after parameter in an order that all ranks know.
All streams are cut into the same number of buckets, so that one collective moves a bucket of each, and they
travel while later parameters are still being updated.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from muonloom.collectives import Pending, Ranks

_BUCKET_BYTES = {"cpu": 32 << 20}
_DEFAULT_BUCKET_BYTES = 256 << 20
# How many buckets are on their way at a time.
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class SharedWeight:
    """A parameter that every rank of a group holds.

    Attributes:
        parameter: index in the plan.
        rows: position, first and last-but-one of dimension 0, of each rank that updates some.
        row_bytes: of one row of the weight.
    """

    parameter: int
    rows: tuple[tuple[int, int, int], ...]
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Extent:
    """Bytes ``start:stop`` of a rank's stream, which are rows of one parameter."""

    weight: SharedWeight
    first_row: int
    start: int
    stop: int


class GroupSharing:
    """Shares the weights of one group of ranks, step after step.

    Args:
        ranks: of the group.
        weights: in an order that is the same on all of them.
        ready: by parameter, the task after which this rank's part is updated.
        device: where the weights are.
        weight_of: returns the whole weight of a parameter.
        bucket_bytes: the most that one collective moves; None: a constant of the device's kind.
    """

    def __init__(
        self,
        ranks: Ranks,
        weights: Sequence[SharedWeight],
        *,
        ready: Mapping[int, int],
        device: torch.device,
        weight_of: Callable[[int], Tensor],
        bucket_bytes: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._weight_of = weight_of
        self._present: frozenset[int] = frozenset()
        self._streams = _streams(weights, ranks.size)
        lengths = [stream[-1].stop if stream else 0 for stream in self._streams]
        limit = bucket_bytes or _BUCKET_BYTES.get(device.type, _DEFAULT_BUCKET_BYTES)
        self.num_buckets = -(-sum(lengths) // limit)
        self._borders = [
            [length * bucket // max(1, self.num_buckets) for bucket in range(self.num_buckets + 1)]
            for length in lengths
        ]
        own = self._streams[ranks.position]
        ends = [self._borders[ranks.position][bucket + 1] for bucket in range(self.num_buckets)]
        self._due = [
            max((ready.get(e.weight.parameter, -1) for e in own if e.start < end), default=-1)
            for end in ends
        ]
        self._sizes = [
            [borders[bucket + 1] - borders[bucket] for borders in self._borders]
            for bucket in range(self.num_buckets)
        ]
        most = max(map(sum, self._sizes), default=0)
        self._memory = [
            torch.empty(most, dtype=torch.uint8, device=device)
            for _ in range(min(_IN_FLIGHT, self.num_buckets))
        ]
        self._flying: deque[tuple[int, Pending]] = deque()

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets in flight."""
        return sum(memory.nbytes for memory in self._memory)

    def due(self, bucket: int) -> int:
        """Return the task after which this rank's part of a bucket is complete; -1: it always is."""
        return self._due[bucket]

    def turn(self, bucket: int) -> tuple[Fraction, tuple[int, ...]]:
        """Return what puts the buckets of all groups in an order, the same on all ranks."""
        return Fraction(bucket + 1, self.num_buckets), self._ranks.ranks

    def begin(self, present: frozenset[int]) -> None:
        """Begin a step; see `WeightSharing.begin`."""
        self._present = present
        self._flying.clear()

    def send(self, bucket: int) -> None:
        """Have a bucket on its way; they go in order."""
        if len(self._flying) == _IN_FLIGHT:
            self._land()
        self._send(bucket)

    def finish(self) -> None:
        """Have all weights where they belong; all buckets are on their way."""
        while self._flying:
            self._land()

    def _send(self, bucket: int) -> None:
        sizes = self._sizes[bucket]
        memory = self._memory[bucket % len(self._memory)]
        parts = list(torch.split(memory[: sum(sizes)], sizes))
        own = parts[self._ranks.position]
        for place, extent, begin, end in self._pieces(bucket, self._ranks.position):
            source = _rows_as_bytes(self._weight_of(extent.weight.parameter), extent)
            own[place : place + end - begin].copy_(source[begin:end])
        self._flying.append((bucket, self._ranks.start_gather(parts, own)))

    def _land(self) -> None:
        bucket, pending = self._flying.popleft()
        pending.wait()
        sizes = self._sizes[bucket]
        memory = self._memory[bucket % len(self._memory)]
        for position, part in enumerate(torch.split(memory[: sum(sizes)], sizes)):
            if position == self._ranks.position:
                continue
            for place, extent, begin, end in self._pieces(bucket, position):
                if extent.weight.parameter not in self._present:
                    continue
                _write_bytes(
                    self._weight_of(extent.weight.parameter),
                    extent,
                    begin,
                    part[place : place + end - begin],
                )

    def _pieces(self, bucket: int, position: int) -> Iterator[tuple[int, _Extent, int, int]]:
        """Yield where in a bucket's part an extent's bytes ``begin:end`` are."""
        start, stop = self._borders[position][bucket : bucket + 2]
        stream = self._streams[position]
        first = bisect_right(stream, start, key=lambda extent: extent.stop)
        for extent in itertools.islice(stream, first, None):
            if extent.start >= stop:
                return
            begin, end = max(start, extent.start), min(stop, extent.stop)
            yield begin - start, extent, begin - extent.start, end - extent.start


class WeightSharing:
    """Shares the weights of all groups, each of a bucket's ranks in its turn.

    Ranks that meet in several groups would wait for one another if each sent what it has ready first: all
    buckets go in one order, and exchanges, which ranks have in the same order, before them.

    Args:
        groups: in which this rank is.
        after: the last task that is a collective of its own; -1: there is none.
    """

    def __init__(self, groups: Sequence[GroupSharing], *, after: int) -> None:
        self._groups = groups
        pairs = ((group, bucket) for group in groups for bucket in range(group.num_buckets))
        self._order = sorted(pairs, key=lambda pair: pair[0].turn(pair[1]))
        self._due = [max(after, group.due(bucket)) for group, bucket in self._order]
        self._next = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets in flight."""
        return sum(group.nbytes for group in self._groups)

    def begin(self, present: frozenset[int]) -> None:
        """Begin a step in which these parameters, on all ranks, are updated; others are not written."""
        for group in self._groups:
            group.begin(present)
        self._next = 0

    def is_due(self, task: int) -> bool:
        """Whether a bucket is complete once `task` is done."""
        return task in self._due

    def advance(self, task: int) -> None:
        """Send the buckets that are complete, now that `task` of the schedule is done."""
        while self._next < len(self._order) and self._due[self._next] <= task:
            group, bucket = self._order[self._next]
            group.send(bucket)
            self._next += 1

    def finish(self) -> None:
        """Send the rest, and have all weights where they belong."""
        self.advance(max(self._due, default=-1))
        for group in self._groups:
            group.finish()


def _streams(weights: Sequence[SharedWeight], num_ranks: int) -> list[list[_Extent]]:
    streams: list[list[_Extent]] = [[] for _ in range(num_ranks)]
    for weight in weights:
        for position, first, last in weight.rows:
            stream = streams[position]
            start = stream[-1].stop if stream else 0
            stop = start + (last - first) * weight.row_bytes
            stream.append(_Extent(weight=weight, first_row=first, start=start, stop=stop))
    return streams


def _rows(weight: Tensor, extent: _Extent) -> Tensor:
    count = (extent.stop - extent.start) // extent.weight.row_bytes
    return weight[extent.first_row : extent.first_row + count]


def _rows_as_bytes(weight: Tensor, extent: _Extent) -> Tensor:
    return _rows(weight, extent).contiguous().view(-1).view(torch.uint8)


def _write_bytes(weight: Tensor, extent: _Extent, begin: int, values: Tensor) -> None:
    rows = _rows(weight, extent)
    flat = _rows_as_bytes(weight, extent)
    flat[begin : begin + values.numel()].copy_(values)
    if not rows.is_contiguous():
        rows.copy_(flat.view(rows.dtype).view(rows.shape))


def bytes_of_row(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of one row of dimension 0."""
    return math.prod(shape[1:]) * itemsize
