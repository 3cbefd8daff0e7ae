"""Between torch's parameter groups and the plan: entries for the planner, tensors for the engine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonloom.assignment import Assignment
from muonloom.bound import Bound
from muonloom.config import AdamWOptions, MuonOptions
from muonloom.dtensors import local_part
from muonloom.errors import complaint
from muonloom.groups import rate_warning, recipe_options
from muonloom.guard import Verdict, gradient_of
from muonloom.plan import Plan
from muonloom.planning import MatrixEntry, ScalarEntry, build_plan
from muonloom.schedule import StagedState
from muonloom.staging import Source
from muonloom.state import Store, kept_dtypes, planned_state_bytes
from muonloom.weights import DeviceWeights

_log = logging.getLogger("muonloom")

Groups = Sequence[Mapping[str, Any]]


def assigned(assignments: Mapping[Tensor, Assignment], tensor: Tensor) -> Assignment:
    """Return what was decided for `tensor` when it was added.

    Raises:
        ValueError: it never was: somebody else put it into a group.
    """
    if tensor not in assignments:
        raise ValueError(
            complaint(
                "params",
                got=f"a tensor of shape {tuple(tensor.shape)} that was not added to the optimizer",
                wanted="the parameters that it was built with",
                remedy="Use add_param_group(), or build the optimizer after the model was wrapped.",
            )
        )
    return assignments[tensor]


def plan_key(groups: Groups, weights: DeviceWeights) -> tuple[Any, ...]:
    """Return what the plan depends on and a caller may change between two steps."""
    return tuple(
        (
            tuple(
                (id(tensor), tensor.dtype, tensor.device, weights.block_rows(tensor))
                for tensor in group["params"]
            ),
            group["algorithm"],
            group["eps"],
            repr(recipe_options(group)),
        )
        for group in groups
    )


def plan_of(
    groups: Groups,
    assignments: Mapping[Tensor, Assignment],
    weights: DeviceWeights,
    *,
    ns_batch_bytes: int | str,
    slot_bytes: int | None = None,
    shared: bool = True,
) -> Plan:
    """Return the plan of one step; parameters are counted through all groups, in order.

    Without `shared` it is that of a rank that does everything alone.
    """
    matrices: list[MatrixEntry] = []
    scalars: list[ScalarEntry] = []
    pairs = [(g, tensor) for g, group in enumerate(groups) for tensor in group["params"]]
    turns = {tensor: turn for turn, tensor in enumerate(assignments)}
    for index, (g, tensor) in enumerate(pairs):
        assignment = assigned(assignments, tensor)
        if not shared:
            assignment = replace(assignment, share=None)
        if assignment.part_spec is None:
            scalars.append(
                ScalarEntry(
                    index=index,
                    turn=turns[tensor],
                    name=assignment.name,
                    kind=assignment.kind,
                    shape=assignment.part_shape,
                    device=tensor.device,
                    pool=(g,),
                    block_rows=weights.block_rows(tensor),
                )
            )
            continue
        matrices.append(
            MatrixEntry(
                index=index,
                turn=turns[tensor],
                name=assignment.name,
                kind=assignment.kind,
                shape=assignment.part_shape,
                spec=assignment.part_spec,
                device=tensor.device,
                eps=groups[g]["eps"],
                recipe_options=tuple(sorted(recipe_options(groups[g]).items())),
                block_rows=weights.block_rows(tensor),
                share=assignment.share,
            )
        )
    return build_plan(matrices, scalars, ns_batch_bytes=ns_batch_bytes, slot_bytes=slot_bytes)


def staged_states(
    groups: Groups, states: Mapping[Tensor, dict[str, Tensor]], *, store: Store
) -> dict[int, StagedState]:
    """Return by parameter, as the plan counts them, which state passes through the device."""
    pairs = [(group, tensor) for group in groups for tensor in group["params"]]
    staged = {}
    for index, (group, tensor) in enumerate(pairs):
        dtypes = kept_dtypes(tensor, group, store=store)
        # State that exists keeps its dtype, whatever its group says by now.
        dtypes |= {k: t.dtype for k, t in states.get(tensor, {}).items() if k in dtypes}
        sizes = {key: dtype.itemsize for key, dtype in dtypes.items() if key != "step"}
        room = tuple(pair for pair in sizes.items() if pair[0] == "momentum_buffer")
        slot = tuple(pair for pair in sizes.items() if pair[0] != "momentum_buffer")
        staged[index] = StagedState(room=room, slot=slot)
    return staged


def sources_of(
    groups: Groups,
    assignments: Mapping[Tensor, Assignment],
    states: Mapping[Tensor, dict[str, Tensor]],
) -> list[Source]:
    """Return all parameters' state and cut, in the plan's order."""
    return [
        Source(state=states.get(tensor, {}), spec=assigned(assignments, tensor).part_spec)
        for group in groups
        for tensor in group["params"]
    ]


def bind(
    groups: Groups,
    assignments: Mapping[Tensor, Assignment],
    states: Mapping[Tensor, dict[str, Tensor]],
    weights: DeviceWeights,
    *,
    split: bool,
    present: Sequence[bool] | None = None,
    known: Sequence[Bound | None] = (),
) -> list[Bound | None]:
    """Pair each parameter that has a gradient with its state and its group's numbers.

    Args:
        groups: the optimizer's.
        assignments: what was decided for each parameter.
        states: by parameter.
        weights: where device weights are.
        split: whether BF16 weights are half of their masters, and so are written as tensors.
        present: which parameters have a gradient on some rank: zero is taken where it is not this one.
        known: what was found before that was known; taken as it is.

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
            if known and known[len(bounds)] is not None:
                bounds.append(known[len(bounds)])  # a sum over ranks is not to be taken twice
                continue
            assignment = assigned(assignments, tensor)
            gradient = gradient_of(assignment.name, tensor)
            if gradient is None and (present is None or not present[len(bounds)]):
                bounds.append(None)
                continue
            if gradient is None:
                gradient = torch.zeros_like(local_part(tensor))
            if tuple(tensor.shape) != assignment.tensor_shape:
                raise ValueError(
                    complaint(
                        assignment.name,
                        got=f"shape {tuple(tensor.shape)}",
                        wanted=f"{assignment.tensor_shape}, as at construction",
                        remedy="Build a new optimizer after the model changed.",
                    )
                )
            bounds.append(
                Bound(
                    name=assignment.name,
                    weight=weights.stored(tensor) if split else weights.part(tensor),
                    gradient=weights.own_rows(tensor, gradient),
                    state=states.get(tensor, {}),
                    options=options,
                    spec=assignment.part_spec,
                    parameter=tensor,
                    writer=None if split else weights.writer(tensor),
                )
            )
    return bounds


