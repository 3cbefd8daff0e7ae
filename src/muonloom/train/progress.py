"""The progress of a run on the terminal: a bar on a TTY, a line at each evaluation anywhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from muonloom.train.trainer import EvalRecord, StepRecord

_SMOOTHING = 0.95  # of the shown loss and speed; the logs hold the raw values


class RunProgress:
    """Context manager around the training loop."""

    def __init__(
        self, console: Console, *, steps: int, nats_per_byte: float, done: int = 0
    ) -> None:
        """Start where the run does.

        Args:
            console: where to draw.
            steps: of the whole run.
            nats_per_byte: the factor from a loss a token to a loss a byte.
            done: steps that were made before.
        """
        self._console = console
        self._scale = nats_per_byte
        self._steps = steps
        self._first = done + 1
        self._loss = 0.0
        self._rate = 0.0
        self._left_s = 0.0
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, figures="")

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        rate = record.tokens / record.seconds
        weight = 1 - _SMOOTHING if record.step > self._first else 1.0
        self._loss += weight * (record.loss * self._scale - self._loss)
        self._rate += weight * (rate - self._rate)
        self._left_s = (self._steps - record.step) * record.tokens / self._rate
        self._bar.update(
            self._task,
            completed=record.step,
            figures=f"loss {self._loss:.3f} · {self._rate:,.0f} tokens/s",
        )

    def eval(self, record: EvalRecord) -> None:
        """Show a held-out loss, with what a log file needs to follow a run."""
        self._console.print(
            f"step {record.step:>5}/{self._steps}  held-out {record.loss * self._scale:.3f}  "
            f"train {self._loss:.3f} nats/byte  {self._rate:,.0f} tokens/s  "
            f"ETA {self._left_s // 60:.0f}:{self._left_s % 60:02.0f}",
            highlight=False,
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
