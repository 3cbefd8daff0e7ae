"""What `torch.distributed.checkpoint` plans is written from a snapshot, and read into its places.

It decides which rank writes and reads which box of which tensor, and checks that boxes fit together. The
bytes go another way than through its own storage: straight from and to the optimizer's memory, in blocks
with checksums, while training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint import load as load_planned
from torch.distributed.checkpoint import save as save_planned
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from muonloom.checkpoint.manifest import Chunk
from muonloom.checkpoint.reader import CheckpointReader, Piece
from muonloom.checkpoint.targets import Target
from muonloom.segments import SnapshotTensor


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor that this rank writes."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_save(tensors: Sequence[SnapshotTensor]) -> list[Box]:
    """Return what of these tensors this rank has to write."""
    return _planned(tuple((tensor.key, tensor.dtype, tensor.shape) for tensor in tensors))


@functools.lru_cache(maxsize=1)  # one save is planned as the one before, and the loop waits for it
def _planned(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> list[Box]:
    shapes = {key: torch.empty(shape, dtype=dtype, device="meta") for key, dtype, shape in entries}
    writer = _PlanOnly()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone():
        save_planned(shapes, storage_writer=writer, planner=planner, no_dist=True)
    return writer.boxes


class _PlanOnly(StorageWriter):
    """Takes note of what is to be written; a thread writes it later."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep the boxes."""
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = Box(key=item.index.fqn, offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))
            self.boxes.append(box)
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the manifest takes the place of DCP's metadata."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any."""
        return True


def load_boxes(reader: CheckpointReader, targets: Mapping[str, Target], *, check: bool) -> None:
    """Read tensors.

    Args:
        reader: of the checkpoint.
        targets: by key.
        check: compare checksums of what is read.

    Raises:
        CheckpointError: what was read is damaged.
    """
    shapes = {key: torch.empty(reader.tensor(key).shape, device="meta") for key in targets}
    try:
        with _alone():
            load_planned(
                shapes,
                storage_reader=_MappedReader(reader, targets, check=check),
                planner=_IntoTargets(),
                no_dist=True,
            )
    except CheckpointException as wrapped:  # DCP's, with one failure a rank
        failure, _ = next(iter(wrapped.failures.values()))
        raise failure from None


class _MappedReader(StorageReader):
    def __init__(
        self, reader: CheckpointReader, targets: Mapping[str, Target], *, check: bool
    ) -> None:
        self._reader = reader
        self._targets = targets
        self._check = check
        self._chunks: dict[tuple[str, torch.Size | None], Chunk] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP has it."""
        found: dict[str, Any] = {}
        for key, tensor in self._reader.manifest.tensors.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ]
            found[key] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), boxes
            )
            for chunk in tensor.chunks:
                self._chunks[key, torch.Size(chunk.offsets)] = chunk
        return Metadata(state_dict_metadata=found, storage_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what goes straight to its place at once; then the others, one by one."""
        by_key: dict[str, list[ReadItem]] = {key: [] for key in self._targets}
        for item in plan.items:
            by_key[item.dest_index.fqn].append(item)
        passing = [key for key, target in self._targets.items() if target.passes]
        straight = [key for key, target in self._targets.items() if not target.passes]
        for keys in [straight, *([key] for key in passing)]:
            for key in keys:
                self._targets[key].begin()
            items = [item for key in keys for item in by_key[key]]
            self._reader.for_each(
                [work for item in items for work in self._pieces(item)], self._put
            )
            for key in keys:
                self._targets[key].finish()
        return _done(None)

    def _pieces(self, item: ReadItem) -> Iterator[tuple[Piece, ReadItem]]:
        key = item.storage_index.fqn
        chunk = self._chunks[key, item.storage_index.offset]
        for piece in self._reader.pieces_of(key, chunk):
            yield piece, item

    def _put(self, work: tuple[Piece, ReadItem]) -> None:
        """Put what a read item wants of a block of rows into its place."""
        piece, item = work
        target = self._targets[item.dest_index.fqn]
        if not piece.chunk.sizes:
            self._reader.check_if(piece, wanted=self._check)
            target.put((), self._reader.values(piece))
            return
        first, count = item.storage_offsets[0], item.lengths[0]
        low, high = max(first, piece.rows.start), min(first + count, piece.rows.stop)
        if low >= high:
            return
        self._reader.check_if(piece, wanted=self._check)
        values = self._reader.values(piece)[low - piece.rows.start : high - piece.rows.start]
        begin = item.dest_offsets[0] + low - first
        for dim, (start, length) in enumerate(_sides(item.storage_offsets, item.lengths), start=1):
            values = values.narrow(dim, start, length)
        sides = [slice(start, start + n) for start, n in _sides(item.dest_offsets, item.lengths)]
        target.put((slice(begin, begin + high - low), *sides), values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any."""
        return True


class _IntoTargets(LoadPlanner):
    """Plans by the boxes that DCP finds to overlap."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what is wanted, and of what there is."""
        assert metadata is not None
        self._plan = create_default_local_load_plan(state_dict, metadata, strict=True)

    def create_local_plan(self) -> LoadPlan:
        """Return the plan."""
        return self._plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse: a checkpoint has tensors only."""
        raise AssertionError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Refuse: targets take boxes by themselves."""
        raise AssertionError

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Refuse: targets take boxes by themselves."""
        raise AssertionError


def _sides(starts: torch.Size, lengths: torch.Size) -> Iterator[tuple[int, int]]:
    """Yield start and length of a box in all dimensions but the first."""
    yield from zip(starts[1:], lengths[1:], strict=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Have DCP not warn that it is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
