"""What a run left behind, and ways to end it before its time."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import muonloom.checkpoint
import muonloom.train.run
from muonloom.checkpoint.files import DataFile
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.train.config_file import load_config
from muonloom.train.logs import RunLog, dump_json
from muonloom.train.run import TrainingRun, train
from muonloom.train.trainer import Trainer

_CLOCKS = ("seconds", "optimizer_seconds")


def quiet() -> Console:
    """Return a console that nobody sees."""
    return Console(file=io.StringIO(), width=100)


def execute(config: Path, *overrides: str, console: Console | None = None) -> dict[str, Any]:
    """Run to the end, in this process."""
    return TrainingRun(load_config(config, overrides), console=console or quiet()).execute()


# -- what is left ---------------------------------------------------------------------------------


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of the run's log, without what a clock said."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in _CLOCKS} for line in lines]


def saved_state(directory: Path) -> dict[str, Any]:
    """Return what the run's last checkpoint holds of model and optimizer."""
    path = muonloom.checkpoint.latest(directory / "checkpoints")
    assert path is not None
    reader = CheckpointReader(path)
    manifest = reader.manifest
    return {
        "step": manifest.step,
        "tensors": {key: _sha256(reader.read(key)) for key in manifest.tensors},
        "parameters": manifest.parameters,
        "options": manifest.options,
        "scheduler": reader.extra(0)["scheduler"],
        "random": {name: _sha256(state) for name, state in reader.extra(0)["random"].items()},
    }


def left_by(directory: Path) -> dict[str, Any]:
    """Return all that a finished run came to, but for times and paths."""
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["interrupted"] is False
    return {
        **saved_state(directory),
        "metrics": metrics(directory),
        **{key: summary[key] for key in ("loss", "completion", "layout", "data")},
        **{key: summary["training"][key] for key in ("steps", "tokens")},
    }


def _sha256(tensor: Tensor) -> str:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()


# -- ways to end ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The `call`-th call of something in a process, from 1, at which signals reach it."""

    where: str
    call: int
    signals: Sequence[signal.Signals] = (signal.SIGKILL,)


PLACES: dict[str, tuple[Any, str]] = {
    "step": (Trainer, "backward"),
    "evaluation": (Trainer, "evaluate"),
    "write": (DataFile, "write"),  # of a checkpoint
    "finish": (DataFile, "finish"),
    "rename": (Path, "replace"),
    "log": (RunLog, "_write"),
    "picture": (muonloom.train.run, "plot"),  # when training is over
}


def end_at(config: Path, overrides: Sequence[str], moment: Moment | None) -> int | None:
    """Run in a process of its own, up to a moment (None: to the end); return its exit code."""
    arguments = (config, tuple(overrides), moment)
    process = _processes.Process(target=_run_to, args=arguments)
    process.start()
    process.join()
    return process.exitcode


# Such processes begin with everything imported, and without the threads of this one.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["muonloom.train.run", "transformers.models.llama.modeling_llama", "matplotlib.figure"]
)


def _run_to(config: Path, overrides: tuple[str, ...], moment: Moment | None) -> None:
    if moment is not None:
        owner, name = PLACES[moment.where]
        setattr(owner, name, _ending(getattr(owner, name), moment))
    sys.exit(train(config, overrides, console=quiet()))


def _ending(original: Callable[..., Any], moment: Moment) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment.call:
            if moment.where == "log":
                _write_half(*args)
            for number in moment.signals:
                signal.raise_signal(number)
        return original(*args)

    return wrapped


def _write_half(log: RunLog, line: dict[str, Any]) -> None:
    log._lines.write(dump_json(line)[:20])
    log._lines.flush()
