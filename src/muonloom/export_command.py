"""`muonloom export`: from a checkpoint to a directory that transformers loads.

The model is built on the meta device, and its weights are read, made and written one after another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from muonloom.checkpoint.finding import latest
from muonloom.checkpoint.manifest import FILE_NAME, Manifest
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.errors import CheckpointError, ConfigError, complaint
from muonloom.exporting import (
    BLOCK,
    DTYPES,
    MAX_BYTES,
    Exporter,
    Weight,
    check_options,
    named_tensors,
)
from muonloom.layout import canonical_name
from muonloom.meta_models import build_on_meta, make_config, read_fields
from muonloom.model_files import Shards, aside, check_room, quantization_config, write_config

MAX_SHARD_BYTES = 5_000_000_000

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_GENERATION = "generation_config.json"
_MODEL = "model."


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        checkpoint: that it was made from.
        step: of the checkpoint.
        num_tensors: in all files.
        num_files: with weights.
        nbytes: of all tensors.
        ragged: FP8 matrices that transformers can misread where it dequantizes them: more than one block
            in a direction, and the last one not whole.
    """

    checkpoint: Path
    step: int
    num_tensors: int
    num_files: int
    nbytes: int
    ragged: tuple[str, ...]


def run_export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    model: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    max_bytes: int = MAX_BYTES,
) -> Exported:
    """Write the model of a checkpoint as `muonloom.export_weights` gives it at that step, bit for bit.

    Nothing is loaded whole: beside the one tensor being made it has at most `max_bytes` in use. All
    checksums of what is read are compared. `out` appears by one rename, when all of it is there.

    Args:
        checkpoint: a checkpoint, or a directory of them, whose newest complete one is taken.
        out: a directory that does not exist yet.
        dtype: of what the optimizer holds: ``"bfloat16"``, ``"float16"``, ``"float32"`` or
            ``"float8_block"``.
        model: a directory with a config.json, or that file; None: the configuration in the checkpoint.
        max_shard_bytes: of tensors in a file; a larger tensor has one for itself.
        max_bytes: see `muonloom.export_weights`.

    Raises:
        ValueError: a bad option; also as `ConfigError`: `out` exists, or the configuration makes another
            model than the checkpoint has, or the disk fails or is full; as `CheckpointError`: none, or a
            damaged one.
    """
    chosen = _checked(out, dtype, max_shard_bytes)
    check_options(chosen, max_bytes)
    reader = CheckpointReader(_resolve(checkpoint))
    hollow = _build(reader, model)
    source = _CheckpointSource(hollow, reader)
    exporter = Exporter(hollow, source, dtype=chosen, max_bytes=max_bytes)
    shards = Shards.of(exporter.entries(), max_shard_bytes)
    check_room(out, shards.nbytes)
    with _system_errors(), aside(out) as partial:
        if isinstance(chosen, torch.dtype):
            write_config(partial, hollow, chosen, None)
        else:
            quantization = quantization_config(exporter, source.weights)
            write_config(partial, hollow, torch.bfloat16, quantization)
        if model is not None and (model / _GENERATION).is_file():
            shutil.copyfile(model / _GENERATION, partial / _GENERATION)
        shards.write(partial, exporter.tensors(torch.device("cpu")))
    return Exported(
        checkpoint=reader.path,
        step=reader.manifest.step,
        num_tensors=len(shards.entries),
        num_files=len(shards.names),
        nbytes=shards.nbytes,
        ragged=tuple(n for n, (kind, shape) in shards.entries.items() if _is_ragged(kind, shape)),
    )


@contextmanager
def _system_errors() -> Iterator[None]:
    """Have errors of the system as a `ConfigError` that names the file."""
    try:
        yield
    except OSError as error:
        line = error.strerror or str(error)
        if error.filename is not None:
            line = complaint(
                error.filename,
                got=f"the error {line!r}",
                wanted="a place to write to",
                remedy="Choose another OUT.",
            )
        raise ConfigError(line) from error


def _checked(out: Path, dtype: str, max_shard_bytes: int) -> torch.dtype | str:
    if dtype not in _DTYPES:
        raise ConfigError(
            complaint(
                "--dtype",
                got=dtype,
                wanted=" or ".join(_DTYPES),
                remedy="Leave it out for bfloat16.",
            )
        )
    if max_shard_bytes < 1:
        raise ConfigError(
            complaint(
                "--max-shard-bytes",
                got=max_shard_bytes,
                wanted="a number of bytes > 0",
                remedy=f"Leave it out for {MAX_SHARD_BYTES:,}.",
            )
        )
    if os.path.lexists(out):
        raise ConfigError(
            complaint(
                str(out),
                got="a path that exists",
                wanted="one that does not",
                remedy="Choose another, or remove it.",
            )
        )
    return _DTYPES[dtype]


