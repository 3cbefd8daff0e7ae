"""`save`: a checkpoint of model and optimizer, written aside and made visible by one rename."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.checkpoint.checksum import checksum
from muonloom.checkpoint.draft import Draft, agreed, check_options
from muonloom.checkpoint.files import (
    DataFile,
    Entry,
    check_room,
    data_header,
    nbytes_of,
    remove_checkpoint,
    remove_stale,
    remove_stale_pointers,
    remove_unfinished,
    saved_name,
    write_whole,
)
from muonloom.checkpoint.finding import LATEST, checkpoints_in
from muonloom.checkpoint.handle import SaveHandle, SaveReport, remember, wait_for_last
from muonloom.checkpoint.manifest import (
    FILE_NAME,
    Block,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    merged,
)
from muonloom.checkpoint.meeting import Meeting
from muonloom.checkpoint.together import all_or_none, ask
from muonloom.checkpoint.validity import faults
from muonloom.collectives import Ranks
from muonloom.optimizer import Muon
from muonloom.ranks import this_rank
from muonloom.snapshot import (
    SEGMENT_BYTES,
    Held,
    Segment,
    Snapshot,
    SnapshotTensor,
    check_extra_bytes,
)
from muonloom.state import lasting

_log = logging.getLogger("muonloom")


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Muon,
    step: int,
    extra: Any = None,
    async_: bool = False,
    extra_host_bytes: int | None = None,
    keep_last: int | None = None,
) -> SaveHandle:
    """Save weights, masters, optimizer state and group options, keyed by parameter name.

    The directory `path` becomes a checkpoint, or a new one in place of that which it was, by one rename at
    the end; whatever happens before, it is what it was. The file ``latest`` beside it then names it.

    All ranks call it, with the same path on a file system that they share. Each writes a part, and none
    makes a checkpoint without the others: where one fails, all do.

    With `async_` it returns when the state can be left to a thread, and training goes on: what a step is
    about to change is saved or copied first, and where there is no room for copies, the step waits. Until
    it is finished, change weights and state by the optimizer's methods alone.

    Args:
        path: directory of the checkpoint; its parents are made.
        model: whose parameters the optimizer has; its other parameters and persistent buffers are saved
            too.
        optimizer: is drained; it may be released.
        step: what `load` returns.
        extra: this rank's own: scheduler, random generators, position in the data. Of types that
            ``torch.load(weights_only=True)`` admits.
        async_: whether to return before it is written.
        extra_host_bytes: host memory for copies while training goes on. None: two units.
        keep_last: how many checkpoints to keep beside each other in the parent directory, this one among
            them; older ones are removed when it is finished. None: all.

    Returns:
        A handle. Its ``result()`` waits, raises what went wrong, and returns a `SaveReport`.

    Raises:
        TypeError: `optimizer` is no `Muon`, or `extra` holds what cannot be loaded safely.
        ValueError: a bad option, a parameter of the optimizer that is not in `model`, or ranks that want
            different things or have different tensors of one name.
        StaleMasterError: a weight was written from outside.
        OSError: the disk is full or fails. Of an asynchronous save, `result` and the next `save` raise it.
        RuntimeError: a failed step left a weight half written.
        LostRanksError: a rank does not take part.
    """
    started = time.perf_counter()

    def prepare() -> Draft:
        check_options(optimizer, step, extra_host_bytes, keep_last)
        wait_for_last(optimizer)
        optimizer.drain()
        if extra_host_bytes is not None and async_:
            check_extra_bytes(extra_host_bytes)
        return Draft.of(
            path, model=model, optimizer=optimizer, step=step, extra=extra, keep_last=keep_last
        )

    # Nothing is copied while the caller waits, and large segments cost least.
    room = extra_host_bytes if async_ else 2 * SEGMENT_BYTES
    with lasting():  # the thread is not in the caller's inference mode
        draft, proposals = ask(prepare, Draft.proposal)
        nonce = agreed(proposals).nonce
        parts = draft.divide(proposals)
        job = _Job(draft, parts, nonce=nonce, started=started)
        return job.start(optimizer, room, is_async=async_)


class _Job:
    """What one rank does for a save.

    Args:
        draft: of the save.
        parts: that this rank writes.
        nonce: of the files of all ranks.
        started: when, by `time.perf_counter`.
    """

    def __init__(
        self, draft: Draft, parts: Sequence[SnapshotTensor], *, nonce: str, started: float
    ) -> None:
        self._path = draft.path
        self._keep_last = draft.keep_last
        self._extra = draft.extra
        self._facts = {**draft.facts, "parameters": draft.parameters_of(parts)}
        self._parts = list(parts)
        self._started = started
        self._rank, ranks = this_rank(), Ranks()
        self._data_path = self._path / saved_name("data", nonce, self._rank)
        self._extra_path = self._path / saved_name("extra", nonce, self._rank)
        self._meeting = Meeting(
            self._path,
            nonce,
            rank=self._rank,
            num_ranks=ranks.size,
            limit_s=ranks.timeout_s if ranks.size > 1 else 0.0,
        )
        self._places = {part.key: part.home for part in parts}
        self._entries: dict[str, Entry] = {part.key: (part.dtype, part.shape) for part in parts}
        self._header, self._begins = data_header(self._entries)
        self._nbytes = sum(map(nbytes_of, self._entries.values()))
        self._data_bytes = len(self._header) + self._nbytes
        self._file: DataFile | None = None
        self._blocks: dict[str, list[tuple[int, Block]]] = {}
        self._seconds = 0.0

    def start(self, optimizer: Muon, room: int | None, *, is_async: bool) -> SaveHandle:
        """Have a thread write everything."""
        try:
            snapshot, sizes = ask(partial(self._open, optimizer, room), lambda _: self._data_bytes)
            with all_or_none():
                self._meeting.find_first()
                check_room(self._data_path, sum(sizes))
        except BaseException:
            optimizer._assembly.finish_reading()
            self._close()
            self._meeting.leave(None)
            raise
        try:
            snapshot.start(self._write, self._done, self._fail)
        except BaseException as failure:
            self._fail(failure)
            raise
        handle = SaveHandle(
            snapshot, report=lambda: self._report(snapshot.held), give_up=self._fail
        )
        remember(optimizer, handle)
        if not is_async:
            handle.result()
        return handle

    def _open(self, optimizer: Muon, room: int | None) -> Snapshot:
        self._path.mkdir(parents=True, exist_ok=True)
        self._file = DataFile(self._data_path, self._data_bytes)
        self._file.write(self._header, 0)
        # The snapshot lets go of them, and so of the state, when they are written.
        parts, self._parts = self._parts, []
        return optimizer._assembly.snapshot(parts, room)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    # -- on the thread ------------------------------------------------------------------------------

    def _write(self, segment: Segment, memory: memoryview, raw: Tensor) -> None:
        assert self._file is not None
        self._meeting.check()
        tensor = segment.tensor
        start = self._begins[tensor.key] + segment.rows.start * tensor.row_bytes
        self._file.write(memory, start)
        block = Block(
            rows=segment.rows.stop - segment.rows.start,
            checksum=checksum(raw),
            finite=tensor.parameter < 0 or _is_finite(raw.view(tensor.dtype)),
        )
        self._blocks.setdefault(tensor.key, []).append((segment.rows.start, block))

    def _done(self) -> None:
        assert self._file is not None
        self._file.finish()
        write_whole(self._extra_path, self._extra)
        if self._rank == 0:
            self._commit(merged([self._manifest(), *self._meeting.others_parts()]))
        else:
            self._meeting.hand_in(self._manifest())
        self._seconds = time.perf_counter() - self._started

    def _fail(self, failure: BaseException) -> None:
        self._close()
        self._meeting.leave(failure)

    def _report(self, held: Held) -> SaveReport:
        return SaveReport(
            path=self._path,
            nbytes=self._nbytes,
            seconds=self._seconds,
            copied_bytes=held.copied_bytes,
            held_seconds=held.seconds,
        )

    def _manifest(self) -> Manifest:
        """Return this rank's part of it."""
        summed = checksum(torch.frombuffer(bytearray(self._extra), dtype=torch.uint8))
        return Manifest(
            tensors={key: self._saved(key) for key in self._entries},
            extras=(self._extra_path.name,),
            files={
                self._data_path.name: SavedFile(nbytes=self._data_bytes),
                self._extra_path.name: SavedFile(nbytes=len(self._extra), checksum=summed),
            },
            **self._facts,
        )

    def _saved(self, key: str) -> SavedTensor:
        dtype, sizes = self._entries[key]
        in_order = sorted(self._blocks.get(key, ()), key=lambda entry: entry[0])
        chunk = Chunk(
            file=self._data_path.name,
            start=self._begins[key],
            offsets=self._places[key].offsets,
            sizes=sizes,
            blocks=tuple(block for _, block in in_order),
        )
        return SavedTensor(dtype=dtype, shape=self._places[key].whole, chunks=(chunk,))

    def _commit(self, manifest: Manifest) -> None:
        """Make the checkpoint visible; then remove what it takes the place of."""
        wrong = next(faults(manifest), None)
        assert wrong is None, wrong
        write_whole(self._path / FILE_NAME, manifest.to_json().encode())
        try:  # from here on the checkpoint is there, whatever happens
            remove_stale(self._path, [*manifest.files, *self._meeting.part_names])
            _point_to(self._path)
            if self._keep_last is not None:
                self._remove_old(self._keep_last)
        except Exception as error:
            _log.warning("Muon: saved %s, but could not remove what is old: %s", self._path, error)
        finally:
            self._meeting.close()

    def _remove_old(self, keep_last: int) -> None:
        remove_unfinished(self._path.parent)
        own = self._path.resolve()  # it may be named by a link
        others = [path for path in checkpoints_in(self._path.parent) if path.resolve() != own]
        for old in others[keep_last - 1 :]:
            remove_checkpoint(old)


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(values.aminmax())).all())


def _point_to(path: Path) -> None:
    """Have ``latest`` in the parent directory name the checkpoint."""
    pointer = path.parent / LATEST
    if pointer != path and (pointer.is_file() or not pointer.exists()):
        write_whole(pointer, os.fsencode(path.name) + b"\n")
        remove_stale_pointers(pointer)
