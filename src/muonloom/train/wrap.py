"""The model of a run, given to its ranks: whole to each (DDP), or in parts (FSDP2, HSDP)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muonloom.errors import ConfigError, complaint
from muonloom.model_tensors import names_by_tensor
from muonloom.train.config import ParallelConfig, TrainConfig
from muonloom.train.team import Team


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A model as its ranks hold it.

    Attributes:
        model: has the parameters; with FSDP2, DTensors, and each forward needs all ranks.
        forward: what training calls, so that gradients are averaged over ranks.
        num_parts: over how many ranks one copy of the weights is spread.
        is_sharded: whether parameters are DTensors.
    """

    model: nn.Module
    forward: nn.Module
    num_parts: int = 1
    is_sharded: bool = False

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return what a forward with its backward goes in; the last of a step averages over ranks."""
        if isinstance(self.forward, DistributedDataParallel) and not is_last:
            return self.forward.no_sync()
        return contextlib.nullcontext()

    def weights(self) -> dict[str, Tensor] | None:
        """Return the whole weights by name, gathered on the first rank; None: they are in `model`.

        All ranks call it.
        """
        if not self.is_sharded:
            return None
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found: dict[str, Any] = get_model_state_dict(self.model, options=options)
        # Tied weights come out as one each, and Transformers would write them twice.
        for first, *others in names_by_tensor(self.model).values() if found else ():
            found |= dict.fromkeys(others, found[first])
        return found


def wrap(model: nn.Module, config: TrainConfig, *, team: Team, device: torch.device) -> Wrapped:
    """Return `model` as `[parallel] mode` says; with FSDP2 it is changed in place.

    Raises:
        ConfigError: a model that cannot be wrapped so.
    """
    if team.mode == "none":
        return Wrapped(model=model, forward=model)
    if config.model.expert_weights != "parameter":
        raise ConfigError(
            complaint(
                "model.expert_weights",
                got=f'"{config.model.expert_weights}" with parallel.mode = "{team.mode}"',
                wanted='"parameter"',
                remedy="Neither DDP nor FSDP2 knows weights that are no parameters.",
            )
        )
    if team.mode == "replicated":
        unused = _may_lack_gradients(model, device)
        forward = DistributedDataParallel(model, find_unused_parameters=unused)
        return Wrapped(model=model, forward=forward)
    num_parts = team.size // (config.parallel.replicas or 1)
    _shard(model, config.parallel, num_parts=num_parts, team=team, device=device)
    return Wrapped(model=model, forward=model, num_parts=num_parts, is_sharded=True)


def _may_lack_gradients(model: nn.Module, device: torch.device) -> bool:
    """Whether a step may leave a parameter without gradient: an indexer's always, an expert's some time."""
    for name, module in model.named_modules():
        if name.endswith("experts") and isinstance(module, nn.ModuleList):
            return True
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        try:
            tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
            torch.autograd.backward(model(input_ids=tokens, use_cache=False).logits.float().sum())
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return True  # the first evaluation tells what is wrong with it
    unused = any(p.requires_grad and p.grad is None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    return unused


def _shard(
    model: nn.Module,
    config: ParallelConfig,
    *,
    num_parts: int,
    team: Team,
    device: torch.device,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if team.mode == "hsdp":
        shape: tuple[int, ...] = (team.size // num_parts, num_parts)
        names: tuple[str, ...] = ("replicas", "shards")
    else:
        shape, names = (num_parts,), ("shards",)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, config.reduce_dtype))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose weights are gathered together, inner ones first.

    They are those that Transformers says are not to be split: a model's layers.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    yield from reversed(found)
