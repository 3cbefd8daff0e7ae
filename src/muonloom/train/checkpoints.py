"""The checkpoints of a run: when one is written, what stands in it, which one a run goes on from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import muonloom.checkpoint
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.errors import CheckpointError, ConfigError, complaint
from muonloom.train.agreement import check_agreement
from muonloom.train.config import TrainConfig
from muonloom.train.logs import LogEnd, read_history
from muonloom.train.team import Team
from muonloom.train.trainer import Trainer

FORMAT = 1  # of what a run adds to a checkpoint; raised when a key changes its meaning or goes
_STEP = re.compile(r"step-\d+")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on from.

    Attributes:
        step: the last one that was made.
        log_end: what of the log belongs to it.
        last_step: `Muon.last_step` of that step.
    """

    step: int
    log_end: LogEnd
    last_step: Mapping[str, Any]


class RunCheckpoints:
    """`checkpoints/` in a run's directory, with one directory a checkpoint: `step-000100`."""

    def __init__(
        self, directory: Path, config: TrainConfig, *, settings: Mapping[str, Any], team: Team
    ) -> None:
        """Write and read nothing yet.

        Args:
            directory: of the run.
            config: of the run.
            settings: what a run that goes on must agree with, from `settings_of`.
            team: the run's ranks; the first decides, and all save and load.
        """
        self.directory = directory / "checkpoints"
        self._run_directory = directory
        self._config = config.checkpoint
        self._settings = dict(settings)
        self._team = team
        self._handle: muonloom.checkpoint.SaveHandle | None = None

    # -- going on ------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """Return the checkpoint that this run goes on from.

        None where there is none, where ``checkpoint.resume`` is false, and where the run in this
        directory has finished: then a start is the start of a new one.

        Raises:
            ConfigError: it is of a run with other numbers, which this one would spoil.
            CheckpointError: it is damaged.
        """
        return self._team.on_first(self._find)

    def _find(self) -> Path | None:
        if not self._config.resume or self._has_finished() or not self.directory.is_dir():
            return None
        path = muonloom.checkpoint.latest(self.directory)
        if path is not None:
            with _says_where_to_go(path):
                extra = CheckpointReader(path).extra(0)
                _check_format(extra, path)
            check_agreement(extra["settings"], self._settings, path)
        return path

    def _has_finished(self) -> bool:
        try:
            text = (self._run_directory / "summary.json").read_text(encoding="utf-8")
            return json.loads(text)["interrupted"] is False
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def load(self, path: Path, trainer: Trainer) -> Resumed:
        """Bring all that a step depends on, and the history, to where they were saved at `path`.

        Raises:
            CheckpointError: it is damaged, or of another model.
            ConfigError: the run's log no longer holds the steps that were made.
        """
        with _says_where_to_go(path):
            first = CheckpointReader(path).extra(0)
            loaded = muonloom.checkpoint.load(
                path,
                model=trainer.model,
                optimizer=trainer.optimizer,
                verify=self._config.verify,
            )
        resumed = Resumed(
            step=loaded["step"],
            log_end=LogEnd(**first["log_end"]),
            last_step=first["last_step"],
        )
        history = read_history(self._run_directory, resumed.log_end)
        trainer.history.steps[:], trainer.history.evals[:] = history.steps, history.evals
        trainer.scheduler.load_state_dict(first["scheduler"])
        if self._team.is_first or first.get("ranks", 1) == self._team.size:
            _set_random_state(loaded["extra"]["random"], trainer.device)
        else:  # another rank's would have two ranks draw the same
            seed_rank(self._settings["run.seed"], resumed.step, rank=self._team.rank)
        return resumed

    def clear(self) -> None:
        """Remove what an earlier run left that would be taken for this one's: a new run begins."""
        self._team.on_first(self._clear)

    def _clear(self) -> None:
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if _STEP.fullmatch(path.name):
                    # First what makes it a checkpoint: one that is half removed must not be found.
                    (path / "manifest.json").unlink(missing_ok=True)
                    shutil.rmtree(path)
            (self.directory / "latest").unlink(missing_ok=True)
        # Last: as long as it is there, what is left of the checkpoints is not resumed.
        (self._run_directory / "summary.json").unlink(missing_ok=True)

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self, step: int, last: bool, *, trainer: Trainer, log_end: Callable[[int], LogEnd]
    ) -> None:
        """Write a checkpoint after `step` where one is due; the last step's is on the disk on return.

        To be called after each step: a save that failed beside the training ends it here.

        Raises:
            ConfigError: the disk would not take this one, or the one before.
        """
        every = self._config.every
        with _disk_takes_it(self.directory):
            if self._handle is not None and self._team.all(self._handle.done()):
                self._handle.result()
                self._handle = None
            if every and (last or step % every == 0):
                self._handle = self._write(step, last, trainer=trainer, log_end=log_end(step))

    def _write(
        self, step: int, last: bool, *, trainer: Trainer, log_end: LogEnd
    ) -> muonloom.checkpoint.SaveHandle | None:
        """Return what still writes."""
        self.directory.mkdir(exist_ok=True)
        size = self._config.extra_host_bytes
        handle = muonloom.checkpoint.save(
            self.directory / f"step-{step:06}",
            model=trainer.model,
            optimizer=trainer.optimizer,
            step=step,
            extra=self._extra(trainer, log_end),
            async_=self._config.asynchronous and not last,
            extra_host_bytes=size if isinstance(size, int) else None,  # or "auto"
            keep_last=self._config.keep_last,
        )
        if not last:
            return handle
        handle.result()
        return None

    def _extra(self, trainer: Trainer, log_end: LogEnd) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "ranks": self._team.size,
            "settings": self._settings,
            "scheduler": trainer.scheduler.state_dict(),
            "random": _random_state(trainer.device),
            "log_end": asdict(log_end),
            "last_step": json.loads(json.dumps(trainer.optimizer.last_step)),
        }


def seed_rank(*entropy: int, rank: int) -> None:
    """Have torch's generators draw on this rank what they draw on no other."""
    torch.manual_seed(int(np.random.SeedSequence([*entropy, rank]).generate_state(1)[0]))


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's generators; nothing else is drawn from one that goes on."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _check_format(extra: Any, path: Path) -> None:
    found = extra.get("format") if isinstance(extra, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            complaint(
                str(path),
                got="a checkpoint that `muonloom train` did not write"
                if found is None
                else f"a run's format {found}",
                wanted=f"a run's format {FORMAT}",
                remedy="Resume with the release that wrote it.",
            )
        )


@contextmanager
def _says_where_to_go(path: Path) -> Iterator[None]:
    """Add to what is wrong with a checkpoint what a user can do about the run."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(
            f"{error} To resume from the checkpoint before it, remove {path}; to start anew, "
            "--set checkpoint.resume=false"
        ) from None


@contextmanager
def _disk_takes_it(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = str(error.strerror or error)
        if str(directory) not in reason:
            wanted = "a disk that takes checkpoints"
            reason = complaint(str(directory), got=reason, wanted=wanted, remedy="Make room.")
        raise ConfigError(
            f"checkpoint: {reason} The next start goes on from the last one; checkpoint.every = 0 "
            "writes none."
        ) from None
