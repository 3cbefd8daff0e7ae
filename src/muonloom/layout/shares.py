"""Cuts of a part of a parameter: which rows hold whole matrices, and how such rows are cut.

A rank that holds some rows of a parameter cuts them into the matrices that the whole parameter has there,
in the same order, and passes pieces of the others on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.layout.blocks import BlockSpec, _check_sum, _Part, _Stacked
from muonloom.layout.cursor import Cursor

Shape = tuple[int, ...]
Rows = tuple[int, int]


def row_atoms(spec: BlockSpec, shape: Sequence[int]) -> tuple[Rows, ...]:
    """Return the smallest ranges of dimension 0 that hold whole matrices, in ascending order.

    Together they are all rows; those of a parameter without elements are each a range of its own. Raises
    `ValueError` where the shape does not fit the spec.
    """
    return _row_atoms(spec, tuple(shape))


def restricted(spec: BlockSpec, shape: Sequence[int], rows: Rows) -> BlockSpec:
    """Return how ``tensor[start:stop]`` of a tensor of this shape is cut, for a run of its atoms.

    Its matrices are those of the whole tensor that lie in these rows: the same elements, the same logical
    shapes and orientation, in the same order. What were blocks of heads stay so in `cuts_heads`, and one
    matrix of a batch stays a batch. Raises `ValueError` for rows that begin or end inside an atom.
    """
    return _restricted(spec, tuple(shape), rows)


def stitched(*parts: tuple[int, BlockSpec]) -> BlockSpec:
    """Return sections along dimension 0 of a tensor of any shape: ``(rows, how they are cut)`` each.

    Sections without rows have no matrices, whatever their spec. Rows must sum.
    """
    return _Stitched(tuple(_Part(rows, inner) for rows, inner in parts))


@dataclass(frozen=True, repr=False)
class _Stitched(BlockSpec):
    parts: tuple[_Part, ...]

    def _inners(self) -> tuple[BlockSpec, ...]:
        return tuple(part.inner for part in self.parts if part.size)

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        _check_sum(cursor, cursor.tensor.shape[0], self.parts, what="rows")
        sections = cursor.tensor.split_with_sizes([part.size for part in self.parts])
        for part, section in zip(self.parts, sections, strict=True):
            if part.size:
                yield from part.inner._cut(dataclasses.replace(cursor, tensor=section))

    def __repr__(self) -> str:
        return f"stitched({', '.join(f'({part.size}, {part.inner!r})' for part in self.parts)})"


@dataclass(frozen=True, repr=False)
class _Restricted(BlockSpec):
    inner: BlockSpec
    shape: Shape
    kept: Rows

    def _inners(self) -> tuple[BlockSpec, ...]:
        return (self.inner,)

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        tensor, (start, stop) = cursor.tensor, self.kept
        if tuple(tensor.shape) != (stop - start, *self.shape[1:]):
            raise cursor.error(
                got=f"dimensions {tuple(tensor.shape)}",
                wanted=f"rows {start} to {stop} of a parameter of dimensions {self.shape}",
                remedy="Pass these rows, and nothing else.",
            )
        before = tensor.storage_offset() - start * tensor.stride(0)
        for piece in _pieces(self, tensor.stride()):
            found = piece.tensor
            offset = before + int(found.storage_offset())
            view = tensor.as_strided(found.shape, found.stride(), offset)
            yield dataclasses.replace(piece, tensor=view, name=cursor.name)

    def __repr__(self) -> str:
        return f"restricted({self.inner!r}, {self.shape}, {self.kept})"


@lru_cache(maxsize=4096)
def _row_atoms(spec: BlockSpec, shape: Shape) -> tuple[Rows, ...]:
    if math.prod(shape) == 0:
        return tuple(itertools.pairwise(range(shape[0] + 1)))
    places = _places(spec, shape)
    first = torch.cat([place.first.flatten() for place in places])
    last = torch.cat([place.last.flatten() for place in places])
    first, order = first.sort()
    reached = last[order].cummax(0).values
    inner = first[1:][first[1:] > reached[:-1]]
    return tuple(itertools.pairwise([0, *inner.tolist(), shape[0]]))


@lru_cache(maxsize=4096)
def _borders(spec: BlockSpec, shape: Shape) -> frozenset[int]:
    return frozenset({0, *(stop for _, stop in _row_atoms(spec, shape))})


@lru_cache(maxsize=4096)
def _restricted(spec: BlockSpec, shape: Shape, rows: Rows) -> BlockSpec:
    start, stop = rows
    if start > stop or not {start, stop} <= _borders(spec, shape):
        raise ValueError(
            complaint(
                "rows",
                got=f"{start} to {stop} of dimensions {shape} cut as {spec!r}",
                wanted="rows that hold whole matrices",
                remedy="See row_atoms().",
            )
        )
    if rows == (0, shape[0]) or isinstance(spec, _Stacked):
        return spec
    if isinstance(spec, _Restricted):
        above = spec.kept[0]
        return _Restricted(spec.inner, spec.shape, (above + start, above + stop))
    return _Restricted(spec, shape, rows)


@dataclass(frozen=True, eq=False)
class _Place:
    """First and last row of dimension 0 of each matrix of a view, in the shape of its batch."""

    first: Tensor
    last: Tensor


@lru_cache(maxsize=4096)
def _places(spec: BlockSpec, shape: Shape) -> tuple[_Place, ...]:
    numbers = torch.arange(shape[0], device="cpu").view(-1, *(1,) * (len(shape) - 1)).expand(shape)
    places = []
    for view in spec.views(numbers):
        # Along each dimension of a matrix row numbers only grow.
        inner = view.tensor.ndim - view.batch_dims
        first, last = (view.tensor[(..., *(corner,) * inner)] for corner in (0, -1))
        places.append(_Place(first, last))
    return tuple(places)


@lru_cache(maxsize=4096)
def _pieces(part: _Restricted, strides: Shape) -> tuple[Cursor, ...]:
    """Cut the whole tensor, as it would lie in memory, and keep what lies in the rows."""
    if math.prod(part.shape) == 0:
        return ()
    start, stop = part.kept
    whole = torch.empty_strided(part.shape, strides, device="meta")
    cursors = part.inner._cut(Cursor(whole, ""))
    pieces = []
    for cursor, place in zip(cursors, _places(part.inner, part.shape), strict=True):
        for index in _boxes((place.first >= start) & (place.first < stop)):
            batch_dims = cursor.batch_dims - sum(isinstance(i, int) for i in index)
            tensor = cursor.tensor[index]
            pieces.append(dataclasses.replace(cursor, tensor=tensor, batch_dims=batch_dims))
    return tuple(pieces)


def _boxes(chosen: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Index the true entries, in order, by few boxes."""
    if chosen.all():
        yield ()
    elif chosen.ndim:
        flat = chosen.reshape(len(chosen), -1)
        kinds = flat.all(1).int() + flat.any(1).int()
        edges = (kinds.diff().nonzero().flatten() + 1).tolist()
        for start, stop in itertools.pairwise([0, *edges, len(kinds)]):
            if kinds[start] == 2:
                yield (slice(start, stop),)
            elif kinds[start] == 1:
                yield from ((i, *box) for i in range(start, stop) for box in _boxes(chosen[i]))
