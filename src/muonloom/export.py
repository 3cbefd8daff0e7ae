"""Weights for rollout engines, from FP32 masters, under the names that Hugging Face files have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from muonloom.conversions import Conversion, Convert, is_of_transformers, plan_of_transformers
from muonloom.errors import complaint
from muonloom.hollow import is_hollow
from muonloom.math.float8 import encode_float8_, scale_shape
from muonloom.optimizer import Muon

_FLOAT8_BLOCK = "float8_block"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, _FLOAT8_BLOCK)
_BLOCK = (128, 128)

# An FP32 element that the optimizer puts together, and what of; and what a conversion makes of it besides.
_READING_BYTES = 8
_CONVERTING_BYTES = 12

# Parts that wrappers put into names.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def export_weights(
    model: nn.Module,
    optimizer: Muon,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    max_bytes: int = 1 << 30,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights one by one, from their FP32 masters, also while they are released.

    Names and shapes are those that ``model.save_pretrained`` writes: gate and up apart, one tensor an
    expert, tied weights once. A model of plain torch modules keeps its own names. What the optimizer does
    not hold (frozen parameters, persistent buffers) comes from the model as it is, and FP32 parameters of
    a model whose other parameters have 16 bits stay FP32.

    ``"float8_block"`` gives each matrix that Muon updates as two tensors: ``X`` in float8_e4m3fn, and
    ``X_scale_inv``, the FP32 factors of its blocks of 128 × 128, ``(ceil(m / 128), ceil(n / 128))``
    (see `muonloom.math.float8`). In a model of transformers these are linear layers and experts,
    as in that library's own FP8 files: a router stays BF16, and so does all else.

    Beside the tensors that the caller holds, and the one being made, it never has more than `max_bytes` in
    use. Take all before the next ``optimizer.step()``.

    Args:
        model: a model of transformers, or any module; also inside DDP or ``torch.compile``.
        optimizer: holds masters of its parameters; is drained.
        dtype: of what the optimizer holds: ``torch.bfloat16``, ``torch.float16``, ``torch.float32`` or
            ``"float8_block"``.
        max_bytes: the most memory for anything else.
        device: where the tensors are to be; None for the host.

    Returns:
        An iterator of names and tensors; each tensor is the caller's own, contiguous, and a view of
        nothing.

    Raises:
        TypeError: `optimizer` is not a `muonloom.Muon`.
        ValueError: a bad option, or a `max_bytes` with which a tensor cannot be made; no parameter of the
            optimizer is in `model`; the iterator: storage was given up that neither master nor copy
            stands for, or a weight is too large for float16.
        RuntimeError: the iterator: this rank does not hold all of a master, or a step was taken meanwhile.
    """
    _check_options(optimizer, dtype, max_bytes)
    model = _unwrapped(model)
    tensors = _named_tensors(model)
    source = _Source(model, tensors, optimizer, dtype)
    if is_of_transformers(model):
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        plan, convert = plan_of_transformers(model, shapes)
    else:
        plan, convert = [Conversion.rename(name, name) for name in _once(tensors)], _as_they_are
    for conversion in plan:
        source.check_memory(conversion, max_bytes)
    optimizer.drain()
    target = torch.device("cpu" if device is None else device)
    return _exported(plan, source, convert, max_bytes, target)


