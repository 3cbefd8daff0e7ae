"""Shares of parameters whose state is kept as they are held: which matrices several ranks have parts of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from muonloom.cuts import flat_views
from muonloom.layout import BlockSpec, restricted, row_atoms, stitched
from muonloom.ownership.assign import matrix_cost, owners
from muonloom.ownership.shares import (
    Candidate,
    Copies,
    Rows,
    Share,
    SharedAtom,
    copies_of,
    holding_of,
    matrices_in,
)
from muonloom.sharding import Box, row_box


def as_held(
    pairs: Sequence[tuple[Candidate, tuple[Rows, ...] | None]], loads: list[float]
) -> Iterator[Share]:
    """Find which atoms are shared, and choose their owners; add to `loads` what all ranks have to do.

    Args:
        pairs: parameters, and which rows each copy of their parts gets; None: there are no copies.
        loads: what each rank has to do anyway.
    """
    # Equal parameters of all layers, or experts, are found out about once.
    known: dict[tuple[object, ...], _Division] = {}
    divisions: list[_Division] = []
    for candidate, runs in pairs:
        key = (candidate.shape, candidate.spec, id(candidate.weights), runs)
        if key not in known:
            known[key] = _Division(candidate, runs)
        divisions.append(known[key])
        for position, cost in known[key].alone:
            loads[position] += cost
    flat = [atom for division in divisions for atom in division.shared]
    chosen = iter(
        owners([atom.cost for atom in flat], [atom.holders for atom in flat], loads=loads)
    )
    for (candidate, _), division in zip(pairs, divisions, strict=True):
        atoms = tuple(atom.given_to(next(chosen)) for atom in division.shared)
        for atom in atoms:
            loads[atom.owner] += atom.cost
        yield Share(
            holding=holding_of(candidate, division.states),
            spec=division.spec,
            copies=division.copies,
            atoms=atoms,
            fragments=division.fragments,
        )


class _Division:
    """How the ranks of a group hold the atoms of a parameter, and of all that are equal.

    Attributes:
        states: what each rank keeps.
        copies: who updates which rows of the same parts; None: there are no copies.
        alone: position and cost, of each atom that one rank has alone.
        shared: the others.
        spec: how this rank's part is cut; None: AdamW.
        fragments: see `Share`.
    """

    def __init__(self, candidate: Candidate, runs: tuple[Rows, ...] | None) -> None:
        self.states, self.copies = candidate.weights, None
        if runs is not None:
            self.states = tuple(box.in_rows(runs[candidate.copy]) for box in candidate.weights)
            self.copies = _of_parts(candidate, runs)
        self.alone: list[tuple[int, float]] = []
        self.shared: list[_Unowned] = []
        self.spec: BlockSpec | None = None
        self.fragments: tuple[tuple[int, int], ...] = ()
        if candidate.spec is None:
            return
        spec, shape = candidate.spec, candidate.shape
        atoms = row_atoms(spec, shape)
        for rows, targets in zip(atoms, _targets(shape, self.states, atoms), strict=True):
            cost = sum(matrix_cost(*each) for each in matrices_in(spec, shape, rows))
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
        own = self.states[candidate.position]
        shared_rows = [unowned.rows for unowned in self.shared]
        self.spec, self.fragments = _local_spec(spec, shape, own, shared_rows)


def _of_parts(candidate: Candidate, runs: Sequence[Rows]) -> Copies:
    """Return which rows of this rank's part its copies update, from which rows of the whole they do."""
    held = candidate.weights[candidate.position]
    first = held.rows[0]
    boxes = [held.in_rows(run).rows for run in runs]
    rows = [(start - first, stop - first) for start, stop in boxes]
    return copies_of(candidate.copies, rows, candidate.copy)


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


def _targets(
    shape: tuple[int, ...], states: Sequence[Box], atoms: Sequence[Rows]
) -> list[list[tuple[int, Box]]]:
    """Return for each atom which ranks hold which part of it."""
    starts, stops = [start for start, _ in atoms], [stop for _, stop in atoms]
    found: list[list[tuple[int, Box]]] = [[] for _ in atoms]
    for position, held in enumerate(states):
        if held.numel:
            first, last = held.rows
            for index in range(bisect_right(stops, first), bisect_left(starts, last)):
                part = held.within(row_box(shape, atoms[index]))
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
