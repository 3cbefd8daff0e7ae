"""Which part of each parameter a rank updates, and which matrices it does for others.

A parameter's *atoms* are the smallest ranges of dimension 0 that hold whole matrices. Where all ranks hold
the whole parameter (DDP), each keeps masters and momentum of some of its atoms. Where each holds a part
(DTensor), it keeps those of its part; atoms that lie on one rank alone are its own, all others are
*shared*: their owner orthogonalizes them for all that hold a part. Where parts have copies (tensor beside
data parallel), the atoms are dealt to the copies first, and each copy's ranks share theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence

from muonloom.layout import BlockSpec, restricted, row_atoms, stitched
from muonloom.ownership.assign import Atoms, matrix_cost, scalar_cost, shared_out
from muonloom.ownership.held import as_held
from muonloom.ownership.shares import Candidate, Rows, Share, copies_of, holding_of, matrices_in
from muonloom.sharding import row_box

# AdamW's kernels round the last few elements of a span otherwise: parts begin at multiples of this.
_ELEMENTS = 64
# Into how many parts an AdamW parameter may be cut.
_MOST_PARTS = 4096


class Ledger:
    """What each rank of each group has to do so far: parameters that come later go to the others."""

    def __init__(self) -> None:
        self._loads: dict[Hashable, list[float]] = {}

    def share(self, candidates: Sequence[Candidate]) -> list[Share]:
        """Return each one's share."""
        found: dict[int, Share] = {}
        runs = self._runs(candidates)
        for ranks in dict.fromkeys(candidate.ranks for candidate in candidates):
            loads = self._of(ranks, len(ranks))
            own = [i for i, c in enumerate(candidates) if c.ranks == ranks]
            whole = [i for i in own if not candidates[i].as_held]
            parts = [i for i in own if candidates[i].as_held]
            shares = _replicated([candidates[i] for i in whole], loads)
            found.update(zip(whole, shares, strict=True))
            pairs = [(candidates[i], runs.get(i)) for i in parts]
            found.update(zip(parts, as_held(pairs, loads), strict=True))
        return [found[i] for i in range(len(candidates))]

    def _of(self, key: Hashable, count: int) -> list[float]:
        return self._loads.setdefault(key, [0.0] * count)

    def _runs(self, candidates: Sequence[Candidate]) -> dict[int, tuple[Rows, ...]]:
        """Return by index which rows each copy gets of parameters of which ranks hold copies of parts.

        All ranks that hold any part have to find the same. So this looks at nothing but whole parameters,
        and counts apart from what the copies of one part have to do anyway.
        """
        found: dict[int, tuple[Rows, ...]] = {}
        grids = [(c.ranks, c.copies) for c in candidates if c.as_held and len(c.copies) > 1]
        for ranks, copies in dict.fromkeys(grids):
            own = [i for i, c in enumerate(candidates) if (c.ranks, c.copies) == (ranks, copies)]
            loads = self._of((ranks, copies), len(copies))
            before = list(loads)
            borders = [_borders(candidates[i]) for i in own]
            parted = _parted([candidates[i] for i in own], borders, loads)
            for i, stops, parts in zip(own, borders, parted, strict=True):
                pairs = itertools.pairwise(parts)
                found[i] = tuple((stops[start], stops[stop]) for start, stop in pairs)
            also = self._of(copies, len(copies))
            for rank, (now, then) in enumerate(zip(loads, before, strict=True)):
                also[rank] += (now - then) / len(ranks)
        return found


def _replicated(candidates: Sequence[Candidate], loads: list[float]) -> Iterator[Share]:
    """Give each rank whole atoms, neighbours of each parameter; add what they cost to `loads`."""
    borders = [_borders(candidate) for candidate in candidates]
    # Few differ: equal parameters of all layers, or experts, have few distinct borders.
    known: dict[tuple[object, ...], _Cut] = {}
    parted = _parted(candidates, borders, loads)
    for candidate, own, parts in zip(candidates, borders, parted, strict=True):
        key = (candidate.shape, candidate.spec, parts)
        if key not in known:
            known[key] = _Cut(candidate, own, parts)
        cut = known[key]
        yield Share(holding=holding_of(candidate, cut.states), spec=cut.spec, copies=cut.copies)


def _parted(
    candidates: Sequence[Candidate], borders: Sequence[Sequence[int]], loads: list[float]
) -> list[tuple[int, ...]]:
    """Return for each which atoms each rank gets, as `shared_out` does; add what they cost to `loads`."""
    atoms = [
        Atoms(cost=_cost(candidate) / max(1, len(own) - 1), count=len(own) - 1)
        for candidate, own in zip(candidates, borders, strict=True)
    ]
    found: list[tuple[int, ...]] = [()] * len(candidates)
    free = []
    for i, (candidate, atom) in enumerate(zip(candidates, atoms, strict=True)):
        if candidate.owner is None:
            free.append(i)
            continue
        found[i] = (0,) * (candidate.owner + 1) + (atom.count,) * (len(loads) - candidate.owner)
        loads[candidate.owner] += atom.cost * atom.count
    chosen = shared_out([atoms[i] for i in free], num_ranks=len(loads), loads=loads)
    taken: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, parts in zip(free, chosen, strict=True):
        if parts not in taken:
            counts = enumerate(stop - start for start, stop in itertools.pairwise(parts))
            taken[parts] = [(rank, count) for rank, count in counts if count]
        for rank, count in taken[parts]:
            loads[rank] += atoms[i].cost * count
        found[i] = parts
    return found


class _Cut:
    """A parameter that is cut at some of its borders, one piece a rank.

    Attributes:
        states: what each rank keeps.
        copies: the same, as rows.
        spec: how this rank's part is cut; None: AdamW.
    """

    def __init__(self, candidate: Candidate, borders: Sequence[int], parts: Sequence[int]) -> None:
        rows = [(borders[start], borders[stop]) for start, stop in itertools.pairwise(parts)]
        # Most are equal, and empty: one object for all of these.
        made = {part: row_box(candidate.shape, part) for part in dict.fromkeys(rows)}
        self.states = tuple(made[part] for part in rows)
        mine, spec = rows[candidate.position], candidate.spec
        self.copies = copies_of(candidate.ranks, rows, candidate.position)
        if spec is not None:
            spec = stitched((mine[1] - mine[0], _inside(spec, candidate.shape, mine)))
        self.spec = spec


def _inside(spec: BlockSpec, shape: Sequence[int], rows: tuple[int, int]) -> BlockSpec:
    return restricted(spec, shape, rows) if rows[0] < rows[1] else BlockSpec.conv()


def _borders(candidate: Candidate) -> list[int]:
    """Return the rows between which a parameter may be parted into equal pieces, first and last too."""
    length = candidate.shape[0]
    if candidate.spec is not None:
        atoms = row_atoms(candidate.spec, candidate.shape)
        kinds = {matrices_in(candidate.spec, candidate.shape, rows) for rows in atoms}
        # Only where atoms cost the same does it not matter who gets which of them.
        return [0, *(stop for _, stop in atoms)] if len(kinds) == 1 else [0, length]
    row_numel = math.prod(candidate.shape[1:])
    step = _ELEMENTS // math.gcd(_ELEMENTS, max(1, row_numel))
    step *= max(1, -(-length // (step * _MOST_PARTS)))
    return [*range(0, length, step), length]


def _cost(candidate: Candidate) -> float:
    if candidate.spec is None:
        return scalar_cost(math.prod(candidate.shape))
    return sum(matrix_cost(*shape) for shape in candidate.spec.matrices(candidate.shape))
