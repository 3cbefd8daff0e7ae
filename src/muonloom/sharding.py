"""Which part of a parameter each rank of a group holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: where it begins, and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)

    @property
    def rows(self) -> tuple[int, int]:
        """First and last-but-one index of dimension 0; (0, 1) for a scalar."""
        if not self.sizes:
            return 0, 1
        return self.offsets[0], self.offsets[0] + self.sizes[0]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts it out of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def in_rows(self, rows: tuple[int, int]) -> Box:
        """Return the part of it that lies in some rows of dimension 0; maybe without rows."""
        start = max(self.offsets[0], rows[0])
        stop = min(self.offsets[0] + self.sizes[0], rows[1])
        start = min(start, max(stop, self.offsets[0]))
        return Box((start, *self.offsets[1:]), (max(0, stop - start), *self.sizes[1:]))

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Whether it is the whole tensor."""
        return not any(self.offsets) and self.sizes == tuple(shape)

    def within(self, outer: Box) -> Box | None:
        """Return the part that lies in `outer`, counted from where that begins; None: nothing does."""
        starts = [max(a, b) for a, b in zip(self.offsets, outer.offsets, strict=True)]
        stops = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, outer.offsets, outer.sizes, strict=True)
        ]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(
            tuple(start - o for start, o in zip(starts, outer.offsets, strict=True)),
            tuple(stop - start for start, stop in zip(starts, stops, strict=True)),
        )


def whole_box(shape: Sequence[int]) -> Box:
    """Return all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def row_box(shape: Sequence[int], rows: tuple[int, int]) -> Box:
    """Return rows of dimension 0."""
    start, stop = rows
    return Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a plain tensor lies on ranks where it is no DTensor: tensor parallelism as in Megatron-Core.

    Attributes:
        process_group: ranks that hold one piece each of the whole parameter, all equal, side by side in
            the group's order; None: it is whole.
        dim: the dimension of the whole parameter that is cut over these ranks.
        owner: of the ranks that hold the same tensor (the parameter's `process_group`), the position of the
            one whose gradient is reduced, and that so keeps its state; None: chosen by cost.
    """

    process_group: Any = None
    dim: int = 0
    owner: int | None = None

    def whole_shape(self, piece: Sequence[int], num_pieces: int) -> tuple[int, ...]:
        """Return the shape of the parameter that pieces of this shape make up."""
        return tuple(n * num_pieces if i == self.dim else n for i, n in enumerate(piece))

    def boxes(self, piece: Sequence[int], num_pieces: int) -> tuple[Box, ...]:
        """Return the pieces, in the group's order."""
        step, sizes = piece[self.dim], tuple(piece)
        offsets = ([0] * len(sizes) for _ in range(num_pieces))
        found = []
        for index, own in enumerate(offsets):
            own[self.dim] = index * step
            found.append(Box(tuple(own), sizes))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """How the ranks of one group hold a parameter and its state.

    Attributes:
        shape: of the whole parameter.
        ranks: of the group, as `torch.distributed` numbers all processes.
        position: of this rank in `ranks`.
        weights: by position, what the parameter's storage has.
        states: by position, what masters and momentum are kept of.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    position: int
    weights: tuple[Box, ...]
    states: tuple[Box, ...]

    @property
    def own(self) -> Box:
        """What this rank keeps state of."""
        return self.states[self.position]

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks have the whole weight, and state is shared out."""
        return all(box.is_all_of(self.shape) for box in self.weights) and len(self.ranks) > 1
