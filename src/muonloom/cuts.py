"""Where a parameter's matrices may be parted: views with one batch dimension, and write atoms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from muonloom.errors import complaint
from muonloom.layout import BlockSpec, MatrixView


def flat_views(spec: BlockSpec, tensor: torch.Tensor) -> list[MatrixView]:
    """Return `tensor`'s views with at most one batch dimension each, so that a run is a slice."""
    views: list[MatrixView] = []
    pending = list(reversed(spec.views(tensor)))
    while pending:
        view = pending.pop()
        if view.batch_dims <= 1:
            views.append(view)
            continue
        parts = view.tensor.unbind(0)
        pending.extend(
            MatrixView(
                tensor=part,
                batch_dims=view.batch_dims - 1,
                count=view.count // len(parts),
                rows=view.rows,
                columns=view.columns,
                transposed=view.transposed,
            )
            for part in reversed(parts)
        )
    return views


@dataclass(frozen=True, kw_only=True)
class Atom:
    """Matrices ``first:stop`` of one flat view, which are all there is in ``rows`` of dimension 0."""

    first: int
    stop: int
    rows: tuple[int, int]


@dataclass(frozen=True)
class _Place:
    """Rows ``low:high`` of dimension 0 that matrix `index` of flat view `view` touches."""

    low: int
    high: int
    view: int
    index: int


def write_atoms(
    spec: BlockSpec, shape: Sequence[int], block_rows: int, *, name: str
) -> tuple[tuple[Atom, ...], ...]:
    """Return for each flat view of a parameter its write atoms, in order.

    An atom is the smallest range of dimension 0 that holds whole matrices and, but for the last one of
    the parameter, a multiple of `block_rows` rows.

    Raises:
        ValueError: the matrices of one atom are of several views, so that they are not updated together.
    """
    found = _write_atoms(spec, tuple(shape), block_rows)
    if found is None:
        raise ValueError(
            complaint(
                name,
                got=f"a writer for blocks of {block_rows} rows and matrices cut as {spec!r}",
                wanted="each range of rows that is written at once to hold equal neighbours only",
                remedy="Choose blocks that end where its matrices do, or cut the parameter otherwise.",
            )
        )
    return found


@lru_cache(maxsize=4096)
def _write_atoms(
    spec: BlockSpec, shape: tuple[int, ...], block_rows: int
) -> tuple[tuple[Atom, ...], ...] | None:
    views = flat_views(spec, torch.empty(shape, device="meta"))
    places = sorted(_places(views, math.prod(shape[1:])), key=lambda place: place.low)
    atoms: list[list[Atom]] = [[] for _ in views]
    group: list[_Place] = []
    for place, following in itertools.zip_longest(places, places[1:]):
        group.append(place)
        end = max(known.high for known in group)
        if following is not None and (following.low < end or end % block_rows):
            continue
        indices = sorted(known.index for known in group)
        first, stop = indices[0], indices[-1] + 1
        if len({known.view for known in group}) > 1 or stop - first != len(indices):
            return None
        atoms[place.view].append(Atom(first=first, stop=stop, rows=(group[0].low, end)))
        group = []
    if any(a.stop != b.first for own in atoms for a, b in itertools.pairwise(own)):
        return None
    return tuple(map(tuple, atoms))


def _places(views: Sequence[MatrixView], row_numel: int) -> Iterator[_Place]:
    for v, view in enumerate(views):
        tensor = view.tensor
        if tensor.numel() == 0:
            continue
        inner = range(view.batch_dims, tensor.ndim)
        extent = sum((tensor.shape[dim] - 1) * tensor.stride(dim) for dim in inner)
        for index in range(view.count):
            begin = tensor.storage_offset()
            begin += index * tensor.stride(0) if view.batch_dims else 0
            low, high = begin // row_numel, (begin + extent) // row_numel + 1
            yield _Place(low, high, v, index)
