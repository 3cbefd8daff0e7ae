"""What a run writes down as it goes: one JSONL line a record, and TensorBoard scalars."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from muonloom.errors import ConfigError, complaint
from muonloom.train.trainer import EvalRecord, History, StepRecord

_METRICS = "metrics.jsonl"


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


@dataclass(frozen=True, kw_only=True)
class LogEnd:
    """Where the log ended when the run was saved: what comes after it was written by steps that are lost.

    Attributes:
        step: the last one in it.
        nbytes: of `metrics.jsonl`.
    """

    step: int
    nbytes: int


class RunLog:
    """Writes `metrics.jsonl` and `tensorboard/` in the run's directory, anew or on from an end."""

    def __init__(
        self, directory: Path, *, tensorboard: bool, end: LogEnd | None = None, writes: bool = True
    ) -> None:
        """Open both.

        Args:
            directory: of the run.
            tensorboard: whether to write that too.
            end: what is to stay of an earlier log, once `read_history` has read it; None: nothing.
            writes: whether this rank does; another one opens nothing.
        """
        self._path = directory / _METRICS
        self._board: Any = None
        if not writes:
            self._lines: IO[str] | None = None
            return
        if end is not None:
            os.truncate(self._path, end.nbytes)
        self._lines = self._path.open("w" if end is None else "a", encoding="utf-8")
        if tensorboard:
            self._board = _summary_writer(directory / "tensorboard", end)

    def end(self, step: int) -> LogEnd:
        """Have all of it on the disk up to now, after `step`, and return where it ends."""
        if self._lines is None:
            return LogEnd(step=step, nbytes=0)
        os.fsync(self._lines.fileno())
        if self._board is not None:
            self._board.flush()
        return LogEnd(step=step, nbytes=self._path.stat().st_size)

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
        if self._lines is not None:
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
        if self._lines is not None:
            self._lines.write(dump_json(line) + "\n")
            self._lines.flush()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def _summary_writer(directory: Path, end: LogEnd | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard shows all event files of a directory as one curve: those of an earlier run must go,
    # and what this run wrote after it was saved is told to be void.
    if end is not None:
        return SummaryWriter(log_dir=str(directory), purge_step=end.step + 1)
    for stale in directory.glob("events.out.tfevents.*"):
        stale.unlink()
    return SummaryWriter(log_dir=str(directory))


def read_history(directory: Path, end: LogEnd) -> History:
    """Return what the log held at `end`.

    Raises:
        ConfigError: it no longer holds that.
    """
    path = directory / _METRICS
    history = History()
    try:
        with path.open("rb") as file:
            text = file.read(end.nbytes)
        for line in map(json.loads, text.splitlines()):
            kind = line.pop("kind")
            if kind in ("step", "eval"):
                # What is not finite was written as null.
                line["loss"] = math.nan if line["loss"] is None else line["loss"]
            if kind == "step":
                history.steps.append(StepRecord(**line))
            elif kind == "eval":
                history.evals.append(EvalRecord(**line))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad_log(path, f"a log that cannot be read ({error})", end) from None
    steps = [record.step for record in history.steps]
    if len(text) != end.nbytes or steps != list(range(1, end.step + 1)) or not history.evals:
        raise _bad_log(path, f"{len(steps)} steps in {len(text):,} bytes", end)
    return history


def _bad_log(path: Path, got: str, end: LogEnd) -> ConfigError:
    return ConfigError(
        complaint(
            str(path),
            got=got,
            wanted=f"the {end.step} steps in {end.nbytes:,} bytes that the run had when it was saved",
            remedy="Put the file back, or start anew by --set checkpoint.resume=false",
        )
    )
