"""Ctrl-C and SIGTERM as requests: the first ends the run after the step it is in, the second at once.

Ranks end after the same step, whichever of them a signal reached.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from muonloom.train.team import Team

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """Context manager. Does nothing outside the main thread.

    Args:
        on_request: called once with the first signal; on several ranks when all know of it.
        team: the run's ranks; None: this process alone.

    Attributes:
        received: the first signal that arrived, here or on another rank.
    """

    def __init__(
        self,
        on_request: Callable[[signal.Signals], None] = lambda number: None,
        *,
        team: Team | None = None,
    ) -> None:
        self.received: signal.Signals | None = None
        self._on_request = on_request
        self._team = Team() if team is None else team
        self._arrived: signal.Signals | None = None  # here
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether one arrived."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it; 0 where none arrived."""
        return 0 if self.received is None else 128 + self.received

    def agreed(self) -> bool:
        """Whether a signal reached any rank; all ranks ask together."""
        if self._team.size > 1 and self.received is None:
            number = self._team.largest(self._arrived or 0)
            if number:
                self.received = signal.Signals(number)
                self._on_request(self.received)
        return self.requested

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            # None: a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._arrived is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._arrived is not None:
            raise SystemExit(128 + number)
        self._arrived = signal.Signals(number)
        if self._team.size > 1:
            self._team.hurry()  # a launcher sends it too where it has lost a rank, and kills soon
            return
        self.received = self._arrived
        self._on_request(self.received)
