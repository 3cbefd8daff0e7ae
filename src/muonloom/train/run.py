"""One training run, from its configuration to its summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import muonloom
from muonloom.errors import ConfigError, complaint
from muonloom.train.agreement import settings_of
from muonloom.train.baselines import baselines
from muonloom.train.checkpoints import Resumed, RunCheckpoints, seed_rank
from muonloom.train.config import TrainConfig
from muonloom.train.config_file import load_config
from muonloom.train.data import Corpus, cut_windows, load_corpus
from muonloom.train.interrupt import StopOnSignal
from muonloom.train.launch import Launch
from muonloom.train.logs import RunLog
from muonloom.train.machine import choose_device, describe_machine
from muonloom.train.model import attach_experts, build_model, class_name
from muonloom.train.optim import build_layout, build_optimizer, make_optimizer, placement_of
from muonloom.train.progress import RunProgress
from muonloom.train.proofs import Bench, ProofRecord, choose_proofs, run_proofs
from muonloom.train.results import plot, save_model, write_summary
from muonloom.train.sample import Completion, choose_prompt, complete
from muonloom.train.schedule import make_scheduler
from muonloom.train.screen import ledger_line, show
from muonloom.train.summary import Measured, summarize
from muonloom.train.team import Team
from muonloom.train.together import train_together
from muonloom.train.trainer import EvalRecord, Observer, StepRecord, Trainer
from muonloom.train.wrap import Wrapped, wrap


def train(path: Path, overrides: Sequence[str] = (), *, console: Console) -> int:
    """Run `path` and show its last screen; return the process's exit code.

    It is 0, or 130 after Ctrl-C and 143 after SIGTERM. Where torchrun started several processes, they share
    the run, and errors are told and turned into an exit code here.

    Raises:
        ConfigError: what the user can put right, in one line.
        FloatingPointError: the training diverged.
    """
    launch = Launch.from_environment()
    if launch.size == 1 and not launch.is_launched:
        return _run(load_config(path, overrides), console, Team())
    return train_together(
        launch, lambda team, shown: _run(load_config(path, overrides), shown, team), console
    )


def _run(config: TrainConfig, console: Console, team: Team) -> int:
    run = TrainingRun(config, console=console, team=team)
    summary = run.execute()
    if team.is_first:
        show(console, summary)
    return run.exit_code


@dataclass(kw_only=True)
class _Parts:
    """What a run is made of, once its configuration is known to work."""

    device: torch.device
    corpus: Corpus
    model: nn.Module
    wrapped: Wrapped
    layout: muonloom.Layout
    optimizer: muonloom.Muon
    trainer: Trainer
    checkpoints: RunCheckpoints
    resumes_from: Path | None


class TrainingRun:
    """Goes once through all phases of a run, and times them."""

    def __init__(self, config: TrainConfig, *, console: Console, team: Team | None = None) -> None:
        self.directory = Path(config.run.directory) / config.run.name
        self.exit_code = 0
        self._config = config
        self._console = console
        self._team = Team() if team is None else team
        self._seconds: dict[str, float] = {}

    def execute(self) -> dict[str, Any]:
        """Train, measure, write the run's directory; return the summary."""
        with self._phase("set-up"):
            parts = self._prepare()
            self._team.on_first(self._make_directory)
        with self._phase("baselines"):
            ladder = self._team.on_first(lambda: self._baselines(parts.corpus))
        with self._phase("before"):
            before = self._first_loss(parts)
            prompt, completion = self._first_completion(parts)
        self._introduce(parts, ladder)
        with self._phase("training"):
            resumed, interrupted = self._train(parts, before)
        with self._phase("evaluation"):
            windows = parts.corpus.held_out_windows(self._final_sequences(interrupted))
            after = parts.trainer.evaluate(windows)
            completion = completion and replace(completion, after=self._complete(parts, prompt))
            last_step, memory = _report(parts, resumed), self._ledger(parts)
        with self._phase("proofs"):
            proofs = [] if interrupted or not self._config.run.proofs else self._proofs(parts)
        scale = 1 / parts.corpus.bytes_per_token
        measured = Measured(
            before=parts.trainer.history.evals[0].loss * scale,
            after=after * scale,
            evaluated_bytes=windows[:, 1:].numel() * parts.corpus.bytes_per_token,
            baselines=ladder,
            completion=completion,
            last_step=last_step,
            memory=memory,
            proofs=proofs,
            seconds=self._seconds,
            interrupted=interrupted,
            resumed_from=None if resumed is None else resumed.step,
        )
        return self._finish(parts, measured)

    # -- phases -------------------------------------------------------------------------------------

    def _prepare(self) -> _Parts:
        config = self._config
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        device = choose_device(config.run.device, self._team.local_rank)
        self._team.begin(config.parallel, device)
        _check_rows(config, self._team.size)
        corpus = load_corpus(config.data)
        torch.manual_seed(config.run.seed)
        model = build_model(
            config.model,
            vocabulary=corpus.tokenizer.vocabulary,
            sequence_length=corpus.sequence_length,
            device=device,
        )
        if not self._team.is_first:
            seed_rank(config.run.seed, rank=self._team.rank)  # the first draws as one alone does
        settings = settings_of(config, corpus, device)
        self._team.check_same(settings)
        checkpoints = RunCheckpoints(self.directory, config, settings=settings, team=self._team)
        resumes_from = checkpoints.find()
        engine = attach_experts(model, config.model)
        layout = build_layout(model, config.optim)
        wrapped = wrap(model, config, team=self._team, device=device)
        optimizer = build_optimizer(model, layout, config.optim, engine)
        trainer = Trainer(
            model=model,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, config.schedule),
            corpus=corpus,
            config=config,
            device=device,
            wrapped=wrapped,
            team=self._team,
        )
        return _Parts(
            device=device,
            corpus=corpus,
            model=model,
            wrapped=wrapped,
            layout=layout,
            optimizer=optimizer,
            trainer=trainer,
            checkpoints=checkpoints,
            resumes_from=resumes_from,
        )

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                complaint(
                    "run.directory",
                    got=f"{self.directory} ({error.strerror})",
                    wanted="a directory that can be written",
                    remedy="Choose another by --set run.directory=PATH",
                )
            ) from None

    def _baselines(self, corpus: Corpus) -> dict[str, float]:
        width, limit = corpus.sequence_length + 1, self._config.eval.final_sequences
        held_out = corpus.held_out.text
        windows = cut_windows(held_out, min(width, len(held_out)), limit)
        return baselines(corpus.train.text, held_out, windows=windows)

    def _first_loss(self, parts: _Parts) -> float:
        windows = parts.corpus.held_out_windows(self._config.eval.sequences)
        try:
            return parts.trainer.evaluate(windows)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            self._team.raise_if_lost(error)
            # Sizes that do not go together show only when the model's own code multiplies them.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                complaint(
                    "model",
                    got=f"a model whose forward fails ({reason[0]})",
                    wanted="one that runs on this device",
                    remedy="Check model.config, model.experts, model.attention and model.dtype.",
                )
            ) from None

    def _first_completion(self, parts: _Parts) -> tuple[Tensor, Completion | None]:
        prompt = choose_prompt(parts.corpus, self._config.eval.prompt_tokens)
        if not self._config.eval.sample_tokens:
            return prompt, None
        text = parts.corpus.tokenizer.decode(prompt.numpy())
        return prompt, Completion(prompt=text, before=self._complete(parts, prompt))

    def _complete(self, parts: _Parts, prompt: Tensor) -> str:
        tokens = complete(
            parts.model,
            prompt,
            num_tokens=self._config.eval.sample_tokens,
            window=parts.corpus.sequence_length,
            temperature=self._config.eval.temperature,
            seed=self._config.run.seed,
            device=parts.device,
        )
        return parts.corpus.tokenizer.decode(tokens.numpy())

    def _introduce(self, parts: _Parts, ladder: dict[str, float]) -> None:
        size = sum(parameter.numel() for parameter in parts.model.parameters())
        figures = ", ".join(f"{name} {value:.3f}" for name, value in ladder.items())
        self._console.print(
            f"{class_name(parts.model)}, {size:,} parameters on {parts.device}{self._team}; "
            f"{self._config.optim.algorithm}, {self._config.schedule.steps} steps → "
            f"{self.directory}\n{ledger_line(parts.optimizer.memory())}\n"
            f"held-out nats a byte to compare with: {figures}",
            highlight=False,
            soft_wrap=True,
        )

    def _train(self, parts: _Parts, before: float) -> tuple[Resumed | None, bool]:
        """Train; return where the run went on from, and whether a signal ended it."""
        resumed = self._begin(parts)
        progress = RunProgress(
            self._console,
            steps=self._config.schedule.steps,
            nats_per_byte=1 / parts.corpus.bytes_per_token,
            done=0 if resumed is None else resumed.step,
        )
        stop = StopOnSignal(
            lambda received: progress.say(
                f"Stopping after this step ({received.name}); once more stops at once."
            ),
            team=self._team,
        )
        log = RunLog(
            self.directory,
            tensorboard=self._config.run.tensorboard,
            end=None if resumed is None else resumed.log_end,
            writes=self._team.is_first,
        )

        def on_step(record: StepRecord) -> None:
            log.step(record)
            progress.step(record)

        def on_eval(record: EvalRecord) -> None:
            log.eval(record)
            log.optimizer(record.step, _report(parts, resumed))
            progress.eval(record)

        def save(step: int, last: bool) -> None:
            parts.checkpoints.save(step, last, trainer=parts.trainer, log_end=log.end)
            if stop.requested and self._config.checkpoint.every:
                progress.say(f"Saved after step {step}; the same command goes on from there.")

        with log, progress, stop:
            if resumed is None:
                first = EvalRecord(step=0, loss=before)
                parts.trainer.history.evals.append(first)
                log.eval(first)
            parts.trainer.run(
                Observer(on_step=on_step, on_eval=on_eval, stop=stop.agreed, save=save)
            )
        self.exit_code = stop.exit_code
        return resumed, stop.requested

    def _begin(self, parts: _Parts) -> Resumed | None:
        """Go on from a checkpoint where there is one, or make room for a new run."""
        if parts.resumes_from is None:
            parts.checkpoints.clear()
            return None
        resumed = parts.checkpoints.load(parts.resumes_from, parts.trainer)
        self._console.print(
            f"resumed from step {resumed.step} ({parts.resumes_from})",
            highlight=False,
            soft_wrap=True,
        )
        return resumed

    def _final_sequences(self, interrupted: bool) -> int:
        return self._config.eval.sequences if interrupted else self._config.eval.final_sequences

    def _proofs(self, parts: _Parts) -> list[ProofRecord]:
        steps, optim = self._config.schedule.steps, self._config.optim
        placement = placement_of(optim)
        return run_proofs(
            Bench(
                model=parts.model,
                optimizer=parts.optimizer,
                backward=lambda: parts.trainer.backward(steps + 1),
                rebuild=lambda model, place: make_optimizer(
                    model, parts.layout, optim, placement=place
                ),
                host=muonloom.HostPlacement() if isinstance(placement, str) else placement,
                team=self._team,
                num_parts=parts.wrapped.num_parts,
            ),
            choose_proofs(
                can_copy=self._team.mode == "none"
                and self._config.model.expert_weights == "parameter",
                team=self._team,
                num_parts=parts.wrapped.num_parts,
            ),
        )

    def _ledger(self, parts: _Parts) -> dict[str, int]:
        """Return the bytes by place as they are in the middle of a step, gradients included."""
        parts.trainer.backward(self._config.schedule.steps + 1)
        memory = parts.optimizer.memory()
        parts.optimizer.zero_grad(set_to_none=True)
        return memory

    def _finish(self, parts: _Parts, measured: Measured) -> dict[str, Any]:
        with self._phase("writing"):
            summary = summarize(
                config=self._config,
                machine=describe_machine(parts.device),
                corpus=parts.corpus,
                model=parts.model,
                layout=parts.layout,
                optimizer=parts.optimizer,
                history=parts.trainer.history,
                measured=measured,
                team=self._team,
            )
            weights = parts.wrapped.weights() if self._config.run.save_model else None
            if self._team.is_first:
                self._write_results(parts, summary, weights)
        summary["seconds"] = dict(self._seconds)
        return write_summary(self.directory, summary) if self._team.is_first else summary

    def _write_results(
        self, parts: _Parts, summary: dict[str, Any], weights: Mapping[str, Tensor] | None
    ) -> None:
        plot(self.directory / "loss.png", summary, parts.trainer.history)
        if self._config.run.save_model:
            directory = self.directory / "model"
            save_model(parts.model, parts.corpus.tokenizer, directory, weights=weights)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - begin


def _check_rows(config: TrainConfig, size: int) -> None:
    if config.schedule.batch_size < size:
        raise ConfigError(
            complaint(
                "schedule.batch_size",
                got=config.schedule.batch_size,
                wanted=f"a sequence or more for each of {size} ranks",
                remedy="It counts the sequences of all ranks together; raise it, or start fewer.",
            )
        )


def _report(parts: _Parts, resumed: Resumed | None) -> dict[str, Any]:
    """Return what the last training step did, also where an earlier process made it."""
    report = dict(parts.optimizer.last_step)
    return report if report or resumed is None else dict(resumed.last_step)
