"""Weights for rollout engines, from FP32 masters, under the names that Hugging Face files have."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muonloom.dtensors import boxes, is_dtensor, local_part, mesh_ranks
from muonloom.errors import complaint
from muonloom.exporting import MAX_BYTES, Exporter, Weight, check_options
from muonloom.failures import storage_given_up
from muonloom.gathering import gathered
from muonloom.hollow import is_hollow
from muonloom.model_tensors import named_tensors, unwrapped
from muonloom.optimizer import Muon

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Of what is put together from ranks: a part, the whole, and parts on their way.
_GATHERING_BYTES = 12


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

    Over ranks it is a collective: all of them call it alike, take all tensors, and get the same ones. What
    is spread over ranks (DTensors, and masters of which each keeps a part) is put together tensor by
    tensor, on the host; what a rank has alone, such as its own experts, comes out on that rank alone.

    Args:
        model: a model of transformers, or any module; also inside DDP, FSDP2 or ``torch.compile``.
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
        RuntimeError: the iterator: a step was taken meanwhile.
        LostRanksError: a rank does not take part.
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
    with optimizer._membership.all_or_none():
        _show_shards(model)
        source = _OptimizerSource(named_tensors(model), optimizer)
        exporter = Exporter(model, source, dtype=dtype, max_bytes=max_bytes)
        optimizer.drain()
    return exporter.tensors(torch.device("cpu" if device is None else device))


def _show_shards(model: nn.Module) -> None:
    """Have modules show the parameters that the optimizer knows: FSDP2 may leave whole ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


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
            name: self._described(tensor, algorithms.get(tensor))
            for name, tensor in tensors.items()
        }

    def _described(self, tensor: Tensor, algorithm: str | None) -> Weight:
        spread = algorithm is not None and self._optimizer._spread(tensor) is not None
        costs = {"reading_bytes": _GATHERING_BYTES} if spread or is_dtensor(tensor) else {}
        return Weight(shape=tensor.shape, dtype=tensor.dtype, algorithm=algorithm, **costs)

    @property
    def version(self) -> int:
        """See `Muon.master_version`."""
        return self._optimizer.master_version

    def read(self, name: str, rows: slice | None) -> Tensor:
        """Return these rows (None: all), on the host or (not the optimizer's) the device."""
        tensor = self._tensors[name]
        if self.weights[name].algorithm is not None:
            master: Tensor = self._optimizer.gathered_master(tensor, rows=rows)
            return master
        copy = self._optimizer.released_copy(tensor)
        if copy is None and is_hollow(tensor):
            raise storage_given_up(name, wanted="a weight to read")
        held = tensor if copy is None else copy
        return self._gathered(name, held, rows) if is_dtensor(held) else _rows(held.detach(), rows)

    def _gathered(self, name: str, tensor: DTensor, rows: slice | None) -> Tensor:
        """Return rows of a DTensor that is not the optimizer's."""
        parts, own = boxes(tensor, name), local_part(tensor).detach()
        if all(box.is_all_of(tensor.shape) for box in parts):
            return _rows(own, rows)
        return gathered(
            lambda inside: _rows(own, inside),
            parts,
            shape=tensor.shape,
            rows=rows,
            dtype=tensor.dtype,
            ranks=self._optimizer._membership.ranks(mesh_ranks(tensor)),
            device=own.device,
        )


def _rows(tensor: Tensor, rows: slice | None) -> Tensor:
    return tensor if rows is None else tensor[rows]
