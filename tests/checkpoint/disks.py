"""Disks that write when they are told to, so that a test decides where a save is."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muonloom.checkpoint import files
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.device import Event
from muonloom.segments import Segment
from muonloom.snapshot import Snapshot

_PATIENCE_S = 10.0


class Disk:
    """Holds every write of a save's thread back, until it is let through.

    Attributes:
        fails_at: the number of the write that raises, counted from 0; None: none does.
        writes: how many were let through.
    """

    def __init__(self) -> None:
        self.fails_at: int | None = None
        self.writes = 0
        self._arrived = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._has_arrived = False

    def write(self, plain: Callable[..., int], *arguments: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return plain(*arguments)  # the header
        if not self._is_open:
            self._arrived.release()
            assert self._permits.acquire(timeout=_PATIENCE_S)
        if self.fails_at is not None and self.writes >= self.fails_at:
            self._is_open = True  # nothing comes after it
            self._arrived.release()
            raise OSError(5, "Input/output error")
        self.writes += 1
        return plain(*arguments)

    def arrive(self) -> None:
        """Wait until the thread has a write to do."""
        if not self._has_arrived:
            assert self._arrived.acquire(timeout=_PATIENCE_S), "the save writes nothing"
            self._has_arrived = True

    def let(self) -> None:
        """Let one write through."""
        self.arrive()
        self._has_arrived = False
        self._permits.release()

    def until(self, event: Event | None) -> None:
        """Let through as many writes as an event of the thread needs: reads come as late as they can."""
        while event is not None and not self._is_open and not event.query():
            self.arrive()
            if not event.query():
                self.let()

    def open(self) -> None:
        """Let all writes through from now on."""
        self._is_open = True
        self._permits.release(1000)


@contextlib.contextmanager
def stalled(*, lazy: bool = False) -> Iterator[Disk]:
    """Have data written only when the disk given is told so; it is opened at the end.

    Args:
        lazy: also while a step waits for the save, and then for no longer than that.
    """
    disk, plain = Disk(), os.pwrite
    genuine = Snapshot._await

    def wait(self: Snapshot, event: Event | None) -> None:
        disk.until(event)
        genuine(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "pwrite", lambda *arguments: disk.write(plain, *arguments))
        if lazy:
            patch.setattr(Snapshot, "_await", wait)
        try:
            yield disk
        finally:
            disk.open()


@contextlib.contextmanager
def watched(name: str, before: Callable[[], None]) -> Iterator[list[str]]:
    """Have `before` called before each call of a snapshot's method; yields the calls."""
    calls: list[str] = []
    genuine = getattr(Snapshot, name)

    def method(self: Snapshot, *arguments: Any) -> Any:
        calls.append(name)
        before()
        return genuine(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, name, method)
        yield calls


def largest(segments: Sequence[Segment]) -> int:
    return max(segment.nbytes for segment in segments)


def saved(path: Path) -> dict[str, Tensor]:
    """Return what a checkpoint holds, named as `support.everything` names it, masters for weights."""
    reader = CheckpointReader(path)
    found: dict[str, Tensor] = {}
    for key in reader.manifest.tensors:
        kind, _, name = key.partition(".")
        if kind == "optimizer":
            name = "/".join(name.rsplit(".", 1))
        found[name] = reader.read(key)
    for name, known in reader.manifest.parameters.items():
        if known.step is not None:
            found[f"{name}/step"] = torch.tensor(known.step)
    return found


def to_save(everything: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a checkpoint has to hold of a run that has this."""
    masters = {
        key.removesuffix("/master_weight"): value
        for key, value in everything.items()
        if key.endswith("/master_weight")
    }
    kept = {k: v for k, v in everything.items() if not k.endswith("/master_weight")}
    return {**kept, **masters}
