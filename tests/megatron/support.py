"""Jobs of several ranks, in processes forked from one that has imported Megatron-Core: 0.3 s a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from ranks.support import run

TESTS = str(Path(__file__).parent.parent)


def run_megatron(n: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
    """Return what `function(rank, *args)` gave on each of `n` ranks; see `ranks.support.run`."""
    start = _server().connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", start):
        return run(n, function, *args, **limits)


@cache
def _server() -> forkserver.ForkServer:
    """Return a server beside that of other tests, whose ranks would have no use for Megatron-Core."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(
        ["torch._dynamo", "megatron.shim", "megatron.steps", "muonloom.checkpoint", "pytest"]
    )
    settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    settings["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, settings):
        server.ensure_running()
    return server
