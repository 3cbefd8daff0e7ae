"""What stays of a run in its directory: `summary.json`, the picture, the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from muonloom.errors import ConfigError, complaint
from muonloom.train.logs import dump_json
from muonloom.train.plots import plot_run
from muonloom.train.tokens import Tokenizer
from muonloom.train.trainer import History


def plot(path: Path, summary: dict[str, Any], history: History) -> None:
    """Write the run's curves, in nats a byte, over its baselines."""
    loss, model, machine = summary["loss"], summary["model"], summary["machine"]
    title = (
        f"{summary['name']}: {model['class']}, {model['parameters']:,} parameters, "
        f"{summary['config']['optim']['algorithm']} · {machine['title']}"
    )
    plot_run(
        path,
        title=title,
        train=[(record.step, record.loss * loss["per_token"]) for record in history.steps],
        held_out=loss["curve"],
        final=loss["held_out"],
        baselines=loss["baselines"],
    )


def save_model(
    model: nn.Module,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights as safetensors with their config.json, and the tokenizer's files.

    Args:
        model: of Transformers.
        tokenizer: of the data.
        directory: to make.
        weights: by name; None: the model's own.
    """
    try:
        model.save_pretrained(directory, state_dict=weights)  # type: ignore[operator]
        tokenizer.save(directory)
    except OSError as error:
        raise ConfigError(
            complaint(
                "run.directory",
                got=f"{directory} ({error.strerror or error})",
                wanted="room for the trained model",
                remedy="Make room, or set run.save_model = false.",
            )
        ) from None


def write_summary(directory: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Write `summary.json`, whole or not at all; return it with the list of the run's files."""
    names = sorted(path.name for path in directory.iterdir() if path.suffix != ".partial")
    files = {"directory": str(directory), "names": sorted({*names, "summary.json"})}
    complete = summary | {"files": files}
    partial = directory / "summary.json.partial"
    partial.write_text(dump_json(complete, indent=1) + "\n", encoding="utf-8")
    partial.replace(directory / "summary.json")
    return complete
