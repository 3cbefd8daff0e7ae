"""The tables and curves of the Muon Split document."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muonloom.bench.flops import standard_flops
from muonloom.bench.split_change import STEPS, Change
from muonloom.bench.text import between_markers
from muonloom.train.plots import BLUE, GREEN, ORANGE, Points, smoothed

# Of the same palette as the colours of the training curves.
PINK = "#CC79A7"
SEED_STYLES = ("-", "--", ":", "-.")
COLORS = {"whole": ORANGE, "k = 4": GREEN, "k = 1": BLUE, "k = 1, default triple": PINK}
KINDS = ("q_b_proj", "kv_b_proj")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What one run of the experiment recorded; lists hold one value a step.

    Attributes:
        variant: a key of the experiment's variants.
        seed: of weights and batches.
        losses: of each step's own batch, nats a byte.
        held_out: (step, nats a byte).
        update_spread: by kind, largest ÷ smallest update norm over heads, in the layer where it is largest.
        gradient_spread: the same of the gradient, as the optimizer got it.
        largest_logit: over layers, heads and tokens of the step's batch.
        ns_calls: batched Newton–Schulz calls of a step.
    """

    variant: str
    seed: int
    losses: list[float]
    held_out: list[tuple[int, float]]
    update_spread: dict[str, list[float]]
    gradient_spread: dict[str, list[float]]
    largest_logit: list[float]
    ns_calls: int


def replace_section(text: str, section: str, lines: Sequence[str]) -> str:
    """Return `text` with what stands between the markers of `section` replaced.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    return between_markers(text, "\n".join(lines), begin=begin, end=end, owner="--doc")


def experiment_table(curves: Sequence[Curves]) -> list[str]:
    """Return a Markdown table with one row a variant and seed."""
    lines = [
        "| variant | seed | held-out loss | training loss, last tenth | heads' gradients q_b, kv_b "
        "| heads' updates q_b: median (most) | heads' updates kv_b: median (most) "
        "| largest logit: most (last tenth) | NS calls |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(curves, key=lambda run: (list(COLORS).index(run.variant), run.seed)):
        updates = [_median_and_most(run.update_spread[kind]) for kind in KINDS]
        gradients = [f"{statistics.median(run.gradient_spread[kind]):.1f}" for kind in KINDS]
        logit = f"{max(run.largest_logit):.1f} ({statistics.fmean(_tail(run.largest_logit)):.1f})"
        cells = [
            run.variant,
            str(run.seed),
            f"{run.held_out[-1][1]:.3f}",
            f"{statistics.fmean(_tail(run.losses)):.3f}",
            ", ".join(gradients),
            *updates,
            logit,
            str(run.ns_calls),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _tail(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, len(values) // 10) :]


def _median_and_most(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4f} ({max(values):.4f})"


def change_table(changes: Sequence[Change]) -> list[str]:
    """Return a Markdown table with one row a polynomial and block size."""
    lines = [
        "| polynomial | heads a block | one step, all matrices | one step, least to most of a parameter "
        f"| {STEPS} steps, summed | first to last weights | the same, plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for change in changes:
        lines.append(
            f"| {change.polynomial} | {change.heads_per_block or 'whole'} | {change.total:.4f} "
            f"| {change.least:.4f} – {change.most:.4f} | {change.sum_of_steps:.3f} "
            f"| {change.end_to_end:.3f} | {change.end_to_end_square:.4f} |"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class UpProjection:
    """Rows a head, in one part or apart, and the columns of an MLA up-projection."""

    parts: tuple[int, ...]
    columns: int

    def flops(self, heads: int, heads_per_block: int, *, components: bool = False) -> int:
        """FLOPs of five standard iterations of all blocks."""
        parts = self.parts if components else (sum(self.parts),)
        blocks = heads // heads_per_block
        return blocks * sum(standard_flops(heads_per_block * p, self.columns) for p in parts)


GLM5_HEADS = 64
GLM5_Q_B = UpProjection(parts=(192, 64), columns=2048)  # nope, rope; q_lora_rank
GLM5_KV_B = UpProjection(parts=(192, 256), columns=512)  # nope, value; kv_lora_rank


def flops_table() -> list[str]:
    """Return a Markdown table of the FLOPs of GLM-5's up-projections, a layer, by block size."""
    lines = [
        "| heads a block | q_b_proj | kv_b_proj | both | whole ÷ this |",
        "|---|---|---|---|---|",
    ]
    whole = sum(p.flops(GLM5_HEADS, GLM5_HEADS) for p in (GLM5_Q_B, GLM5_KV_B))
    for k, components in ((64, False), (16, False), (4, False), (1, False), (1, True)):
        q_b, kv_b = (p.flops(GLM5_HEADS, k, components=components) for p in (GLM5_Q_B, GLM5_KV_B))
        label = "64 (whole)" if k == GLM5_HEADS else f"{k}{', components' if components else ''}"
        lines.append(
            f"| {label} | {q_b:.3g} | {kv_b:.3g} | {q_b + kv_b:.3g} | {whole / (q_b + kv_b):.1f} |"
        )
    return lines


def write_plots(directory: Path, curves: Sequence[Curves]) -> None:
    """Write the three figures; a line style is a seed."""
    figure, (train, held_out) = _figure("Loss, nats a byte", ("training, smoothed", "held out"))
    _draw(train, curves, lambda run: list(enumerate(smoothed(run.losses, 0.9), start=1)))
    _draw(held_out, curves, lambda run: run.held_out, marker="o", markersize=4)
    # All start alike, from ln(256); from there on the differences would not show.
    train.set_ylim(top=min(3.5, train.get_ylim()[1]))
    _save(figure, (train, held_out), directory / "split-loss.png")

    title = "Update norms of the 8 heads, largest ÷ smallest (log scale; dots: 1.02)"
    figure, panels = _figure(title, KINDS)
    for kind, panel in zip(KINDS, panels, strict=True):
        _draw(panel, curves, _spreads_of(kind))
        panel.set_yscale("log")
        panel.axhline(1.02, color="#777777", linewidth=1, linestyle=":", zorder=1)
    _plain_ticks(panels)
    _save(figure, panels, directory / "split-update-spread.png")

    title = "Largest attention logit (q·k·scaling) in each training batch, smoothed"
    figure, panels = _figure(title, ("",))
    _draw(panels[0], curves, lambda run: list(enumerate(smoothed(run.largest_logit, 0.8), start=1)))
    _save(figure, panels, directory / "split-largest-logit.png")


def _spreads_of(kind: str) -> Callable[[Curves], Points]:
    return lambda run: list(enumerate(run.update_spread[kind], start=1))


def _figure(title: str, panel_titles: Sequence[str]) -> tuple[Any, list[Any]]:
    # The object interface needs neither a display nor pyplot's global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    panels = list(figure.subplots(1, len(panel_titles), squeeze=False)[0])
    for panel, panel_title in zip(panels, panel_titles, strict=True):
        panel.set_title(panel_title, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.2)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, panels


def _draw(
    panel: Any, curves: Sequence[Curves], points: Callable[[Curves], Points], **style: Any
) -> None:
    for run in curves:
        steps, values = zip(*points(run), strict=True)
        panel.plot(
            steps,
            values,
            color=COLORS[run.variant],
            linestyle=SEED_STYLES[run.seed % len(SEED_STYLES)],
            linewidth=1.3,
            label=f"{run.variant}, seed {run.seed}",
            **style,
        )


def _plain_ticks(panels: Sequence[Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for panel in panels:
        panel.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_locator(NullLocator())


def _save(figure: Any, panels: Sequence[Any], path: Path) -> None:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)
