"""From matrices to batches: which of them share a Newton–Schulz call, and in what runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from muonloom.cuts import Atom, flat_views, write_atoms
from muonloom.errors import complaint
from muonloom.layout import BlockSpec, MatrixView
from muonloom.math import Recipe, make_recipe
from muonloom.ownership import Share
from muonloom.plan import Batch, Run

# How much FP32 one element-wise pass touches: on a CPU little enough to stay in its caches between the
# passes, on an accelerator enough to hide kernel launches.
_RUN_BYTES = {"cpu": 1 << 20}
_DEFAULT_RUN_BYTES = 64 << 20

# The bytes of one batch of matrices in the compute dtype, for `ns_batch_bytes="auto"`.
_BATCH_BYTES = {"cpu": 32 << 20}
_DEFAULT_BATCH_BYTES = 256 << 20

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
        block_rows: how many rows of dimension 0 its writer writes together; 0 without a writer.
        share: what this rank does of it, where `shape` and `spec` are of a part; None: everything.
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
    block_rows: int = 0
    share: Share | None = None


@dataclass(frozen=True)
class _BatchKey:
    """What the matrices of one batch must have in common."""

    rows: int
    columns: int
    recipe: Recipe
    eps: float
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A view that waits for its batch; `atoms` are what may not be parted, for one with a writer."""

    entry: MatrixEntry
    index: int
    view: MatrixView
    atoms: tuple[Atom, ...] = ()

    @property
    def least(self) -> int:
        """The matrices that a batch has to hold together."""
        return max((atom.stop - atom.first for atom in self.atoms), default=1)

    def longest(self, first: int, *, wanted: int, possible: int) -> int:
        """Return how many matrices from `first` on make a run of about `wanted`; 0: none of `possible`."""
        if not self.atoms:
            # Matrices whose elements alternate in storage stay together: apart, they would have to be
            # copied element by element.
            wanted = self.view.count if _is_interleaved(self.view) else wanted
            return min(wanted, self.view.count - first, possible)
        count, rows = 0, None
        for atom in self.atoms:
            if atom.first < first:
                continue
            following = rows is None or rows == atom.rows[0]
            if atom.stop - first > (min(wanted, possible) if count else possible) or not following:
                break
            count, rows = atom.stop - first, atom.rows[1]
        return count

    def rows(self, first: int, count: int) -> tuple[int, int] | None:
        """Return the rows of dimension 0 that a run is all of, for a parameter with a writer."""
        own = [atom.rows for atom in self.atoms if first <= atom.first < first + count]
        return (own[0][0], own[-1][1]) if own else None


class Batching:
    """Takes matrices in, and gives batches of equal ones out.

    Args:
        ns_batch_bytes: the most bytes, in the compute dtype, that one batch may hold.
        slot_bytes: the most bytes of state that a run of several matrices may have.
    """

    def __init__(self, ns_batch_bytes: int | str, slot_bytes: int | None) -> None:
        self._ns_batch_bytes = ns_batch_bytes
        self._slot_bytes = slot_bytes
        self._queues: dict[_BatchKey, list[_Item]] = {}

    def add(self, entry: MatrixEntry) -> None:
        """Take the matrices of a parameter that no other rank has a part of."""
        for item in _items(entry):
            view = item.view
            recipe = recipe_of(entry, view.rows, view.columns)
            key = _BatchKey(view.rows, view.columns, recipe, entry.eps, entry.device)
            self._queues.setdefault(key, []).append(item)

    def batches(self) -> Iterator[Batch]:
        """Yield them.

        Raises:
            ValueError: what is updated together is larger than a batch may be.
        """
        for key, queue in self._queues.items():
            capacity = _capacity(key, queue, self._ns_batch_bytes)
            yield from _fill(key, queue, capacity, self._slot_bytes)


def recipe_of(entry: MatrixEntry, rows: int, columns: int) -> Recipe:
    """Return how matrices of this stored shape of a parameter are iterated."""
    options = dict(entry.recipe_options)
    return make_recipe(rows, columns, device_type=entry.device.type, **options)  # type: ignore[arg-type]


def _items(entry: MatrixEntry) -> Iterator[_Item]:
    views = flat_views(entry.spec, torch.empty(entry.shape, device="meta"))
    atoms: Sequence[tuple[Atom, ...]] = [()] * len(views)
    if entry.block_rows:
        atoms = write_atoms(entry.spec, entry.shape, entry.block_rows, name=entry.name)
    fragments = {view for view, _ in entry.share.fragments} if entry.share is not None else set()
    for index, (view, own) in enumerate(zip(views, atoms, strict=True)):
        if view.count * view.rows * view.columns and index not in fragments:
            yield _Item(entry=entry, index=index, view=view, atoms=own)


def _capacity(key: _BatchKey, queue: Sequence[_Item], ns_batch_bytes: int | str) -> int:
    """Matrices a batch."""
    matrix_bytes = key.rows * key.columns * key.recipe.compute_dtype.itemsize
    largest = max(queue, key=lambda item: item.least)
    needed = largest.least * matrix_bytes
    if isinstance(ns_batch_bytes, str):
        return max(needed, batch_bytes(key.device, ns_batch_bytes)) // matrix_bytes
    if ns_batch_bytes < needed:
        many = f"{largest.least} of which are written together, " if largest.least > 1 else ""
        raise ValueError(
            complaint(
                largest.entry.name,
                got=f"a {key.rows}×{key.columns} matrix of {matrix_bytes} bytes in "
                f"{key.recipe.compute_dtype}, {many}and ns_batch_bytes={ns_batch_bytes}",
                wanted="a batch that holds what is updated together",
                remedy=f"Set ns_batch_bytes to {needed} or more, or to 'auto'.",
            )
        )
    return ns_batch_bytes // matrix_bytes


def batch_bytes(device: torch.device, ns_batch_bytes: int | str) -> int:
    """Return what "auto" stands for on a device, or the number itself."""
    if isinstance(ns_batch_bytes, str):
        return _BATCH_BYTES.get(device.type, _DEFAULT_BATCH_BYTES)
    return ns_batch_bytes


def _fill(
    key: _BatchKey, queue: Sequence[_Item], capacity: int, slot_bytes: int | None
) -> Iterator[Batch]:
    """Cut a queue of views into runs, and the runs into batches of at most `capacity` matrices."""
    limit = _RUN_BYTES.get(key.device.type, _DEFAULT_RUN_BYTES)
    limit = limit if slot_bytes is None else min(limit, slot_bytes)
    most = max(1, limit // (key.rows * key.columns * _FP32_BYTES))
    runs: list[Run] = []
    filled = 0
    for item in queue:
        first = 0
        while first < item.view.count:
            count = item.longest(first, wanted=most, possible=capacity - filled)
            if count:
                runs.append(_run(item, first=first, count=count, offset=filled))
            first += count
            filled += count
            if filled == capacity or not count:
                yield _batch(key, runs)
                runs, filled = [], 0
    if runs:
        yield _batch(key, runs)


def _is_interleaved(view: MatrixView) -> bool:
    strides = view.tensor.stride()
    return view.batch_dims == 1 and strides[0] < max(strides[1:], default=0)


def _run(item: _Item, *, first: int, count: int, offset: int) -> Run:
    view = item.view
    return Run(
        parameter=item.entry.index,
        view=item.index,
        batched=view.batch_dims == 1,
        first=first,
        count=count,
        offset=offset,
        shape=view.shape,
        kind=item.entry.kind,
        numel=count * view.rows * view.columns,
        rows=item.rows(first, count),
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
