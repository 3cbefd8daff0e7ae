"""How far BF16 momentum leads away from FP32 momentum: ``python -m muonloom.bench.momentum``.

Two optimizers that differ in ``momentum_dtype`` alone start from the same weights, on two problems:

- *given gradients*: both get the same Gaussian gradients, whatever their weights are. What is measured is
  rounding alone.
- *regression*: each follows the gradient of its own weights, on the same mini-batches of a noisy linear
  problem whose inputs have singular values from 1 down to 1/100.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from muonloom.bench.machine import num_threads
from muonloom.bench.text import between_markers, number

ROWS, COLUMNS, SAMPLES, NOISE = 96, 64, 128, 0.1
STEPS = (1, 10, 100, 1000)
SEEDS = (0, 1)
LR = 1e-2
_HELD_OUT, _TEACHER = 0, 999_999  # of the random streams that no step draws from
BEGIN, END = "<!-- momentum:begin -->", "<!-- momentum:end -->"

Gradient = Callable[[int, Tensor], Tensor]
"""From the step and the weight (ROWS, COLUMNS) to its gradient."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far BF16 is from FP32 after `step` steps.

    Attributes:
        momentum: ||M16 - M32|| / ||M32||.
        weights: ||W16 - W32|| / ||W32 - W0||, the part of the way that they do not share.
        losses: of FP32 and of BF16; None where the problem has no loss.
    """

    problem: str
    seed: int
    step: int
    momentum: float
    weights: float
    losses: tuple[float, float] | None


class Regression:
    """``||X Wᵀ - Y||² / (2 · samples)`` on mini-batches; FP32."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._teacher = torch.randn(ROWS, COLUMNS, generator=_generator(seed, _TEACHER))
        self._spectrum = torch.logspace(0, -2, COLUMNS)

    def gradient(self, step: int, weight: Tensor) -> Tensor:
        """Return the gradient on the batch of `step`, (ROWS, COLUMNS)."""
        inputs, errors = self._errors(step, weight)
        return errors.mT @ inputs / SAMPLES

    def loss(self, weight: Tensor) -> float:
        """Return the loss on a batch that no step saw."""
        _, errors = self._errors(_HELD_OUT, weight)
        return float(errors.square().sum() / (2 * SAMPLES))

    def _errors(self, step: int, weight: Tensor) -> tuple[Tensor, Tensor]:
        generator = _generator(self._seed, step)
        inputs = torch.randn(SAMPLES, COLUMNS, generator=generator) * self._spectrum
        noise = NOISE * torch.randn(SAMPLES, ROWS, generator=generator)
        return inputs, inputs @ (weight - self._teacher).mT - noise


def given_gradients(seed: int) -> Gradient:
    """Return Gaussian gradients that depend on the step alone."""
    return lambda step, _: torch.randn(ROWS, COLUMNS, generator=_generator(seed, step))


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


def trajectory(
    gradient: Gradient, *, seed: int, momentum_dtype: torch.dtype, steps: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weight and momentum, both FP32, before the first step and after each of `steps`."""
    generator = torch.Generator().manual_seed(seed)
    weight = Parameter(torch.randn(ROWS, COLUMNS, generator=generator))
    optimizer = muonloom.Muon(
        [("weight", weight)],
        lr=LR,
        adjust_lr_fn="match_rms_adamw",
        momentum_dtype=momentum_dtype,
        ns_compute_dtype=torch.float32,
    )
    yield weight.detach().clone(), torch.zeros(ROWS, COLUMNS)
    for step in range(1, max(steps) + 1):
        weight.grad = gradient(step, weight.detach())
        optimizer.step()
        if step in steps:
            momentum = optimizer.state[weight]["momentum_buffer"]
            yield weight.detach().clone(), momentum.to(torch.float32, copy=True)


def distances(problem: str, seed: int, steps: Sequence[int] = STEPS) -> list[Distance]:
    """Run both optimizers on a problem, ``"given gradients"`` or ``"regression"``."""
    regression = Regression(seed) if problem == "regression" else None
    gradient = given_gradients(seed) if regression is None else regression.gradient
    (start, _), *wide = trajectory(gradient, seed=seed, momentum_dtype=torch.float32, steps=steps)
    _, *narrow = trajectory(gradient, seed=seed, momentum_dtype=torch.bfloat16, steps=steps)
    return [
        Distance(
            problem=problem,
            seed=seed,
            step=step,
            momentum=_relative(m16 - m32, m32),
            weights=_relative(w16 - w32, w32 - start),
            losses=None if regression is None else (regression.loss(w32), regression.loss(w16)),
        )
        for step, (w32, m32), (w16, m16) in zip(steps, wide, narrow, strict=True)
    ]


def _relative(difference: Tensor, whole: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(whole))


def markdown(found: Sequence[Distance]) -> list[str]:
    """Return the lines of the table: a row a problem and step, the seeds side by side."""
    lines = [
        "| problem | step | momentum apart | weights apart, of the way gone "
        "| loss with FP32 momentum | with BF16 |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, int], list[Distance]] = {}
    for distance in found:
        rows.setdefault((distance.problem, distance.step), []).append(distance)
    for (problem, step), seeds in rows.items():
        losses = [seed.losses or (None, None) for seed in seeds]
        cells = [
            _cell([seed.momentum for seed in seeds], 2),
            _cell([seed.weights for seed in seeds], 2),
            _cell([pair[0] for pair in losses], 5),
            _cell([pair[1] for pair in losses], 5),
        ]
        lines.append(f"| {problem} | {step} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float | None], digits: int) -> str:
    return ", ".join(number(value, digits) for value in values) if None not in values else "–"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the table into a Markdown file between its markers."""
    parser = argparse.ArgumentParser(prog="python -m muonloom.bench.momentum", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/host-placement.md"))
    options = parser.parse_args(argv)
    try:
        text = options.out.read_text(encoding="utf-8")
        _into(text, [])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with num_threads(1):
        found = [
            distance
            for problem in ("given gradients", "regression")
            for seed in SEEDS
            for distance in distances(problem, seed)
        ]
    lines = markdown(found)
    print("\n".join(lines))
    options.out.write_text(_into(text, lines), encoding="utf-8")
    return 0


def _into(text: str, lines: Sequence[str]) -> str:
    return between_markers(text, "\n".join(lines), begin=BEGIN, end=END, owner="--out")


if __name__ == "__main__":
    sys.exit(main())
