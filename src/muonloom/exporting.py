"""What a model's weights are in files, made tensor by tensor from FP32 numbers, wherever those lie."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from muonloom.conversions import Conversion, is_of_transformers, plan_of_transformers
from muonloom.errors import complaint
from muonloom.layout.rules import WRAPPERS
from muonloom.math.float8 import encode_float8_, scale_shape
from muonloom.model_tensors import named_tensors

FLOAT8_BLOCK = "float8_block"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FLOAT8_BLOCK)
BLOCK = (128, 128)
MAX_BYTES = 1 << 30

# An FP32 element that is read, and what a conversion makes of it besides.
_CONVERTING_BYTES = 12

# Parts that wrappers put into names.
_WRAPPERS = WRAPPERS - {"module"}  # a model's own modules may be called so


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor of a model, before its numbers are read.

    Attributes:
        shape: of all of it.
        dtype: that the model has it in.
        algorithm: by which the optimizer updates it; None: the optimizer does not hold it.
        reading_bytes: what an element takes while it is read: as FP32, and what of.
    """

    shape: torch.Size
    dtype: torch.dtype
    algorithm: str | None
    reading_bytes: int = 8


class WeightSource(Protocol):
    """Where the numbers come from."""

    @property
    def weights(self) -> Mapping[str, Weight]:
        """All parameters and persistent buffers by their names in the model, tied ones by each name."""

    @property
    def version(self) -> int:
        """What changes whenever what is read may have changed."""

    def read(self, name: str, rows: slice | None) -> Tensor:
        """Return these rows of dimension 0 (None: all); nobody may write them.

        What the optimizer holds is FP32 on the host, all else has its own dtype.
        """


