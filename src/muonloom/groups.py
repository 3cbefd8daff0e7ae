"""From what a caller passes as `params` to parameter groups of one algorithm each."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.assignment import Assignment, rule_for
from muonloom.config import check_options
from muonloom.errors import complaint
from muonloom.layout import Layout, canonical_name
from muonloom.math import make_recipe, muon_scale

_WHOLE_ONLY = frozenset(
    {
        "layout",
        "ns_batch_bytes",
        "free_gradients",
        "skip_nonfinite",
        "max_consecutive_skips",
        "placement",
    }
)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what a caller passes as `params` as groups; none for an empty list."""
    if isinstance(params, Tensor):
        raise TypeError(
            "params: got a tensor; wanted an iterable of parameters. Pass model.named_parameters()."
        )
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params: got a module ({type(params).__name__}); wanted an iterable of parameters. "
            "Pass model.named_parameters()."
        )
    members = list(params)
    if members and isinstance(members[0], dict):
        return members
    return [{"params": members}] if members else []


def refuse_misplaced(group: Mapping[str, Any], *, owner: str) -> None:
    """Raise a ValueError for an option of the whole optimizer in a group, where it would do nothing."""
    misplaced = sorted(_WHOLE_ONLY & group.keys())
    if misplaced:
        raise ValueError(
            complaint(
                owner + misplaced[0],
                got="an option of the whole optimizer in a group",
                wanted="an option of one group",
                remedy="Give it to Muon(...).",
            )
        )


def named_members(group: Mapping[str, Any], first: int) -> list[tuple[str | None, Tensor]]:
    """Return a group's parameters with their canonical names (None where none was given).

    Raises:
        TypeError: a member is neither a tensor nor a (name, tensor) pair, or only some are named.
    """
    members = group["params"]
    members = [members] if isinstance(members, Tensor) else list(members)
    names = group.get("param_names")
    if names is not None and members and isinstance(members[0], Tensor):
        members = list(zip(names, members, strict=True))
    pairs: list[tuple[str | None, Tensor]] = []
    for position, member in enumerate(members, start=first):
        pair = member if isinstance(member, tuple) else (None, member)
        if len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise TypeError(
                complaint(
                    f"params[{position}]",
                    got=type(member).__name__,
                    wanted="a tensor or a (name, tensor) pair",
                    remedy="Pass model.named_parameters().",
                )
            )
        pairs.append(pair)
    if len({name is None for name, _ in pairs}) > 1:
        raise TypeError(
            "params: got named and unnamed parameters in one group; wanted one kind. "
            "Pass model.named_parameters()."
        )
    return [(None if name is None else canonical_name(name), tensor) for name, tensor in pairs]


def check_not_twice(
    members: Sequence[tuple[str | None, Tensor]], *, known: Mapping[Tensor, Assignment], first: int
) -> None:
    """Raise a ValueError that names the first parameter that is there already, or twice here."""
    seen: set[Tensor | str] = set()
    names = {assignment.name for assignment in known.values()}
    for position, (name, tensor) in enumerate(members, start=first):
        if tensor in seen or tensor in known or name in seen or name in names:
            raise ValueError(
                complaint(
                    name or f"params[{position}]",
                    got="a parameter (or its name) that is in a group already",
                    wanted="each parameter once",
                    remedy="Take it out of one of the groups.",
                )
            )
        seen.add(tensor)
        if name is not None:
            seen.add(name)


