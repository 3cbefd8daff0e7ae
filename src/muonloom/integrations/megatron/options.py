"""Options of `muonloom.Muon` from Megatron's `OptimizerConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from muonloom.errors import complaint

# Megatron's scale and factor -> the rule with the same numbers.
_SCALES = {
    ("spectral", 0.2): "match_rms_adamw",
    ("shape_scaling", 1.0): "original",
    ("unit_rms_norm", 1.0): "spectral",
}
LAYOUT_OPTIONS = ("heads_per_block", "mla_components", "cut_output", "overrides")
# Emerging-Optimizers' "quintic" is not what muonloom calls so: https://leloykun.github.io/ponder/muon-opt-coeffs/
_FIVE_QUINTICS = (
    (4.0848, -6.8946, 2.927),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_COEFFICIENTS = {
    "simple": "quintic",
    "quintic": _FIVE_QUINTICS,
    "polar_express": "polar_express_1.01",
}


def muon_options(config: OptimizerConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `Muon`: what the caller gave, else what `config` says.

    Raises:
        ValueError: an option of `config` that has no equal here.
    """
    _refuse(config)
    for name in ("lr", "adamw_lr", "weight_decay", "adamw_weight_decay"):
        if name in given:
            raise ValueError(
                complaint(
                    name,
                    got="an option of get_optimizer()",
                    wanted="what Megatron's groups say",
                    remedy="Set it in config, or by config_overrides=.",
                )
            )
    found = {
        "lr": config.lr,
        "adamw_lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_steps": config.muon_num_ns_steps,
        "adamw_betas": (config.adam_beta1, config.adam_beta2),
        "adamw_eps": config.adam_eps,
        **given,
    }
    if "ns_coefficients" not in found:
        kind = config.muon_coefficient_type
        if kind not in _COEFFICIENTS:
            raise _error(
                "muon_coefficient_type", kind, f"one of {[*_COEFFICIENTS]}", "ns_coefficients"
            )
        found["ns_coefficients"] = _COEFFICIENTS[kind]
        if kind == "quintic":  # it begins again after its five steps
            found["ns_coefficients"] = tuple(islice(cycle(_FIVE_QUINTICS), found["ns_steps"]))
    if "adjust_lr_fn" not in found:
        scale = (config.muon_scale_mode, config.muon_extra_scale_factor)
        if scale not in _SCALES:
            raise _error(
                "muon_scale_mode, config.muon_extra_scale_factor",
                scale,
                f"one of {[*_SCALES]}",
                "adjust_lr_fn",
            )
        found["adjust_lr_fn"] = _SCALES[scale]
    return found


def group_options(group: Mapping[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    """Return a Megatron group, but its parameters, as one of `Muon` before a scheduler's first step."""
    found = {key: value for key, value in group.items() if key not in ("params", "eps")}
    found["lr"] = config.lr if group.get("max_lr") is None else group["max_lr"]
    found["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
    if "eps" in group:
        found["adamw_eps"] = group["eps"]  # Megatron means Adam's; Muon's is that of a norm
    return found


def _refuse(config: OptimizerConfig) -> None:
    wanted = {
        "fp16": (False, "Train in BF16."),
        "loss_scale": (None, "Leave the loss scale out: BF16 needs none."),
        "decoupled_weight_decay": (True, "Decay is decoupled here."),
        "use_precision_aware_optimizer": (False, "Use momentum_dtype= and placement=."),
        "optimizer_cpu_offload": (False, "Use placement='host'."),
        "use_distributed_optimizer": (False, "State is shared out by this optimizer itself."),
        "overlap_param_gather": (False, "Updated weights are gathered by this optimizer itself."),
        "muon_scalar_optimizer": ("adam", "AdamW updates what is no matrix."),
    }
    for name, (value, remedy) in wanted.items():
        got = getattr(config, name, value)
        if got != value and not (value is None and not got):
            raise ValueError(
                complaint(f"config.{name}", got=repr(got), wanted=repr(value), remedy=remedy)
            )
    if config.lr is None:
        raise ValueError(
            complaint("config.lr", got="None", wanted="a learning rate", remedy="Give one.")
        )


def _error(name: str, got: object, wanted: str, option: str) -> ValueError:
    remedy = f"Change it, or pass {option}= to get_optimizer()."
    return ValueError(complaint(f"config.{name}", got=repr(got), wanted=wanted, remedy=remedy))