class Exporter:
    """The weights of a model under the names of its files, in one dtype.

    Args:
        model: gives names, ties and kinds of modules; its tensors are not read.
        source: gives the numbers of this model's tensors.
        dtype: of what the optimizer holds: one of `DTYPES`.
        max_bytes: the most memory beside finished tensors and the one being made.

    Raises:
        ValueError: a `max_bytes` with which a tensor cannot be made.
    """

    def __init__(
        self, model: nn.Module, source: WeightSource, *, dtype: torch.dtype | str, max_bytes: int
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._max_bytes = max_bytes
        tensors = named_tensors(model)
        held = [weight for weight in source.weights.values() if weight.algorithm is not None]
        self._is_mixed = any(weight.dtype.itemsize == 2 for weight in held)
        of_transformers = is_of_transformers(model)
        encodable = _encodable(model) if of_transformers else set(tensors.values())
        self._encodable = {
            name
            for name, tensor in tensors.items()
            if tensor in encodable and source.weights[name].algorithm == "muon"
        }
        shapes = {name: source.weights[name].shape for name in tensors}
        if of_transformers:
            self._plan, self._convert = plan_of_transformers(model, shapes)
        else:
            self._plan = [Conversion.same(name, shapes[name]) for name in _once(tensors)]
        for conversion in self._plan:
            self._check_memory(conversion)

    def entries(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtypes and shapes of all tensors, in the order in which `tensors` yields them."""
        found: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for conversion in self._plan:
            kind = self._kind_of(conversion.sources)
            dtype = kind if isinstance(kind, torch.dtype) else self._own_dtype(conversion)
            for outputs in conversion.outputs:
                for name, shape in outputs.items():
                    bare = without_wrappers(name)
                    if kind != FLOAT8_BLOCK:
                        found[bare] = (dtype, shape)
                    elif len(shape) != 2:
                        found[bare] = (torch.bfloat16, shape)
                    else:
                        found[bare] = (torch.float8_e4m3fn, shape)
                        scales = torch.Size(scale_shape(shape, BLOCK))
                        found[f"{bare}_scale_inv"] = (torch.float32, scales)
        return found

    def encoded(self) -> set[str]:
        """Return names in the model of what becomes FP8 matrices alone."""
        return {
            name
            for conversion in self._plan
            for name in conversion.sources
            if self._kind_of(conversion.sources) == FLOAT8_BLOCK
            and all(len(shape) == 2 for made in conversion.outputs for shape in made.values())
        }

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Make the tensors one by one; each is the caller's own, contiguous, and a view of nothing.

        Raises:
            RuntimeError: what is read changed meanwhile.
            ValueError: a weight is too large for float16.
        """
        version = self._source.version
        for conversion in self._plan:
            kind = self._kind_of(conversion.sources)
            for index, names in enumerate(conversion.outputs):
                parts = self._parts(conversion, index)
                for name in map(without_wrappers, names):
                    self._check_version(version)
                    # Popped, so that nothing here holds a tensor longer than it has to.
                    if kind == FLOAT8_BLOCK and len(parts[-1].shape) == 2:
                        yield from _encoded(name, parts.pop(), self._max_bytes, device)
                    else:
                        yield name, _cast(name, parts.pop(), kind, self._max_bytes).to(device)

    def _parts(self, conversion: Conversion, index: int) -> list[_Part]:
        """Return the outputs of one piece of a conversion, the last one first."""
        read = self._source.read
        if not conversion.computes:
            (name,) = conversion.sources
            weight, dtype = self._source.weights[name], self._own_dtype(conversion)
            return [
                _Part(
                    shape=weight.shape,
                    dtype=dtype,
                    read=functools.partial(read, name),
                    reading_bytes=weight.reading_bytes,
                )
            ]
        rows = slice(index, index + 1) if conversion.by_expert else None
        made = self._convert({name: read(name, rows) for name in conversion.sources})
        return [_Part.of(tensor) for _, tensor in reversed(made)]

    def _own_dtype(self, conversion: Conversion) -> torch.dtype:
        """Return the dtype of what is made of these tensors as they are read."""
        weights = [self._source.weights[name] for name in conversion.sources]
        read = [w.dtype if w.algorithm is None else torch.float32 for w in weights]
        return functools.reduce(torch.promote_types, read)

    def _kind_of(self, names: Sequence[str]) -> torch.dtype | str | None:
        """Return the dtype of what is made of these tensors, or None for the one that they have."""
        weights = [self._source.weights[name] for name in names]
        held = [weight for weight in weights if weight.algorithm is not None]
        if not held or (self._is_mixed and all(w.dtype == torch.float32 for w in held)):
            return None
        if self._dtype == FLOAT8_BLOCK and not self._encodable.issuperset(names):
            return torch.bfloat16
        return self._dtype

    def _check_memory(self, conversion: Conversion) -> None:
        weights = [self._source.weights[name] for name in conversion.sources]
        if conversion.computes:
            numel = sum(math.prod(weight.shape) for weight in weights) // len(conversion.outputs)
            needed = max(_CONVERTING_BYTES, *(w.reading_bytes for w in weights)) * numel
        else:
            (weight,) = weights
            rows = BLOCK[0] if self._kind_of(conversion.sources) == FLOAT8_BLOCK else 1
            length = weight.shape[0] if weight.shape else 1
            row_numel = math.prod(weight.shape) // max(1, length)
            needed = weight.reading_bytes * row_numel * min(rows, length)
        if needed > self._max_bytes:
            raise ValueError(
                complaint(
                    "max_bytes",
                    got=self._max_bytes,
                    wanted=f"at least {needed}, to make {conversion.sources[0]}",
                    remedy="Raise it.",
                )
            )

    def _check_version(self, version: int) -> None:
        if version != self._source.version:
            raise RuntimeError(
                complaint(
                    "export_weights",
                    got="masters that changed between two tensors",
                    wanted="all tensors of one step",
                    remedy="Take all of them before the next step, load, refresh or resume.",
                )
            )


def check_options(dtype: object, max_bytes: object) -> None:
    """Raise a ValueError unless `Exporter` takes these."""
    if dtype not in DTYPES:
        raise ValueError(
            complaint(
                "dtype",
                got=repr(dtype),
                wanted=" or ".join(map(repr, DTYPES)),
                remedy="It is the dtype of the tensors to yield.",
            )
        )
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(
            complaint(
                "max_bytes",
                got=repr(max_bytes),
                wanted="a whole number of bytes > 0",
                remedy="Leave it out for 1 GiB.",
            )
        )


# -- names -----------------------------------------------------------------------------------------


def without_wrappers(name: str) -> str:
    """Return a tensor's name without what `torch.compile` and checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _once(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the first name of each tensor."""
    first: dict[Tensor, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor, name)
    return list(first.values())


def _encodable(model: nn.Module) -> set[Tensor]:
    """Return what transformers' FP8 files have as FP8: linear layers and stacks of experts."""
    return {
        param
        for module in model.modules()
        for param in module.parameters(recurse=False)
        if isinstance(module, nn.Linear) or param.ndim == 3
    }


# -- one tensor --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor that is read in runs of rows.

    Attributes:
        shape: of all of it.
        dtype: that it has if it stays as it is.
        read: returns these rows, or (None) all; nobody may write them.
        reading_bytes: what an element takes while it is read.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[slice | None], Tensor]
    reading_bytes: int = 8

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        """Return what reads a tensor at hand."""
        return cls(
            shape=tensor.shape,
            dtype=tensor.dtype,
            read=lambda rows: tensor if rows is None else tensor[rows],
        )

    def runs(self, max_bytes: int, *, multiple: int = 1) -> Iterator[slice | None]:
        """Yield runs of rows, all but the last a multiple, that can be read within `max_bytes`."""
        if not self.shape:
            yield None
            return
        rows = max_bytes // max(1, self.reading_bytes * math.prod(self.shape[1:]))
        step = max(multiple, rows - rows % multiple)
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


def _cast(name: str, part: _Part, kind: torch.dtype | str | None, max_bytes: int) -> Tensor:
    dtype = part.dtype if kind is None else torch.bfloat16 if isinstance(kind, str) else kind
    made = torch.empty(part.shape, dtype=dtype)
    for rows in part.runs(max_bytes):
        (made if rows is None else made[rows]).copy_(part.read(rows))
    if kind == torch.float16 and made.numel() and not torch.stack(made.aminmax()).isfinite().all():
        raise ValueError(
            complaint(
                name,
                got="a weight that float16 cannot hold",
                wanted="magnitudes up to 65504",
                remedy="Export in torch.bfloat16.",
            )
        )
    return made


def _encoded(
    name: str, part: _Part, max_bytes: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    data = torch.empty(part.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(scale_shape(part.shape, BLOCK), dtype=torch.float32)
    height = BLOCK[0]
    for rows in part.runs(max_bytes, multiple=height):
        assert rows is not None
        blocks = slice(rows.start // height, -(-rows.stop // height))
        encode_float8_(part.read(rows), data[rows], scale_inv[blocks], block=BLOCK)
    del part
    yield name, data.to(device)
    del data
    yield f"{name}_scale_inv", scale_inv.to(device)
