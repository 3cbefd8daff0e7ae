"""Do FP8 experts learn as BF16 ones do? ``python -m muonloom.bench.float8_training``.

The default run is repeated in BF16 with the experts as plain parameters and as FP8 data and scales, with
several seeds each. What is compared is the held-out loss at the end: the means, beside the pooled standard
deviation over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from muonloom.bench.text import write_between
from muonloom.train.config_file import load_config
from muonloom.train.logs import dump_json
from muonloom.train.plots import plot_comparison
from muonloom.train.run import TrainingRun

BEGIN, END = "<!-- float8-training:begin -->", "<!-- float8-training:end -->"
ARMS = {"BF16 experts": "parameter", "FP8 experts": "float8_block"}
_QUIET = ("run.proofs=false", "run.save_model=false", "run.tensorboard=false")


def run(config: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once; return the arm, the seed, the loss at the end and the curve."""
    loaded = load_config(
        config,
        [
            *_QUIET,
            "model.dtype=bfloat16",
            f"model.expert_weights={ARMS[arm]}",
            f"run.seed={seed}",
            f"run.name=float8-training-{ARMS[arm]}-{seed}",
            f"schedule.steps={steps}",
        ],
    )
    summary = TrainingRun(loaded, console=Console(quiet=True)).execute()
    loss = summary["loss"]
    return {
        "arm": arm,
        "seed": seed,
        "loss": loss["held_out"],
        "curve": loss["curve"],
        "baselines": loss["baselines"],
        "machine": summary["machine"],
    }


def spread(losses: dict[str, list[float]]) -> tuple[float, float]:
    """Return the difference of the two means, second less first, and the pooled standard deviation."""
    first, second = losses.values()
    pooled = statistics.fmean([statistics.variance(first), statistics.variance(second)]) ** 0.5
    return statistics.fmean(second) - statistics.fmean(first), pooled


def markdown(losses: dict[str, list[float]]) -> list[str]:
    """Return the lines of the table, and what they say."""
    difference, pooled = spread(losses)
    lines = ["| experts | held-out, nats a byte, by seed | mean |", "|---|---|---|"]
    for arm, values in losses.items():
        listed = ", ".join(f"{value:.4f}" for value in values)
        lines.append(f"| {arm} | {listed} | {statistics.fmean(values):.4f} |")
    lines += [
        "",
        f"The means differ by {difference:+.4f}: {abs(difference) / pooled:.1f} pooled standard deviations "
        f"(σ = {pooled:.4f}).",
    ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Train all, write the picture, its numbers beside it, and the table between its markers."""
    parser = argparse.ArgumentParser(
        prog="python -m muonloom.bench.float8_training", description=__doc__
    )
    parser.add_argument("--config", type=Path, default=Path("configs/default.toml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--out", type=Path, default=Path("docs/device-weights.md"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images/float8-experts.png"))
    options = parser.parse_args(argv)
    tasks = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
    with ProcessPoolExecutor(options.processes) as pool:
        futures = [pool.submit(run, options.config, *task, options.steps) for task in tasks]
        found = [future.result() for future in futures]
    losses = {arm: [one["loss"] for one in found if one["arm"] == arm] for arm in ARMS}
    lines = markdown(losses)
    print("\n".join(lines))
    plot_comparison(
        options.plot,
        title=f"held-out loss, {options.seeds} seeds each · {found[0]['machine']['title']}",
        curves={f"{one['arm']}, seed {one['seed']}": one["curve"] for one in found},
        baselines=found[0]["baselines"],
        num_colors=len(ARMS),
    )
    options.plot.with_suffix(".json").write_text(
        dump_json(found, indent=1) + "\n", encoding="utf-8"
    )
    write_between(options.out, lines, begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
