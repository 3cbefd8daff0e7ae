"""What one optimizer step does, as plain data.

A plan can be printed, compared, hashed and counted without a device. It is a function of the layout,
the group options that pick an iteration, and `ns_batch_bytes`: never of free memory, rank or timing,
so that every placement runs the same batches.

    for each batch:   DIRECTION of each unit → ORTHOGONALIZE the batch → UPDATE of each unit
    then:             ADAMW of each pack of spans
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from muonloom.errors import complaint
from muonloom.layout import BlockSpec, MatrixView
from muonloom.math import Recipe, make_recipe, workspace_numel

# How much FP32 one element-wise item touches: on a CPU little enough to stay in its caches between the
# passes, on an accelerator enough to hide kernel launches.
_UNIT_BYTES = {"cpu": 1 << 20}
_DEFAULT_UNIT_BYTES = 64 << 20

# The bytes of one batch of matrices in the compute dtype, for `ns_batch_bytes="auto"`.
_BATCH_BYTES = {"cpu": 32 << 20}
_DEFAULT_BATCH_BYTES = 512 << 20

# AdamW spans start at multiples of this, so that the fused kernels round alike in every placement.
_SPAN_ALIGNMENT = 64

_FP32_BYTES = 4


class Op(enum.Enum):
    """The kinds of work in a plan."""

    DIRECTION = "direction"
    ORTHOGONALIZE = "orthogonalize"
    UPDATE = "update"
    ADAMW = "adamw"


@dataclass(frozen=True, kw_only=True)
class MatrixEntry:
    """One Muon parameter, as the plan sees it.

    Attributes:
        index: position among all parameters of the optimizer.
        name: for errors and reports.
        kind: the name with layer and expert numbers replaced.
        shape: of the parameter.
        spec: how it is cut into matrices.
        device: where it lives.
        eps: floor of the norm.
        recipe_options: keywords of `muonloom.math.make_recipe`, as sorted pairs.
    """

    index: int
    name: str
    kind: str
    shape: tuple[int, ...]
    spec: BlockSpec
    device: torch.device
    eps: float
    recipe_options: tuple[tuple[str, object], ...]


@dataclass(frozen=True, kw_only=True)
class ScalarEntry:
    """One AdamW parameter: `pool` is what may share one kernel call (group, device)."""

    index: int
    name: str
    kind: str
    shape: tuple[int, ...]
    pool: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A run of equal matrices of one view of one parameter, at `offset` in its batch.

    `batched` tells whether the view has a dimension that counts matrices (``first:first+count`` of it).
    """

    parameter: int
    view: int
    batched: bool
    first: int
    count: int
    offset: int
    shape: tuple[int, int]
    kind: str
    numel: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Matrices of one stored shape that one Newton–Schulz call takes together."""

    rows: int
    columns: int
    recipe: Recipe
    eps: float
    device: torch.device
    units: tuple[Unit, ...]

    @property
    def count(self) -> int:
        """The number of matrices."""
        return sum(unit.count for unit in self.units)

    @property
    def numel(self) -> int:
        """The elements of all matrices."""
        return self.count * self.rows * self.columns

    @property
    def x_bytes(self) -> int:
        """The bytes of the matrices in the compute dtype."""
        return self.numel * self.recipe.compute_dtype.itemsize

    @property
    def scratch_numel(self) -> int:
        """The elements that the iteration needs beside them."""
        return workspace_numel(self.count, self.rows, self.columns, self.recipe)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements ``start:stop`` of one AdamW parameter, flattened."""

    parameter: int
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Spans of one group that one AdamW call takes together."""

    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """The elements of all spans."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One piece of work: `batch` and `unit` index into the plan; for ADAMW `unit` is the pack."""

    op: Op
    batch: int
    unit: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole step. `names` and `kinds` are indexed by parameter."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    batches: tuple[Batch, ...]
    packs: tuple[Pack, ...]
    items: tuple[Item, ...]

    @property
    def ns_calls(self) -> int:
        """Batched Newton–Schulz calls of a step in which every parameter has a gradient."""
        return len(self.batches)

    @property
    def num_matrices(self) -> int:
        """All matrices of all batches."""
        return sum(batch.count for batch in self.batches)

    @property
    def matrices(self) -> dict[tuple[int, int], int]:
        """Count of matrices by logical (out, in) shape."""
        counts: dict[tuple[int, int], int] = {}
        for batch in self.batches:
            for unit in batch.units:
                counts[unit.shape] = counts.get(unit.shape, 0) + unit.count
        return counts

    def gradient_uses(self) -> Counter[int]:
        """Return in how many units and spans the gradient of each parameter is used up."""
        units = (unit.parameter for batch in self.batches for unit in batch.units)
        return Counter((*units, *(span.parameter for pack in self.packs for span in pack.spans)))

    def digest(self) -> str:
        """SHA-256 of the plan, equal exactly where the work is equal (devices' indices aside)."""
        rows = [
            f"{i} {self.names[u.parameter]} {u.view} {u.first} {u.count} {b.rows}x{b.columns} {b.recipe}"
            for i, b in enumerate(self.batches)
            for u in b.units
        ]
        rows += [
            f"{self.names[s.parameter]} {s.start}:{s.stop}" for p in self.packs for s in p.spans
        ]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def flat_views(spec: BlockSpec, tensor: torch.Tensor) -> list[MatrixView]:
    """Return `tensor`'s views with at most one batch dimension each, so that a unit can be a slice."""
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


