"""The ranks of a run: what they tell one another beside what torch and the optimizer send."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muonloom.collectives import Ranks
from muonloom.default_group import roll
from muonloom.errors import ConfigError, LostRanksError, complaint
from muonloom.train.config import ParallelConfig
from muonloom.train.launch import Launch

T = TypeVar("T")


class Team:
    """All ranks of a run, or the one process that it has.

    Args:
        launch: which process this is.
        store: of all of them.

    Attributes:
        rank: of this process.
        size: how many there are.
        mode: what `[parallel] mode` comes to, once `begin` was called.
    """

    def __init__(self, launch: Launch | None = None, store: dist.Store | None = None) -> None:
        self._launch = Launch() if launch is None else launch
        self._store = store
        self._met = time.monotonic()
        self.rank, self.size = self._launch.rank, self._launch.size
        self.mode = "none"

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what a run leaves."""
        return self.rank == 0

    @property
    def local_rank(self) -> int | None:
        """This rank among those of the machine; None for a process alone."""
        return None if self.size == 1 else self._launch.local_rank

    def __str__(self) -> str:
        """Return what a heading adds: " × 4 ranks (fsdp2)"."""
        return f" × {self.size} ranks ({self.mode})" if self.size > 1 else ""

    # -- beginning and end --------------------------------------------------------------------------

    def begin(self, config: ParallelConfig, device: torch.device) -> None:
        """Make the process group that `[parallel]` describes.

        Raises:
            ConfigError: a mode or a backend that these ranks cannot have.
            LostRanksError: not all of them come.
        """
        mode = self._mode(config)
        if mode == "none":
            return
        try:
            dist.init_process_group(
                _backend(config, device),
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=config.timeout_s),
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            got = f"not all of {self.size} ranks within {config.timeout_s:g} s ({reason})"
            remedy = "See the output of the others."
            raise LostRanksError(
                complaint("parallel", got=got, wanted="each to come", remedy=remedy)
            ) from error
        roll()  # which has to be there before a rank is lost
        self.mode, self._met = mode, time.monotonic()

    def _mode(self, config: ParallelConfig) -> str:
        mode = config.mode
        if mode == "auto":
            return "none" if self.size == 1 else "replicated"
        if mode == "none" and self.size > 1:
            got, wanted = f'"none" on {self.size} ranks', '"auto", "replicated", "fsdp2" or "hsdp"'
            raise _bad("mode", got, wanted, "Without it, each would make the same run.")
        if mode != "none" and not self._launch.is_launched:
            start = f"torchrun --nproc-per-node=N -m muonloom train CONFIG, or set mode = {_AUTO}"
            raise _bad(
                "mode", f'"{mode}" in one process', "ranks to share the run", f"Use {start}."
            )
        if config.replicas is not None and self.size % config.replicas:
            raise _bad(
                "replicas",
                config.replicas,
                f"a divisor of the number of ranks ({self.size})",
                "Each replica is spread over as many ranks as the others.",
            )
        return mode

    def end(self) -> None:
        """Leave the process group, together with all others."""
        if self.mode != "none":
            self._gather(0.0)
            dist.destroy_process_group()

    # -- ranks that are lost ------------------------------------------------------------------------

    @contextlib.contextmanager
    def losses_named(self) -> Iterator[None]:
        """Make errors of torch's own collectives what those of the optimizer are.

        Raises:
            LostRanksError: a collective inside failed; names the ranks that are missing.
        """
        try:
            yield
        except RuntimeError as error:
            self.raise_if_lost(error)
            raise

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise what a failed collective means, where `error` is one's."""
        if self.mode != "none" and _is_of_a_collective(error):
            with Ranks().named_losses("training", self._met):
                raise error

    def hurry(self) -> None:
        """Have this rank wait no longer than it must for ranks that are lost: it is about to be killed."""
        if self.mode != "none":
            roll().hurry()

    def leave(self) -> None:
        """Have the others not wait for this rank, which ends by an error of its own."""
        if self.mode != "none":
            roll().leave()

    # -- what ranks tell one another ----------------------------------------------------------------

    def _gather(self, value: float) -> list[float]:
        """Return what all ranks gave, by rank."""
        if self.size == 1:
            return [value]
        message = torch.frombuffer(bytearray(struct.pack("d", value)), dtype=torch.uint8)
        rows = Ranks().gather_small(message)
        self._met = time.monotonic()
        return [struct.unpack("d", bytes(row.tolist()))[0] for row in rows]

    def sum(self, value: float) -> float:
        """Return the sum over ranks, the same number on all of them; FP64."""
        values = self._gather(value)
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

    def mean(self, value: float) -> float:
        """Return the mean over ranks, the same number on all of them; FP64."""
        return self.sum(value) / self.size

    def largest(self, value: int) -> int:
        """Return the largest number that a rank gave."""
        return int(max(self._gather(float(value))))

    def all(self, value: bool) -> bool:
        """Whether it is so on all ranks."""
        return all(self._gather(float(value)))

    def gather(self, value: T) -> list[T]:
        """Return what all ranks gave, by rank; of what can be pickled."""
        if self.size == 1:
            return [value]
        found: list[T] = Ranks().gather_objects(value)
        self._met = time.monotonic()
        return found

    def on_first(self, act: Callable[[], T]) -> T:
        """Return, on all ranks, what `act` returns on the first; the others do not call it.

        Raises:
            Exception: what went wrong there.
            ConfigError: the same, on the other ranks.
        """
        if self.size == 1:
            return act()
        values: list[T] = []
        failure: Exception | None = None
        try:
            values += [act()] if self.is_first else []
        except Exception as error:
            failure = error
        told, reason = self.gather((values, failure and str(failure)))[0]
        if failure is not None:
            raise failure
        if reason is not None:
            raise ConfigError(reason)
        return told[0]

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Compare plain values by key over ranks.

        Raises:
            ConfigError: they differ; names the first key. The same on all ranks.
        """
        everyone = self.gather(dict(settings))
        for key in everyone[0]:
            for rank, theirs in enumerate(everyone):
                if theirs.get(key) != everyone[0][key]:
                    raise ConfigError(
                        complaint(
                            key,
                            got=f"{json.dumps(theirs.get(key))} on rank {rank}",
                            wanted=f"{json.dumps(everyone[0][key])}, as on rank 0",
                            remedy="Give all ranks the same configuration and the same files.",
                        )
                    )

    # -- shares of the work -------------------------------------------------------------------------

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of `rows` `(n, ...)`: one run of them, as long as others' or 1 less."""
        return torch.tensor_split(rows, self.size)[self.rank]


_AUTO = '"auto"'


def _backend(config: ParallelConfig, device: torch.device) -> str:
    """Return the backend as torch takes it: on a GPU, what hosts tell one another goes over gloo."""
    if device.type == "cpu":
        if config.backend == "nccl":
            raise _bad("backend", '"nccl" on a CPU', '"gloo"', 'Use "auto".')
        return "gloo"
    return "gloo" if config.backend == "gloo" else f"cpu:gloo,{device.type}:nccl"


def _bad(key: str, got: object, wanted: str, remedy: str) -> ConfigError:
    return ConfigError(complaint(f"parallel.{key}", got=got, wanted=wanted, remedy=remedy))


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether a backend raised it; gloo raises plain RuntimeErrors."""
    text = str(error)
    marks = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or any(mark in text for mark in marks)
