"""Files of a checkpoint: safetensors written out of order, small ones written whole, leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from muonloom.checkpoint.manifest import DTYPE_NAMES, FILE_NAME
from muonloom.errors import complaint

_REMOVED = "removed.json"  # the manifest of a checkpoint that is being removed

_STALE_S = 60.0  # a pointer is written in far less

# Files of a save, by kind; and small ones on their way to their names.
_SUFFIXES = {"data": "safetensors", "extra": "pt", "part": "json", "failed": "txt"}
_SAVED = rf"({'|'.join(_SUFFIXES)})-[0-9a-f]{{16}}-\d{{5,}}\.({'|'.join(_SUFFIXES.values())})"
_PARTIAL = r"\.[0-9a-f]{16}\.partial"
_OWN = re.compile(rf"{_SAVED}|{_REMOVED}|({_SAVED}|{re.escape(FILE_NAME)}){_PARTIAL}")

# (dtype, shape) of a tensor in a data file.
Entry = tuple[torch.dtype, tuple[int, ...]]


def new_nonce() -> str:
    """Return what makes the file names of one save unlike those of every other."""
    return secrets.token_hex(8)


def saved_name(kind: str, nonce: str, rank: int) -> str:
    """Return the name of a rank's file of a save: ``"data"``, ``"extra"``, ``"part"`` or ``"failed"``."""
    return f"{kind}-{nonce}-{rank:05}.{_SUFFIXES[kind]}"


def nbytes_of(entry: Entry) -> int:
    """Return the bytes of a tensor."""
    dtype, shape = entry
    return torch.Size(shape).numel() * dtype.itemsize


def data_header(entries: Mapping[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """Lay a safetensors file out.

    Tensors whose bytes are no multiple of 8 come last, so that all others are aligned for words.

    Returns:
        Its header, and where each tensor begins in the file.
    """
    order = sorted(entries, key=lambda key: nbytes_of(entries[key]) % 8 != 0)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for key in order:
        dtype, shape = entries[key]
        begins[key], end = end, end + nbytes_of(entries[key])
        header[key] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: len(head) + begin for key, begin in begins.items()}


def check_room(path: Path, nbytes: int) -> None:
    """Raise an OSError where the disk has no room for so many bytes at `path`, before any is written."""
    with _named(path):
        free = shutil.disk_usage(path.parent).free
        if free < nbytes:
            raise OSError(
                28,  # ENOSPC
                complaint(
                    str(path),
                    got=f"{free:,} bytes of free disk",
                    wanted=f"{nbytes:,} for a checkpoint",
                    remedy="Make room, or save elsewhere.",
                ),
            )


class DataFile:
    """A new file of known size, filled in any order by one thread.

    Raises (all methods):
        OSError: the disk is full or fails; the message names the file.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        check_room(path, nbytes)
        with _named(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: bytes | memoryview, start: int) -> None:
        """Write bytes from `start` on."""
        view = memoryview(data)
        with _named(self.path):
            while view.nbytes:
                count = os.pwrite(self._descriptor, view, start)
                view, start = view[count:], start + count

    def finish(self) -> None:
        """Have all of it on the disk, and close."""
        with _named(self.path):
            os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that at every moment it has its old content, or (by one rename) all of the new."""
    partial = path.with_name(f"{path.name}.{new_nonce()}.partial")
    with _named(path):
        try:
            file = DataFile(partial, len(data))
            try:
                file.write(data, 0)
                file.finish()
            finally:
                file.close()
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    with contextlib.suppress(OSError):  # some filesystems cannot
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_stale(path: Path, keep: Iterable[str]) -> None:
    """Remove files of earlier and of unfinished saves from a checkpoint's directory."""
    kept = set(keep)
    # What says that the rest may go, goes last.
    for file in sorted(path.iterdir(), key=lambda file: file.name == _REMOVED):
        if _OWN.fullmatch(file.name) and file.name not in kept:
            file.unlink(missing_ok=True)


def remove_stale_pointers(pointer: Path) -> None:
    """Remove what killed saves left of a pointer; one that is being written now is another save's."""
    for file in pointer.parent.iterdir():
        if re.fullmatch(re.escape(pointer.name) + _PARTIAL, file.name):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > _STALE_S:
                    file.unlink()


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; one rename makes it none, and what that leaves `remove_unfinished` finds."""
    (path / FILE_NAME).replace(path / _REMOVED)
    sync_directory(path)
    _remove_rest(path)


def remove_unfinished(folder: Path) -> None:
    """Go on where a removal of a checkpoint in `folder` was killed."""
    for path in folder.iterdir():
        if (path / _REMOVED).is_file() and not (path / FILE_NAME).exists():
            _remove_rest(path)


def _remove_rest(path: Path) -> None:
    remove_stale(path, ())
    with contextlib.suppress(OSError):  # somebody else's files stay
        path.rmdir()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about."""
    try:
        yield
    except OSError as error:
        if error.strerror and str(path) not in error.strerror:
            reason = complaint(
                str(path),
                got=f"the error {error.strerror!r}",
                wanted="a disk that takes the checkpoint",
                remedy="Make room, or save elsewhere; the checkpoint before is untouched.",
            )
            raise OSError(error.errno, reason) from error
        raise
