"""Curves of several configurations from the same seed, each at the best of a few learning rates.

    python -m muonloom.train.compare configs/default.toml configs/default-adamw.toml --out curves.png

Each configuration runs once per factor on its learning rates, one run after the other. Beside the
picture stands a JSON file of the same name with all curves, and a table is printed as Markdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from muonloom.errors import ConfigError
from muonloom.train.config import TrainConfig
from muonloom.train.config_file import load_config
from muonloom.train.logs import dump_json
from muonloom.train.plots import plot_comparison
from muonloom.train.run import TrainingRun

_QUIET = (
    *("run.proofs=false", "run.save_model=false", "run.tensorboard=false"),
    *("checkpoint.every=0", "checkpoint.resume=false"),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison."""

    name: str  # of the configuration
    lr: float
    summary: dict[str, Any]

    @property
    def loss(self) -> float:
        """Held-out loss at the end, nats a byte."""
        return float(self.summary["loss"]["held_out"])

    @property
    def label(self) -> str:
        """What the legend says."""
        return f"{self.name}, lr {self.lr:g}: {self.loss:.3f}"


def scaled(config: TrainConfig, factor: float) -> TrainConfig:
    """Return `config` with its learning rates times `factor`, and a run of its own name."""
    rates = {
        key: getattr(config.optim, key) * factor
        for key in ("lr", "adamw_lr")
        if getattr(config.optim, key) is not None
    }
    name = f"{config.run.name}-lr-{rates['lr']:g}"
    return config.model_copy(
        update={
            "optim": config.optim.model_copy(update=rates),
            "run": config.run.model_copy(update={"name": name}),
        }
    )


def run_trials(config: TrainConfig, factors: list[float], console: Console) -> list[Trial]:
    """Run `config` at each factor on its learning rates."""
    trials = []
    for factor in factors:
        variant = scaled(config, factor)
        summary = TrainingRun(variant, console=console).execute()
        if summary["interrupted"]:
            raise KeyboardInterrupt
        trials.append(Trial(name=config.run.name, lr=variant.optim.lr, summary=summary))
    return trials


def best(trials: list[Trial]) -> Trial:
    """Return the trial of the lowest held-out loss."""
    return min(trials, key=lambda trial: trial.loss)


def table(trials: list[Trial]) -> str:
    """Return one line a trial, as Markdown."""
    lines = [
        "| configuration | lr | held-out, nats a byte | a step, ms | optimizer's share |",
        "|---|---|---|---|---|",
    ]
    for trial in trials:
        training = trial.summary["training"]
        lines.append(
            f"| {trial.name} | {trial.lr:g} | {trial.loss:.3f} | "
            f"{training['step_seconds'] * 1e3:.0f} | {training['optimizer_share']:.1%} |"
        )
    return "\n".join(lines)


def write(out: Path, trials: list[Trial], winners: list[Trial]) -> None:
    """Write the picture of the winners, and all trials as JSON beside it."""
    first = winners[0].summary
    plot_comparison(
        out,
        title=f"held-out loss, same seed and text, best of {len(trials) // len(winners)} "
        f"learning rates each · {first['machine']['title']}",
        curves={trial.label: trial.summary["loss"]["curve"] for trial in winners},
        baselines=first["loss"]["baselines"],
    )
    records = [_record(trial) for trial in trials]
    out.with_suffix(".json").write_text(dump_json(records, indent=1) + "\n", encoding="utf-8")


def _record(trial: Trial) -> dict[str, Any]:
    """Return what of a trial may be published: all but the paths of the machine it ran on."""
    config = dict(trial.summary["config"])
    seed = config.pop("run")["seed"]
    kept = {key: trial.summary[key] for key in ("machine", "training", "loss")}
    return {"name": trial.name, "lr": trial.lr, "seed": seed, **kept, "config": config}


def compare(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="TOML files.")],
    out: Annotated[Path, typer.Option(help="The PNG; a .json is written beside it.")],
    factors: Annotated[
        str, typer.Option(help="On the learning rates, separated by commas.")
    ] = "0.5,1,2",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For every run.")
    ] = None,
) -> None:
    """Compare configurations, each at the best of its learning rates."""
    console = Console()
    try:
        steps = [float(factor) for factor in factors.split(",")]
        loaded = [load_config(path, [*_QUIET, *(overrides or [])]) for path in configs]
        groups = [run_trials(config, steps, console) for config in loaded]
        out.parent.mkdir(parents=True, exist_ok=True)
    except (ConfigError, ValueError) as error:
        typer.echo(f"compare: {error}", err=True)
        raise typer.Exit(2) from None
    trials = [trial for group in groups for trial in group]
    write(out, trials, [best(group) for group in groups])
    print(table(trials))


if __name__ == "__main__":
    typer.run(compare)
