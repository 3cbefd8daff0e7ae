"""One `muonloom.Muon` for all parameters of all model chunks, as an optimizer of Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import (
    OptimizerConfig,
    _get_param_groups,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import FP32Optimizer, copy_optimizer_param_metadata
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from muonloom import Muon, Sharding
from muonloom.errors import complaint
from muonloom.integrations.megatron.checkpoint import is_empty, load_sharded, sharded_state
from muonloom.integrations.megatron.layout import Described, describe
from muonloom.integrations.megatron.options import group_options, muon_options


def get_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    *,
    config_overrides: Mapping[Any, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    heads_per_block: int | None = None,
    mla_components: bool = False,
    cut_output: bool = False,
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> MegatronMuon:
    """Return the optimizer of all chunks of this rank: matrices by Muon, all others by AdamW.

    All ranks call it. Each keeps masters and state of a part of what its data-parallel ranks have in
    common: whole matrices, chosen by cost. A matrix that tensor-parallel ranks hold pieces of gets the
    update of the whole. Chunks are wrapped in Megatron's `DistributedDataParallel`; its
    `use_distributed_optimizer` is off, or on with a `full_param_layout` of whole parameters for all of them
    (see docs/megatron.md).

    Args:
        config: `lr`, `weight_decay`, `clip_grad`, `adam_*` and `muon_*` are taken from it.
        model_chunks: wrapped.
        config_overrides: as `get_megatron_optimizer` takes them; None: Megatron's standard ones.
        pg_collection: None: those of `parallel_state`.
        heads_per_block: as of `muonloom.Layout`, with all that follow.
        mla_components: see there.
        cut_output: see there.
        overrides: see there; names as `MegatronMuon.muon` has them, layers and experts numbered globally.
        options: of `muonloom.Muon`, instead of what `config` says: ``placement="host"``, ``engine=``.

    Raises:
        ValueError: an option that contradicts the model or the other options, led by its name.
    """
    model_chunks = _checked(model_chunks)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    taken = muon_options(config, options)
    layout, described = describe(
        model_chunks,
        pg_collection=groups,
        heads_per_block=heads_per_block,
        mla_components=mla_components,
        cut_output=cut_output,
        overrides=overrides,
    )
    known: dict[Tensor, Described] = {each.parameter: each for each in described}
    owners = _owners(model_chunks, known)
    places = {param: _Place(each, groups, owners.get(param)) for param, each in known.items()}
    if config_overrides is None:
        config_overrides = get_standard_config_overrides(config)
    muon = Muon(
        [
            part
            for group in _get_param_groups(model_chunks, config, config_overrides)
            for part in _parts(group, known, places, config)
        ],
        layout=layout,
        sharding={known[p].name: place.sharding for p, place in places.items() if place.sharding},
        step_group=dist.group.WORLD,
        **taken,
    )
    return MegatronMuon(muon, config, places=places, groups=groups)


def _checked(model_chunks: Any) -> list[Any]:
    chunks = [] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if not chunks or not all(hasattr(chunk, "ddp_config") for chunk in chunks):
        kinds = [type(chunk).__name__ for chunk in chunks]
        raise ValueError(
            complaint(
                "model_chunks",
                got=f"a {type(model_chunks).__name__} of {kinds}",
                wanted="a list of Megatron's DistributedDataParallel",
                remedy="Wrap each chunk, and pass [model] for one.",
            )
        )
    return chunks


class _Place:
    """Which ranks hold a parameter.

    Attributes:
        name: of the parameter.
        replicas: the group of ranks with the same tensor.
        sharding: how it is cut, or who has to update it; None: neither.
        is_counted_once: whether one rank alone updates each row, of all that hold it.
    """

    def __init__(
        self, described: Described, groups: ProcessGroupCollection, owner: tuple[Any, int] | None
    ) -> None:
        self.name = described.name
        cut = described.cut_dim is not None
        # What all tensor-parallel ranks have whole, one of all of them updates; but not where gradients
        # are scattered over data-parallel ranks.
        spread = not cut and not described.is_expert and owner is None
        replicas = groups.tp_dp_cp if spread else groups.dp_cp
        self.replicas = groups.expt_dp if described.is_expert else replicas
        self.is_counted_once = cut or spread
        position: int | None = None
        if owner is not None:
            self.replicas, position = owner
        self.sharding = None
        if cut or owner is not None:
            self.sharding = Sharding(
                process_group=described.group, dim=described.cut_dim or 0, owner=position
            )


def _parts(
    group: Mapping[str, Any],
    known: Mapping[Tensor, Described],
    places: Mapping[Tensor, _Place],
    config: OptimizerConfig,
) -> Iterable[dict[str, Any]]:
    """Yield Megatron's group as groups whose ranks are the same."""
    options = group_options(group, config)
    if group["params"] and options.get("optimizer") not in (None, config.optimizer):
        name = known[group["params"][0]].name
        raise ValueError(
            complaint(
                "config_overrides",
                got=f"optimizer={options['optimizer']!r} for {name}",
                wanted="one optimizer for all",
                remedy="Pass overrides={name: 'adamw'} to get_optimizer().",
            )
        )
    by_ranks: dict[Any, list[tuple[str, Tensor]]] = {}
    for param in group["params"]:
        if param in known:
            pair = (known[param].name, param)
            by_ranks.setdefault(places[param].replicas, []).append(pair)
    for replicas, named in by_ranks.items():
        yield {**options, "process_group": replicas, "params": named}


