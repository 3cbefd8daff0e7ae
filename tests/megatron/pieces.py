"""Parameters of this rank as parts of those of the whole model: by Megatron-Core's attributes alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter of this rank as part of one of the whole model.

    Attributes:
        name: of the whole parameter; layers and experts are numbered over all ranks.
        parameter: the piece.
        dim: along which it is cut; None: not at all.
        stride: into how many parts it is cut one by one: two, where gate rows come before up rows.
        rank: of this piece, of those that make up the whole.
        num_ranks: how many do.
    """

    name: str
    parameter: Tensor
    dim: int | None
    stride: int
    rank: int
    num_ranks: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        shape = list(self.parameter.shape)
        if self.dim is not None:
            shape[self.dim] *= self.num_ranks
        return tuple(shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of it."""
        if self.dim is None:
            return whole
        parts = whole.chunk(self.stride * self.num_ranks, self.dim)
        return torch.cat(parts[self.rank :: self.num_ranks], self.dim)


def pieces(chunks: Sequence[nn.Module]) -> Iterator[Piece]:
    """Yield all parameters of this rank."""
    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        for name, parameter in model.named_parameters():
            is_expert = ".local_experts." in name
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if is_expert
                else parallel_state.get_tensor_model_parallel_group()
            )
            is_cut = getattr(parameter, "tensor_model_parallel", False) and group.size() > 1
            yield Piece(
                name=_global_name(model, name, parameter),
                parameter=parameter,
                dim=parameter.partition_dim if is_cut else None,
                stride=parameter.partition_stride if is_cut else 1,
                rank=group.rank() if is_cut else 0,
                num_ranks=group.size() if is_cut else 1,
            )


def _global_name(model: nn.Module, name: str, parameter: Tensor) -> str:
    if getattr(parameter, "shared_embedding", False):
        return "embedding.word_embeddings.weight"  # of which the last pipeline stage has a copy
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts")
        num_local = model.config.num_moe_experts // model.config.expert_model_parallel_size
        first = parallel_state.get_expert_model_parallel_rank() * num_local
        parts[at + 1] = str(first + int(parts[at + 1]))
    return ".".join(parts)


def weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a whole parameter's initial values, float32: the same on any number of ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    drawn = torch.randn(shape, generator=generator)
    return 1 + drawn / 10 if len(shape) == 1 else drawn / shape[1] ** 0.5


def gathered(model: Sequence[nn.Module], attribute: str = "data") -> dict[str, Tensor]:
    """Return whole parameters by name, as one process would have them; all ranks call it.

    Args:
        model: what `build` gave.
        attribute: "data"; or "main_grad".

    Raises:
        AssertionError: ranks that have the same piece differ in it.
    """
    own = [
        replace(piece, parameter=getattr(piece.parameter, attribute).clone())
        for piece in pieces(model)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    by_name: dict[str, dict[int, Piece]] = {}
    for piece in (piece for rank in everyone for piece in rank):
        known = by_name.setdefault(piece.name, {}).setdefault(piece.rank, piece)
        assert torch.equal(known.parameter, piece.parameter), f"{piece.name} differs"
    return {name: _joined(found) for name, found in by_name.items()}


def _joined(found: dict[int, Piece]) -> Tensor:
    first = found[0]
    if first.dim is None:
        return first.parameter
    parts = [found[rank].parameter.chunk(first.stride, first.dim) for rank in sorted(found)]
    return torch.cat([part for row in zip(*parts, strict=True) for part in row], first.dim)
