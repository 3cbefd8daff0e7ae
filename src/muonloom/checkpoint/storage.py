"""What `torch.distributed.checkpoint` plans is read into its places.

It decides from which of the boxes that ranks have saved, of whatever sharding, the box that this rank needs
is put together. The bytes go another way than through its own storage: straight to the optimizer's memory,
in blocks with checksums.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    StorageReader,
)
from torch.distributed.checkpoint import load as load_planned
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from muonloom.checkpoint.manifest import Chunk
from muonloom.checkpoint.reader import CheckpointReader, Piece
from muonloom.checkpoint.targets import Target
from muonloom.sharding import Box


def load_boxes(
    reader: CheckpointReader,
    targets: Mapping[str, Target],
    boxes: Mapping[str, Box],
    *,
    check: bool,
) -> None:
    """Read boxes of tensors.

    Args:
        reader: of the checkpoint.
        targets: by key; each takes a box, counted from where that begins.
        boxes: by key, in the whole tensor.
        check: compare checksums of what is read.

    Raises:
        CheckpointError: what was read is damaged.
    """
    try:
        with _alone():
            load_planned(
                {},
                storage_reader=_MappedReader(reader, targets, check=check),
                planner=_IntoTargets({key: boxes[key] for key in targets}),
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
        for key in self._targets:
            tensor = self._reader.tensor(key)
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

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        self._boxes = boxes

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what is wanted, and of what there is."""
        assert metadata is not None
        items: list[ReadItem] = []
        for key, box in self._boxes.items():
            saved = metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            if box.numel:
                items += create_read_items_for_chunk_list(key, saved, [wanted])
        self._plan = LoadPlan(items)

    def create_local_plan(self) -> LoadPlan:
        """Return the plan."""
        return self._plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return global_plan

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
