"""The words that family tables are written in: block specs whose sizes are config attributes.

A description is frozen data. `Description.spec` fills in a model's config and the caller's options
and returns the `BlockSpec` of one parameter.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from muonloom.errors import complaint
from muonloom.layout.blocks import BlockSpec

Size = int | str
"""A number, or an expression over config attributes: `"num_attention_heads * head_dim"`."""

_FALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "head_dim": "hidden_size // num_attention_heads",
        "num_key_value_heads": "num_attention_heads",
    }
)
_OPERATORS: Mapping[type, Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
    }
)


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What the caller asked for; see `Layout.from_model`."""

    heads_per_block: int | None = None
    mla_components: bool = False
    cut_output: bool = False


@dataclass(frozen=True)
class Dims:
    """Sizes looked up in a config object (attributes), with the usual fallbacks."""

    config: Any

    def value(self, size: Size) -> int:
        """Evaluate `size`. Raises `ValueError` naming an attribute that the config lacks."""
        if isinstance(size, int):
            return size
        return self._evaluate(_parse(size))

    def _evaluate(self, node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            apply = _OPERATORS[type(node.op)]
            return apply(self._evaluate(node.left), self._evaluate(node.right))
        if isinstance(node, ast.Constant):
            return int(node.value)  # type: ignore[arg-type]  # _parse admits whole numbers only
        assert isinstance(node, ast.Name)
        return self._attribute(node.id)

    def _attribute(self, name: str) -> int:
        value = getattr(self.config, name, None)
        if value is None and name in _FALLBACKS:
            return self.value(_FALLBACKS[name])
        if not isinstance(value, int):
            raise ValueError(
                complaint(
                    f"config.{name}",
                    got=repr(value),
                    wanted="a whole number, which the family table reads",
                    remedy="Correct the config, or register_family() with a table that fits.",
                )
            )
        return value


def _parse(size: str) -> ast.expr:
    """Parse a size expression: names, whole numbers and + - * // only."""
    try:
        node = ast.parse(size, mode="eval").body
    except SyntaxError:
        node = ast.Constant(value=None)
    for part in ast.walk(node):
        known = isinstance(part, (ast.BinOp, ast.Name, ast.Load, *_OPERATORS))
        if not known and not (isinstance(part, ast.Constant) and type(part.value) is int):
            raise ValueError(
                complaint(
                    "size",
                    got=repr(size),
                    wanted="config attributes and whole numbers joined by + - * //",
                    remedy="Correct the family table.",
                )
            )
    return node


class Description:
    """Base of the descriptions; a new one overrides the underscored methods it needs."""

    __slots__ = ()

    def spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        """Return the block spec for this config and these options."""
        return self._spec(dims, options)

    def heads_of(self, dims: Dims) -> tuple[int, ...]:
        """Head counts that `heads_per_block` cuts; empty where it cannot change the result."""
        return self._heads(dims)

    def output_heads_of(self, dims: Dims) -> tuple[int, ...]:
        """Head counts that are cut under `cut_output` alone."""
        return self._output_heads(dims)

    @property
    def has_components(self) -> bool:
        """Whether `mla_components` can change the result."""
        return self._has_components()

    def text(self, dims: Dims, options: HeadOptions) -> str:
        """Say in a few words how heads were cut, for the layout table; empty where none was."""
        if options.heads_per_block is None:
            return ""
        heads = self.heads_of(dims)
        if options.cut_output:
            heads += self.output_heads_of(dims)
        return "; ".join(_heads_text(count, options.heads_per_block) for count in heads)

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        raise AssertionError("every description makes a block spec of its own")

    def _heads(self, dims: Dims) -> tuple[int, ...]:
        return ()

    def _output_heads(self, dims: Dims) -> tuple[int, ...]:
        return ()

    def _has_components(self) -> bool:
        return False


@dataclass(frozen=True)
class Fixed(Description):
    """A block spec that needs no config."""

    block: BlockSpec

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        return self.block


@dataclass(frozen=True)
class HeadRows(Description):
    """The rows are `heads` equal heads, cut into blocks of `heads_per_block`.

    `parts` are the row sections of each head: always apart (query and gate), or with `joint=True`
    apart only under `mla_components` (nope and rope; nope and value).
    """

    heads: Size
    parts: tuple[Size, ...] = ()
    joint: bool = False

    def _heads(self, dims: Dims) -> tuple[int, ...]:
        return (dims.value(self.heads),)

    def _has_components(self) -> bool:
        return self.joint

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        heads, block = dims.value(self.heads), options.heads_per_block
        if self.parts and (options.mla_components or not self.joint):
            sizes = [dims.value(part) for part in self.parts]
            return BlockSpec.heads(heads, heads_per_block=block, components=sizes)
        if block is None or block >= heads:
            return BlockSpec.whole()
        return BlockSpec.heads(heads, heads_per_block=block)


@dataclass(frozen=True)
class HeadColumns(Description):
    """The columns are `heads` heads of `size`: cut by `heads_per_block` only with `cut_output`."""

    heads: Size
    size: Size

    def _output_heads(self, dims: Dims) -> tuple[int, ...]:
        return (dims.value(self.heads),)

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        heads, block = dims.value(self.heads), options.heads_per_block
        if block is None or not options.cut_output or block >= heads:
            return BlockSpec.whole()
        if heads % block:
            return BlockSpec.heads(heads, heads_per_block=block)  # raises, with the divisors
        return BlockSpec.columns(*(block * dims.value(self.size),) * (heads // block))


@dataclass(frozen=True)
class RowBlocks(Description):
    """The rows are `count` equal blocks that are matrices of their own, whatever the options."""

    count: Size

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        return BlockSpec.heads(dims.value(self.count), heads_per_block=1)


@dataclass(frozen=True)
class Part:
    """`rows` rows that hold `heads` heads in all; None: not cut by heads."""

    rows: Size
    heads: Size | None = None

    def pair(self, dims: Dims, options: HeadOptions) -> tuple[int, BlockSpec]:
        """Return the number of rows and how they are cut."""
        inner = (
            BlockSpec.whole() if self.heads is None else HeadRows(self.heads).spec(dims, options)
        )
        return dims.value(self.rows), inner


def _part_heads(parts: tuple[Part, ...], dims: Dims) -> tuple[int, ...]:
    heads = [dims.value(part.heads) for part in parts if part.heads is not None]
    return tuple(dict.fromkeys(heads))


@dataclass(frozen=True)
class Sections(Description):
    """Fused projections one below the other: all of q, then all of k, then all of v."""

    parts: tuple[Part, ...]

    def _heads(self, dims: Dims) -> tuple[int, ...]:
        return _part_heads(self.parts, dims)

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        return BlockSpec.rows(*(part.pair(dims, options) for part in self.parts))


@dataclass(frozen=True)
class Groups(Description):
    """Fused projections interleaved: `groups` times (rows of part 1, rows of part 2, ...).

    A part's rows are counted in one group, its heads over all groups.
    """

    groups: Size
    parts: tuple[Part, ...]

    def _heads(self, dims: Dims) -> tuple[int, ...]:
        return _part_heads(self.parts, dims)

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        pairs = [part.pair(dims, options) for part in self.parts]
        return BlockSpec.heads(dims.value(self.groups), components=pairs)


@dataclass(frozen=True)
class Transposed(Description):
    """Storage is `(in, out)`; `inner` describes the logical `(out, in)` matrix."""

    inner: Description

    def _heads(self, dims: Dims) -> tuple[int, ...]:
        return self.inner.heads_of(dims)

    def _output_heads(self, dims: Dims) -> tuple[int, ...]:
        return self.inner.output_heads_of(dims)

    def _has_components(self) -> bool:
        return self.inner.has_components

    def _spec(self, dims: Dims, options: HeadOptions) -> BlockSpec:
        return BlockSpec.transposed(self.inner.spec(dims, options))


def _heads_text(heads: int, heads_per_block: int) -> str:
    block = min(heads, heads_per_block)
    text = f"{heads} heads in blocks of {block}"
    if heads_per_block > heads:
        text += f" (heads_per_block={heads_per_block} exceeds them)"
    return text
