"""State in Megatron's distributed checkpoints: each rank's rows, by the model's own keys and offsets.

A rank updates some rows of its tensor. Where the model's sharded state says that the tensor lies in the
whole parameter, there lie these rows of its state; so any other arrangement of ranks reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from muonloom import Muon
from muonloom.collectives import Ranks
from muonloom.errors import complaint

_MEGATRON_KEYS = {"master_weight": "fp32_param"}
_OPTIONS = ("lr", "weight_decay")


def sharded_state(
    muon: Muon, params: Mapping[Tensor, tuple[str, bool]], model_state: dict[str, Any]
) -> dict[str, Any]:
    """Return this rank's state as sharded tensors, and what all ranks have in common. All ranks call it.

    Args:
        muon: the optimizer.
        params: name of each, and whether one rank alone updates each row, of all that hold it.
        model_state: the model's sharded state, whose tensors are the parameters themselves.
    """
    entries = get_param_id_to_sharded_param_map(model_state, params)
    state: dict[str, dict[str, list[ShardedTensor]]] = {}
    steps: dict[str, float] = {}
    for index, (param, (name, is_counted_once)) in enumerate(params.items()):
        if index not in entries:
            raise ValueError(
                complaint(
                    name,
                    got="no sharded tensor of the model for it",
                    wanted="the very parameter in the model's sharded state",
                    remedy="Make that by sharded_state_dict(), whose tensors are the parameters.",
                )
            )
        if is_empty(muon.updated_rows(param)):
            continue
        rows, own = muon.own_state(param)
        if "step" in own:
            steps[name] = float(own.pop("step"))
        state[name] = {
            key: list(_sharded(entries[index], key, tensor, rows, name, is_counted_once))
            for key, tensor in own.items()
        }
    everything = Ranks().gather_objects(
        (steps, [_identified(group) for group in muon.param_groups])
    )
    return {
        "state": state,
        "adamw_steps": {name: step for steps, _ in everything for name, step in steps.items()},
        "groups": list({repr(g): g for _, groups in everything for g in groups}.values()),
    }


def load_sharded(muon: Muon, params: Mapping[str, Tensor], state_dict: Mapping[str, Any]) -> None:
    """Take loaded state: its tensors are those that `sharded_state` gave, filled."""
    states: dict[Tensor, dict[str, Any]] = {}
    for name, param in params.items():
        if is_empty(muon.updated_rows(param)):
            continue
        own: dict[str, Any] = {}
        for key, parts in state_dict["state"].get(name, {}).items():
            rows = torch.cat([part.reshape(-1, *param.shape[1:]) for part in parts])
            own[key] = rows if param.ndim else rows.reshape(())
        if name in state_dict["adamw_steps"]:
            own["step"] = torch.tensor(state_dict["adamw_steps"][name])
        states[param] = own
    muon.load_own_state(states)
    saved = {repr(group["key"]): group for group in state_dict["groups"]}
    for group in muon.param_groups:
        options = saved.get(repr(_identified(group)["key"]), {})
        group.update({name: options[name] for name in _OPTIONS if name in options})


def is_empty(rows: slice) -> bool:
    """Whether a rank updates nothing of a tensor."""
    return bool(rows.start == rows.stop)


def _identified(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scheduler changes of a group, with what tells it from others in all arrangements."""
    key = {name: group.get(name) for name in (*param_group_identifier_keys, "algorithm")}
    del key["is_expert_parallel"]  # which of one rank's experts are not
    return {"key": key, **{name: float(group[name]) for name in _OPTIONS}}


def _sharded(
    entry: Any, key: str, own: Tensor, rows: slice, name: str, is_counted_once: bool
) -> Iterator[ShardedTensor]:
    """Yield an own part of state as the pieces that the parameter is saved in."""
    for piece, first in _pieces(entry, name):
        length = 1 if own.ndim == 0 else piece.local_shape[0]
        start, stop = max(first, rows.start), min(first + length, rows.stop)
        if start >= stop:
            continue
        part = own if own.ndim == 0 else own[start - rows.start : stop - rows.start]
        ahead = piece.prepend_axis_num
        offset = list(piece.global_offset)
        if own.ndim:
            offset[ahead] += start - first
        part = part.reshape((1,) * ahead + tuple(part.shape))
        replica = piece.replica_id
        if not isinstance(replica, int):
            replica = (replica[0], 0 if is_counted_once else replica[1], 0)
        yield ShardedTensor(
            key=f"optimizer.state.{_MEGATRON_KEYS.get(key, key)}.{piece.key}",
            data=part,
            dtype=part.dtype,
            local_shape=tuple(part.shape),
            global_shape=piece.global_shape,
            global_offset=tuple(offset),
            axis_fragmentations=None,  # rows of several ranks are of several lengths
            replica_id=replica,
        )


def _pieces(entry: Any, name: str) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the pieces in which the model saves a tensor, and the row of the tensor where each begins."""
    if not isinstance(entry, ShardedTensorFactory):
        yield entry, 0
        return
    probe = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    covered = 0
    for piece in nested_values(replace(entry, data=probe).build()):
        row = piece.data.storage_offset() // max(1, probe.stride(0))
        is_view = piece.data.untyped_storage()._cdata == probe.untyped_storage()._cdata
        is_at_row = row * probe.stride(0) == piece.data.storage_offset()
        is_run = piece.data.is_contiguous() and piece.data.shape[1:] == probe.shape[1:]
        if not (is_view and is_at_row and is_run):
            covered = -1
            break
        covered += piece.data.numel()
        yield piece, row
    if covered != probe.numel():
        raise ValueError(
            complaint(
                name,
                got="a tensor that the model does not save by runs of its rows",
                wanted="rows",
                remedy="Have it updated by another optimizer, or save by muonloom.checkpoint.",
            )
        )
