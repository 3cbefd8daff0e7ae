"""The layout, the groups and the optimizer that `[optim]` describes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import muonloom
from muonloom.errors import ConfigError, complaint
from muonloom.train.config import OptimConfig
from muonloom.writers import ExpertEngine

# Options that are `muonloom.Muon`'s under the same name; the rest of the section describes the layout.
_MUON_OPTIONS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_steps",
    "ns_coefficients",
    "ns_method",
    "adjust_lr_fn",
    "adamw_lr",
    "adamw_betas",
    "adamw_eps",
    "adamw_weight_decay",
    "ns_batch_bytes",
    "idle_matrices",
    "skip_nonfinite",
    "max_consecutive_skips",
    "free_gradients",
)


def build_layout(model: nn.Module, config: OptimConfig) -> muonloom.Layout:
    """Return which parameters are cut into which matrices.

    Raises:
        ConfigError: a layout option that this model cannot follow.
    """
    options: dict[str, Any] = {
        "heads_per_block": config.heads_per_block,
        "mla_components": config.mla_components,
        "cut_output": config.cut_output,
        "overrides": dict(config.overrides),
    }
    if config.algorithm == "adamw":
        options = {"overrides": {"*": "adamw"}}  # there are no matrices to cut
    try:
        return muonloom.Layout.from_model(model, **options)
    except ValueError as error:
        raise ConfigError(f"optim: {error}") from None


def placement_of(config: OptimConfig) -> str | muonloom.HostPlacement:
    """Return where state lives, as `muonloom.Muon` takes it."""
    if config.placement == "device":
        return "device"
    return muonloom.HostPlacement(**config.host.model_dump())


def make_optimizer(
    model: nn.Module,
    layout: muonloom.Layout,
    config: OptimConfig,
    *,
    placement: str | muonloom.HostPlacement,
    engine: ExpertEngine | None = None,
) -> muonloom.Muon:
    """Return the optimizer of `model`, on its device; errors are those of `muonloom.Muon`."""
    groups = muonloom.parameter_groups(model, layout, no_decay=tuple(config.no_decay))
    options: dict[str, Any] = {name: getattr(config, name) for name in _MUON_OPTIONS}
    options["momentum_dtype"] = getattr(torch, config.momentum_dtype)
    with warnings.catch_warnings():
        if config.algorithm == "adamw":
            # Muon tells whoever gives it no matrix; here that is what was asked for.
            warnings.filterwarnings("ignore", message="params: none of .* is a matrix")
        return muonloom.Muon(groups, layout=layout, placement=placement, engine=engine, **options)


def build_optimizer(
    model: nn.Module,
    layout: muonloom.Layout,
    config: OptimConfig,
    engine: ExpertEngine | None = None,
) -> muonloom.Muon:
    """Return the optimizer of `model`; its groups' rates are what the schedule multiplies.

    Raises:
        ConfigError: an option that the optimizer refuses, or memory that is not there.
    """
    try:
        return make_optimizer(model, layout, config, placement=placement_of(config), engine=engine)
    except (ValueError, MemoryError, OSError, RuntimeError) as error:
        line = _refusal(error)
        if line is None:
            raise
        raise ConfigError(line) from None


def _refusal(error: Exception) -> str | None:
    """Return one line that leads with a key of the file; None where no key is to blame."""
    text = str(error)
    name = text.partition(":")[0]
    if name in OptimConfig.model_fields:
        return f"optim.{text}"
    if isinstance(error, ValueError):
        return f"optim: {text}"
    if isinstance(error, MemoryError | OSError | torch.OutOfMemoryError):
        reason = (text.splitlines() or [type(error).__name__])[0]
        return complaint(
            "optim.placement",
            got=f"a refusal of memory ({reason})",
            wanted="room for the optimizer's state and slots",
            remedy="docs/host-placement.md says what decides how much it takes.",
        )
    return None
