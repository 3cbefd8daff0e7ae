"""The accuracy tables of ``docs/accuracy.md``: ``python -m muonloom.bench.accuracy``.

One table a coefficient set, method and dtype, over condition numbers and aspect ratios; and the
gate that every choice of ``method="auto"`` has to pass, on five spectra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muonloom.bench.gate import Gate, GateResult, polynomial
from muonloom.bench.text import between_markers
from muonloom.math import (
    Recipe,
    expand_coefficients,
    iterate,
    make_recipe,
    normalize_,
    ns_coefficient_names,
    workspace_numel,
)

CONDITIONS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
ASPECTS = (1, 2, 4, 8, 16, 32)
METHODS = ("standard", "gram")
DTYPES = (torch.bfloat16, torch.float32)
GATE_SHAPES = ((64, 64), (64, 96), (64, 128), (64, 192), (192, 64), (64, 512), (32, 1024))
STEPS = 5
BEGIN, END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What one recipe makes of one matrix.

    Attributes:
        condition: largest ÷ smallest singular value of the input, evenly spread on a log scale.
        aspect: long side ÷ short side.
        smallest: singular value of the result, over the input's singular directions.
        largest: singular value of the result.
        error: ||Y - exact|| / ||exact||, exact being the same polynomial in FP64.
        to_polar: ||Y - UVᵀ|| / ||UVᵀ||.
    """

    condition: float
    aspect: int
    smallest: float
    largest: float
    error: float
    to_polar: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice of ``"auto"``, and how it does on every spectrum."""

    coefficients: str
    shape: tuple[int, int]
    fast_bfloat16: bool
    recipe: Recipe
    results: list[GateResult]


def run_recipe(x: Tensor, recipe: Recipe) -> Tensor:
    """Return the recipe's result on FP32 ``x`` (count, rows, columns), in the compute dtype."""
    start = torch.empty_like(x, dtype=recipe.compute_dtype)
    normalize_(x.clone(), out=start, like_torch=recipe.like_torch)
    scratch = start.new_empty(workspace_numel(x.shape[0], x.shape[1], x.shape[2], recipe))
    return iterate(start, recipe, scratch)


def accuracy_table(
    coefficients: str,
    method: str,
    compute_dtype: torch.dtype,
    *,
    conditions: Sequence[float] = CONDITIONS,
    aspects: Sequence[int] = ASPECTS,
    short: int = 64,
    seed: int = 0,
) -> list[Accuracy]:
    """Return one measurement for each condition number and aspect ratio, aspects innermost.

    Args:
        coefficients: a name of `muonloom.ns_coefficient_names`.
        method: ``"standard"`` or ``"gram"``.
        compute_dtype: BF16, FP32 or FP64.
        conditions: largest ÷ smallest singular value.
        aspects: long ÷ short side.
        short: short side.
        seed: of the singular vectors.
    """
    measured = []
    for condition in conditions:
        for aspect in aspects:
            generator = torch.Generator().manual_seed(seed)
            left, right = (
                torch.linalg.qr(torch.randn(side, short, generator=generator).double()).Q
                for side in (short, aspect * short)
            )
            s = torch.logspace(0, -float(torch.tensor(condition).log10()), short).double()
            exact = (left * polynomial(s / s.norm(), _triples(coefficients))) @ right.mT
            recipe = make_recipe(
                short,
                aspect * short,
                device_type="cpu",
                ns_steps=STEPS,
                ns_coefficients=coefficients,
                method=method,
                compute_dtype=compute_dtype,
            )
            y = run_recipe(((left * s) @ right.mT).float()[None], recipe)[0].double()
            singular = torch.linalg.svdvals(y)
            polar = left @ right.mT
            measured.append(
                Accuracy(
                    condition=condition,
                    aspect=aspect,
                    smallest=float(singular.min()),
                    largest=float(singular.max()),
                    error=float((y - exact).norm() / exact.norm()),
                    to_polar=float((y - polar).norm() / polar.norm()),
                )
            )
    return measured


def _triples(coefficients: str) -> tuple[tuple[float, float, float], ...]:
    return expand_coefficients(coefficients, STEPS)


