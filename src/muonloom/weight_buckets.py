"""Which weights go to other ranks, in which order: where several hold a tensor and update parts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from muonloom.assignment import Assignment
from muonloom.collectives import Ranks
from muonloom.sharing import GroupSharing, SharedWeight, WeightSharing, bytes_of_row


def weight_sharing(
    tensors: Sequence[Tensor],
    assignments: Mapping[Tensor, Assignment],
    ranks_of: Callable[[tuple[int, ...]], Ranks],
    *,
    ready: Mapping[int, int],
    after: int,
) -> WeightSharing | None:
    """Return what gives updated weights to those who did not update them; None: all did.

    Args:
        tensors: all parameters, in the plan's order.
        assignments: what was decided for each.
        ranks_of: returns the group of some ranks.
        ready: by parameter, the task after which this rank's part is updated.
        after: the last task that is an exchange; -1: there is none.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Any, SharedWeight]]] = {}
    first_turn: dict[Any, int] = {}
    index_of = {tensor: index for index, tensor in enumerate(tensors)}
    for turn, (tensor, assignment) in enumerate(assignments.items()):
        copies = None if assignment.share is None else assignment.share.copies
        if copies is None or len(copies.ranks) == 1:
            continue
        # Equal shapes are updated together, so that they are ready together.
        kind = (assignment.algorithm, assignment.shape)
        weight = SharedWeight(
            parameter=index_of[tensor],
            rows=copies.rows,
            row_bytes=bytes_of_row(tuple(tensor.shape), tensor.element_size()),
        )
        order = (first_turn.setdefault(kind, turn), turn)
        by_ranks.setdefault(copies.ranks, []).append((order, weight))
    shared = [
        GroupSharing(
            ranks_of(ids),
            [weight for _, weight in sorted(found, key=lambda pair: pair[0])],
            ready=ready,
            device=tensors[found[0][1].parameter].device,
            weight_of=lambda index: tensors[index].detach(),
        )
        for ids, found in sorted(by_ranks.items())
    ]
    return WeightSharing(shared, after=after) if shared else None
