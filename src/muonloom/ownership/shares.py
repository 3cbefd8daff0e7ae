"""Which part of each parameter a rank updates, and which matrices it does for others.

A parameter's *atoms* are the smallest ranges of dimension 0 that hold whole matrices. Where all ranks hold
the whole parameter (DDP), each keeps masters and momentum of some of its atoms. Where each holds a part
(DTensor), it keeps those of its part; atoms that lie on one rank alone are its own, all others are
*shared*: their owner orthogonalizes them for all that hold a part.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from muonloom.cuts import flat_views
from muonloom.layout import BlockSpec, restricted, row_atoms, stitched
from muonloom.ownership.assign import Atoms, matrix_cost, owners, scalar_cost, shared_out
from muonloom.sharding import Box, Holding, row_box

# AdamW's kernels round the last few elements of a span otherwise: parts begin at multiples of this.
_ELEMENTS = 64
# Into how many parts an AdamW parameter may be cut.
_MOST_PARTS = 4096


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
class Share:
    """What this rank does of one parameter.

    Attributes:
        holding: what all ranks hold.
        spec: how this rank's part is cut: matrices of its own, and fragments of shared atoms; None: AdamW.
        atoms: all shared ones of the parameter.
        fragments: index of the flat view, and of the atom that it is a part of.
    """

    holding: Holding
    spec: BlockSpec | None
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
        is_dtensor: whether state is kept as the parameter is.
    """

    shape: tuple[int, ...]
    spec: BlockSpec | None
    ranks: tuple[int, ...]
    position: int
    weights: tuple[Box, ...]
    is_dtensor: bool


class Ledger:
    """What each rank of each group has to do so far: parameters that come later go to the others."""

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[float]] = {}

    def share(self, candidates: Sequence[Candidate]) -> list[Share]:
        """Return each one's share."""
        found: dict[int, Share] = {}
        for ranks in dict.fromkeys(candidate.ranks for candidate in candidates):
            loads = self._loads.setdefault(ranks, [0.0] * len(ranks))
            for is_dtensor, share_out in ((False, _replicated), (True, _as_held)):
                own = [
                    i
                    for i, c in enumerate(candidates)
                    if c.ranks == ranks and c.is_dtensor == is_dtensor
                ]
                shares = share_out([candidates[i] for i in own], loads)
                found.update(zip(own, shares, strict=True))
        return [found[i] for i in range(len(candidates))]


# -- replicated ---------------------------------------------------------------------------------------


def _replicated(candidates: Sequence[Candidate], loads: list[float]) -> Iterator[Share]:
    """Give each rank whole atoms, neighbours of each parameter; add what they cost to `loads`."""
    borders = [_borders(candidate) for candidate in candidates]
    atoms = [
        Atoms(cost=_cost(candidate) / max(1, len(own) - 1), count=len(own) - 1)
        for candidate, own in zip(candidates, borders, strict=True)
    ]
    num_ranks = len(loads)
    shared = shared_out(atoms, num_ranks=num_ranks, loads=loads)
    # Few differ: equal parameters of all layers, or experts, have few distinct borders.
    known: dict[tuple[object, ...], _Cut] = {}
    for candidate, own, atom, parts in zip(candidates, borders, atoms, shared, strict=True):
        key = (candidate.shape, candidate.spec, parts)
        if key not in known:
            known[key] = _Cut(candidate, own, parts)
        cut = known[key]
        for rank, count in cut.taken:
            loads[rank] += atom.cost * count
        yield Share(holding=_holding(candidate, cut.states), spec=cut.spec)


class _Cut:
    """A parameter that is cut at some of its borders, one piece a rank.

    Attributes:
        taken: rank and number of atoms, of those that take some.
        states: what each rank keeps.
        spec: how this rank's part is cut; None: AdamW.
    """

    def __init__(self, candidate: Candidate, borders: Sequence[int], parts: Sequence[int]) -> None:
        counts = [stop - start for start, stop in itertools.pairwise(parts)]
        self.taken = [(rank, count) for rank, count in enumerate(counts) if count]
        rows = [(borders[start], borders[stop]) for start, stop in itertools.pairwise(parts)]
        # Most are equal, and empty: one object for all of these.
        made = {part: row_box(candidate.shape, part) for part in dict.fromkeys(rows)}
        self.states = tuple(made[part] for part in rows)
        mine, spec = rows[candidate.position], candidate.spec
        if spec is not None:
            spec = stitched((mine[1] - mine[0], _inside(spec, candidate.shape, mine)))
        self.spec = spec


