"""Random plans with their staged schedules, as data: no tensors, no optimizer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import torch

from muonloom import BlockSpec
from muonloom.plan import Plan
from muonloom.planning import MatrixEntry, ScalarEntry, build_plan
from muonloom.schedule import Schedule, StagedState, staged_schedule

CPU = torch.device("cpu")
RECIPE = (("compute_dtype", torch.float32), ("method", "standard"))

MATRICES: list[tuple[tuple[int, ...], BlockSpec]] = [
    ((8, 4), BlockSpec.whole()),
    ((16, 4), BlockSpec.whole()),
    ((4, 16), BlockSpec.whole()),
    ((16, 4), BlockSpec.rows(8, 4, 4)),
    ((5, 16, 4), BlockSpec.stacked(BlockSpec.whole())),
    ((3, 4, 16), BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True)))),
    ((8, 2, 2, 1), BlockSpec.conv()),
]
SCALARS: list[tuple[int, ...]] = [(3,), (64,), (100, 5), (40,)]

# What each kind of parameter keeps on the host: (room, slot), bytes an element.
MUON_STATES: list[tuple[int, dict[str, int]]] = [
    (4, {"master_weight": 4}),
    (2, {"master_weight": 4}),
    (2, {"master_low": 2}),
    (4, {}),
]
MOMENTS = {"exp_avg": 4, "exp_avg_sq": 4}
ADAMW_STATES: list[dict[str, int]] = [
    {**MOMENTS, "master_weight": 4},
    {**MOMENTS, "master_low": 2},
    MOMENTS,
]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A plan with what is staged, and the schedule of both."""

    plan: Plan
    staged: dict[int, StagedState]
    schedule: Schedule


def matrix(index: int, shape: tuple[int, ...], spec: BlockSpec) -> MatrixEntry:
    return MatrixEntry(
        index=index,
        turn=index,
        name=f"p{index}",
        kind="p",
        shape=shape,
        spec=spec,
        device=CPU,
        eps=1e-7,
        recipe_options=RECIPE,
    )


def scalar(index: int, shape: tuple[int, ...], pool: int = 0) -> ScalarEntry:
    return ScalarEntry(
        index=index,
        turn=index,
        name=f"p{index}",
        kind="p",
        shape=shape,
        device=CPU,
        pool=(pool,),
    )


def muon_state(momentum: int, masters: dict[str, int]) -> StagedState:
    return StagedState(room=(("momentum_buffer", momentum),), slot=tuple(masters.items()))


@cache
def example(seed: int) -> Example:
    choose = random.Random(seed)
    matrices: list[MatrixEntry] = []
    scalars: list[ScalarEntry] = []
    staged: dict[int, StagedState] = {}
    for index in range(choose.randint(1, 12)):
        if choose.random() < 0.7:
            matrices.append(matrix(index, *choose.choice(MATRICES)))
            staged[index] = muon_state(*choose.choice(MUON_STATES))
        else:
            scalars.append(scalar(index, choose.choice(SCALARS), choose.randint(0, 1)))
            staged[index] = StagedState(slot=tuple(choose.choice(ADAMW_STATES).items()))
    slot_bytes = choose.choice([768, 1024, 2048, "auto"])
    plan = build_plan(
        matrices,
        scalars,
        ns_batch_bytes=choose.choice([256, 600, 2048, "auto"]),
        slot_bytes=None if isinstance(slot_bytes, str) else slot_bytes,
    )
    num_slots = choose.choice([1, 2, 3, 4, 5])
    schedule = staged_schedule(plan, staged, slot_bytes=slot_bytes, num_slots=num_slots)
    return Example(plan=plan, staged=staged, schedule=schedule)
