"""Reading a checkpoint: by rows of its tensors, checked as far as the caller wants."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonloom.checkpoint.checksum import checksum
from muonloom.checkpoint.manifest import (
    FILE_NAME,
    Block,
    Chunk,
    SavedTensor,
    damaged,
    read_manifest,
)
from muonloom.checkpoint.validity import faults
from muonloom.errors import CheckpointError, complaint
from muonloom.sharding import Box

_MOST_THREADS = 8

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One block of a chunk.

    Attributes:
        key: of the tensor.
        chunk: that it is of.
        block: what the manifest says of it.
        rows: where it is in dimension 0 of the chunk.
    """

    key: str
    chunk: Chunk
    block: Block
    rows: slice


class CheckpointReader:
    """A checkpoint whose files are mapped into memory as they are needed.

    Attributes:
        manifest: what is in it.

    Raises:
        CheckpointError: there is no finished checkpoint, or a file has gone or has another size.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        try:
            wrong = next(faults(self.manifest), None)
        except (ValueError, TypeError, AttributeError) as error:
            wrong = f"a value of another type ({error})"
        if wrong is not None:
            raise damaged(self.path / FILE_NAME, wrong)
        self._maps: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        for name, file in self.manifest.files.items():
            found = _size(self.path / name)
            if found != file.nbytes:
                got = "no such file" if found is None else f"{found:,} bytes"
                raise _damaged(self.path / name, got, f"{file.nbytes:,} bytes")

    def tensor(self, key: str) -> SavedTensor:
        """Return what the manifest says of a tensor."""
        return self.manifest.tensors[key]

    def pieces(self, key: str, box: Box | None = None) -> Iterator[Piece]:
        """Yield the blocks of a tensor, or of those only that have elements in a box of it."""
        for chunk in self.tensor(key).chunks:
            if box is None:
                yield from self.pieces_of(key, chunk)
            elif (inside := box.within(Box(chunk.offsets, chunk.sizes))) is not None:
                first, last = inside.rows
                for piece in self.pieces_of(key, chunk):
                    if piece.rows.start < last and first < piece.rows.stop:
                        yield piece

    def pieces_of(self, key: str, chunk: Chunk) -> Iterator[Piece]:
        """Yield the blocks of a chunk."""
        start = 0
        for block in chunk.blocks:
            rows = slice(start, start + block.rows)
            yield Piece(key=key, chunk=chunk, block=block, rows=rows)
            start += block.rows

    def raw(self, piece: Piece) -> Tensor:
        """Return a block's bytes, 1-D uint8, mapped: not to be written."""
        row_bytes = _row_bytes(piece.chunk, self.tensor(piece.key).dtype)
        start = piece.chunk.start + piece.rows.start * row_bytes
        return self._map(piece.chunk.file)[start : start + piece.block.rows * row_bytes]

    def values(self, piece: Piece) -> Tensor:
        """Return a block, shaped as these rows of its chunk; not to be written."""
        dtype, sizes = self.tensor(piece.key).dtype, piece.chunk.sizes
        raw = self.raw(piece)
        if raw.numel() and raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        shape = (piece.block.rows, *sizes[1:]) if sizes else ()
        return raw.view(dtype).view(shape)

    def read(self, key: str, rows: slice | None = None) -> Tensor:
        """Return rows of dimension 0 of a tensor (None: all), new, of its saved dtype; checks them.

        Raises:
            CheckpointError: they are damaged.
        """
        saved = self.tensor(key)
        length = saved.shape[0] if saved.shape else 1
        start, stop, _ = (rows or slice(None)).indices(length)
        shape = (max(0, stop - start), *saved.shape[1:]) if saved.shape else ()
        made = torch.empty(shape, dtype=saved.dtype, device="cpu")
        target = made if saved.shape else made.view(1)
        for piece in self.pieces(key):
            offsets, sizes = piece.chunk.offsets or (0,), piece.chunk.sizes or (1,)
            first = offsets[0] + piece.rows.start
            low, high = max(start, first), min(stop, first + piece.block.rows)
            if low >= high:
                continue
            self.check(piece)
            box = [slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True)]
            values = self.values(piece).view(-1, *sizes[1:])
            target[(slice(low - start, high - start), *box)] = values[low - first : high - first]
        return made

    def check(self, piece: Piece) -> None:
        """Compare a block's checksum.

        Raises:
            CheckpointError: it is another.
        """
        if checksum(self.raw(piece)) != piece.block.checksum:
            file = self.path / piece.chunk.file
            raise CheckpointError(
                complaint(
                    piece.key,
                    got=f"bytes in {file} that are not those that were saved",
                    wanted="the checksum of the manifest",
                    remedy="Go back to an earlier checkpoint.",
                )
            )

    def check_if(self, piece: Piece, *, wanted: bool) -> None:
        """Compare a block's checksum if that is wanted."""
        if wanted:
            self.check(piece)

    def check_all(self, boxes: Mapping[str, Box]) -> None:
        """Compare all checksums of what is read of these boxes of tensors, on a few threads."""
        pieces = [piece for key, box in boxes.items() for piece in self.pieces(key, box)]
        self.for_each(pieces, self.check)

    def for_each(self, things: Sequence[_T], work: Callable[[_T], None]) -> None:
        """Do something with each of these, on a few threads; the first failure comes out."""
        threads = min(_MOST_THREADS, _num_cores())
        with ThreadPoolExecutor(threads, thread_name_prefix="muonloom-read") as pool:
            futures = [pool.submit(work, thing) for thing in things]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def extra(self, rank: int) -> Any:
        """Return what the caller gave on rank `rank`; where there were fewer ranks, they are taken in turn.

        Raises:
            CheckpointError: the file is damaged.
        """
        name = self.manifest.extras[rank % len(self.manifest.extras)]
        if checksum(self._map(name)) != self.manifest.files[name].checksum:
            raise _damaged(self.path / name, "another checksum", "the one of the manifest")
        try:
            with (self.path / name).open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[:1]
            raise _damaged(
                self.path / name, f"what cannot be loaded safely {reason}", "what was saved"
            ) from None

    def _map(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._maps:
                self._maps[name] = _mapped(self.path / name, self.manifest.files[name].nbytes)
            return self._maps[name]


def _mapped(path: Path, nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        with path.open("rb") as file:
            # Private and writable, and never written: torch warns of memory that it may not write.
            pages = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise _damaged(path, f"a file that cannot be read ({error})", f"{nbytes:,} bytes") from None
    return torch.frombuffer(pages, dtype=torch.uint8)


def _row_bytes(chunk: Chunk, dtype: torch.dtype) -> int:
    return torch.Size(chunk.sizes[1:]).numel() * dtype.itemsize


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _damaged(path: Path, got: str, wanted: str) -> CheckpointError:
    remedy = "Go back to an earlier checkpoint."
    return CheckpointError(complaint(str(path), got=got, wanted=wanted, remedy=remedy))
