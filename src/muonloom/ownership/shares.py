"""What a rank does of a parameter that it shares with others, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muonloom.layout import BlockSpec, restricted
from muonloom.sharding import Box, Holding

Rows = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SharedAtom:
    """Matrices that several ranks hold parts of, or all of which several ranks hold.

    Attributes:
        rows: of dimension 0 of the parameter.
        shape: of these rows.
        spec: how they are cut.
        cost: of orthogonalizing them.
        owner: position of the rank that does it.
        sources: who sends the owner which part of the direction: position, and box of the atom.
        targets: who gets which part of the result.
    """

    rows: tuple[int, int]
    shape: tuple[int, ...]
    spec: BlockSpec
    cost: float
    owner: int
    sources: tuple[tuple[int, Box], ...] = ()
    targets: tuple[tuple[int, Box], ...] = ()

    @property
    def numel(self) -> int:
        """The elements of all of it."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Ranks that hold the same tensor, and update parts of it for one another.

    Attributes:
        ranks: as `torch.distributed` numbers all processes.
        own: the rows of dimension 0 of the tensor that this rank updates.
        rows: position, first and last-but-one row, of those that update some.
    """

    ranks: tuple[int, ...]
    own: tuple[int, int]
    rows: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this rank does of one parameter.

    Attributes:
        holding: what all ranks hold.
        copies: who else holds this very tensor and updates other rows of it; None: nobody does.
        spec: how this rank's part is cut: matrices of its own, and fragments of shared atoms; None: AdamW.
        atoms: all shared ones of the parameter.
        fragments: index of the flat view, and of the atom that it is a part of.
    """

    holding: Holding
    spec: BlockSpec | None
    copies: Copies | None = None
    atoms: tuple[SharedAtom, ...] = ()
    fragments: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return self.holding.own.sizes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A parameter that is to be shared over ranks.

    Attributes:
        shape: of the whole parameter.
        spec: how it is cut; None: it is AdamW's.
        ranks: of its group.
        position: of this rank among them.
        weights: by position, what the parameter's storage has.
        as_held: whether state is kept as the parameter is, rather than shared out.
        copies: the ranks that hold the same part, this one among them; empty: no matter.
        copy: position of this rank among them.
        owner: position of the rank that has to update all of it, among those that hold the same; None: any.
    """

    shape: tuple[int, ...]
    spec: BlockSpec | None
    ranks: tuple[int, ...]
    position: int
    weights: tuple[Box, ...]
    as_held: bool
    copies: tuple[int, ...] = ()
    copy: int = 0
    owner: int | None = None


def copies_of(ranks: tuple[int, ...], rows: Sequence[Rows], own: int) -> Copies:
    """Return what ranks that hold the same tensor update of it: rows by position; `own` is this rank's."""
    updated = tuple((p, *part) for p, part in enumerate(rows) if part[0] < part[1])
    return Copies(ranks=ranks, own=rows[own], rows=updated)


def holding_of(candidate: Candidate, states: tuple[Box, ...]) -> Holding:
    """Return what ranks hold of a parameter, and keep state of."""
    return Holding(
        shape=candidate.shape,
        ranks=candidate.ranks,
        position=candidate.position,
        weights=candidate.weights,
        states=states,
    )


def matrices_in(
    spec: BlockSpec, shape: tuple[int, ...], rows: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Return logical shapes of the matrices in a run of atoms."""
    return restricted(spec, shape, rows).matrices((rows[1] - rows[0], *shape[1:]))
