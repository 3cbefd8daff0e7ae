"""The loop: batches, gradients, the optimizer's step, held-out loss; what it saw, as records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LRScheduler

import muonloom
from muonloom.dtensors import is_dtensor
from muonloom.train.config import TrainConfig
from muonloom.train.data import Corpus
from muonloom.train.team import Team
from muonloom.train.wrap import Wrapped


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Losses are nats a token, before the step; times are wall seconds."""

    step: int  # from 1
    loss: float
    learning_rates: dict[str, float]  # by algorithm
    gradient_norm: float | None  # before clipping; None where nothing is clipped
    tokens: int
    seconds: float
    optimizer_seconds: float


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Held-out loss after `step` steps, nats a token, on the run's fixed held-out sequences."""

    step: int
    loss: float


@dataclass(kw_only=True)
class History:
    """All that a run recorded, in order."""

    steps: list[StepRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return sum(record.tokens for record in self.steps)

    @property
    def seconds(self) -> float:
        """Wall seconds inside training steps."""
        return sum(record.seconds for record in self.steps)


@dataclass(frozen=True, kw_only=True)
class Observer:
    """What is told to whom while a run goes on.

    Attributes:
        on_step: after each step.
        on_eval: after each evaluation.
        stop: asked after each step, whether it was the last.
        save: told a step when all that belongs to it is done, and whether it is the last.
    """

    on_step: Callable[[StepRecord], None] = lambda record: None
    on_eval: Callable[[EvalRecord], None] = lambda record: None
    stop: Callable[[], bool] = lambda: False
    save: Callable[[int, bool], None] = lambda step, last: None


class Trainer:
    """Owns a model, its optimizer and its text; goes through the steps of a schedule.

    On several ranks each reads its share of every batch, and all call the same methods.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: muonloom.Muon,
        scheduler: LRScheduler,
        corpus: Corpus,
        config: TrainConfig,
        device: torch.device,
        wrapped: Wrapped | None = None,
        team: Team | None = None,
    ) -> None:
        self.model = model
        self._wrapped = Wrapped(model=model, forward=model) if wrapped is None else wrapped
        self._team = Team() if team is None else team
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.device = device
        self.history = History()
        self._corpus = corpus
        self._config = config
        self._windows = corpus.held_out_windows(config.eval.sequences)

    def run(self, observer: Observer) -> History:
        """Train on to the last step, or to the first after which `observer.stop()` is true.

        It goes on after the last step of `history`. A run that is stopped saves before it evaluates, since
        it may have little time left; the evaluation is made up for when it goes on.
        """
        done, steps = len(self.history.steps), self._config.schedule.steps
        if done and self.history.evals[-1].step < done:
            self._evaluate_if_due(done, observer)
        for step in range(done + 1, steps + 1):
            record = self._timed_step(step)
            self.history.steps.append(record)
            observer.on_step(record)
            stopped = observer.stop()
            if not stopped:
                self._evaluate_if_due(step, observer)
            observer.save(step, stopped or step == steps)
            if stopped:
                break
        return self.history

    def _evaluate_if_due(self, step: int, observer: Observer) -> None:
        every = self._config.eval.every
        if every and step % every == 0:
            evaluation = EvalRecord(step=step, loss=self.evaluate(self._windows))
            self.history.evals.append(evaluation)
            observer.on_eval(evaluation)

    def _timed_step(self, step: int) -> StepRecord:
        rates = {
            str(group["algorithm"]): float(group["lr"]) for group in self.optimizer.param_groups
        }
        begin = time.perf_counter()
        loss = self._team.mean(self.backward(step))
        norm = self._clip()
        self._synchronize()
        before = time.perf_counter()
        self.optimizer.step()
        self._synchronize()
        after = time.perf_counter()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        schedule = self._config.schedule
        return StepRecord(
            step=step,
            loss=loss,
            learning_rates=rates,
            gradient_norm=norm,
            tokens=schedule.batch_size * schedule.accumulate * self._corpus.sequence_length,
            seconds=time.perf_counter() - begin,
            optimizer_seconds=after - before,
        )

    def backward(self, step: int) -> float:
        """Accumulate the gradient of step `step` (from 1) in `.grad`.

        Returns:
            This rank's part of the mean loss: the mean of all parts is that of the whole batch.
        """
        schedule = self._config.schedule
        total = torch.zeros((), device=self.device)
        rows = self._corpus.train_batch(
            seed=self._config.run.seed, step=step, rows=schedule.batch_size * schedule.accumulate
        )
        for number, part in enumerate(torch.split(rows, schedule.batch_size), start=1):
            own = self._team.share(part)
            # Ranks' gradients are averaged, and one may have a row less than another.
            divisor = schedule.accumulate * (len(part) / (self._team.size * len(own)))
            with self._wrapped.accumulating(is_last=number == schedule.accumulate):
                with self._autocast():
                    loss, auxiliary = self._losses(self._wrapped.forward, own.to(self.device))
                torch.autograd.backward((loss + auxiliary) / divisor)
            total += loss.detach().float() / divisor
        return float(total)

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:
        """Return the mean loss, nats a token, on int64 `windows` `(rows, sequence_length + 1)`."""
        self.model.eval()
        total = 0.0
        for part in torch.split(windows, self._config.schedule.batch_size):
            own = self._team.share(part)
            # A forward of a sharded model needs all ranks, also those without a row of the last part.
            rows = own if len(own) else part[:1]
            with self._autocast():
                loss, _ = self._losses(self.model, rows.to(self.device))
            total += float(loss) * len(own)
        self.model.train()
        return self._team.sum(total) / len(windows)

    def _losses(self, model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cross entropy, the model's own auxiliary loss or 0), FP32 scalars."""
        outputs = model(input_ids=rows[:, :-1], use_cache=False)
        loss = cross_entropy(outputs.logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        auxiliary: Any = getattr(outputs, "aux_loss", None)
        if auxiliary is None:
            return loss, loss.new_zeros(())
        return loss, auxiliary * getattr(self.model.config, "router_aux_loss_coef", 0.0)

    def _clip(self) -> float | None:
        """Clip to `schedule.clip_norm` (0: never); return the norm before."""
        limit = self._config.schedule.clip_norm
        if not limit:
            return None
        norm = clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if is_dtensor(norm) else norm)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self._config.model.autocast
        ):
            yield

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            # Not the whole device: what is stored and loaded ahead may go on beside the next forward.
            torch.cuda.current_stream(self.device).synchronize()
