"""Weights for rollout engines, from FP32 masters, under the names that Hugging Face files have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from muonloom.errors import complaint
from muonloom.exporting import MAX_BYTES, Exporter, Weight, check_options
from muonloom.failures import storage_given_up
from muonloom.hollow import is_hollow
from muonloom.model_tensors import named_tensors, unwrapped
from muonloom.optimizer import Muon


def export_weights(
    model: nn.Module,
    optimizer: Muon,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    max_bytes: int = MAX_BYTES,
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
    if not isinstance(optimizer, Muon):
        raise TypeError(
            complaint(
                "optimizer",
                got=type(optimizer).__name__,
                wanted="a muonloom.Muon",
                remedy="Only that has FP32 masters to export.",
            )
        )
    check_options(dtype, max_bytes)
    model = unwrapped(model)
    source = _OptimizerSource(named_tensors(model), optimizer)
    exporter = Exporter(model, source, dtype=dtype, max_bytes=max_bytes)
    optimizer.drain()
    return exporter.tensors(torch.device("cpu" if device is None else device))


class _OptimizerSource:
    """Reads the tensors of a model by name, from masters where there are."""

    def __init__(self, tensors: Mapping[str, Tensor], optimizer: Muon) -> None:
        self._tensors = tensors
        self._optimizer = optimizer
        algorithms = {
            param: group["algorithm"]
            for group in optimizer.param_groups
            for param in group["params"]
        }
        if not any(tensor in algorithms for tensor in tensors.values()):
            raise ValueError(
                complaint(
                    "optimizer",
                    got="parameters none of which is in the model",
                    wanted="the optimizer of this very model",
                    remedy="Pass the model whose parameters it was built with.",
                )
            )
        self.weights = {
            name: Weight(shape=tensor.shape, dtype=tensor.dtype, algorithm=algorithms.get(tensor))
            for name, tensor in tensors.items()
        }

    @property
    def version(self) -> int:
        """See `Muon.master_version`."""
        return self._optimizer.master_version

    def read(self, name: str, rows: slice | None) -> Tensor:
        """Return these rows (None: all), on the host or (not the optimizer's) the device."""
        tensor = self._tensors[name]
        if self.weights[name].algorithm is not None:
            return _master(self._optimizer, name, tensor, rows)
        copy = self._optimizer.released_copy(tensor)
        if copy is None and is_hollow(tensor):
            raise storage_given_up(name, wanted="a weight to read")
        found = (tensor if copy is None else copy).detach()
        return found if rows is None else found[rows]


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
