"""Which part of a parameter each rank of a group holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
