"""What one optimizer step does, as plain data.

A plan can be printed, compared, hashed and counted without a device. It is a function of the layout,
the group options that pick an iteration, and `ns_batch_bytes`: never of free memory, rank or timing,
so that every placement runs the same batches. `muonloom.schedule` puts its work in order.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from muonloom.errors import complaint
from muonloom.layout import BlockSpec, MatrixView
from muonloom.math import Recipe, make_recipe, workspace_numel

# How much FP32 one element-wise pass touches: on a CPU little enough to stay in its caches between the
# passes, on an accelerator enough to hide kernel launches.
_RUN_BYTES = {"cpu": 1 << 20}
_DEFAULT_RUN_BYTES = 64 << 20

# The bytes of one batch of matrices in the compute dtype, for `ns_batch_bytes="auto"`.
_BATCH_BYTES = {"cpu": 32 << 20}
_DEFAULT_BATCH_BYTES = 256 << 20

# The elements of one AdamW call, whose state passes through one slot. Spans start at multiples of 64
# elements: vectorized kernels round their last few elements otherwise.
_PACK_NUMEL = {"cpu": 1 << 16}
_DEFAULT_PACK_NUMEL = 1 << 22
_SPAN_ALIGNMENT = 64
_ADAMW_BYTES = 12  # of state an element, at most

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MatrixEntry:
    """One Muon parameter, as the plan sees it.

    Attributes:
        index: position among all parameters of the optimizer.
        turn: position in the model, and so about in a forward pass.
        name: for errors and reports.
        kind: the name with layer and expert numbers replaced.
        shape: of the parameter.
        spec: how it is cut into matrices.
        device: where it lives.
        eps: floor of the norm.
        recipe_options: keywords of `muonloom.math.make_recipe`, as sorted pairs.
    """

    index: int
    turn: int
    name: str
    kind: str
    shape: tuple[int, ...]
    spec: BlockSpec
    device: torch.device
    eps: float
    recipe_options: tuple[tuple[str, object], ...]


@dataclass(frozen=True, kw_only=True)
class ScalarEntry:
    """One AdamW parameter: `pool` is what may share one kernel call (its group)."""

    index: int
    turn: int
    name: str
    kind: str
    shape: tuple[int, ...]
    device: torch.device
    pool: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
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
    runs: tuple[Run, ...]

    @property
    def parts(self) -> tuple[Run, ...]:
        """What it consists of: its runs."""
        return self.runs

    @property
    def count(self) -> int:
        """The number of matrices."""
        return sum(run.count for run in self.runs)

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

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Spans of one group that one AdamW call takes together."""

    spans: tuple[Span, ...]
    device: torch.device

    @property
    def parts(self) -> tuple[Span, ...]:
        """What it consists of: its spans."""
        return self.spans

    @property
    def numel(self) -> int:
        """The elements of all spans."""
        return sum(span.numel for span in self.spans)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole step. `names`, `kinds` and `turns` are indexed by parameter."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    turns: tuple[int, ...]
    batches: tuple[Batch, ...]
    packs: tuple[Pack, ...]

    @property
    def works(self) -> list[Batch | Pack]:
        """All batches and packs, in the order in which a forward pass asks for their weights first."""
        return sorted((*self.batches, *self.packs), key=self._first_turn)

    def _first_turn(self, work: Batch | Pack) -> int:
        return min(self.turns[part.parameter] for part in work.parts)

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
            for run in batch.runs:
                counts[run.shape] = counts.get(run.shape, 0) + run.count
        return counts

    def gradient_uses(self) -> Counter[int]:
        """Return in how many runs and spans the gradient of each parameter is used up."""
        runs = (run.parameter for batch in self.batches for run in batch.runs)
        return Counter((*runs, *(span.parameter for pack in self.packs for span in pack.spans)))

    def digest(self) -> str:
        """SHA-256 of the plan, equal exactly where the work is equal (devices' indices aside)."""
        rows = []
        for i, batch in enumerate(self.batches):
            what = f"{batch.rows}x{batch.columns} {batch.recipe}"
            # How a batch is cut into runs changes no result, and depends on the size of a slot.
            for (parameter, view), runs in groupby(batch.runs, key=lambda r: (r.parameter, r.view)):
                cut = list(runs)
                count = sum(run.count for run in cut)
                rows.append(f"{i} {self.names[parameter]} {view} {cut[0].first} {count} {what}")
        # Spans are left out for the same reason, and all AdamW parameters are in some.
        scalars = {s.parameter: s.stop for p in self.packs for s in p.spans}
        rows += [f"{self.names[index]} {stop}" for index, stop in sorted(scalars.items())]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


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