def _owners(
    model_chunks: Sequence[Any], known: Mapping[Tensor, Described]
) -> dict[Tensor, tuple[Any, int]]:
    """Return by whom each scattered gradient is kept: a group, and a position in it."""
    found: dict[Tensor, tuple[Any, int]] = {}
    for chunk in model_chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            ranks = buffer.data_parallel_group
            for param, (start, stop, index) in buffer.param_index_map.items():
                bucket = buffer.buckets[index]
                step = bucket.grad_data.numel() // ranks.size()
                first, last = ((at - bucket.offset) // step for at in (start, stop - 1))
                if first != last:
                    raise ValueError(
                        complaint(
                            known[param].name,
                            got="a gradient that is scattered over several ranks",
                            wanted="whole gradients, each on one rank or on all",
                            remedy="Set use_distributed_optimizer=False, or give DistributedDataParallel a "
                            "full_param_layout of whole parameters (docs/megatron.md).",
                        )
                    )
                found[param] = (ranks, first)
    return found


class MegatronMuon(FP32Optimizer):  # type: ignore[misc]
    """What Megatron's training loop takes for an optimizer; `get_optimizer` makes it.

    Attributes:
        muon: the `muonloom.Muon`: for masters, writers, `release`, `last_step` and all else.
    """

    def __init__(
        self,
        muon: Muon,
        config: OptimizerConfig,
        *,
        places: Mapping[Tensor, _Place],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(muon, config, lambda *_: None)
        self.muon = muon
        self.tp_group, self.expert_tp_group = groups.tp, groups.expt_tp
        self.grad_stats_parallel_group = None  # all ranks
        self._places = places
        self._main: list[Tensor] = []
        self._rounded: list[tuple[Tensor, Tensor]] = []

    # -- gradients ------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Have the gradients of what this rank updates ready for clipping; True is never returned.

        Muon looks for what is not finite itself, and leaves the step out on all ranks.
        """
        self._main, self._rounded = [], []
        for param, place in self._places.items():
            gradient = getattr(param, "main_grad", None)
            gradient = param.grad if gradient is None else gradient
            rows = self.muon.updated_rows(param)
            if gradient is None or is_empty(rows):
                continue
            own = gradient if param.ndim == 0 else gradient[rows]
            wide = own.float()  # the very tensor where that is what it is
            if wide is not own:
                self._rounded.append((own, wide))
            self._main.append(_carrier(wide, param, is_counted_once=place.is_counted_once))
        if not self._main:  # or this rank would stay away from the norms of the others
            self._main.append(_carrier(self._scale[:0], self._scale, is_counted_once=True))
        return False

    def get_parameters(self) -> list[Tensor]:
        """Return stand-ins for the rows that this rank updates, with their FP32 gradients."""
        return self._main

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Return the norm over all ranks, and scale gradients where it is larger than `clip_grad`."""
        norm: float = super().clip_grad_norm(clip_grad)
        for own, wide in self._rounded:
            own.copy_(wide)
        return norm

    # -- the step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Take the step; return whether it was taken, rather than left out."""
        super().step_with_ready_grads()
        self._main, self._rounded = [], []
        return not self.muon.skipped

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Make masters anew from the model's weights, after these were loaded from elsewhere."""
        if state_dict is not None:
            raise ValueError(
                complaint(
                    "state_dict",
                    got="weights to make masters from",
                    wanted="None: masters are made from the model's weights",
                    remedy="Load them into the model; or use muon.apply_to_masters().",
                )
            )
        self.muon.refresh_masters()

    def offload_to_cpu(self) -> None:
        """Give back what the optimizer has on the device: slots, workspace, masters and momentum."""
        self.muon.release(weights=False)

    def restore_from_cpu(self) -> None:
        """Have it on the device again."""
        self.muon.resume()

    # -- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state on this rank, where it has all; see `Muon.state_dict`."""
        try:
            return self.muon.state_dict()
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} With Megatron-Core: use sharded_state_dict() and its distributed checkpoint."
            ) from error

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part for Megatron's distributed checkpoint, by the model's own keys."""
        counted = {p: (place.name, place.is_counted_once) for p, place in self._places.items()}
        return sharded_state(self.muon, counted, model_sharded_state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `sharded_state_dict` or `state_dict` gave, after the model's weights were loaded."""
        if "adamw_steps" in state_dict:
            load_sharded(
                self.muon, {place.name: p for p, place in self._places.items()}, state_dict
            )
        else:
            self.muon.load_state_dict(state_dict)


def _carrier(gradient: Tensor, param: Tensor, *, is_counted_once: bool) -> Tensor:
    """Return a tensor with a gradient and the attributes that Megatron's norms go by."""
    carrier = gradient.detach()
    tensor_parallel.copy_tensor_model_parallel_attributes(carrier, param)
    copy_optimizer_param_metadata(carrier, param)
    if is_counted_once:
        carrier.tensor_model_parallel = True  # type: ignore[attr-defined]
    carrier.grad = gradient
    return carrier
