"""All ranks do something, or none of them: what fails on one is an error on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from muonloom.collectives import Ranks
from muonloom.errors import CheckpointError, LostRanksError, StaleMasterError

T = TypeVar("T")
U = TypeVar("U")

# What callers tell apart; the first that fits.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointError, StaleMasterError, ValueError, TypeError, MemoryError, OSError)
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong on one rank, as others can be told.

    Attributes:
        kind: of the exception, as far as callers tell it apart.
        text: of it.
        lost: ranks that were found to be missing.
    """

    kind: str
    text: str
    lost: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        kinds = (name for name, kind in _KINDS.items() if isinstance(error, kind))
        text = str(error) or type(error).__name__
        lost = error.ranks if isinstance(error, LostRanksError) else ()
        return cls(kind=next(kinds, ""), text=text, lost=lost)

    def elsewhere(self, rank: int) -> Exception:
        """Return the exception for other ranks than this one, of the same kind; it names the rank."""
        if self.lost:
            return LostRanksError(self.text, self.lost)
        text = self.text if self.text.startswith("rank ") else f"rank {rank}: {self.text}"
        return _KINDS.get(self.kind, RuntimeError)(text)


def ask(give: Callable[[], T], tell: Callable[[T], U]) -> tuple[T, list[U]]:
    """Have all ranks do something, and tell all others of it; all of them call it.

    Args:
        give: does it; what it raises comes out on this rank.
        tell: returns what others are told of it; it can be pickled.

    Returns:
        What this rank has done, and what all of them told, by rank.

    Raises:
        Exception: what went wrong on another rank, as near as it can be; its text leads with the rank.
        LostRanksError: a rank does not call it.
    """
    ranks = Ranks()
    given: list[T] = []
    told: list[U] = []
    error: Exception | None = None
    try:
        given.append(give())
        told.append(tell(given[0]))
    except LostRanksError:
        raise  # the others do not answer, and find out by themselves
    except Exception as caught:
        if ranks.size == 1:
            raise
        error = caught
    failure = None if error is None else Failure.of(error)
    answers: list[tuple[list[U], Failure | None]] = ranks.gather_objects((told, failure))
    if error is not None:
        raise error
    for rank, (_, found) in zip(ranks.ranks, answers, strict=True):
        if found is not None:
            raise found.elsewhere(rank)
    return given[0], [only for (only,), _ in answers]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Have all ranks raise where one does inside; all of them enter. See `ask`."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error

    def give() -> None:
        if failure is not None:
            raise failure

    ask(give, _nothing)


def _nothing(given: object) -> None:
    """There is nothing to tell."""