def _exported(
    plan: Sequence[Conversion],
    source: _Source,
    convert: Convert,
    max_bytes: int,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    version = source.version
    for conversion in plan:
        kind = source.kind_of(conversion.sources)
        for index, names in enumerate(conversion.outputs):
            parts = _parts(conversion, source, convert, index)
            for name in map(_without_wrappers, names):
                source.check_version(version)
                # Popped, so that nothing here holds a tensor longer than it has to.
                if kind == _FLOAT8_BLOCK and len(parts[-1].shape) == 2:
                    yield from _encoded(name, parts.pop(), max_bytes, device)
                else:
                    yield name, _cast(name, parts.pop(), kind, max_bytes).to(device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor that is read in runs of rows.

    Attributes:
        shape: of all of it.
        dtype: that it has if it stays as it is.
        read: returns these rows, or (None) all; nobody may write them.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[slice | None], Tensor]

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
        rows = max_bytes // max(1, _READING_BYTES * math.prod(self.shape[1:]))
        step = max(multiple, rows - rows % multiple)
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


def _parts(conversion: Conversion, source: _Source, convert: Convert, index: int) -> list[_Part]:
    """Return the outputs of one piece of a conversion, the last one first."""
    if not conversion.computes:
        return [source.part(conversion.sources[0])]
    rows = slice(index, index + 1) if conversion.by_expert else None
    made = convert({name: source.read(name, rows) for name in conversion.sources})
    return [_Part.of(tensor) for _, tensor in reversed(made)]


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
    scale_inv = torch.empty(scale_shape(part.shape, _BLOCK), dtype=torch.float32)
    height = _BLOCK[0]
    for rows in part.runs(max_bytes, multiple=height):
        assert rows is not None
        blocks = slice(rows.start // height, -(-rows.stop // height))
        encode_float8_(part.read(rows), data[rows], scale_inv[blocks], block=_BLOCK)
    del part
    yield name, data.to(device)
    del data
    yield f"{name}_scale_inv", scale_inv.to(device)


def _as_they_are(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return list(tensors.items())


# -- where weights come from ------------------------------------------------------------------------


class _Source:
    """Reads the tensors of a model by name, from masters where there are, and says what becomes of them."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        optimizer: Muon,
        dtype: torch.dtype | str,
    ) -> None:
        self._tensors = tensors
        self._optimizer = optimizer
        self._dtype = dtype
        self._algorithms = {
            param: group["algorithm"]
            for group in optimizer.param_groups
            for param in group["params"]
        }
        held = [tensor for tensor in tensors.values() if tensor in self._algorithms]
        if not held:
            raise ValueError(
                complaint(
                    "optimizer",
                    got="parameters none of which is in the model",
                    wanted="the optimizer of this very model",
                    remedy="Pass the model whose parameters it was built with.",
                )
            )
        self._is_mixed = any(tensor.element_size() == 2 for tensor in held)
        encodable = _encodable(model) if is_of_transformers(model) else set(tensors.values())
        self._encodable = {t for t in encodable if self._algorithms.get(t) == "muon"}

    @property
    def version(self) -> int:
        """See `Muon.master_version`."""
        return self._optimizer.master_version

    def check_version(self, version: int) -> None:
        """Raise where masters are no longer what they were."""
        if version != self.version:
            raise RuntimeError(
                complaint(
                    "export_weights",
                    got="masters that changed between two tensors",
                    wanted="all tensors of one step",
                    remedy="Take all of them before the next step, load, refresh or resume.",
                )
            )

    def part(self, name: str) -> _Part:
        """Return the tensor to export, to be read in runs of rows."""
        tensor = self._tensors[name]
        dtype = torch.float32 if tensor in self._algorithms else tensor.dtype
        return _Part(shape=tensor.shape, dtype=dtype, read=lambda rows: self.read(name, rows))

    def read(self, name: str, rows: slice | None) -> Tensor:
        """Return these rows of it (None: all), on the host or (not the optimizer's) the device."""
        tensor = self._tensors[name]
        if tensor in self._algorithms:
            return _master(self._optimizer, name, tensor, rows)
        copy = self._optimizer.released_copy(tensor)
        if copy is None and is_hollow(tensor):
            raise ValueError(
                complaint(
                    name,
                    got="storage that was given up, and neither a master nor a copy in the optimizer",
                    wanted="a weight to read",
                    remedy="Bring it back first.",
                )
            )
        found = (tensor if copy is None else copy).detach()
        return found if rows is None else found[rows]

    def kind_of(self, names: Sequence[str]) -> torch.dtype | str | None:
        """Return the dtype of what is made of these tensors, or None for the one that they have."""
        tensors = [self._tensors[name] for name in names]
        held = [tensor for tensor in tensors if tensor in self._algorithms]
        if not held or (self._is_mixed and all(t.dtype == torch.float32 for t in held)):
            return None
        if self._dtype == _FLOAT8_BLOCK and not all(t in self._encodable for t in tensors):
            return torch.bfloat16
        return self._dtype

    def check_memory(self, conversion: Conversion, max_bytes: int) -> None:
        """Raise where making one of its tensors may take more than `max_bytes`."""
        tensors = [self._tensors[name] for name in conversion.sources]
        if conversion.computes:
            numel = sum(tensor.numel() for tensor in tensors) // len(conversion.outputs)
            needed = _CONVERTING_BYTES * numel
        else:
            (tensor,) = tensors
            rows = _BLOCK[0] if self.kind_of(conversion.sources) == _FLOAT8_BLOCK else 1
            length = tensor.shape[0] if tensor.ndim else 1
            needed = _READING_BYTES * tensor.numel() // max(1, length) * min(rows, length)
        if needed > max_bytes:
            raise ValueError(
                complaint(
                    "max_bytes",
                    got=max_bytes,
                    wanted=f"at least {needed}, to make {conversion.sources[0]}",
                    remedy="Raise it.",
                )
            )


def _master(optimizer: Muon, name: str, param: Tensor, rows: slice | None) -> Tensor:
    """Return rows of the complete FP32 master (None: all), on the host; nobody may write them."""
    master: Tensor | None = optimizer.get_full_parameter_master(param, rows=rows)
    if master is None:
        raise RuntimeError(
            complaint(
                name,
                got="a master that this rank does not hold all of",
                wanted="whole parameters on this rank",
                remedy="Masters are not gathered over ranks; export where they are whole.",
            )
        )
    return master


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, tied ones by each of their names; reads no data.

    A model's `state_dict` would, and refuses to while weights are released.
    """
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


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


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


# -- what is refused ----------------------------------------------------------------------------------


def _check_options(optimizer: object, dtype: object, max_bytes: object) -> None:
    if not isinstance(optimizer, Muon):
        raise TypeError(
            complaint(
                "optimizer",
                got=type(optimizer).__name__,
                wanted="a muonloom.Muon",
                remedy="Only that has FP32 masters to export.",
            )
        )
    if dtype not in _DTYPES:
        raise ValueError(
            complaint(
                "dtype",
                got=repr(dtype),
                wanted=" or ".join(map(repr, _DTYPES)),
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
