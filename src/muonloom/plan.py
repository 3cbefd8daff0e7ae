"""What one optimizer step does, as plain data.

A plan can be printed, compared, hashed and counted without a device. It is a function of the layout,
the group options that pick an iteration, and `ns_batch_bytes`: never of free memory, rank or timing,
so that every placement runs the same batches. `muonloom.planning` makes it, `muonloom.schedule` puts
its work in order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import torch

from muonloom.math import Recipe, workspace_numel
from muonloom.ownership import SharedAtom


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of equal matrices of one view of one parameter, at `offset` in its batch.

    `batched` tells whether the view has a dimension that counts matrices (``first:first+count`` of it).
    `rows` are those of dimension 0 that it is all of, for a parameter with a writer.
    """

    parameter: int
    view: int
    batched: bool
    first: int
    count: int
    offset: int
    shape: tuple[int, int]
    kind: str
    numel: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Matrices of one stored shape that one Newton–Schulz call takes together."""

    rows: int
    columns: int
    recipe: Recipe
    eps: float
    device: torch.device
    runs: tuple[Run, ...]

    @property
    def parts(self) -> tuple[Run, ...]:
        """What it consists of: its runs."""
        return self.runs

    @property
    def count(self) -> int:
        """The number of matrices."""
        return sum(run.count for run in self.runs)

    @property
    def numel(self) -> int:
        """The elements of all matrices."""
        return self.count * self.rows * self.columns

    @property
    def x_bytes(self) -> int:
        """The bytes of the matrices in the compute dtype."""
        return self.numel * self.recipe.compute_dtype.itemsize

    @property
    def scratch_numel(self) -> int:
        """The elements that the iteration needs beside them."""
        return workspace_numel(self.count, self.rows, self.columns, self.recipe)


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """A shared atom of a parameter, which this rank holds a part of; `dtype` is what travels."""

    parameter: int
    atom: SharedAtom
    dtype: torch.dtype

    @property
    def matrix_shapes(self) -> tuple[tuple[int, int], ...]:
        """Logical (out, in) shapes of the atom's matrices."""
        return self.atom.spec.matrices(self.atom.shape)


@dataclass(frozen=True, kw_only=True)
class OwnedBatch:
    """Matrices of shared atoms that this rank orthogonalizes; `shipments` tells by run which atoms.

    A run's view is one of its atom's.
    """

    batch: Batch
    shipments: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """Shared atoms that travel to their owners, and back, together; compared by identity, being large.

    Attributes:
        ranks: that take part, as `torch.distributed` numbers them.
        position: of this rank among them.
        turn: of the first parameter that has a part in it on any rank.
        device: where this rank's parts are.
        parameters: that have a part in it on any rank.
        runs: this rank's parts.
        shipments: the atom that each of these is of.
        owned: what this rank does of it.
    """

    ranks: tuple[int, ...]
    position: int
    turn: int
    device: torch.device
    parameters: frozenset[int]
    runs: tuple[Run, ...]
    shipments: tuple[Shipment, ...]
    owned: tuple[OwnedBatch, ...]

    @property
    def parts(self) -> tuple[Run, ...]:
        """What it consists of on this rank: its runs."""
        return self.runs


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements ``start:stop`` of one AdamW parameter, flattened."""

    parameter: int
    start: int
    stop: int
    last: bool

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Spans of one group that one AdamW call takes together."""

    spans: tuple[Span, ...]
    device: torch.device

    @property
    def parts(self) -> tuple[Span, ...]:
        """What it consists of: its spans."""
        return self.spans

    @property
    def numel(self) -> int:
        """The elements of all spans."""
        return sum(span.numel for span in self.spans)


Work = Batch | Pack | Exchange
"""What is done together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole step. `names`, `kinds` and `turns` are indexed by parameter."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    turns: tuple[int, ...]
    batches: tuple[Batch, ...]
    packs: tuple[Pack, ...]
    exchanges: tuple[Exchange, ...] = ()

    @property
    def works(self) -> list[Work]:
        """All of it, in the order in which a forward pass asks for the weights first.

        Exchanges have the same order on all of their ranks.
        """
        return sorted((*self.exchanges, *self.batches, *self.packs), key=self._first_turn)

    def _first_turn(self, work: Work) -> int:
        if isinstance(work, Exchange):
            return work.turn
        return min(self.turns[part.parameter] for part in work.parts)

    @property
    def all_batches(self) -> list[Batch]:
        """All batches that this rank orthogonalizes, those of exchanges too."""
        owned = (found.batch for exchange in self.exchanges for found in exchange.owned)
        return [*self.batches, *owned]

    @property
    def ns_calls(self) -> int:
        """Batched Newton–Schulz calls of a step in which every parameter has a gradient."""
        return len(self.all_batches)

    @property
    def num_matrices(self) -> int:
        """All matrices of all batches."""
        return sum(batch.count for batch in self.all_batches)

    @property
    def matrices(self) -> dict[tuple[int, int], int]:
        """Count of matrices by logical (out, in) shape."""
        counts: dict[tuple[int, int], int] = {}
        for batch in self.all_batches:
            for run in batch.runs:
                counts[run.shape] = counts.get(run.shape, 0) + run.count
        return counts

    def gradient_uses(self) -> Counter[int]:
        """Return in how many runs and spans the gradient of each parameter is used up."""
        works: list[Batch | Exchange] = [*self.batches, *self.exchanges]
        runs = (run.parameter for work in works for run in work.runs)
        return Counter((*runs, *(span.parameter for pack in self.packs for span in pack.spans)))

    def digest(self) -> str:
        """SHA-256 of the plan, equal exactly where the work is equal (devices' indices aside)."""
        rows = []
        for i, batch in enumerate(self.batches):
            what = f"{batch.rows}x{batch.columns} {batch.recipe}"
            # How a batch is cut into runs changes no result, and depends on the size of a slot.
            for (parameter, view), runs in groupby(batch.runs, key=lambda r: (r.parameter, r.view)):
                cut = list(runs)
                count = sum(run.count for run in cut)
                rows.append(f"{i} {self.names[parameter]} {view} {cut[0].first} {count} {what}")
        # Spans are left out for the same reason, and all AdamW parameters are in some.
        scalars = {s.parameter: s.stop for p in self.packs for s in p.spans}
        rows += [f"{self.names[index]} {stop}" for index, stop in sorted(scalars.items())]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()
