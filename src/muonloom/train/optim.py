"""The layout, the groups and the optimizer that `[optim]` describes."""

from __future__ import annotations

import warnings

from torch import nn

import muonloom
from muonloom.errors import ConfigError
from muonloom.train.config import OptimConfig

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
    "idle_matrices",
    "skip_nonfinite",
    "max_consecutive_skips",
    "placement",
)


def build_layout(model: nn.Module, config: OptimConfig) -> muonloom.Layout:
    """Return which parameters are cut into which matrices.

    Raises:
        ConfigError: a layout option that this model cannot follow.
    """
    overrides = {"*": "adamw"} if config.algorithm == "adamw" else dict(config.overrides)
    try:
        return muonloom.Layout.from_model(
            model,
            heads_per_block=config.heads_per_block,
            mla_components=config.mla_components,
            cut_output=config.cut_output,
            overrides=overrides,
        )
    except ValueError as error:
        raise ConfigError(f"optim: {error}") from None


def build_optimizer(
    model: nn.Module, layout: muonloom.Layout, config: OptimConfig
) -> muonloom.Muon:
    """Return the optimizer of `model`; its groups' rates are what the schedule multiplies.

    Raises:
        ConfigError: an option that the optimizer refuses.
    """
    groups = muonloom.parameter_groups(model, layout, no_decay=tuple(config.no_decay))
    options = {name: getattr(config, name) for name in _MUON_OPTIONS}
    try:
        with warnings.catch_warnings():
            if config.algorithm == "adamw":
                # Muon tells whoever gives it no matrix; here that is what was asked for.
                warnings.filterwarnings("ignore", message="params: none of .* is a matrix")
            return muonloom.Muon(groups, layout=layout, **options)
    except ValueError as error:
        raise ConfigError(f"optim.{error}") from None