def split_group(
    group: Mapping[str, Any],
    members: Sequence[tuple[str | None, Tensor]],
    assignments: Sequence[Assignment],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return one group for each algorithm that occurs, each with all the caller's options.

    The AdamW rate is the group's `adamw_lr`, else its `lr`, else the optimizer's `adamw_lr`, else its
    `lr`; likewise for `weight_decay`.
    """
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    adamw_own = {key: own.pop(f"adamw_{key}", None) for key in ("lr", "weight_decay")}
    halves = []
    for algorithm in ("muon", "adamw"):
        mine = [m for m, a in zip(members, assignments, strict=True) if a.algorithm == algorithm]
        if not mine:
            continue
        half = {**own, "algorithm": algorithm}
        named = mine[0][0] is not None
        half["params"] = mine if named else [tensor for _, tensor in mine]
        if algorithm == "adamw":
            for key, value in adamw_own.items():
                fallback = defaults[f"adamw_{key}"]
                fallback = defaults[key] if fallback is None else fallback
                half[key] = own.get(key, fallback) if value is None else value
        for key in ("lr", "weight_decay"):
            # Halves may not share a tensor: a scheduler that changes it in place would do so twice.
            value = half.get(key, defaults[key])
            half[key] = value.clone() if isinstance(value, Tensor) else value
        halves.append(half)
    return halves


def check_group(group: Mapping[str, Any], *, owner: str = "") -> None:
    """Raise a ValueError that leads with the first bad option of a (complete) group."""
    check_options(group, owner=owner)
    if group.get("algorithm") == "adamw":
        return
    muon_scale(1, 1, group["adjust_lr_fn"])
    make_recipe(2, 2, device_type="cpu", **recipe_options(group))
    eps = group["eps"]
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < math.inf:
        raise ValueError(
            complaint(
                owner + "eps", got=repr(eps), wanted="a finite number > 0", remedy="Change eps."
            )
        )


def recipe_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `muonloom.math.make_recipe` that a group sets."""
    return {
        "ns_steps": group["ns_steps"],
        "ns_coefficients": group["ns_coefficients"],
        "method": group["ns_method"],
        "compute_dtype": group["ns_compute_dtype"],
    }


def rate_warning(
    groups: Iterable[Mapping[str, Any]], assignments: Mapping[Tensor, Assignment]
) -> str | None:
    """Return a line on AdamW parameters that got a rate meant for matrices, with both update sizes."""
    groups = list(groups)
    matrix_groups = [group for group in groups if group["algorithm"] == "muon"]
    scalar_groups = [group for group in groups if group["algorithm"] == "adamw"]
    if not matrix_groups or not scalar_groups:
        return None
    group = matrix_groups[0]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return None
    tensor = max(group["params"], key=Tensor.numel)
    spec = assignments[tensor].spec
    assert spec is not None
    m, n = spec.views(torch.empty(assignments[tensor].shape, device="meta"))[0].shape
    rms = float(group["lr"]) * muon_scale(m, n, group["adjust_lr_fn"]) / math.sqrt(max(m, n, 1))
    rate = float(scalar_groups[0]["lr"])
    return (
        f"adamw_lr: not given, so AdamW parameters take lr={rate:g} of the matrices. Expected update "
        f"RMS: {rms:.2g} for a {m}×{n} matrix (lr={float(group['lr']):g}, adjust_lr_fn="
        f"{group['adjust_lr_fn']!r}), about {0.2 * rate:.2g} for AdamW. Give adamw_lr=, or "
        "adjust_lr_fn='match_rms_adamw' to use one rate for both."
    )


def parameter_groups(
    model: nn.Module, layout: Layout, no_decay: Sequence[str] = ("*norm*", "*bias")
) -> list[dict[str, Any]]:
    """Return groups of named parameters for `muonloom.Muon`: matrices, AdamW, AdamW without decay.

    Args:
        model: its trainable parameters are taken, each once (tied weights by their first name).
        layout: says which are matrices.
        no_decay: globs on the full name; AdamW parameters that match get ``weight_decay=0.0``.

    Returns:
        At most three groups of ``(name, parameter)`` pairs with their `algorithm`.

    Raises:
        ValueError: the layout lacks a parameter.
    """
    groups: dict[str, dict[str, Any]] = {
        "muon": {"algorithm": "muon", "params": []},
        "adamw": {"algorithm": "adamw", "params": []},
        "no_decay": {"algorithm": "adamw", "weight_decay": 0.0, "params": []},
    }
    for raw, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = canonical_name(raw)
        key: str = rule_for(name, tuple(parameter.shape), layout).algorithm
        if key == "adamw" and any(fnmatch.fnmatchcase(name, glob) for glob in no_decay):
            key = "no_decay"
        groups[key]["params"].append((name, parameter))
    return [group for group in groups.values() if group["params"]]
