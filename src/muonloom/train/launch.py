"""The processes that torchrun starts for one run: which one this is, and who of them speaks to the user."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from muonloom.roll_call import within

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_S = 300.0
_FIRST_S = 1.0  # that the first rank may come later than others with the same line
_TOLD_S = 2.0  # that a line may take to be printed
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those of the run.

    Attributes:
        rank: from 0.
        size: how many there are.
        local_rank: among those of this machine.
        is_launched: whether a launcher started it, and the others can be found.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    is_launched: bool = False

    @classmethod
    def from_environment(cls) -> Launch:
        """Return what torchrun says in the environment; one process alone where it does not."""
        if not all(name in os.environ for name in _VARIABLES):
            return cls()
        rank, size, local_rank = (int(os.environ[name]) for name in _VARIABLES[:3])
        return cls(rank=rank, size=size, local_rank=local_rank, is_launched=True)

    def connect(self) -> dist.Store | None:
        """Return the store by which the ranks find each other; None for one that was not launched."""
        if not self.is_launched:
            return None
        timeout = timedelta(seconds=_CONNECT_S)
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=timeout))
        found: dist.Store = dist.PrefixStore("muonloom train", store)
        return found


class Voice:
    """Tells the user why ranks end: in one line, however many of them end for that.

    The first rank speaks where it fails too. A launcher ends the others as soon as one of its processes is
    gone, so whoever has nothing to say stays until it was said.

    Args:
        launch: which process this is.
        store: of all of them; None: there is one.
    """

    def __init__(self, launch: Launch, store: dist.Store | None) -> None:
        self._launch = launch
        self._store = store

    def tell(self, line: str) -> None:
        """Print a line on stderr, or have another rank tell."""
        store = self._store
        if store is None or self._launch.size == 1:
            _print(line)
            return
        try:
            within(2 * (_FIRST_S + _TOLD_S), lambda: self._tell(store, line))
        except RuntimeError:  # the store is gone, with the rank that held it
            _print(line)

    def _tell(self, store: dist.Store, line: str) -> None:
        rank = self._launch.rank
        if rank == 0:
            store.set("first", "")
        elif _comes("first", store, _FIRST_S):
            _comes("told", store, _TOLD_S)
            return
        if store.add("speakers", 1) == 1:
            _print(f"rank {rank}: {line}" if rank else line)
            store.set("told", "")
        else:
            _comes("told", store, _TOLD_S)

    def leave(self) -> None:
        """Take note that this rank ends by an error of its own, which it tells."""
        self._ask(lambda store: store.set(f"left/{self._launch.rank}", ""))

    def has_left(self, ranks: Sequence[int]) -> bool:
        """Whether one of these ranks ended by an error that it told itself."""
        found: list[bool] = []
        self._ask(lambda store: found.append(any(store.check([f"left/{rank}"]) for rank in ranks)))
        return any(found)

    def _ask(self, request: Callable[[dist.Store], None]) -> None:
        store = self._store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                within(_TOLD_S, lambda: request(store))


def _print(line: str) -> None:
    print(f"muonloom: {line}", file=sys.stderr, flush=True)


def _comes(key: str, store: dist.Store, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True