def _resolve(checkpoint: Path) -> Path:
    """Return the checkpoint itself, or the newest one in a directory of them."""
    if (checkpoint / FILE_NAME).exists() or not checkpoint.is_dir():
        return checkpoint
    found = latest(checkpoint)
    if found is None:
        raise CheckpointError(
            complaint(
                str(checkpoint),
                got="a directory without a finished checkpoint",
                wanted="a checkpoint, or a directory that has one",
                remedy="It is the path that muonloom.checkpoint.save was given, or the one above.",
            )
        )
    return found


def _build(reader: CheckpointReader, given: Path | None) -> nn.Module:
    """Return the checkpoint's model on the meta device, with the very tensors and ties that it had.

    Raises:
        ConfigError: there is no configuration, or it makes another model.
    """
    saved = reader.manifest.model
    if given is not None:
        fields, where = read_fields(given), str(given)
    elif saved is not None:
        fields, where = saved["config"], str(reader.path)
    else:
        raise ConfigError(
            complaint(
                str(reader.path),
                got="a checkpoint that has no configuration of transformers",
                wanted="one, to know the files' names",
                remedy="Give --model: the directory of such a model, or its config.json.",
            )
        )
    config = make_config({k: v for k, v in fields.items() if k != "quantization_config"}, where)
    names = [saved["class"]] if saved is not None else fields.get("architectures") or [None]
    model = build_on_meta(config, where, class_name=names[0])
    keys = _keys(reader.manifest)
    _check_model(model, reader.manifest, keys, where)
    _retie(model, keys)
    return model


def _keys(manifest: Manifest) -> dict[str, str]:
    """Return the key that the checkpoint has each tensor of the model under, by all canonical names."""
    keys = {key.removeprefix(_MODEL): key for key in manifest.tensors if key.startswith(_MODEL)}
    return keys | {alias: _MODEL + name for alias, name in manifest.aliases.items()}


def _check_model(model: nn.Module, manifest: Manifest, keys: Mapping[str, str], where: str) -> None:
    tensors = {canonical_name(name): tensor for name, tensor in named_tensors(model).items()}
    known = tensors.keys() | {canonical_name(name) for name, _ in model.named_buffers()}
    odd = [(name, "a", "none") for name in tensors if name not in keys]
    odd += [(name, "no", "one") for name in keys if name not in known]
    for name in (name for name in tensors if name in keys):
        shape, saved = tuple(tensors[name].shape), manifest.tensors[keys[name]].shape
        if shape != saved:
            odd.append((name, f"{shape} as", str(saved)))
    if odd:
        name, got, wanted = odd[0]
        raise ConfigError(
            complaint(
                where,
                got=f"a configuration whose model has {got} {name}",
                wanted=f"that of the checkpoint, which has {wanted}",
                remedy="Give --model: the configuration that was trained with.",
            )
        )


def _retie(model: nn.Module, keys: Mapping[str, str]) -> None:
    """Have those tensors of the model be one that were one in training, whatever the configuration says."""
    made: dict[str, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        tensor = made.setdefault(keys[canonical_name(name)], type(tensor)(torch.empty_like(tensor)))
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix)
        held = module._parameters if leaf in module._parameters else module._buffers
        held[leaf] = tensor  # type: ignore[assignment]


class _CheckpointSource:
    """Reads the tensors of a model by name from a checkpoint, and compares their checksums."""

    version = 0

    def __init__(self, model: nn.Module, reader: CheckpointReader) -> None:
        self._reader = reader
        keys = _keys(reader.manifest)
        self._keys = {name: keys[canonical_name(name)] for name in named_tensors(model)}
        self.weights = {name: self._weight(key) for name, key in self._keys.items()}

    def _weight(self, key: str) -> Weight:
        saved = self._reader.tensor(key)
        shape = torch.Size(saved.shape)
        parameter = self._reader.manifest.parameters.get(key.removeprefix(_MODEL))
        if parameter is None:
            return Weight(shape=shape, dtype=saved.dtype, algorithm=None)
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        return Weight(shape=shape, dtype=dtype, algorithm=parameter.algorithm)

    def read(self, name: str, rows: slice | None) -> Tensor:
        """Return these rows (None: all).

        Raises:
            CheckpointError: they are damaged.
        """
        found = self._reader.read(self._keys[name], rows)
        return found if self.weights[name].algorithm is None else found.to(torch.float32)


def _is_ragged(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return dtype == torch.float8_e4m3fn and any(
        size > block and size % block for size, block in zip(shape, BLOCK, strict=True)
    )
