"""What a run writes down as it goes: one JSONL line a record, and TensorBoard scalars."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from muonloom.train.trainer import EvalRecord, StepRecord


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Return standard JSON: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class RunLog:
    """Writes `metrics.jsonl` and `tensorboard/` in the run's directory, anew for each run."""

    def __init__(self, directory: Path, *, tensorboard: bool) -> None:
        self._lines = (directory / "metrics.jsonl").open("w", encoding="utf-8")
        self._board: Any = _summary_writer(directory / "tensorboard") if tensorboard else None

    def step(self, record: StepRecord) -> None:
        """Write a training step."""
        self._write({"kind": "step", **asdict(record)})
        self._scalar("train/loss", record.loss, record.step)
        if record.gradient_norm is not None:
            self._scalar("train/gradient_norm", record.gradient_norm, record.step)
        self._scalar("train/tokens_per_second", record.tokens / record.seconds, record.step)
        for algorithm, rate in record.learning_rates.items():
            self._scalar(f"learning_rate/{algorithm}", rate, record.step)

    def eval(self, record: EvalRecord) -> None:
        """Write a held-out loss."""
        self._write({"kind": "eval", **asdict(record)})
        self._scalar("held_out/loss", record.loss, record.step)

    def optimizer(self, step: int, report: dict[str, Any]) -> None:
        """Write `Muon.last_step` of `step`."""
        self._write({"kind": "optimizer", "step": step, **report})
        for kind, rms in report["update_rms"].items():
            self._scalar(f"update_rms/{kind}", rms, step)
        for kind, heads in report["heads"].items():
            for spread in ("update_spread", "momentum_spread"):
                if heads[spread] is not None:
                    self._scalar(f"heads/{spread}/{kind}", heads[spread], step)

    def close(self) -> None:
        """Flush and close both."""
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.write(dump_json(line) + "\n")
        self._lines.flush()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def _summary_writer(directory: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard shows all event files of a directory as one curve: those of an earlier run must go.
    for stale in directory.glob("events.out.tfevents.*"):
        stale.unlink()
    return SummaryWriter(log_dir=str(directory))
