"""Between torch's parameter groups and the plan: entries for the planner, tensors for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muonloom.config import AdamWOptions, MuonOptions
from muonloom.engine import Bound
from muonloom.errors import complaint
from muonloom.groups import Assignment, recipe_options
from muonloom.guard import gradient_of
from muonloom.plan import MatrixEntry, Plan, ScalarEntry, build_plan

Groups = Sequence[Mapping[str, Any]]


def plan_key(groups: Groups) -> tuple[Any, ...]:
    """Return what the plan depends on and a caller may change between two steps."""
    return tuple(
        (len(group["params"]), group["algorithm"], group["eps"], repr(recipe_options(group)))
        for group in groups
    )


def plan_of(
    groups: Groups, assignments: Mapping[Tensor, Assignment], *, ns_batch_bytes: int | str
) -> Plan:
    """Return the plan of one step; parameters are counted through all groups, in order."""
    matrices: list[MatrixEntry] = []
    scalars: list[ScalarEntry] = []
    pairs = [(g, tensor) for g, group in enumerate(groups) for tensor in group["params"]]
    for index, (g, tensor) in enumerate(pairs):
        assignment = assignments[tensor]
        if assignment.spec is None:
            scalars.append(
                ScalarEntry(
                    index=index,
                    name=assignment.name,
                    kind=assignment.kind,
                    shape=assignment.shape,
                    pool=(g, str(tensor.device)),
                    divisible=tensor.is_contiguous(),
                )
            )
            continue
        matrices.append(
            MatrixEntry(
                index=index,
                name=assignment.name,
                kind=assignment.kind,
                shape=assignment.shape,
                spec=assignment.spec,
                device=tensor.device,
                eps=groups[g]["eps"],
                recipe_options=tuple(sorted(recipe_options(groups[g]).items())),
            )
        )
    return build_plan(matrices, scalars, ns_batch_bytes=ns_batch_bytes)


def bind(
    groups: Groups,
    assignments: Mapping[Tensor, Assignment],
    states: Mapping[Tensor, dict[str, Tensor]],
) -> list[Bound | None]:
    """Pair each parameter that has a gradient with its state and its group's numbers.

    Returns:
        In the plan's order; None for a parameter without gradient.

    Raises:
        ValueError: a parameter or gradient has another shape than at construction.
    """
    bounds: list[Bound | None] = []
    for group in groups:
        options: MuonOptions | AdamWOptions
        options = (MuonOptions if group["algorithm"] == "muon" else AdamWOptions).of(group)
        for tensor in group["params"]:
            assignment = assignments[tensor]
            gradient = gradient_of(assignment.name, tensor)
            if gradient is None:
                bounds.append(None)
                continue
            if tuple(tensor.shape) != assignment.shape:
                raise ValueError(
                    complaint(
                        assignment.name,
                        got=f"shape {tuple(tensor.shape)}",
                        wanted=f"{assignment.shape}, as at construction",
                        remedy="Build a new optimizer after the model changed.",
                    )
                )
            bounds.append(
                Bound(
                    name=assignment.name,
                    weight=tensor,
                    gradient=gradient,
                    state=states.get(tensor, {}),
                    options=options,
                    spec=assignment.spec,
                )
            )
    return bounds
