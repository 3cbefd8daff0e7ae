"""Which rows of a sorted batch belong to which expert, and in which runs experts are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some experts that have rows, ascending, and their rows.

    Attributes:
        experts: their numbers.
        rows: of the sorted batch.
        ends: where each expert's rows end, counted from ``rows.start``.
    """

    experts: tuple[int, ...]
    rows: slice
    ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The rows of a batch that is sorted by expert; rows of other ranks' experts are at its end.

    Attributes:
        experts: those that have rows, ascending.
        ends: where each one's rows end.
    """

    experts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> Groups:
        """Find each expert's rows; the one wait for the device of a forward.

        Args:
            expert_ids: (rows,) ascending integers; `num_experts` and above: an expert of another rank.
            num_experts: on this rank.
        """
        numbers = torch.arange(num_experts, device=expert_ids.device, dtype=expert_ids.dtype)
        bounds = torch.searchsorted(expert_ids, numbers, right=True).tolist()
        pairs = zip((0, *bounds), bounds, strict=False)
        filled = [expert for expert, (begin, end) in enumerate(pairs) if end > begin]
        return cls(experts=tuple(filled), ends=tuple(bounds[expert] for expert in filled))

    @property
    def num_rows(self) -> int:
        """How many rows belong to experts of this rank."""
        return self.ends[-1] if self.ends else 0

    def runs(self, capacity: int) -> Iterator[Run]:
        """Yield runs of at most `capacity` experts, which together are all of them."""
        begin = 0
        for first in range(0, len(self.experts), capacity):
            ends = self.ends[first : first + capacity]
            yield Run(
                experts=self.experts[first : first + capacity],
                rows=slice(begin, ends[-1]),
                ends=tuple(end - begin for end in ends),
            )
            begin = ends[-1]
