"""Group options and AdamW's counters, as a manifest has them, and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muonloom.checkpoint.manifest import Manifest, SavedParameter
from muonloom.errors import complaint
from muonloom.optimizer import Muon

_log = logging.getLogger("muonloom")

# Of this optimizer alone, or saved otherwise.
_NOT_OPTIONS = frozenset({"params", "param_names", "algorithm"})

# How state is stored and computed is the choice of whoever built the optimizer.
_KEPT = frozenset({"momentum_dtype"})


def refuse_other_optimizer(optimizer: object) -> None:
    """Raise a TypeError if it is no `Muon`."""
    if not isinstance(optimizer, Muon):
        raise TypeError(
            complaint(
                "optimizer",
                got=type(optimizer).__name__,
                wanted="a muonloom.Muon",
                remedy="torch.distributed.checkpoint saves and loads others.",
            )
        )


def plain_groups(optimizer: Muon) -> tuple[dict[str, Any], ...]:
    """Return the options of all groups as values that JSON has.

    Raises:
        TypeError: a group has an option that JSON does not know.
    """
    return tuple(
        {
            key: _plain(value, f"param_groups[{index}].{key}")
            for key, value in group.items()
            if key not in _NOT_OPTIONS
        }
        for index, group in enumerate(optimizer.param_groups)
    )


def saved_parameters(optimizer: Muon, names: Mapping[Tensor, str]) -> dict[str, SavedParameter]:
    """Return what is saved of each parameter beside its tensors."""
    found: dict[str, SavedParameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            step = optimizer.state.get(param, {}).get("step")
            found[names[param]] = SavedParameter(
                algorithm=group["algorithm"],
                options=index,
                dtype=str(param.dtype).removeprefix("torch."),
                step=None if step is None else float(step),
            )
    return found


def restore_groups(optimizer: Muon, names: Mapping[Tensor, str], manifest: Manifest) -> None:
    """Give each group the options that its parameters were saved with.

    Where these differ within a group, it keeps its own, and a warning says so.
    """
    for index, group in enumerate(optimizer.param_groups):
        saved = {
            manifest.parameters[names[param]].options
            for param in group["params"]
            if names[param] in manifest.parameters
        }
        found = [manifest.options[number] for number in sorted(saved)]
        for key in dict.fromkeys(key for options in found for key in options):
            values = [options.get(key) for options in found]
            if key in _KEPT:
                continue
            if any(value != values[0] for value in values):
                _log.warning(
                    "Muon: param_groups[%d].%s stays %r: its parameters were saved with %s",
                    index,
                    key,
                    group.get(key),
                    values,
                )
                continue
            group[key] = _restored(values[0], group.get(key))


def _plain(value: Any, owner: str) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item, owner) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        complaint(
            owner,
            got=f"a {type(value).__name__}",
            wanted="numbers, strings, dtypes, and lists of them",
            remedy="Keep other things outside of param_groups.",
        )
    )


def _restored(value: Any, old: Any) -> Any:
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    if isinstance(value, list):
        return tuple(_restored(item, None) for item in value)
    return value
