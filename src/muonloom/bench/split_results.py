"""Muon Split as plain JSON values, its figures, and its tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from muonloom.bench.results import Plain, figure, plain_timing
from muonloom.bench.shapes import (
    BATCHES,
    GLM5_QUARTER,
    QUICK_BATCHES,
    QUICK_SPLIT,
    SPLIT_MODELS,
    MoeSize,
)
from muonloom.bench.split import (
    BLOCKS,
    COUNTED_LAYERS,
    QUERY,
    QUERY_AND_KEY_VALUE,
    SPLIT_VARIANTS,
    WHOLE,
    LoopWork,
    SplitWork,
    Variant,
    VariantTiming,
    count_calls,
    measure_loop,
    measure_variants,
    one_block_a_call,
    projections,
    whole_variants,
)
from muonloom.bench.text import Block, number

BLOCK_GOALS = {
    ("q_b", "k = 1"): 0.20,
    ("q_b + kv_b", "k = 1"): 0.35,
    ("q_b + kv_b", "k = 1, components"): 0.30,
}
STEP_WORK = "whole step, 4 layers"
STEP_GOAL = 1.0
LOOP_GOAL = 2.5

SPLIT_COLUMNS = (
    "cut",
    "matrices",
    "orth. ms",
    "÷ whole",
    "iter. ÷",
    "FLOPs ÷",
    "GFLOP/s",
    "step ÷",
)
LOOP_COLUMNS = ("iteration alone", "ms", "÷ batched", "GFLOP/s")
CALL_COLUMNS = ("cut", *(f"calls, {layers} layers" for layers in COUNTED_LAYERS), "matrices")


def measure_split(*, quick: bool, rounds: int, device: torch.device) -> Plain:
    """Measure all of Muon Split, and return it as plain values."""
    models = {"tiny": QUICK_SPLIT} if quick else SPLIT_MODELS
    works = []
    for name, size in models.items():
        print(f"measuring head blocks of {name} ...", file=sys.stderr, flush=True)
        for kinds in (QUERY, QUERY_AND_KEY_VALUE):
            work = _projections(name, size, kinds, rounds=rounds, device=device)
            works.append(plain_variants(work))
    size = QUICK_SPLIT if quick else GLM5_QUARTER
    print("measuring the step of a split model ...", file=sys.stderr, flush=True)
    step = measure_variants(
        STEP_WORK,
        size,
        size.parameters(),
        [Variant(name=WHOLE), *(v for v in SPLIT_VARIANTS if v.heads_per_block != BLOCKS[-1])],
        rounds=rounds,
        device=device,
        bounds=False,
    )
    works.append(plain_variants(step))
    shape = (QUICK_BATCHES if quick else BATCHES)[0]
    loop = measure_loop(shape, rounds=rounds, device=device)
    return {"works": works, "loop": plain_loop(loop), "calls": count_calls()}


def _projections(
    name: str, size: MoeSize, kinds: Sequence[str], *, rounds: int, device: torch.device
) -> SplitWork:
    shapes = projections(size, kinds)
    variants = [*whole_variants(shapes, device), *SPLIT_VARIANTS]
    if kinds == QUERY:
        variants.append(one_block_a_call(size, device))
    return measure_variants(
        f"{name}: {' + '.join(kinds)}",
        size,
        shapes,
        variants,
        rounds=rounds,
        device=device,
        bounds=True,
    )


def plain_variants(work: SplitWork) -> Plain:
    """Return all variants; ratios are to whole matrices in the method that is fastest for them."""
    whole = work.whole()
    best = min(whole, key=lambda row: row.orthogonalize_s)
    step_s = min(row.step.median_s for row in whole)
    return {
        "name": work.name,
        "model": asdict(work.size),
        "parameters": {name: list(shape) for name, shape in work.shapes.items()},
        "best_whole": best.variant.name,
        "rows": [_plain_row(row, best, step_s) for row in work.rows],
    }


def _plain_row(row: VariantTiming, best: VariantTiming, step_s: float) -> Plain:
    return {
        "name": row.variant.name,
        "heads_per_block": row.variant.heads_per_block,
        "mla_components": row.variant.mla_components,
        "matrices": [[*shape, count] for shape, count in row.matrices.items()],
        "ns_calls": row.ns_calls,
        "step": plain_timing(row.step, row.step.median_s) | {"ratio": row.step.median_s / step_s},
        "phases_s": row.phases_s,
        "orthogonalize_s": row.orthogonalize_s,
        "iterate_s": row.iterate_s,
        "iterate_ratio": row.iterate_s / best.iterate_s,
        "orthogonalize_ratio": row.orthogonalize_s / best.orthogonalize_s,
        "flops_ratio": row.step.flops / best.step.flops,
        "flops_per_s": row.step.flops / row.iterate_s,
        "bound": None if row.bound_s is None else row.bound_s / best.orthogonalize_s,
    }


def plain_loop(work: LoopWork) -> Plain:
    """Return the same iteration batched and one at a time; ``ratio`` is the loop's time ÷ the batch's."""
    batched_s = work.batched.median_s
    return {
        "name": work.shape.name,
        "ratio": work.looped.median_s / batched_s,
        "bound": work.looped.median_s / work.bound_s,
        "contenders": [plain_timing(t, batched_s) for t in (work.batched, work.looped)],
    }


def split_figures(split: Plain) -> list[Plain]:
    """Return the figures that have goals."""
    found = []
    for work in split["works"]:
        kinds = work["name"].rpartition(": ")[2]
        for row in work["rows"]:
            name = f"{work['name']}, {row['name']} ÷ whole"
            goal = BLOCK_GOALS.get((kinds, row["name"]))
            if goal is not None:
                value, bound = row["orthogonalize_ratio"], row["bound"]
                found.append(figure(name, value, goal, most=True, bound=bound))
            if work["name"] == STEP_WORK and row["heads_per_block"] == 1:
                found.append(figure(name, row["step"]["ratio"], STEP_GOAL, most=True))
    loop = split["loop"]
    name = f"{loop['name']}: same iteration, one at a time ÷ batched"
    found.append(figure(name, loop["ratio"], LOOP_GOAL, most=False, bound=loop["bound"]))
    differ = sum(len(set(row["calls"].values())) > 1 for row in split["calls"])
    first, last = COUNTED_LAYERS
    name = f"cuts whose Newton–Schulz calls differ between {first} and {last} layers"
    found.append(figure(name, differ, 0, most=True))
    return found


def split_tables(split: Plain) -> list[Block]:
    """Return a table a work, then batched against one at a time, then the counts of calls."""
    tables: list[Block] = [
        (f"Muon Split, {work['name']}", SPLIT_COLUMNS, split_rows(work)) for work in split["works"]
    ]
    loop = split["loop"]
    loop_rows = [
        [
            entry["name"],
            number(1e3 * entry["median_s"]),
            number(entry["ratio"]),
            number(entry["flops_per_s"] / 1e9),
        ]
        for entry in loop["contenders"]
    ]
    tables.append((f"Muon Split, {loop['name']}", LOOP_COLUMNS, loop_rows))
    tables.append(("Batched Newton–Schulz calls of a step", CALL_COLUMNS, call_rows(split)))
    return tables


def split_rows(work: Plain) -> list[list[str]]:
    """Return one row a variant, as `SPLIT_COLUMNS`."""
    return [
        [
            row["name"],
            _matrices_text(row["matrices"]),
            number(1e3 * row["orthogonalize_s"]),
            number(row["orthogonalize_ratio"]),
            number(row["iterate_ratio"]),
            number(row["flops_ratio"]),
            number(row["flops_per_s"] / 1e9),
            number(row["step"]["ratio"]),
        ]
        for row in work["rows"]
    ]


def _matrices_text(matrices: Sequence[Sequence[int]]) -> str:
    if len(matrices) > 4:
        return f"{sum(count for _, _, count in matrices)} of {len(matrices)} shapes"
    return ", ".join(f"{count}×{rows}×{columns}" for rows, columns, count in matrices)


def call_rows(split: Plain) -> list[list[str]]:
    """Return one row a cut, as `CALL_COLUMNS`."""
    return [
        [
            row["name"],
            *(str(calls) for calls in row["calls"].values()),
            " / ".join(f"{count:,}" for count in row["matrices"].values()),
        ]
        for row in split["calls"]
    ]
