"""The optimizer's options: their checks, in one table, and the values that one step reads."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from muonloom.errors import complaint

IDLE_CHOICES = ("update", "skip")
ALGORITHMS = ("muon", "adamw")
MOMENTUM_DTYPES = (torch.float32, torch.bfloat16)
MASTER_LAYOUTS = ("full", "split")
METHODS = ("standard", "gram", "auto")
COMPUTE_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)


def is_number(value: object, *, least: float = 0.0, below: float = math.inf) -> bool:
    """Whether `value` is a finite number (or a one-element tensor) in ``[least, below)``."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and is_number(float(value), least=least, below=below)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return math.isfinite(value) and least <= float(value) < below


def _is_betas(value: object) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(is_number(beta, below=1.0) for beta in value)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_batch_bytes(value: object) -> bool:
    return value == "auto" or (_is_count(value) and value != 0)


# Option -> (check, what was wanted). What math/ checks under the same name is not repeated here.
def _is_process_group(value: object) -> bool:
    return value is None or value is False or type(value).__name__ == "ProcessGroup"


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "lr": (is_number, "a finite number >= 0, or a one-element tensor of one"),
    "weight_decay": (is_number, "a finite number >= 0"),
    "momentum": (lambda value: is_number(value, below=1.0), "a number in [0, 1)"),
    "nesterov": (lambda value: isinstance(value, bool), "True or False"),
    "adamw_lr": (lambda value: value is None or is_number(value), "None or a finite number >= 0"),
    "adamw_weight_decay": (
        lambda value: value is None or is_number(value),
        "None or a finite number >= 0",
    ),
    "adamw_betas": (_is_betas, "two numbers in [0, 1)"),
    "adamw_eps": (is_number, "a finite number >= 0"),
    "momentum_dtype": (
        lambda value: value in MOMENTUM_DTYPES,
        "torch.float32 or torch.bfloat16",
    ),
    "ns_method": (lambda value: value in METHODS, f"one of {METHODS}"),
    "ns_compute_dtype": (
        lambda value: value in COMPUTE_DTYPES,
        "None, torch.bfloat16, torch.float32 or torch.float64",
    ),
    "idle_matrices": (lambda value: value in IDLE_CHOICES, "'update' or 'skip'"),
    "ns_batch_bytes": (_is_batch_bytes, "'auto' or a positive number of bytes"),
    "skip_nonfinite": (lambda value: isinstance(value, bool), "True or False"),
    "free_gradients": (lambda value: isinstance(value, bool), "True or False"),
    "max_consecutive_skips": (_is_count, "an integer >= 0"),
    "placement": (
        lambda value: value in ("device", "host") or isinstance(value, HostPlacement),
        "'device', 'host' or a muonloom.HostPlacement",
    ),
    "process_group": (_is_process_group, "None, False or a process group"),
    "algorithm": (lambda value: value in ALGORITHMS, "'muon' or 'adamw'"),
}


@dataclass(frozen=True)
class HostPlacement:
    """Masters and momentum in host memory, streamed through a fixed part of the device's.

    Attributes:
        slot_bytes: of each device buffer through which state passes. "auto" takes a constant of the
            device's kind, or more where the largest matrix or the masters of a batch need it.
        num_slots: how many of them; one works, one thing after another; three let load, compute and
            store overlap.
        master_layout: ``"full"`` keeps FP32 masters; ``"split"`` keeps of a BF16 parameter's master
            only the 16 bits that the weight lacks: the same numbers, half the bytes.

    Raises:
        ValueError: a value that is none of these.
    """

    slot_bytes: int | str = "auto"
    num_slots: int = 3
    master_layout: str = "full"

    def __post_init__(self) -> None:
        checks = {
            "slot_bytes": (_is_batch_bytes, "'auto' or a positive number of bytes"),
            "num_slots": (lambda value: _is_count(value) and value != 0, "an integer >= 1"),
            "master_layout": (lambda value: value in MASTER_LAYOUTS, f"one of {MASTER_LAYOUTS}"),
        }
        for name, (accepts, wanted) in checks.items():
            value = getattr(self, name)
            if not accepts(value):
                remedy = f"Change {name}."
                raise ValueError(complaint(name, got=repr(value), wanted=wanted, remedy=remedy))


def host_placement(placement: object) -> HostPlacement | None:
    """Return how state is placed on the host, or None for the device."""
    if isinstance(placement, HostPlacement):
        return placement
    return HostPlacement() if placement == "host" else None


def check_options(options: Mapping[str, object], *, owner: str = "") -> None:
    """Raise a ValueError that leads with the first bad option's name.

    Args:
        options: names and values; names without a check pass.
        owner: where they stand, such as ``"param_groups[1]."``.
    """
    for name, value in options.items():
        if name not in _CHECKS:
            continue
        accepts, wanted = _CHECKS[name]
        if not accepts(value):
            raise ValueError(
                complaint(owner + name, got=repr(value), wanted=wanted, remedy=f"Change {name}.")
            )


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """What a step reads of a Muon group, as plain numbers."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    adjust_lr_fn: str | None
    skip_idle: bool

    @classmethod
    def of(cls, group: Mapping[str, object]) -> MuonOptions:
        """Read a parameter group; a tensor learning rate is read here, at every step."""
        adjust = group["adjust_lr_fn"]
        return cls(
            lr=_number(group["lr"]),
            weight_decay=_number(group["weight_decay"]),
            momentum=_number(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            adjust_lr_fn=None if adjust is None else str(adjust),
            skip_idle=group["idle_matrices"] == "skip",
        )


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """What a step reads of an AdamW group, as plain numbers."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float

    @classmethod
    def of(cls, group: Mapping[str, object]) -> AdamWOptions:
        """Read a parameter group; a tensor learning rate is read here, at every step."""
        betas = group["adamw_betas"]
        assert isinstance(betas, tuple | list)
        return cls(
            lr=_number(group["lr"]),
            weight_decay=_number(group["weight_decay"]),
            betas=(float(betas[0]), float(betas[1])),
            eps=_number(group["adamw_eps"]),
        )


def _number(value: object) -> float:
    return float(value)  # type: ignore[arg-type]
