"""Shares of work: costs, and who takes what.

An atom is what a rank takes whole or not at all. Every rank computes every share by itself, so the
results depend on the arguments alone: floats are added in one fixed order, ties go to the lower rank.

Both ways are longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969):
the dearest atom goes first, to the rank that has least to do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MUON_BYTES, ADAMW_BYTES = 8, 12
"""State of an element: FP32 master and momentum; FP32 master and two moments."""

FLOPS_PER_BYTE = 1000
"""What a byte of state costs.

A device that iterates at 400 TFLOP/s does 130 FLOPs while it reads a byte at 3 TB/s (state on the device)
and 8,000 while one comes at 50 GB/s (state on the host). This is the geometric mean: where FLOPs alone are
shared out, a rank may have many times the mean's bytes; `python -m muonloom.bench.ownership` shows both.
"""

Border = tuple[int, ...]
Heap = list[tuple[float, int]]
"""(load, rank) of each."""


def matrix_cost(rows: int, columns: int) -> float:
    """Return what a step costs for one matrix by Muon, in FLOPs.

    Five standard iterations, 5 (4 m² n + 2 m³) for m <= n, whichever method is used, and the state's bytes.
    """
    short, long = min(rows, columns), max(rows, columns)
    flops = 5 * (4 * short**2 * long + 2 * short**3)
    return float(flops + FLOPS_PER_BYTE * MUON_BYTES * rows * columns)


def scalar_cost(numel: int) -> float:
    """Return what a step costs for `numel` elements by AdamW, in the unit of `matrix_cost`."""
    return float(FLOPS_PER_BYTE * ADAMW_BYTES * numel)


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """Equal, interchangeable atoms of one parameter, in the order of its rows.

    Attributes:
        cost: of one of them, >= 0.
        count: how many there are.
    """

    cost: float
    count: int

    def __post_init__(self) -> None:
        assert 0 <= self.cost < math.inf
        assert self.count >= 0


def shared_out(
    atoms: Sequence[Atoms], *, num_ranks: int, loads: Sequence[float] | None = None
) -> list[Border]:
    """Share parameters out that every rank has whole.

    A rank takes as many atoms of a parameter as fit below the level that all would reach if work could be
    cut anywhere, so that few ranks share one; what fits nowhere goes to the least loaded, atom by atom.
    No rank passes the level by more than its last atom; without loads, none passes 4/3 of the best that is
    possible: the level is not above the best, and beyond it Graham's proof asks only for the least loaded.

    Args:
        atoms: of each parameter.
        num_ranks: of the group.
        loads: what each rank has to do anyway; None: nothing.

    Returns:
        for each parameter `num_ranks + 1` ascending indices from 0 to `count`: rank r owns the atoms
        `borders[r]:borders[r + 1]`, maybe none.
    """
    loads = [0.0] * num_ranks if loads is None else loads
    level = _level(loads, math.fsum(each.cost * each.count for each in atoms))
    heap = sorted((load, rank) for rank, load in enumerate(loads))
    borders: list[Border] = [()] * len(atoms)
    known: dict[tuple[tuple[int, int], ...], Border] = {}
    for index in _dearest_first([each.cost for each in atoms]):
        taken = _taken(atoms[index], heap, level)
        # A model that keeps its experts apart has 10⁵ parameters of one atom: few distinct borders.
        key = tuple(sorted(taken.items()))
        if key not in known:
            known[key] = _borders(taken, num_ranks)
        borders[index] = known[key]
    return borders


def _level(loads: Sequence[float], work: float) -> float:
    """Return how high `work` would stand if it were poured over the loads."""
    ascending = sorted(loads)
    for number, above in enumerate((*ascending[1:], math.inf), start=1):
        work += ascending[number - 1]
        if work <= number * above:
            break
    return work / number


def _dearest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: -costs[index])


def _taken(atoms: Atoms, heap: Heap, level: float) -> dict[int, int]:
    """Give the atoms of one parameter away: rank -> how many."""
    taken: dict[int, int] = {}
    left = atoms.count
    while left:
        load, rank = heap[0]
        fit = (level - load) / atoms.cost if atoms.cost else math.inf
        number = int(min(max(fit, 1), left))
        heapq.heapreplace(heap, (load + number * atoms.cost, rank))
        taken[rank] = taken.get(rank, 0) + number
        left -= number
    return taken


def _borders(taken: Mapping[int, int], num_ranks: int) -> Border:
    borders = [0]
    for rank in range(num_ranks):
        borders.append(borders[-1] + taken.get(rank, 0))
    return tuple(borders)


def owners(
    costs: Sequence[float], candidates: Sequence[Sequence[int]], *, loads: Sequence[float]
) -> list[int]:
    """Choose for each atom the least loaded of its candidates.

    Args:
        costs: of each atom, >= 0.
        candidates: of each atom, the ranks that may own it, as indices into `loads`; at least one.
        loads: what each rank has to do anyway.

    Returns:
        the owner of each atom.
    """
    assert len(costs) == len(candidates)
    now = list(loads)
    heaps: dict[tuple[int, ...], Heap] = {}
    heap: Heap = []
    chosen = [0] * len(costs)
    last: Sequence[int] | None = None
    for atom in _dearest_first(costs):
        # Neighbours often share one long sequence: reading it again would take most of the time.
        if candidates[atom] is not last:
            last = candidates[atom]
            ranks = tuple(last)
            if ranks not in heaps:
                heaps[ranks] = sorted((now[rank], rank) for rank in ranks)
            heap = heaps[ranks]
        chosen[atom] = owner = _least_loaded(heap, now)
        now[owner] += costs[atom]
    return chosen


def _least_loaded(heap: Heap, loads: Sequence[float]) -> int:
    # Loads only grow: an entry that is out of date is too small, and comes up to be corrected.
    while True:
        load, rank = heap[0]
        if load == loads[rank]:
            return rank
        heapq.heapreplace(heap, (loads[rank], rank))