def gate_choices(
    shapes: Sequence[tuple[int, int]] = GATE_SHAPES,
    names: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> Iterator[Choice]:
    """Judge what ``"auto"`` chooses for every shape and coefficient set, on both kinds of device.

    Args:
        shapes: (m, n) pairs.
        names: coefficient sets; None for all.
        seed: of the samples.
    """
    for m, n in shapes:
        gate = Gate(2, m, n, device=torch.device("cpu"), seed=seed)
        for name in ns_coefficient_names() if names is None else names:
            for fast_bfloat16 in (True, False):
                recipe = make_recipe(
                    m,
                    n,
                    device_type="cpu",
                    ns_steps=STEPS,
                    ns_coefficients=name,
                    fast_bfloat16=fast_bfloat16,
                )
                yield Choice(
                    coefficients=name,
                    shape=(m, n),
                    fast_bfloat16=fast_bfloat16,
                    recipe=recipe,
                    results=gate.judge(partial(run_recipe, recipe=recipe), _triples(name)),
                )


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float32: "FP32", torch.float64: "FP64"}[dtype]


def _grid(cells: list[list[str]], conditions: Sequence[float], aspects: Sequence[int]) -> list[str]:
    head = "| condition | " + " | ".join(f"aspect {aspect}" for aspect in aspects) + " |"
    lines = [head, "|---" * (len(aspects) + 1) + "|"]
    for condition, row in zip(conditions, cells, strict=True):
        lines.append(f"| {condition:.0e} | " + " | ".join(row) + " |")
    return lines


def accuracy_markdown(
    *, conditions: Sequence[float], aspects: Sequence[int], short: int, seed: int
) -> list[str]:
    """Return the lines of all accuracy tables: smallest–largest singular value, error, distance."""
    lines = []
    for name in ns_coefficient_names():
        for dtype in DTYPES:
            for method in METHODS:
                measured = accuracy_table(
                    name,
                    method,
                    dtype,
                    conditions=conditions,
                    aspects=aspects,
                    short=short,
                    seed=seed,
                )
                cells = [
                    f"{a.smallest:.2g}–{a.largest:.3f}, {a.error:.0e}, {a.to_polar:.2f}"
                    for a in measured
                ]
                wide = len(aspects)
                rows = [cells[i : i + wide] for i in range(0, len(cells), wide)]
                lines += ["", f"**`{name}`, {method}, {_dtype_name(dtype)}**", ""]
                lines += _grid(rows, conditions, aspects)
    return lines


def gate_markdown(choices: Sequence[Choice]) -> list[str]:
    """Return the lines of the gate table: the worst spectrum of each choice."""
    lines = [
        "",
        "| BF16 instructions | coefficients | shape | auto chooses | restarts | error ÷ standard BF16 "
        "| worst error | largest singular value (exact) | passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for choice in choices:
        worst = max(choice.results, key=lambda r: r.largest_singular_value)
        ratio = max(r.error_ratio for r in choice.results)
        error = max(r.error for r in choice.results)
        recipe = choice.recipe
        passed = all(r.passed for r in choice.results)
        lines.append(
            f"| {'yes' if choice.fast_bfloat16 else 'no'} | `{choice.coefficients}` "
            f"| {choice.shape[0]}×{choice.shape[1]} "
            f"| {recipe.method} {_dtype_name(recipe.compute_dtype)} "
            f"| {', '.join(map(str, recipe.restarts)) or '–'} | {ratio:.3f} | {error:.0e} "
            f"| {worst.largest_singular_value:.3f} ({worst.exact_largest_singular_value:.3f}) "
            f"| {'yes' if passed else '**no**'} |"
        )
    return lines


def _into(text: str, lines: Sequence[str]) -> str:
    return between_markers(text, "\n".join(lines), begin=BEGIN, end=END, owner="--out")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the tables into a Markdown file between its markers."""
    parser = argparse.ArgumentParser(prog="python -m muonloom.bench.accuracy", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/accuracy.md"))
    parser.add_argument("--short", type=int, default=64, help="short side of the matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three conditions, two aspects")
    options = parser.parse_args(argv)
    conditions: Sequence[float] = CONDITIONS
    aspects: Sequence[int] = ASPECTS
    shapes: Sequence[tuple[int, int]] = GATE_SHAPES
    if options.quick:
        conditions, aspects, shapes = (1e0, 1e3, 1e6), (1, 4), GATE_SHAPES[:1]
    try:
        text = options.out.read_text(encoding="utf-8")
        _into(text, [])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    choices = list(gate_choices(shapes, seed=options.seed))
    lines = ["### The gate, for every choice of auto", *gate_markdown(choices)]
    lines += ["", "### All methods"]
    lines += accuracy_markdown(
        conditions=conditions, aspects=aspects, short=options.short, seed=options.seed
    )
    options.out.write_text(_into(text, lines), encoding="utf-8")
    return 0 if all(r.passed for choice in choices for r in choice.results) else 1


if __name__ == "__main__":
    sys.exit(main())
