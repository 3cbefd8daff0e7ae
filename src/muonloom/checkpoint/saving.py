"""`save`: a checkpoint of model and optimizer, written aside and made visible by one rename."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.checkpoint.checksum import checksum
from muonloom.checkpoint.contents import description, extra_bytes, other_tensors
from muonloom.checkpoint.files import (
    DataFile,
    Entry,
    data_header,
    nbytes_of,
    new_nonce,
    remove_checkpoint,
    remove_stale,
    remove_stale_pointers,
    remove_unfinished,
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
)
from muonloom.checkpoint.options import plain_groups, refuse_other_optimizer, saved_parameters
from muonloom.checkpoint.storage import plan_save
from muonloom.errors import complaint
from muonloom.model_tensors import names_by_tensor
from muonloom.optimizer import Muon
from muonloom.ranks import gathered, this_rank
from muonloom.snapshot import (
    SEGMENT_BYTES,
    Held,
    Segment,
    Snapshot,
    SnapshotTensor,
    check_extra_bytes,
)
from muonloom.state import lasting
from muonloom.version import __version__

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
    the end; whatever happens before, it is what it was. The file ``latest`` beside it then names it. All
    ranks call it, with the same path on a file system that they share.

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
        ValueError: a bad option, or a parameter of the optimizer that is not in `model`.
        StaleMasterError: a weight was written from outside.
        OSError: the disk is full or fails. Of an asynchronous save, `result` and the next `save` raise it.
        RuntimeError: a failed step left a weight half written.
    """
    _check_options(optimizer, step, extra_host_bytes, keep_last)
    started = time.perf_counter()
    wait_for_last(optimizer)
    optimizer.drain()
    names = names_by_tensor(model)
    _check_names(optimizer, names)
    extras = gathered(extra_bytes(extra))
    first = {tensor: found[0] for tensor, found in names.items()}
    job = _Job(
        path=Path(os.path.abspath(path)),  # the thread may meet another working directory
        started=started,
        keep_last=keep_last,
        extras=extras,
        facts={
            "step": int(step),
            "created_s": time.time(),
            "versions": {"muonloom": __version__, "torch": torch.__version__},
            "aliases": {name: found[0] for found in names.values() for name in found[1:]},
            "parameters": saved_parameters(optimizer, first),
            "options": plain_groups(optimizer),
            "ns_batch_bytes": optimizer._ns_batch_bytes(),
            "model": description(model),
        },
    )
    if extra_host_bytes is not None and async_:
        check_extra_bytes(extra_host_bytes)
    # Nothing is copied while the caller waits, and large segments cost least.
    room = extra_host_bytes if async_ else 2 * SEGMENT_BYTES
    with lasting():  # the thread is not in the caller's inference mode
        if this_rank():  # all ranks hold the same, and the first one writes it
            snapshot = optimizer._assembly.snapshot([], room)
        else:
            snapshot = optimizer._snapshot(first, other_tensors(optimizer, first), room)
        return job.start(optimizer, snapshot, is_async=async_)


