"""Strided views on their way from a parameter to matrices."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from muonloom.errors import complaint


def split(tensor: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """View one dimension as (outer, inner)."""
    return tensor.view(*tensor.shape[:dim], outer, inner, *tensor.shape[dim + 1 :])


@dataclass(frozen=True, eq=False)
class MatrixView:
    """A batch of equally shaped matrices inside one parameter.

    `tensor` is a strided view of the parameter's storage; its elements in row-major order are
    `(count, rows, columns)`. Its first `batch_dims` dimensions enumerate the matrices; rows and
    columns may each span several dimensions. The dimension that has the smaller stride in a dense
    parameter comes last: where that is the logical row, `transposed` is True and the logical
    (out, in) matrix is `(columns, rows)`.
    """

    tensor: Tensor
    batch_dims: int
    count: int
    rows: int
    columns: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (out, in) shape of each matrix."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Cursor:
    """A view on its way to being matrices: dimensions are (batch..., rows..., columns...).

    `row_dims` is 0 until the trailing dimensions have been read as a matrix.
    """

    tensor: Tensor
    name: str
    batch_dims: int = 0
    row_dims: int = 0

    @property
    def column_start(self) -> int:
        """Index of the first column dimension."""
        return self.batch_dims + self.row_dims

    @property
    def row_count(self) -> int:
        """Rows of one matrix."""
        return math.prod(self.tensor.shape[self.batch_dims : self.column_start])

    def error(self, *, got: object, wanted: object, remedy: str) -> ValueError:
        """Return the error that names the parameter."""
        return ValueError(complaint(self.name, got=got, wanted=wanted, remedy=remedy))

    def matrix(self) -> Cursor:
        """Read the dimensions after the batch as (rows, columns)."""
        if self.row_dims:
            return self
        rest = tuple(self.tensor.shape[self.batch_dims :])
        if len(rest) != 2:
            raise self.error(
                got=f"dimensions {rest} where a matrix is expected",
                wanted="exactly two",
                remedy="Use stacked() for leading batch dimensions or conv() for kernels.",
            )
        return dataclasses.replace(self, row_dims=1)

    def swapped(self) -> Cursor:
        """Exchange the roles of rows and columns."""
        dims = range(self.tensor.dim())
        order = (*dims[: self.batch_dims], *dims[self.column_start :])
        order += tuple(dims[self.batch_dims : self.column_start])
        columns = self.tensor.dim() - self.column_start
        return dataclasses.replace(self, tensor=self.tensor.permute(order), row_dims=columns)

    def unfolded(self, parts: int) -> tuple[Cursor, int]:
        """Split the rows into `parts` equal runs; return how many row dimensions count the runs."""
        tensor, left, outer = self.tensor, parts, 0
        while left > 1:
            dim = self.batch_dims + outer
            size = tensor.shape[dim] if outer < self.row_dims else 1
            if size % left == 0:
                tensor = split(tensor, dim, left, size // left)
                row_dims = self.row_dims + 1
                return dataclasses.replace(self, tensor=tensor, row_dims=row_dims), outer + 1
            if outer >= self.row_dims or left % size:
                raise self.error(
                    got=f"rows {tuple(tensor.shape[self.batch_dims : self.column_start])}",
                    wanted=f"rows that split into {parts} equal blocks",
                    remedy="Choose a number of blocks that divides the rows.",
                )
            left, outer = left // size, outer + 1
        return self, outer

    def batched(self, parts: int) -> Cursor:
        """Split the rows into `parts` equal runs, each a matrix of its own."""
        cursor, outer = self.unfolded(parts)
        return dataclasses.replace(
            cursor, batch_dims=self.batch_dims + outer, row_dims=cursor.row_dims - outer
        )

    def narrowed(self, start: int, size: int, *, skip: int = 0) -> Cursor:
        """Keep rows `start : start + size`, counted inside the first `skip` row dimensions."""
        dim = self.batch_dims + skip
        inner = max(1, math.prod(self.tensor.shape[dim + 1 : self.column_start]))
        if start % inner or size % inner:
            raise self.error(
                got=f"rows {start} to {start + size} of interleaved runs of {inner}",
                wanted="whole runs",
                remedy="Cut the runs first, with heads(..., components=...).",
            )
        return dataclasses.replace(
            self, tensor=self.tensor.narrow(dim, start // inner, size // inner)
        )

    def is_transposed(self) -> bool:
        """Whether storage runs along the logical rows."""
        return self._fastest(rows=True) < self._fastest(rows=False)

    def view(self, transposed: bool) -> MatrixView:
        """Describe the result, with the logical rows last where `transposed`."""
        cursor = self.swapped() if transposed else self
        shape = cursor.tensor.shape
        return MatrixView(
            tensor=cursor.tensor,
            batch_dims=cursor.batch_dims,
            count=math.prod(shape[: cursor.batch_dims]),
            rows=cursor.row_count,
            columns=math.prod(shape[cursor.column_start :]),
            transposed=transposed,
        )

    def _fastest(self, *, rows: bool) -> float:
        dims = range(self.tensor.dim())
        chosen = dims[self.batch_dims : self.column_start] if rows else dims[self.column_start :]
        strides = [self.tensor.stride(d) for d in chosen if self.tensor.shape[d] > 1]
        return min(strides, default=math.inf)