def only_makes_state(verdict: Verdict, bounds: Sequence[Bound | None]) -> bool:
    """Whether this is the step by which torch.distributed.checkpoint has state made.

    It steps over zero gradients with a zero rate, and nothing may come of it: not even AdamW's
    counters may move.
    """
    present = [bound for bound in bounds if bound is not None]
    return (
        bool(present)
        and verdict.grad_norm == 0
        and all(bound.options.lr == 0 for bound in present)
        and not any(b.gradient is not None and bool(b.gradient.any()) for b in present)
    )


def announce(
    groups: Groups,
    assignments: Mapping[Tensor, Assignment],
    plan: Plan,
    *,
    store: Store,
    host_bytes: int | None,
    warn: bool,
    is_stage: bool,
) -> None:
    """Log what was built in one line; warn of AdamW parameters that were probably not meant so.

    Args:
        groups: the optimizer's groups.
        assignments: what was decided for each parameter.
        plan: of a whole step.
        store: where state comes from.
        host_bytes: of the slabs; None in device placement.
        warn: whether nobody gave AdamW a rate of its own.
        is_stage: whether other ranks have other parameters, matrices maybe.
    """
    scalars = sum(assignment.algorithm == "adamw" for assignment in assignments.values())
    warning = rate_warning(groups, assignments) if warn else None
    if scalars and scalars == len(assignments) and not is_stage:
        warning = (
            f"params: none of {scalars} parameters is a matrix, so AdamW updates all of them; "
            "wanted at least one matrix. Use torch.optim.AdamW, or check the layout."
        )
    if warning is not None:
        warnings.warn(warning, UserWarning, stacklevel=4)
    _log.info(
        "Muon: %d parameters -> %d matrices in %d batches; %d AdamW parameters; "
        "state: host %d bytes, device %d bytes",
        len(assignments) - scalars,
        plan.num_matrices,
        plan.ns_calls,
        scalars,
        host_bytes or 0,
        planned_state_bytes(groups, store=store) if host_bytes is None else 0,
    )
    if host_bytes is not None:
        _tell_of_own_masters([tensor for tensor in assignments if not store.has_master(tensor)])


def _tell_of_own_masters(wide: Sequence[Tensor]) -> None:
    """FP32 parameters are their own masters, so that these stay on the device."""
    if wide:
        _log.info(
            "Muon: %d FP32 parameters (%d bytes) are their own masters and stay on the device; only their "
            "momentum moves. Keep the model in BF16 to have masters on the host too.",
            len(wide),
            sum(tensor.nbytes for tensor in wide),
        )