@dataclass(kw_only=True)
class _Job:
    """One save.

    Attributes:
        path: of the checkpoint.
        started: when, by `time.perf_counter`.
        keep_last: see `save`.
        extras: of all ranks.
        facts: fields of the manifest that are known from the start.
        nonce: of its files.
    """

    path: Path
    started: float
    keep_last: int | None
    extras: Sequence[bytes]
    facts: Mapping[str, Any]
    nonce: str = field(default_factory=new_nonce)
    _file: DataFile | None = None
    _entries: dict[str, Entry] = field(default_factory=dict)
    _begins: dict[str, int] = field(default_factory=dict)
    _blocks: dict[str, list[tuple[int, Block]]] = field(default_factory=dict)
    _data_bytes: int = 0
    _seconds: float = 0.0

    def start(self, optimizer: Muon, snapshot: Snapshot, *, is_async: bool) -> SaveHandle:
        """Have the snapshot's thread write everything."""
        try:
            if this_rank() == 0:
                self._open(snapshot.tensors)
        except BaseException:
            optimizer._assembly.finish_reading()
            self._give_up()
            raise
        handle = SaveHandle(
            snapshot, report=lambda: self._report(snapshot.held), give_up=self._give_up
        )
        remember(optimizer, handle)
        snapshot.start(self._write, self._done)
        if not is_async:
            handle.result()
        return handle

    def _open(self, tensors: Sequence[SnapshotTensor]) -> None:
        known = {tensor.key: (tensor.dtype, tensor.shape) for tensor in tensors}
        self._entries = {box.key: known[box.key] for box in plan_save(tensors)}
        header, self._begins = data_header(self._entries)
        self._data_bytes = len(header) + self._nbytes
        self.path.mkdir(parents=True, exist_ok=True)
        self._file = DataFile(self._data_path, self._data_bytes)
        self._file.write(header, 0)

    def _write(self, segment: Segment, memory: memoryview, raw: Tensor) -> None:
        assert self._file is not None
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
        if self._file is not None:
            self._file.finish()
            self._commit()
        self._seconds = time.perf_counter() - self.started

    @property
    def _nbytes(self) -> int:
        return sum(map(nbytes_of, self._entries.values()))

    def _report(self, held: Held) -> SaveReport:
        return SaveReport(
            path=self.path,
            nbytes=self._nbytes,
            seconds=self._seconds,
            copied_bytes=held.copied_bytes,
            held_seconds=held.seconds,
        )

    @property
    def _data_path(self) -> Path:
        return self.path / f"data-{self.nonce}-{0:05}.safetensors"

    def _commit(self) -> None:
        """Make the checkpoint visible; then remove what it takes the place of."""
        names = [f"extra-{self.nonce}-{rank:05}.pt" for rank in range(len(self.extras))]
        files = {self._data_path.name: SavedFile(nbytes=self._data_bytes)}
        for name, data in zip(names, self.extras, strict=True):
            write_whole(self.path / name, data)
            summed = checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            files[name] = SavedFile(nbytes=len(data), checksum=summed)
        tensors = {key: self._saved(key) for key in self._entries}
        manifest = Manifest(tensors=tensors, extras=tuple(names), files=files, **self.facts)
        write_whole(self.path / FILE_NAME, manifest.to_json().encode())
        try:  # from here on the checkpoint is there, whatever happens
            remove_stale(self.path, files)
            _point_to(self.path)
            if self.keep_last is not None:
                remove_unfinished(self.path.parent)
                own = self.path.resolve()  # it may be named by a link
                others = [
                    path for path in checkpoints_in(self.path.parent) if path.resolve() != own
                ]
                for old in others[self.keep_last - 1 :]:
                    remove_checkpoint(old)
        except Exception as error:
            _log.warning("Muon: saved %s, but could not remove what is old: %s", self.path, error)

    def _saved(self, key: str) -> SavedTensor:
        dtype, shape = self._entries[key]
        in_order = sorted(self._blocks.get(key, ()), key=lambda entry: entry[0])
        chunk = Chunk(
            file=self._data_path.name,
            start=self._begins[key],
            offsets=(0,) * len(shape),
            sizes=shape,
            blocks=tuple(block for _, block in in_order),
        )
        return SavedTensor(dtype=dtype, shape=shape, chunks=(chunk,))

    def _give_up(self) -> None:
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(OSError):
            for path in self.path.glob(f"*-{self.nonce}-*"):
                path.unlink(missing_ok=True)
            self.path.rmdir()  # only where nothing else is in it


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


# -- what is refused ----------------------------------------------------------------------------------


def _check_options(
    optimizer: object, step: object, extra_host_bytes: object, keep_last: object
) -> None:
    refuse_other_optimizer(optimizer)
    for name, value, least in (
        ("step", step, 0),
        ("extra_host_bytes", extra_host_bytes, 0),
        ("keep_last", keep_last, 1),
    ):
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_number and (value is not None or name == "step"):
            raise ValueError(
                complaint(
                    name,
                    got=repr(value),
                    wanted=f"a whole number of {least} or more",
                    remedy="" if name == "step" else "Leave it out for the default.",
                )
            )


def _check_names(optimizer: Muon, names: Mapping[Tensor, Sequence[str]]) -> None:
    for param, known in optimizer._assignments.items():
        if param not in names:
            raise ValueError(
                complaint(
                    known.name,
                    got="a parameter of the optimizer that is not in the model",
                    wanted="the model that the optimizer was built for",
                    remedy="Pass that very model.",
                )
            )
