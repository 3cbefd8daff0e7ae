"""A run as one of several ranks sees it from outside: what it shows, and how it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from rich.console import Console

from muonloom.errors import LostRanksError
from muonloom.train.launch import Launch, Voice
from muonloom.train.team import Team

LOST_RANKS, USER_ERROR, INTERRUPTED = 1, 2, 130


def train_together(launch: Launch, run: Callable[[Team, Console], int], console: Console) -> int:
    """Run with the other ranks that were launched; return the process's exit code.

    The first rank alone writes and shows, warnings too. What a user can put right is told in one line,
    once; so is the loss of ranks.

    Args:
        launch: which rank this is.
        run: the run; called with the ranks and where to show.
        console: of the first rank.
    """
    store = launch.connect()
    voice, team = Voice(launch, store), Team(launch, store)
    with warnings.catch_warnings():
        if not team.is_first:
            console = Console(quiet=True)
            warnings.simplefilter("ignore")
        try:
            with team.losses_named():
                code = run(team, console)
                team.end()
        except LostRanksError as error:
            # One that ended by an error of its own tells that itself.
            if not voice.has_left(error.ranks):
                voice.tell(str(error))
            return LOST_RANKS
        except (ValueError, FloatingPointError, FileNotFoundError, KeyboardInterrupt) as error:
            voice.leave()
            voice.tell(_line(error))
            team.leave()
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else USER_ERROR
        except BaseException:
            voice.leave()
            team.leave()
            raise
    return code


def _line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, FileNotFoundError):
        return f"{error.filename or error}: got no such file; wanted one that exists."
    return " ".join(str(error).split())
