"""Saves under way: what the caller waits for, and who else has to."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muonloom.optimizer import Muon
from muonloom.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did on this rank.

    Attributes:
        path: of the checkpoint.
        nbytes: of tensors that this rank wrote.
        seconds: from the call until the checkpoint was there.
        copied_bytes: copied because a step was about to change them.
        held_seconds: that steps waited for it.
    """

    path: Path
    nbytes: int
    seconds: float
    copied_bytes: int
    held_seconds: float


class SaveHandle:
    """A save under way; `muonloom.checkpoint.save` returns it.

    The next save of the same optimizer and the end of the program wait for it, and raise its failure where
    nobody has seen that.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        report: Callable[[], SaveReport],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._snapshot = snapshot
        self._make_report = report
        self._give_up = give_up
        self._report: SaveReport | None = None
        self._failure: BaseException | None = None
        self._is_over = False
        self._is_seen = False

    @property
    def held_seconds(self) -> float:
        """Seconds that steps have waited for it so far."""
        return self._snapshot.held.seconds

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._is_over or self._snapshot.is_written or self._snapshot.failed

    def result(self) -> SaveReport:
        """Wait for the checkpoint; return what was done.

        Raises:
            OSError: the disk is full or fails; the message names the file, and nothing was made visible.
            LostRanksError: a rank was killed or hangs.
            Exception: whatever else went wrong, likewise; of another rank the message names that.
        """
        self._wait()
        self._is_seen = True
        if self._failure is not None:
            raise self._failure
        assert self._report is not None
        return self._report

    def _wait(self) -> None:
        if self._is_over:
            return
        self._failure = self._snapshot.finish()
        self._is_over = True
        _running.discard(self)
        if self._failure is not None:
            self._give_up(self._failure)
        else:
            self._report = self._make_report()

    def raise_unseen(self) -> None:
        """Wait for it; raise its failure where nobody has seen that."""
        self._wait()
        if not self._is_seen:
            self.result()


_running: set[SaveHandle] = set()
_last: weakref.WeakKeyDictionary[Muon, SaveHandle] = weakref.WeakKeyDictionary()


def remember(optimizer: Muon, handle: SaveHandle) -> None:
    """Have the next save of `optimizer`, and the end of the program, wait for `handle`."""
    _running.add(handle)
    _last[optimizer] = handle


def wait_for_last(optimizer: Muon) -> None:
    """Wait for the last save of `optimizer`; raise its failure where nobody has seen that."""
    handle = _last.pop(optimizer, None)
    if handle is not None:
        handle.raise_unseen()


@atexit.register
def _finish_all() -> None:
    failures: list[BaseException] = []
    for handle in list(_running):
        try:
            handle.raise_unseen()
        except BaseException as failure:
            failures.append(failure)
    if len(failures) > 1:  # the interpreter shows a group's message alone
        reasons = "; ".join(map(str, failures))
        raise BaseExceptionGroup(f"{len(failures)} checkpoints were not saved: {reasons}", failures)
    for only in failures:
        raise only
