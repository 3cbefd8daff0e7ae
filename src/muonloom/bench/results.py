"""Measurements as plain JSON values, and the ratios made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from muonloom.bench.orthogonalization import GRAM_FP32, OURS, STANDARD_BF16, BatchWork
from muonloom.bench.peers import REFERENCE
from muonloom.bench.step import StepWork, share_outside
from muonloom.bench.timing import Timing

SCHEMA = 1
STEP_NAME = "whole step"
CEILING_SHAPE = "64x192x1536"

Plain = dict[str, Any]


def plain_timing(timing: Timing, ours_s: float) -> Plain:
    """Return one contender's result; its ratio is its median time ÷ ours."""
    entry: Plain = {
        "name": timing.name,
        "role": timing.role,
        "dtype": timing.dtype,
        "status": timing.status,
        "note": timing.note,
    }
    if timing.ok:
        low, high = timing.quartiles_s()
        entry |= {
            "measured": timing.measured,
            "rounds": len(timing.samples_s),
            "samples_s": timing.samples_s,
            "median_s": timing.median_s,
            "quartiles_s": [low, high],
            "flops": timing.flops,
            "flops_per_s": timing.flops_per_s,
            "ratio": timing.median_s / ours_s,
        }
    return entry


def ceiling(timings: Sequence[Timing], dtype: str) -> float | None:
    """Return the FLOP/s of the fastest product in ``dtype``, or None where none was timed."""
    rates = [t.flops_per_s for t in timings if t.role == "ceiling" and t.dtype == dtype and t.ok]
    return max(rates, default=None)


def plain_batch(work: BatchWork) -> Plain:
    """Return one shape's results.

    ``bound`` is the ratio to the reference that ours would have if its products ran at the ceiling and
    all else took no time.
    """
    ours = _named(work.timings, OURS)
    reference = _named(work.timings, REFERENCE)
    best = ceiling(work.timings, ours.dtype)
    bound = None
    if best is not None and reference.ok:
        bound = reference.median_s * best / ours.flops
    shape = work.shape
    entries = [plain_timing(t, ours.median_s) for t in work.timings]
    for entry in entries:
        entry["gate"] = work.gates.get(entry["name"])
    return {
        "kind": "orthogonalization",
        "name": shape.name,
        "shape": [shape.count, shape.rows, shape.columns],
        "source": shape.source,
        "recipe": {
            "method": work.recipe.method,
            "dtype": str(work.recipe.compute_dtype).removeprefix("torch."),
            "restarts": list(work.recipe.restarts),
        },
        "goal": shape.goal,
        "bound": bound,
        "bound_with_bfloat16": shape.bound,
        "ceilings": {dtype: ceiling(work.timings, dtype) for dtype in ("bfloat16", "float32")},
        "contenders": entries,
    }


def plain_step(work: StepWork, *, ceilings: Plain) -> Plain:
    """Return the whole step's results.

    Args:
        work: the measurement.
        ceilings: the best FLOP/s by dtype of all shapes in this run, for the bound.
    """
    ours = _named(work.timings, OURS)
    reference = _named(work.timings, REFERENCE)
    best = ceilings.get(ours.dtype)
    bound = None
    if best and reference.ok:
        bound = reference.median_s * best / ours.flops
    return {
        "kind": "step",
        "name": STEP_NAME,
        "model": asdict(work.size),
        "parameters": work.numel,
        "matrices": [list(matrix) for matrix in work.matrices],
        "goal": 1.28,
        "bound": bound,
        "bound_with_bfloat16": "1.35-1.4",
        "phases_s": work.phases_s,
        "share_outside_orthogonalization": share_outside(work.phases_s),
        "contenders": [plain_timing(t, ours.median_s) for t in work.timings],
    }


def figures(works: Sequence[Plain]) -> list[Plain]:
    """Return the figures that have goals, each with whether it is reached.

    Args:
        works: from `plain_batch` and `plain_step`.
    """
    found: list[Plain] = []
    for work in works:
        reference = contender(work, REFERENCE)
        if work["goal"] is not None and "ratio" in reference:
            found.append(
                figure(
                    f"{work['name']}: torch.optim.Muon's time ÷ ours",
                    reference["ratio"],
                    work["goal"],
                    most=False,
                    bound=work["bound"],
                )
            )
        if work["kind"] == "step":
            share = work["share_outside_orthogonalization"]
            found.append(figure("share of our step outside the iteration", share, 0.03, most=True))
        if work["name"] == CEILING_SHAPE:
            found += _ceiling_figures(work)
        found += _gram_figures(work)
    return found


def contender(work: Plain, name: str) -> Plain:
    """Return a contender's entry, empty where there is none."""
    return next((entry for entry in work["contenders"] if entry["name"] == name), {})


def figure(
    name: str, value: float, goal: float, *, most: bool, bound: float | None = None
) -> Plain:
    """Return a value, its goal, and whether it is reached; ``most``: the goal is an upper limit."""
    reached = value <= goal if most else value >= goal
    return {
        "name": name,
        "value": value,
        "goal": goal,
        "most": most,
        "bound": bound,
        "reached": reached,
    }


def _ceiling_figures(work: Plain) -> list[Plain]:
    ours = contender(work, OURS)
    best = work["ceilings"][ours["dtype"]]
    name = f"{work['name']}: own FLOP/s ÷ {ours['dtype']} GEMM ceiling"
    return [figure(name, ours["flops_per_s"] / best, 0.92, most=False, bound=1.0)] if best else []


def _gram_figures(work: Plain) -> list[Plain]:
    gram, standard = contender(work, GRAM_FP32), contender(work, STANDARD_BF16)
    if "median_s" not in gram or "median_s" not in standard:
        return []
    name = f"{work['name']}: FP32 Gram"
    return [
        figure(
            f"{name} ÷ standard BF16 time", gram["median_s"] / standard["median_s"], 0.75, most=True
        ),
        figure(f"{name}, largest error", gram["gate"]["error"], 2e-3, most=True),
    ]


def _named(timings: Sequence[Timing], name: str) -> Timing:
    return next(timing for timing in timings if timing.name == name)
