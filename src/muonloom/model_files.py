"""A directory that `transformers.AutoModelForCausalLM.from_pretrained` loads, written tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonloom.checkpoint.files import (
    DataFile,
    Entry,
    data_header,
    nbytes_of,
    new_nonce,
    sync_directory,
    write_whole,
)
from muonloom.conversions import float8_description
from muonloom.errors import ConfigError, complaint
from muonloom.exporting import BLOCK, Exporter, Weight
from muonloom.meta_models import quiet

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What goes into which file.

    Attributes:
        entries: dtypes and shapes of all tensors, by name.
        names: those in each file, in the order in which they are made.
    """

    entries: Mapping[str, Entry]
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, entries: Mapping[str, Entry], max_shard_bytes: int) -> Shards:
        """Fill files in order; a tensor that is larger than `max_shard_bytes` has one for itself."""
        files: list[list[str]] = []
        room = 0
        for name, entry in entries.items():
            nbytes = nbytes_of(entry)
            if not files or nbytes > room:
                files.append([])
                room = max_shard_bytes
            files[-1].append(name)
            room -= nbytes
        return cls(entries=entries, names=tuple(map(tuple, files)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(nbytes_of, self.entries.values()))

    def files(self) -> list[str]:
        """Return the files' names."""
        count = len(self.names)
        return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def write(self, directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Write all files and their index, with one tensor at a time in memory."""
        for file_name, names in zip(self.files(), self.names, strict=True):
            header, begins = data_header({name: self.entries[name] for name in names})
            nbytes = len(header) + sum(nbytes_of(self.entries[name]) for name in names)
            with contextlib.closing(DataFile(directory / file_name, nbytes)) as file:
                file.write(header, 0)
                for wanted in names:
                    name, tensor = next(tensors)
                    assert (name, tensor.dtype, tensor.shape) == (wanted, *self.entries[name])
                    file.write(_bytes_of(tensor), begins[name])
                    del tensor
                file.finish()
        weight_map = {
            name: file
            for file, names in zip(self.files(), self.names, strict=True)
            for name in names
        }
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
        _write_json(directory / INDEX_NAME, index)


@contextlib.contextmanager
def aside(out: Path) -> Iterator[Path]:
    """Yield a new directory beside `out`, which has that name when all has gone well, and else is removed.

    A process that is killed leaves it, as ``OUT.*.partial``.
    """
    partial = out.with_name(f"{out.name}.{new_nonce()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_directory(partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(out.parent)


def check_room(out: Path, nbytes: int) -> None:
    """Refuse what the disk has no room for, before anything is written.

    Raises:
        ConfigError: it has not.
    """
    parent = next(path for path in out.absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise ConfigError(
            complaint(
                str(out),
                got=f"{free:,} bytes of free disk",
                wanted=f"{nbytes:,} for the model",
                remedy="Make room, or write elsewhere.",
            )
        )


def write_config(
    directory: Path, model: Any, dtype: torch.dtype, quantization: Mapping[str, Any] | None
) -> None:
    """Write config.json and, of a model that generates, generation_config.json."""
    config = model.config
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    with quiet():
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    path = directory / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    if quantization is not None:
        fields["quantization_config"] = dict(quantization)
    _write_json(path, fields)


def quantization_config(exporter: Exporter, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Return what transformers calls the layout of an export in FP8 blocks.

    What is not FP8 stands in it by its name in the files, as in published models, and where it is tied
    or stacked, so that the files do not have it, by that of its module.
    """
    in_files = {
        name
        for name, (dtype, shape) in exporter.entries().items()
        if len(shape) > 1 and dtype != torch.float8_e4m3fn
    }
    encoded = exporter.encoded()
    in_model = {
        name for name, weight in weights.items() if len(weight.shape) > 1 and name not in encoded
    }
    plain = {n.removesuffix(".weight") for n in in_files | in_model if n.endswith(".weight")}
    stacks = {n.rpartition(".")[0] for n in in_model if len(weights[n].shape) == 3}
    return float8_description(BLOCK, plain | stacks)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_json(path: Path, value: object) -> None:
    write_whole(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
