"""Whether a manifest makes sense: what follows relies on it, and is not to fail half way."""

from __future__ import annotations

import math
from collections.abc import Iterator

from muonloom.checkpoint.manifest import Chunk, Manifest, SavedTensor
from muonloom.config import is_number


def faults(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a manifest whose checksum is right."""
    if not _is_count(manifest.step) or not is_number(manifest.created_s):
        yield "a step or time that is no number"
    if not all(isinstance(name, str) for pair in manifest.aliases.items() for name in pair):
        yield "aliases that are no names"
    if not all(isinstance(options, dict) for options in manifest.options):
        yield "options of a group that are no table"
    for name, file in manifest.files.items():
        if "/" in name or name in (".", "..") or not _is_count(file.nbytes):
            yield f"the file {name!r} of {file.nbytes!r} bytes"
    if not manifest.extras or not set(manifest.extras) <= manifest.files.keys():
        yield "what callers gave in files that are not listed"
    for name, parameter in manifest.parameters.items():
        if parameter.options not in range(len(manifest.options)):
            yield f"{name} with the options {parameter.options!r} of {len(manifest.options)}"
        if parameter.step is not None and not is_number(parameter.step):
            yield f"{name} with the step {parameter.step!r}"
    for key, tensor in manifest.tensors.items():
        sizes = 0
        for chunk in tensor.chunks:
            sizes += math.prod(chunk.sizes)
            if not _fits(manifest, tensor, chunk):
                yield f"a part of {key} that is in no file"
        filled = [chunk.offsets for chunk in tensor.chunks if math.prod(chunk.sizes)]
        if sizes != math.prod(tensor.shape) or len(set(filled)) < len(filled):
            yield f"{key} with parts that are not all of it"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _fits(manifest: Manifest, tensor: SavedTensor, chunk: Chunk) -> bool:
    """Whether a chunk is inside of its tensor and of its file, and its blocks are all of it."""
    numbers = (chunk.start, *chunk.offsets, *chunk.sizes, *(b.rows for b in chunk.blocks))
    if not all(map(_is_count, numbers)):
        return False
    sides = list(zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True))
    inside = all(0 <= offset <= offset + size <= n for offset, size, n in sides)
    nbytes = math.prod(chunk.sizes) * tensor.dtype.itemsize
    known = manifest.files.get(chunk.file)
    there = known is not None and 0 <= chunk.start <= chunk.start + nbytes <= known.nbytes
    rows = chunk.sizes[0] if chunk.sizes else 1
    whole = nbytes == 0 or sum(block.rows for block in chunk.blocks) == rows
    return inside and there and whole and all(block.rows > 0 for block in chunk.blocks)