def build_plan(
    matrices: Sequence[MatrixEntry],
    scalars: Sequence[ScalarEntry],
    *,
    ns_batch_bytes: int | str = "auto",
) -> Plan:
    """Return the plan of one step.

    Args:
        matrices: the Muon parameters, in the layout's order.
        scalars: the AdamW parameters, in order.
        ns_batch_bytes: the most bytes, in the compute dtype, that one batch may hold. "auto" takes a
            constant of the device type, or the largest single matrix where that is more.

    Raises:
        ValueError: a matrix is larger than the `ns_batch_bytes` that was asked for.
    """
    batches = tuple(_batches(matrices, ns_batch_bytes))
    packs = tuple(_packs(scalars))
    entries: list[MatrixEntry | ScalarEntry] = [*matrices, *scalars]
    size = max((entry.index for entry in entries), default=-1) + 1
    names, kinds = [""] * size, [""] * size
    for entry in entries:
        names[entry.index], kinds[entry.index] = entry.name, entry.kind
    return Plan(
        names=tuple(names),
        kinds=tuple(kinds),
        batches=batches,
        packs=packs,
        items=tuple(_items(batches, packs)),
    )


def _items(batches: Sequence[Batch], packs: Sequence[Pack]) -> Iterator[Item]:
    for b, batch in enumerate(batches):
        units = range(len(batch.units))
        yield from (Item(op=Op.DIRECTION, batch=b, unit=u) for u in units)
        yield Item(op=Op.ORTHOGONALIZE, batch=b, unit=-1)
        yield from (Item(op=Op.UPDATE, batch=b, unit=u) for u in units)
    yield from (Item(op=Op.ADAMW, batch=-1, unit=p) for p in range(len(packs)))


@dataclass(frozen=True)
class _BatchKey:
    """What the matrices of one batch must have in common."""

    rows: int
    columns: int
    recipe: Recipe
    eps: float
    device: torch.device


def _batches(matrices: Sequence[MatrixEntry], ns_batch_bytes: int | str) -> Iterator[Batch]:
    queues: dict[_BatchKey, list[tuple[MatrixEntry, int, MatrixView]]] = {}
    for entry in matrices:
        meta = torch.empty(entry.shape, device="meta")
        for v, view in enumerate(flat_views(entry.spec, meta)):
            if view.count * view.rows * view.columns == 0:
                continue
            recipe = make_recipe(
                view.rows,
                view.columns,
                device_type=entry.device.type,
                **dict(entry.recipe_options),  # type: ignore[arg-type]
            )
            key = _BatchKey(view.rows, view.columns, recipe, entry.eps, entry.device)
            queues.setdefault(key, []).append((entry, v, view))
    for key, queue in queues.items():
        yield from _fill(key, queue, _capacity(key, queue[0][0].name, ns_batch_bytes))


