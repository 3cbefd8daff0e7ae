"""Jobs of several ranks in fresh processes, forked from one that has imported torch: 0.2 s a job."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

GRACE_S = 3.0  # what the others have to finish in once one rank has raised


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rank.

    Attributes:
        value: what the function returned; None where it did not.
        error: its traceback; None where it returned.
        exitcode: of the process; negative: the signal that ended it.
    """

    value: Any
    error: str | None
    exitcode: int | None


def run(
    n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, limit_s: float = 60.0
) -> list[Any]:
    """Return what `function(rank, *args)` gave on each of `n` ranks of a gloo group.

    Args:
        n: ranks.
        function: of a module's top level.
        args: whatever can be pickled.
        timeout_s: of the process group.
        limit_s: of the whole job.

    Raises:
        AssertionError: a rank raised, died or did not finish; with rank and traceback.
    """
    outcomes = spawn(n, function, *args, timeout_s=timeout_s, limit_s=limit_s, must_return=True)
    failures = [
        f"rank {rank}: {outcome.error or f'ended with {outcome.exitcode}'}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.exitcode
    ]
    assert not failures, "\n".join(failures)
    return [outcome.value for outcome in outcomes]


def spawn(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    limit_s: float = 60.0,
    lost: Sequence[int] = (),
    store: str = "file",
    must_return: bool = False,
) -> list[Outcome]:
    """Return what became of each rank, where ranks may raise, be killed or hang.

    Args:
        n: ranks.
        function: of a module's top level; called as `function(rank, *args)`.
        args: whatever can be pickled.
        timeout_s: of the process group.
        limit_s: of the whole job.
        lost: ranks that nobody waits for: killed once the others are done.
        store: "file"; or "tcp", which rank 0 holds.
        must_return: whether one rank's failure ends the job, and all ranks leave the group together.
    """
    with tempfile.TemporaryDirectory() as directory:
        where = f"file://{directory}/store" if store == "file" else f"tcp://127.0.0.1:{_port()}"
        job = _Job(
            num_ranks=n,
            where=where,
            directory=directory,
            timeout_s=timeout_s,
            limit_s=limit_s,
            leaves_together=must_return,
            module=function.__module__,
            path=str(Path(sys.modules[function.__module__].__file__ or "")),
            name=function.__qualname__,
            args=pickle.dumps(args),
        )
        return _Processes(job).outcomes(awaited=set(range(n)) - set(lost), in_a_hurry=must_return)


@dataclass(frozen=True, kw_only=True)
class _Job:
    num_ranks: int
    where: str
    directory: str
    timeout_s: float
    limit_s: float
    leaves_together: bool
    module: str
    path: str
    name: str
    args: bytes


class _Processes:
    """The processes of one job."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._until = time.monotonic() + job.limit_s + 1  # the stacks are written at limit_s
        self._answers: dict[int, tuple[Any, str | None]] = {}
        self._processes, self._ends = [], []
        for rank in range(job.num_ranks):
            ours, theirs = _context().Pipe(duplex=False)
            process = _context().Process(target=_rank_main, args=(rank, job, theirs), daemon=True)
            with _one_at_a_time:
                process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def outcomes(self, *, awaited: set[int], in_a_hurry: bool) -> list[Outcome]:
        """Wait for the awaited ranks, end the others."""
        try:
            self._collect(set(awaited), in_a_hurry)
        finally:
            for rank in self._answers:
                wait([self._processes[rank].sentinel], timeout=5)
            exitcodes = [_exitcode(process) for process in self._processes]
            for process, end in zip(self._processes, self._ends, strict=True):
                process.kill()
                wait([process.sentinel])
                _exitcode(process)
                end.close()
        return [
            self._outcome(rank, exitcode, is_awaited=rank in awaited)
            for rank, exitcode in enumerate(exitcodes)
        ]

    def _collect(self, open_ranks: set[int], in_a_hurry: bool) -> None:
        until = self._until
        while open_ranks and time.monotonic() < until:
            ends = {self._ends[rank]: rank for rank in open_ranks}
            for end in wait(list(ends), timeout=max(until - time.monotonic(), 0)):
                rank = ends[end]  # type: ignore[index]
                open_ranks.discard(rank)
                try:
                    self._answers[rank] = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    wait([self._processes[rank].sentinel], timeout=5)
                    self._answers[rank] = None, f"died: {_exitcode(self._processes[rank])}"
                if in_a_hurry and self._answers[rank][1]:
                    until = min(until, time.monotonic() + GRACE_S)

    def _outcome(self, rank: int, exitcode: int | None, *, is_awaited: bool) -> Outcome:
        if rank in self._answers:
            value, error = self._answers[rank]
        elif is_awaited:
            value, error = None, f"did not finish\n{self._stack(rank)}"
        else:
            value, error = None, None
        return Outcome(value=value, error=error, exitcode=exitcode)

    def _stack(self, rank: int) -> str:
        path = Path(self._job.directory, f"{rank}.stack")
        return path.read_text() if path.exists() else ""


# Starting a process looks for the exit codes of all, and each can be read only once.
_one_at_a_time = Lock()


def _exitcode(process: Any) -> int | None:
    with _one_at_a_time:
        code: int | None = process.exitcode
        return code


@cache
def _context() -> Any:
    """Return how processes are made: forked from one that has imported much, and has no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._dynamo",  # which the first optimizer imports
            "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel",
            "muonloom.checkpoint",
            "pytest",
        ]
    )
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with mock.patch.dict(os.environ, one_thread):
        multiprocessing.forkserver.ensure_running()  # type: ignore[attr-defined]
    return context


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank_main(rank: int, job: _Job, end: Connection) -> None:
    """Run the function as one rank, and send what it returned or its traceback."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with Path(job.directory, f"{rank}.stack").open("w") as stack:
        faulthandler.dump_traceback_later(job.limit_s, file=stack)
        try:
            answer = _called(rank, job), None
        except BaseException:
            answer = None, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))  # not as a process's queue would, which shares tensors
        faulthandler.cancel_dump_traceback_later()


def _called(rank: int, job: _Job) -> Any:
    function = _module(job.module, job.path)
    for part in job.name.split("."):
        function = getattr(function, part)
    dist.init_process_group(
        "gloo",
        init_method=job.where,
        rank=rank,
        world_size=job.num_ranks,
        timeout=datetime.timedelta(seconds=job.timeout_s),
    )
    value = function(rank, *pickle.loads(job.args))  # type: ignore[operator]
    if job.leaves_together:
        dist.barrier()
        dist.destroy_process_group()
    return value


def _module(name: str, path: str) -> Any:
    """Import a test module, whether or not its name can be found from here."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
