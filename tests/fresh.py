"""Programs in processes that have imported torch and nothing else: forks of one, which imports it once."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

SERVER = """
import torch
import json, os, signal, sys, warnings

for line in sys.stdin:
    request = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        break
else:
    sys.exit()
signal.alarm(request["limit_s"])
for descriptor, name in ((0, os.devnull), (1, request["output"]), (2, request["errors"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
sys.argv[1:] = request["arguments"]
if request["strict"]:
    warnings.simplefilter("error")
# Here, at the end of the program, so that it ends as any other does.
exec(request["code"])
"""


class Fresh:
    """Runs programs, one at a time, as ``python -c`` would after an ``import torch``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(
        self, code: str, *arguments: object, strict: bool = False, limit_s: int = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `code` in a process of its own.

        Args:
            arguments: what it finds in ``sys.argv[1:]``, as strings.
            strict: warnings are errors, as with ``-W error``.
            limit_s: after so long it is ended by SIGALRM.
        """
        files = [self._folder / f"{next(self._numbers)}" for _ in range(2)]
        request = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "strict": strict,
            "limit_s": limit_s,
            "output": str(files[0]),
            "errors": str(files[1]),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        output, errors = (file.read_text() for file in files)
        return subprocess.CompletedProcess(["python"], status, output, errors)

    def close(self) -> None:
        self._server.communicate()