def build_plan(
    matrices: Sequence[MatrixEntry],
    scalars: Sequence[ScalarEntry],
    *,
    ns_batch_bytes: int | str = "auto",
    slot_bytes: int | None = None,
) -> Plan:
    """Return the plan of one step.

    Args:
        matrices: the Muon parameters, in the layout's order.
        scalars: the AdamW parameters, in order.
        ns_batch_bytes: the most bytes, in the compute dtype, that one batch may hold. "auto" takes a
            constant of the device type, or the largest single matrix where that is more.
        slot_bytes: the most bytes of state that a run of several matrices or a pack may have, where the
            device's own choice would be more. How finely these are cut changes no result.

    Raises:
        ValueError: a matrix is larger than the `ns_batch_bytes` that was asked for.
    """
    batches = tuple(_batches(matrices, ns_batch_bytes, slot_bytes))
    packs = tuple(_packs(scalars, slot_bytes))
    entries: list[MatrixEntry | ScalarEntry] = [*matrices, *scalars]
    size = max((entry.index for entry in entries), default=-1) + 1
    names, kinds, turns = [""] * size, [""] * size, [0] * size
    for entry in entries:
        names[entry.index], kinds[entry.index] = entry.name, entry.kind
        turns[entry.index] = entry.turn
    return Plan(
        names=tuple(names),
        kinds=tuple(kinds),
        turns=tuple(turns),
        batches=batches,
        packs=packs,
    )


@dataclass(frozen=True)
class _BatchKey:
    """What the matrices of one batch must have in common."""

    rows: int
    columns: int
    recipe: Recipe
    eps: float
    device: torch.device


def _batches(
    matrices: Sequence[MatrixEntry], ns_batch_bytes: int | str, slot_bytes: int | None
) -> Iterator[Batch]:
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
        capacity = _capacity(key, queue[0][0].name, ns_batch_bytes)
        yield from _fill(key, queue, capacity, slot_bytes)


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
    key: _BatchKey,
    queue: Sequence[tuple[MatrixEntry, int, MatrixView]],
    capacity: int,
    slot_bytes: int | None,
) -> Iterator[Batch]:
    """Cut a queue of views into runs, and the runs into batches of at most `capacity` matrices."""
    limit = _RUN_BYTES.get(key.device.type, _DEFAULT_RUN_BYTES)
    limit = limit if slot_bytes is None else min(limit, slot_bytes)
    most = max(1, limit // (key.rows * key.columns * _FP32_BYTES))
    runs: list[Run] = []
    filled = 0
    for entry, v, view in queue:
        first = 0
        while first < view.count:
            # Matrices whose elements alternate in storage stay together: apart, they would have to be
            # copied element by element.
            longest = view.count if _is_interleaved(view) else most
            count = min(longest, view.count - first, capacity - filled)
            runs.append(_run(entry, v, view, first=first, count=count, offset=filled))
            first += count
            filled += count
            if filled == capacity:
                yield _batch(key, runs)
                runs, filled = [], 0
    if runs:
        yield _batch(key, runs)


def _is_interleaved(view: MatrixView) -> bool:
    strides = view.tensor.stride()
    return view.batch_dims == 1 and strides[0] < max(strides[1:], default=0)


def _run(
    entry: MatrixEntry, index: int, view: MatrixView, *, first: int, count: int, offset: int
) -> Run:
    return Run(
        parameter=entry.index,
        view=index,
        batched=view.batch_dims == 1,
        first=first,
        count=count,
        offset=offset,
        shape=view.shape,
        kind=entry.kind,
        numel=count * view.rows * view.columns,
    )


def _batch(key: _BatchKey, runs: Sequence[Run]) -> Batch:
    return Batch(
        rows=key.rows,
        columns=key.columns,
        recipe=key.recipe,
        eps=key.eps,
        device=key.device,
        runs=tuple(runs),
    )


def _packs(scalars: Sequence[ScalarEntry], slot_bytes: int | None) -> Iterator[Pack]:
    """Pack spans of one pool up to the size of a call; a large parameter is cut at aligned places."""
    pools: dict[tuple[object, ...], list[ScalarEntry]] = {}
    for entry in scalars:
        pools.setdefault((*entry.pool, entry.device), []).append(entry)
    for entries in pools.values():
        entries.sort(key=lambda entry: entry.turn)  # works are done so: a last span must come last
        device = entries[0].device
        most = _PACK_NUMEL.get(device.type, _DEFAULT_PACK_NUMEL)
        if slot_bytes is not None:
            most = min(most, slot_bytes // _ADAMW_BYTES)
        most = max(most // _SPAN_ALIGNMENT, 1) * _SPAN_ALIGNMENT
        spans: list[Span] = []
        filled = 0
        for span in (span for entry in entries for span in _spans(entry, most)):
            if spans and filled + span.numel > most:
                yield Pack(spans=tuple(spans), device=device)
                spans, filled = [], 0
            spans.append(span)
            filled += span.numel
        if spans:
            yield Pack(spans=tuple(spans), device=device)


def _spans(entry: ScalarEntry, most: int) -> Iterator[Span]:
    numel = math.prod(entry.shape)
    for start in range(0, numel, most):
        stop = min(start + most, numel)
        yield Span(parameter=entry.index, start=start, stop=stop, last=stop == numel)