def _capacity(key: _BatchKey, name: str, ns_batch_bytes: int | str) -> int:
    """Matrices a batch."""
    matrix_bytes = key.rows * key.columns * key.recipe.compute_dtype.itemsize
    if isinstance(ns_batch_bytes, str):
        limit = _BATCH_BYTES.get(key.device.type, _DEFAULT_BATCH_BYTES)
        return max(1, limit // matrix_bytes)
    if ns_batch_bytes < matrix_bytes:
        raise ValueError(
            complaint(
                name,
                got=f"a {key.rows}×{key.columns} matrix of {matrix_bytes} bytes in "
                f"{key.recipe.compute_dtype} and ns_batch_bytes={ns_batch_bytes}",
                wanted="a batch that holds at least one matrix",
                remedy=f"Set ns_batch_bytes to {matrix_bytes} or more, or to 'auto'.",
            )
        )
    return ns_batch_bytes // matrix_bytes


def _fill(
    key: _BatchKey, queue: Sequence[tuple[MatrixEntry, int, MatrixView]], capacity: int
) -> Iterator[Batch]:
    """Cut a queue of views into units, and the units into batches of at most `capacity` matrices."""
    unit_bytes = _UNIT_BYTES.get(key.device.type, _DEFAULT_UNIT_BYTES)
    most = max(1, unit_bytes // (key.rows * key.columns * _FP32_BYTES))
    units: list[Unit] = []
    filled = 0
    for entry, v, view in queue:
        first = 0
        while first < view.count:
            count = min(most, view.count - first, capacity - filled)
            shape = (view.columns, view.rows) if view.transposed else (view.rows, view.columns)
            units.append(
                Unit(
                    parameter=entry.index,
                    view=v,
                    batched=view.batch_dims == 1,
                    first=first,
                    count=count,
                    offset=filled,
                    shape=shape,
                    kind=entry.kind,
                    numel=count * key.rows * key.columns,
                )
            )
            first += count
            filled += count
            if filled == capacity:
                yield _batch(key, units)
                units, filled = [], 0
    if units:
        yield _batch(key, units)


def _batch(key: _BatchKey, units: Sequence[Unit]) -> Batch:
    return Batch(
        rows=key.rows,
        columns=key.columns,
        recipe=key.recipe,
        eps=key.eps,
        device=key.device,
        units=tuple(units),
    )


def _packs(scalars: Sequence[ScalarEntry]) -> Iterator[Pack]:
    """Pack spans of one pool up to a unit's size; a large parameter is cut at aligned places."""
    pools: dict[tuple[object, ...], list[Span]] = {}
    for entry in scalars:
        pools.setdefault(entry.pool, []).extend(_spans(entry))
    most = _DEFAULT_UNIT_BYTES // _FP32_BYTES
    for spans in pools.values():
        pack: list[Span] = []
        filled = 0
        for span in spans:
            if pack and filled + span.stop - span.start > most:
                yield Pack(spans=tuple(pack))
                pack, filled = [], 0
            pack.append(span)
            filled += span.stop - span.start
        if pack:
            yield Pack(spans=tuple(pack))


def _spans(entry: ScalarEntry) -> Iterator[Span]:
    numel = math.prod(entry.shape)
    most = _DEFAULT_UNIT_BYTES // _FP32_BYTES // _SPAN_ALIGNMENT * _SPAN_ALIGNMENT
    for start in range(0, numel, most):
        stop = min(start + most, numel)
        yield Span(parameter=entry.index, start=start, stop=stop, last=stop == numel)
