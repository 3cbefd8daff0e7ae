"""How one parameter is cut into matrices, as data.

A `BlockSpec` is a small frozen tree. `BlockSpec.views` turns it, and a tensor, into strided views
of that very tensor. A view shares storage with the parameter, so that writing through it *is* the
exact inverse of the cut: nothing is gathered, and nothing has to be scattered back.

Rows are the output side of a matrix and columns its input side, as in `torch.nn.Linear.weight`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.layout.cursor import Cursor, MatrixView, split

_UNNAMED = "parameter"


class BlockSpec:
    """How one parameter is cut into matrices. Immutable, hashable, comparable data.

    Made by the static methods below and by nesting them, for example
    `BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True)))`.
    """

    __slots__ = ()

    def views(self, tensor: Tensor, *, name: str = _UNNAMED) -> tuple[MatrixView, ...]:
        """Cut `tensor` (any strides and device, meta too) into views that cover each element once.

        Raises `ValueError`, leading with `name`, where the shape does not fit the spec.
        """
        cursors = list(self._cut(Cursor(tensor, name)))
        if tensor.is_contiguous():
            return tuple(cursor.view(cursor.is_transposed()) for cursor in cursors)
        # The orientation belongs to the spec, not to one tensor's strides: a strided gradient has to
        # meet its momentum in the same order of rows and columns.
        plain = self.views(torch.empty(tensor.shape, device="meta"), name=name)
        return tuple(c.view(v.transposed) for c, v in zip(cursors, plain, strict=True))

    def matrices(
        self, shape: Sequence[int], *, name: str = _UNNAMED
    ) -> tuple[tuple[int, int], ...]:
        """Logical (out, in) shapes of all matrices of a parameter of this shape, in view order."""
        try:
            return _matrices(self, tuple(shape))
        except ValueError:
            self.views(torch.empty(tuple(shape), device="meta"), name=name)
            raise

    @property
    def cuts_heads(self) -> bool:
        """Whether some of its matrices are blocks of fewer than all heads."""
        return any(inner.cuts_heads for inner in self._inners())

    def _inners(self) -> tuple[BlockSpec, ...]:
        return ()

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        raise AssertionError("every kind of block spec cuts in its own way")

    @staticmethod
    def whole() -> BlockSpec:
        """The parameter `(m, n)` is one matrix."""
        return _Whole()

    @staticmethod
    def rows(*sizes: int | tuple[int, BlockSpec]) -> BlockSpec:
        """Sections one below the other; a size may be `(size, inner spec)`. Sizes must sum."""
        return _Sections("rows", _parts("rows", sizes))

    @staticmethod
    def columns(*sizes: int | tuple[int, BlockSpec]) -> BlockSpec:
        """Sections side by side; a size may be `(size, inner spec)`. Sizes must sum."""
        return _Sections("columns", _parts("columns", sizes))

    @staticmethod
    def stacked(inner: BlockSpec | None = None) -> BlockSpec:
        """`(E, m, n)`: E parameters of shape `(m, n)`, each cut by `inner`."""
        return _Stacked(_spec("stacked", inner))

    @staticmethod
    def gate_up(interleaved: bool = False) -> BlockSpec:
        """Rows hold two projections: halves, or every second row where `interleaved`."""
        return _GateUp(bool(interleaved))

    @staticmethod
    def heads(
        num_heads: int,
        *,
        heads_per_block: int | None = None,
        components: Iterable[int | tuple[int, BlockSpec]] | None = None,
    ) -> BlockSpec:
        """Rows hold `num_heads` equal heads; blocks of `min(heads_per_block, num_heads)` heads.

        `components` are the row sections of *each* head; the same section of all heads of a block
        forms one matrix, which its own inner spec may cut further. `heads_per_block=None` puts all
        heads in one block. Raises `ValueError` where the block does not divide the heads.
        """
        parts = None if components is None else _parts("heads components", tuple(components))
        return _Heads(_size("num_heads", num_heads), _block(num_heads, heads_per_block), parts)

    @staticmethod
    def transposed(inner: BlockSpec | None = None) -> BlockSpec:
        """Storage is `(in, out)`; `inner` sees the logical `(out, in)` matrix."""
        return _Transposed(_spec("transposed", inner))

    @staticmethod
    def conv() -> BlockSpec:
        """`(o, i, *kernel)` is the matrix `(o, i * prod(kernel))`."""
        return _Conv()


@dataclass(frozen=True, repr=False)
class _Whole(BlockSpec):
    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        yield cursor.matrix()

    def __repr__(self) -> str:
        return "whole()"


@dataclass(frozen=True, repr=False)
class _Part:
    size: int
    inner: BlockSpec

    def __repr__(self) -> str:
        return str(self.size) if self.inner == _Whole() else f"({self.size}, {self.inner!r})"


@dataclass(frozen=True, repr=False)
class _Sections(BlockSpec):
    axis: str
    parts: tuple[_Part, ...]

    def _inners(self) -> tuple[BlockSpec, ...]:
        return tuple(part.inner for part in self.parts)

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        across = self.axis == "columns"
        cursor = cursor.matrix()
        cursor = cursor.swapped() if across else cursor
        _check_sum(cursor, cursor.row_count, self.parts, what=self.axis)
        start = 0
        for part, run in _runs(self.parts):
            section = cursor.narrowed(start, run * part.size).batched(run)
            start += run * part.size
            yield from part.inner._cut(section.swapped() if across else section)

    def __repr__(self) -> str:
        return f"{self.axis}({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, repr=False)
class _Stacked(BlockSpec):
    inner: BlockSpec

    def _inners(self) -> tuple[BlockSpec, ...]:
        return (self.inner,)

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        rest = tuple(cursor.tensor.shape[cursor.batch_dims :])
        if cursor.row_dims or len(rest) < 3:
            raise cursor.error(
                got=f"dimensions {rest}",
                wanted="(stack, rows, columns) for stacked()",
                remedy="Leave stacked() out for a plain matrix.",
            )
        yield from self.inner._cut(dataclasses.replace(cursor, batch_dims=cursor.batch_dims + 1))

    def __repr__(self) -> str:
        return f"stacked({_inner(self.inner)})"


@dataclass(frozen=True, repr=False)
class _GateUp(BlockSpec):
    interleaved: bool

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        cursor = cursor.matrix()
        last = cursor.column_start - 1
        if cursor.row_count % 2 or (self.interleaved and cursor.tensor.shape[last] % 2):
            raise cursor.error(
                got=f"{cursor.row_count} rows",
                wanted="an even number for gate_up()",
                remedy="Use whole(), or rows(...) for parts of different size.",
            )
        if not self.interleaved:
            yield cursor.batched(2)
            return
        pairs = split(cursor.tensor, last, cursor.tensor.shape[last] // 2, 2)
        yield dataclasses.replace(
            cursor,
            tensor=pairs.movedim(last + 1, cursor.batch_dims),
            batch_dims=cursor.batch_dims + 1,
        )

    def __repr__(self) -> str:
        return f"gate_up({'interleaved=True' if self.interleaved else ''})"


@dataclass(frozen=True, repr=False)
class _Heads(BlockSpec):
    num_heads: int
    block: int
    components: tuple[_Part, ...] | None

    @property
    def cuts_heads(self) -> bool:
        return self.block < self.num_heads or super().cuts_heads

    def _inners(self) -> tuple[BlockSpec, ...]:
        return tuple(part.inner for part in self.components or ())

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        cursor = cursor.matrix()
        if cursor.row_count % self.num_heads:
            raise cursor.error(
                got=f"{cursor.row_count} rows",
                wanted=f"a multiple of {self.num_heads} heads",
                remedy="Check the number of heads.",
            )
        blocks = cursor.batched(self.num_heads // self.block)
        if self.components is None:
            yield blocks
            return
        head_rows = cursor.row_count // self.num_heads
        _check_sum(cursor, head_rows, self.components, what="rows of a head")
        heads, skip = blocks.unfolded(self.block)
        start = 0
        for part in self.components:
            yield from part.inner._cut(heads.narrowed(start, part.size, skip=skip))
            start += part.size

    def __repr__(self) -> str:
        text = f"heads({self.num_heads}, heads_per_block={self.block}"
        if self.components is not None:
            listed = ", ".join(map(repr, self.components))
            text += f", components=({listed}{',' if len(self.components) == 1 else ''})"
        return text + ")"


@dataclass(frozen=True, repr=False)
class _Transposed(BlockSpec):
    inner: BlockSpec

    def _inners(self) -> tuple[BlockSpec, ...]:
        return (self.inner,)

    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        yield from self.inner._cut(cursor.matrix().swapped())

    def __repr__(self) -> str:
        return f"transposed({_inner(self.inner)})"


@dataclass(frozen=True, repr=False)
class _Conv(BlockSpec):
    def _cut(self, cursor: Cursor) -> Iterator[Cursor]:
        rest = tuple(cursor.tensor.shape[cursor.batch_dims :])
        if cursor.row_dims or len(rest) < 2:
            raise cursor.error(
                got=f"dimensions {rest}",
                wanted="(out, in, *kernel) for conv()",
                remedy="Use whole() for a plain matrix.",
            )
        yield dataclasses.replace(cursor, row_dims=1)

    def __repr__(self) -> str:
        return "conv()"


@functools.lru_cache(maxsize=4096)
def _matrices(spec: BlockSpec, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    views = spec.views(torch.empty(shape, device="meta"))
    return tuple(view.shape for view in views for _ in range(view.count))


def _inner(spec: BlockSpec) -> str:
    return "" if spec == _Whole() else repr(spec)


def _spec(where: str, spec: BlockSpec | None) -> BlockSpec:
    if spec is None:
        return _Whole()
    if not isinstance(spec, BlockSpec):
        raise TypeError(
            complaint(where, got=repr(spec), wanted="a BlockSpec", remedy="See BlockSpec.whole().")
        )
    return spec


def _size(where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            complaint(where, got=repr(value), wanted="a whole number >= 1", remedy="Correct it.")
        )
    return value


def _block(num_heads: int, heads_per_block: int | None) -> int:
    if heads_per_block is None:
        return num_heads
    block = min(_size("heads_per_block", heads_per_block), num_heads)
    if num_heads % block:
        works = [k for k in range(1, num_heads + 1) if num_heads % k == 0]
        raise ValueError(
            complaint(
                "heads_per_block",
                got=f"{heads_per_block} for {num_heads} heads",
                wanted="a divisor of the number of heads",
                remedy=f"These work: {', '.join(map(str, works))}.",
            )
        )
    return block


def _parts(where: str, sizes: Sequence[int | tuple[int, BlockSpec]]) -> tuple[_Part, ...]:
    if not sizes:
        raise ValueError(
            complaint(where, got="no sizes", wanted="at least one", remedy="Use whole().")
        )
    pairs = [size if isinstance(size, tuple) else (size, _Whole()) for size in sizes]
    return tuple(_Part(_size(where, size), _spec(where, inner)) for size, inner in pairs)


def _runs(parts: tuple[_Part, ...]) -> Iterator[tuple[_Part, int]]:
    """Equal neighbours together: they become one view with a batch dimension."""
    start = 0
    for index in range(1, len(parts) + 1):
        if index == len(parts) or parts[index] != parts[start]:
            yield parts[start], index - start
            start = index


def _check_sum(cursor: Cursor, total: int, parts: tuple[_Part, ...], *, what: str) -> None:
    summed = sum(part.size for part in parts)
    if summed != total:
        raise cursor.error(
            got=f"sizes {tuple(part.size for part in parts)}, which sum to {summed}",
            wanted=f"a sum of {total}, the {what}",
            remedy="Correct the sizes.",
        )