def _holding(candidate: Candidate, states: tuple[Box, ...]) -> Holding:
    return Holding(
        shape=candidate.shape,
        ranks=candidate.ranks,
        position=candidate.position,
        weights=candidate.weights,
        states=states,
    )


def _inside(spec: BlockSpec, shape: Sequence[int], rows: tuple[int, int]) -> BlockSpec:
    return restricted(spec, shape, rows) if rows[0] < rows[1] else BlockSpec.conv()


def _borders(candidate: Candidate) -> list[int]:
    """Return the rows between which a parameter may be parted into equal pieces, first and last too."""
    length = candidate.shape[0]
    if candidate.spec is not None:
        atoms = row_atoms(candidate.spec, candidate.shape)
        kinds = {_matrices(candidate.spec, candidate.shape, rows) for rows in atoms}
        # Only where atoms cost the same does it not matter who gets which of them.
        return [0, *(stop for _, stop in atoms)] if len(kinds) == 1 else [0, length]
    row_numel = math.prod(candidate.shape[1:])
    step = _ELEMENTS // math.gcd(_ELEMENTS, max(1, row_numel))
    step *= max(1, -(-length // (step * _MOST_PARTS)))
    return [*range(0, length, step), length]


def _matrices(
    spec: BlockSpec, shape: tuple[int, ...], rows: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    return restricted(spec, shape, rows).matrices((rows[1] - rows[0], *shape[1:]))


def _cost(candidate: Candidate) -> float:
    if candidate.spec is None:
        return scalar_cost(math.prod(candidate.shape))
    return sum(matrix_cost(*shape) for shape in candidate.spec.matrices(candidate.shape))


# -- as the parameters are held -----------------------------------------------------------------------


def _as_held(candidates: Sequence[Candidate], loads: list[float]) -> Iterator[Share]:
    """Find which atoms are shared, and choose their owners; add to `loads` what all ranks have to do."""
    # Equal parameters of all layers, or experts, are found out about once.
    known: dict[tuple[object, ...], _Division] = {}
    divisions: list[_Division] = []
    for candidate in candidates:
        key = (candidate.shape, candidate.spec, id(candidate.weights))
        if key not in known:
            known[key] = _Division(candidate)
        divisions.append(known[key])
        for position, cost in known[key].alone:
            loads[position] += cost
    flat = [atom for division in divisions for atom in division.shared]
    chosen = iter(
        owners([atom.cost for atom in flat], [atom.holders for atom in flat], loads=loads)
    )
    for candidate, division in zip(candidates, divisions, strict=True):
        atoms = tuple(atom.given_to(next(chosen)) for atom in division.shared)
        for atom in atoms:
            loads[atom.owner] += atom.cost
        yield Share(
            holding=_holding(candidate, candidate.weights),
            spec=division.spec,
            atoms=atoms,
            fragments=division.fragments,
        )


class _Division:
    """How the ranks of a group hold the atoms of a parameter, and of all that are equal.

    Attributes:
        alone: position and cost, of each atom that one rank has alone.
        shared: the others.
        spec: how this rank's part is cut; None: AdamW.
        fragments: see `Share`.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.alone: list[tuple[int, float]] = []
        self.shared: list[_Unowned] = []
        self.spec: BlockSpec | None = None
        self.fragments: tuple[tuple[int, int], ...] = ()
        if candidate.spec is None:
            return
        spec, shape = candidate.spec, candidate.shape
        atoms = row_atoms(spec, shape)
        for rows, targets in zip(atoms, _targets(candidate, atoms), strict=True):
            cost = sum(matrix_cost(*each) for each in _matrices(spec, shape, rows))
            if len(targets) == 1:
                self.alone.append((targets[0][0], cost))
            elif targets:
                atom = SharedAtom(
                    rows=rows,
                    shape=row_box(shape, rows).sizes,
                    spec=restricted(spec, shape, rows),
                    cost=cost,
                    owner=-1,
                    targets=tuple(targets),
                )
                self.shared.append(_Unowned(atom))
        own = candidate.weights[candidate.position]
        shared_rows = [unowned.rows for unowned in self.shared]
        self.spec, self.fragments = _local_spec(spec, shape, own, shared_rows)


class _Unowned:
    """A shared atom that is given to an owner for each of the equal parameters."""

    def __init__(self, atom: SharedAtom) -> None:
        self._atom = atom
        self.rows, self.cost = atom.rows, atom.cost
        self.holders = tuple(position for position, _ in atom.targets)
        self._by_box: dict[Box, list[int]] = {}
        for position, box in atom.targets:
            self._by_box.setdefault(box, []).append(position)
        self._sources: dict[int, tuple[tuple[int, Box], ...]] = {}
        self._owned: dict[int, SharedAtom] = {}

    def given_to(self, owner: int) -> SharedAtom:
        """Return the atom with its owner, who gets each part from one of the ranks that hold it."""
        if owner not in self._owned:
            own = next(box for position, box in self._atom.targets if position == owner)
            sources = self._sources_of(self._by_box[own].index(owner))
            self._owned[owner] = replace(self._atom, owner=owner, sources=sources)
        return self._owned[owner]

    def _sources_of(self, replica: int) -> tuple[tuple[int, Box], ...]:
        if replica not in self._sources:
            found = [(held[replica % len(held)], box) for box, held in self._by_box.items()]
            self._sources[replica] = tuple(sorted(found))
        return self._sources[replica]


def _targets(candidate: Candidate, atoms: Sequence[tuple[int, int]]) -> list[list[tuple[int, Box]]]:
    """Return for each atom which ranks hold which part of it."""
    starts, stops = [start for start, _ in atoms], [stop for _, stop in atoms]
    found: list[list[tuple[int, Box]]] = [[] for _ in atoms]
    for position, held in enumerate(candidate.weights):
        if held.numel:
            first, last = held.rows
            for index in range(bisect_right(stops, first), bisect_left(starts, last)):
                part = held.within(row_box(candidate.shape, atoms[index]))
                if part is not None:
                    found[index].append((position, part))
    return found


def _local_spec(
    spec: BlockSpec, shape: tuple[int, ...], box: Box, shared_rows: Sequence[tuple[int, int]]
) -> tuple[BlockSpec, tuple[tuple[int, int], ...]]:
    """Return how a rank's part is cut, and which of its views are fragments of which shared atoms."""
    if not box.numel:
        return stitched((box.sizes[0], BlockSpec.conv())), ()
    shared = {rows: index for index, rows in enumerate(shared_rows)}
    own_parts: list[tuple[tuple[int, int], int | None]] = []
    for rows in row_atoms(spec, shape):
        start, stop = max(rows[0], box.rows[0]), min(rows[1], box.rows[1])
        if start < stop:
            own_parts.append(((start, stop), shared.get(rows)))
    parts: list[tuple[int, BlockSpec]] = []
    fragments: list[tuple[int, int]] = []
    views = 0
    for _, group in groupby(enumerate(own_parts), key=_kind):
        found = [part for _, part in group]
        (start, _), atom = found[0]
        stop = found[-1][0][1]
        inner = restricted(spec, shape, (start, stop)) if atom is None else BlockSpec.conv()
        parts.append((stop - start, inner))
        if atom is not None:
            fragments.append((views, atom))
        part = torch.empty((stop - start, *box.sizes[1:]), device="meta")
        views += len(flat_views(inner, part))
    return stitched(*parts), tuple(fragments)


def _kind(part: tuple[int, tuple[tuple[int, int], int | None]]) -> tuple[bool, int]:
    """Neighbours of a rank's own go together; fragments of shared atoms each by itself."""
    index, (_, atom) = part
    return (True, 0) if atom is None else (False, index)
