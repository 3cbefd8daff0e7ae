"""Commands on several ranks, in processes that find each other as those of torchrun do.

They are forked from one that has imported everything, so that a run costs seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from train.support import PLACES, Moment, _ending, _processes


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: of its exit; negative: the signal that ended it; None: it was still there.
        out: what it printed.
        err: likewise, on stderr.
        seconds: since the first rank was started.
    """

    code: int | None
    out: str
    err: str
    seconds: float


def train_on(
    num_ranks: int,
    config: Path,
    *overrides: str,
    moments: Mapping[int, Moment] | None = None,
    waits_for: Sequence[int] | None = None,
    by_rank: Mapping[int, Sequence[str]] | None = None,
) -> list[Ended]:
    """Run ``python -m muonloom train``, and return how each rank ended.

    Args:
        num_ranks: how many.
        config: TOML file.
        overrides: for ``--set``.
        moments: by rank, when signals reach it.
        waits_for: ranks that end by themselves; the others are killed then. None: all.
        by_rank: more overrides, of one rank.
    """
    commands = []
    for rank in range(num_ranks):
        everything = (*overrides, *(by_rank or {}).get(rank, ()))
        settings = [part for override in everything for part in ("--set", override)]
        commands.append(["-m", "muonloom", "train", str(config), *settings])
    return launch(commands, moments=moments, waits_for=waits_for)


def launch(
    commands: Sequence[Sequence[str]],
    *,
    moments: Mapping[int, Moment] | None = None,
    waits_for: Sequence[int] | None = None,
) -> list[Ended]:
    """Run what stands after ``python``, by rank, and return how each ended; see `train_on`."""
    with tempfile.TemporaryDirectory() as directory:
        return _launch(commands, moments or {}, waits_for, Path(directory))


def _launch(
    commands: Sequence[Sequence[str]],
    moments: Mapping[int, Moment],
    waits_for: Sequence[int] | None,
    directory: Path,
) -> list[Ended]:
    num_ranks = len(commands)
    # As torchrun, this process holds the store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_MINUTE)
    began = time.monotonic()
    processes = []
    for rank in range(num_ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        prints = directory / f"rank-{rank}"
        arguments = (environment, list(commands[rank]), prints, moments.get(rank))
        process = _processes.Process(target=_main, args=arguments)
        process.start()
        processes.append(process)
    awaited = range(num_ranks) if waits_for is None else waits_for
    seconds = _join(processes, awaited, began=began)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [
        Ended(
            code=codes[rank],
            out=_read(directory / f"rank-{rank}.out"),
            err=_read(directory / f"rank-{rank}.err"),
            seconds=seconds.get(rank, 0.0),
        )
        for rank in range(num_ranks)
    ]


_MINUTE = timedelta(seconds=60)


def _join(
    processes: Sequence[multiprocessing.Process], awaited: Sequence[int], *, began: float
) -> dict[int, float]:
    """Wait for ranks; return after how many seconds each ended."""
    seconds: dict[int, float] = {}
    open_ranks = {processes[rank].sentinel: rank for rank in awaited}
    until = began + _MINUTE.total_seconds()
    while open_ranks and time.monotonic() < until:
        ready = multiprocessing.connection.wait(list(open_ranks), until - time.monotonic())
        for sentinel in ready:
            rank = open_ranks.pop(sentinel)
            processes[rank].join()
            seconds[rank] = time.monotonic() - began
    return seconds


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _main(
    environment: Mapping[str, str], command: list[str], prints: Path, moment: Moment | None
) -> None:
    os.environ.update(environment)
    for number, ending in ((1, "out"), (2, "err")):
        file = os.open(f"{prints}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if moment is not None:
        owner, name = PLACES[moment.where]
        setattr(owner, name, _ending(getattr(owner, name), moment))
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
