"""The manifest: what a checkpoint holds and where, as data and as JSON (docs/checkpoint-format.md)."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from muonloom.errors import CheckpointError, complaint

FORMAT = "muonloom-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"

# The names of dtypes in safetensors files.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows of dimension 0 of a chunk (a scalar is one row), checked together.

    Attributes:
        rows: how many.
        checksum: of their bytes.
        finite: whether none of them is a NaN or infinite.
    """

    rows: int
    checksum: str
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, contiguous in one file, row by row.

    Attributes:
        file: in the checkpoint's directory.
        start: its first byte, from the beginning of the file.
        offsets: where the box begins in the tensor.
        sizes: of the box.
        blocks: its rows, in order.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """One tensor: ``model.NAME`` or ``optimizer.NAME.KEY``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class SavedParameter:
    """What the optimizer had of one parameter, but for its tensors.

    Attributes:
        algorithm: ``"muon"`` or ``"adamw"``.
        options: index of its group's options.
        dtype: of the parameter itself, which a master may be rounded to.
        step: of AdamW; None: it had no step.
    """

    algorithm: str
    options: int
    dtype: str
    step: float | None = None


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """A file beside the manifest; small ones have a checksum of all of it."""

    nbytes: int
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: as the caller counts.
        created_s: when it was saved, seconds since 1970.
        versions: of muonloom and torch.
        tensors: by key.
        aliases: other names of tied tensors, and the name that they are saved under.
        parameters: of the optimizer, by name.
        options: of its groups.
        ns_batch_bytes: of the optimizer.
        extras: by rank, the file with what the caller gave.
        files: by name.
        model: class and configuration of a model of transformers.
    """

    step: int
    created_s: float
    versions: Mapping[str, str]
    tensors: Mapping[str, SavedTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, SavedParameter]
    options: tuple[Mapping[str, Any], ...]
    ns_batch_bytes: int | str
    extras: tuple[str, ...]
    files: Mapping[str, SavedFile]
    model: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """Return the content of the manifest's file."""
        body = {**dataclasses.asdict(self), "tensors": {}}
        for key, tensor in self.tensors.items():
            entry = dataclasses.asdict(tensor)
            body["tensors"][key] = {**entry, "dtype": DTYPE_NAMES[tensor.dtype]}
        head = {"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(_text(body).encode())}
        return json.dumps({**head, "body": body}, sort_keys=True, indent=None) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Read the content of the manifest's file at `path`.

        Raises:
            CheckpointError: it is damaged, or of a format or version that this release cannot read.
        """
        try:
            whole = json.loads(text)
            found = (whole["format"], whole["version"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise damaged(path, "a file that is no manifest") from None
        if found[0] != FORMAT or found[1] != VERSION:
            raise CheckpointError(
                complaint(
                    str(path),
                    got=f"format {found[0]}, version {found[1]}",
                    wanted=f"format {FORMAT}, version {VERSION}",
                    remedy="Load it with the release that wrote it.",
                )
            )
        try:
            if zlib.crc32(_text(whole["body"]).encode()) != whole["crc32"]:
                raise damaged(path, "a manifest whose checksum is wrong")
            return cls._from_body(whole["body"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise damaged(path, f"a malformed manifest ({error!r})") from None

    @classmethod
    def _from_body(cls, body: Mapping[str, Any]) -> Manifest:
        tensors = {
            key: SavedTensor(
                dtype=DTYPES[entry["dtype"]],
                shape=tuple(entry["shape"]),
                chunks=tuple(map(_chunk, entry["chunks"])),
            )
            for key, entry in body["tensors"].items()
        }
        return cls(
            **{
                **body,
                "tensors": tensors,
                "parameters": {n: SavedParameter(**e) for n, e in body["parameters"].items()},
                "options": tuple(body["options"]),
                "extras": tuple(body["extras"]),
                "files": {n: SavedFile(**e) for n, e in body["files"].items()},
            }
        )


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint `path`.

    Raises:
        CheckpointError: there is none, or it cannot be used.
    """
    return read_manifest_file(path / FILE_NAME)


def read_manifest_file(file: Path) -> Manifest:
    """Read a manifest, or a rank's part of one.

    Raises:
        CheckpointError: there is none, or it cannot be used.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise damaged(file, "a file that is no manifest") from None
    except OSError as error:
        raise CheckpointError(
            complaint(
                str(file),
                got=f"no manifest to read ({error.strerror})",
                wanted="the directory of a finished checkpoint",
                remedy="muonloom.checkpoint.latest(directory) finds the newest one.",
            )
        ) from None
    return Manifest.from_json(text, file)


def merged(parts: Sequence[Manifest]) -> Manifest:
    """Return the manifest of what several ranks have written; what they say alike is the first one's."""
    first = parts[0]
    options = list(first.options)
    parameters = dict(first.parameters)
    chunks: dict[str, list[Chunk]] = {}
    tensors: dict[str, SavedTensor] = {}
    for part in parts:
        for key, tensor in part.tensors.items():
            tensors.setdefault(key, tensor)
            chunks.setdefault(key, []).extend(tensor.chunks)
        if part is not first:
            numbers = [_number(entry, options) for entry in part.options]
            for name, parameter in part.parameters.items():
                own = dataclasses.replace(parameter, options=numbers[parameter.options])
                parameters[name] = own
    return dataclasses.replace(
        first,
        tensors={k: dataclasses.replace(t, chunks=tuple(chunks[k])) for k, t in tensors.items()},
        aliases={name: saved for part in parts for name, saved in part.aliases.items()},
        parameters=parameters,
        options=tuple(options),
        extras=tuple(extra for part in parts for extra in part.extras),
        files={name: file for part in parts for name, file in part.files.items()},
        model=next((part.model for part in parts if part.model is not None), None),
    )


def _number(options: Mapping[str, Any], known: list[Mapping[str, Any]]) -> int:
    """Return which of the options known these are; add them if they are new."""
    text = _text(options)
    for number, other in enumerate(known):
        if _text(other) == text:
            return number
    known.append(options)
    return len(known) - 1


def _chunk(entry: Mapping[str, Any]) -> Chunk:
    shape = {"offsets": tuple(entry["offsets"]), "sizes": tuple(entry["sizes"])}
    blocks = tuple(Block(**block) for block in entry["blocks"])
    return Chunk(**{**entry, **shape, "blocks": blocks})


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def damaged(path: Path, got: str) -> CheckpointError:
    """Return the error for a manifest that cannot be used."""
    return CheckpointError(
        complaint(
            str(path),
            got=got,
            wanted="the manifest as it was written",
            remedy="Go back to an earlier checkpoint.",
        )
    )
