"""Loss curves as PNG."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, told apart with any colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"

Points = Sequence[tuple[int, float]]  # (step, nats a byte)


def plot_run(
    path: Path,
    *,
    title: str,
    train: Points,
    held_out: Points,
    final: float,
    baselines: Mapping[str, float],
) -> None:
    """Write one run's curves over its baselines.

    Args:
        path: the PNG.
        title: stands above the axes.
        train: loss of each step's own batch.
        held_out: loss on the held-out sequences of the run's evaluations.
        final: loss on all the held-out sequences that the report counts.
        baselines: by name, drawn as horizontal lines.
    """
    figure, axes = _axes(title)
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=BLUE, linewidth=1.6, label="train")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        axes.plot(steps, losses, color=ORANGE, marker="o", markersize=4, label="held out")
        axes.plot(
            steps[-1:],
            [final],
            color=ORANGE,
            marker="*",
            markersize=13,
            linestyle="none",
            label=f"held out, in full: {final:.3f}",
        )
    _finish(figure, axes, path, baselines, [loss for _, loss in (*train, *held_out)])


def plot_comparison(
    path: Path,
    *,
    title: str,
    curves: Mapping[str, Points],
    baselines: Mapping[str, float],
    num_colors: int = 4,
) -> None:
    """Write the held-out curves of several runs, by label, over their common baselines.

    Of every `num_colors` curves (up to 4) each has a color of its own.
    """
    figure, axes = _axes(title)
    colors = itertools.cycle((BLUE, ORANGE, GREEN, GREY)[:num_colors])
    for (label, points), color in zip(curves.items(), colors, strict=False):
        steps, losses = zip(*points, strict=True)
        axes.plot(steps, losses, marker="o", markersize=4, linewidth=1.8, color=color, label=label)
    levels = [loss for points in curves.values() for _, loss in points]
    _finish(figure, axes, path, baselines, levels)


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average, corrected for its start."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(average / total)
    return result


def _axes(title: str) -> tuple[Any, Any]:
    # The object interface needs neither a display nor pyplot's global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a byte")
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _finish(
    figure: Any,
    axes: Any,
    path: Path,
    baselines: Mapping[str, float],
    losses: Sequence[float],
) -> None:
    for name, value in baselines.items():
        axes.axhline(value, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            f"{name} {value:.2f}",
            (1.005, value),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=GREY,
        )
    levels = [*baselines.values(), *losses]
    if levels:
        # The first steps fall from ln(vocabulary) and would flatten all that follows.
        top = max(baselines.values(), default=max(levels)) + 0.4
        axes.set_ylim(min(levels) - 0.15, max(min(top, max(levels) + 0.1), min(levels) + 0.1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)
