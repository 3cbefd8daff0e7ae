"""Who is still there, asked over the store of `torch.distributed` once a collective has failed.

A backend tells that a collective failed, and on some ranks long before others, but not who is missing. So
each rank whose collective failed says so in the store, and waits for the others as long as their own
collectives may take to fail. Who has said nothing by then is missing. The first rank that knows writes it
down: all others take it from there, also those that wait in another group for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from muonloom.errors import LostRanksError, complaint

T = TypeVar("T")

GRACE_S = 3.0  # for ranks that began the same collective later
_HURRY_S = 1.5  # for ranks that still answer, once this process is about to be ended
_STORE_S = 1.0  # for an answer of the store
_START_S = 30.0  # for the first, when all ranks ask at once
_POLL_S = 0.05
_TOLERANCE_S = 0.5  # of what is seen late, by polling


class StoreLostError(RuntimeError):
    """The store does not answer; the process that holds it is gone, or out of reach."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns; in a thread, since a store out of reach may never answer.

    Raises:
        StoreLostError: it did not answer in time.
    """
    answers: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    Thread(target=answer, name="muonloom store", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except Empty:
        raise StoreLostError(f"the store did not answer within {seconds:.1f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class Roll:
    """The ranks of one default process group.

    Args:
        store: of the default group.
        rank: of this process.

    Raises:
        LostRanksError: the store does not answer.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.host = _host(store)
        self._rank = rank
        self._answers = True
        self._hurried: float | None = None
        # A store may outlive the default group, and hold what was written for an earlier one.
        try:
            generation = within(_START_S, lambda: store.add(f"muonloom/generation/{rank}", 1))
        except RuntimeError as error:
            raise _store_lost(self.host, [rank], "the first request", error) from error
        self.store = dist.PrefixStore(f"muonloom/{generation}", store)

    def hurry(self) -> None:
        """Have `call` wait no longer than it must: this process is about to end. For signal handlers."""
        self._hurried = time.monotonic()

    def leave(self) -> None:
        """Say that this rank ends by an error that it tells itself, so that nobody waits for it."""
        with contextlib.suppress(RuntimeError):
            within(_STORE_S, lambda: self._write((self._rank,)))

    def is_called(self) -> bool:
        """Whether a rank has given up, in whatever group."""
        if not self._answers:
            return False
        try:
            return within(
                _STORE_S, lambda: self.store.check(["roll/1"]) or self.store.check(["missing"])
            )
        except RuntimeError:
            # The collective fails by itself if the store's host is gone; one stuck thread is enough.
            self._answers = False
            return False

    def call(self, ranks: Sequence[int], *, waited_s: float, timeout_s: float) -> tuple[int, ...]:
        """Return who is missing, once this rank's collective has failed.

        Args:
            ranks: that should have taken part.
            waited_s: since this rank began it.
            timeout_s: after which a collective fails.

        Returns:
            The missing ranks, maybe of another group, which this one waited for; empty where all
            answered.

        Raises:
            StoreLostError: the store does not answer.
        """
        began = time.monotonic() - waited_s
        until = max(began + timeout_s, time.monotonic()) + GRACE_S
        try:
            within(_STORE_S, lambda: self._post(waited_s))
            return within(
                until - time.monotonic() + 1.5 * _STORE_S,
                lambda: self._missing(ranks, began=began, timeout_s=timeout_s, until=until),
            )
        except StoreLostError:
            raise
        except RuntimeError as error:
            raise StoreLostError(str(error)) from error

    def _missing(
        self, ranks: Sequence[int], *, began: float, timeout_s: float, until: float
    ) -> tuple[int, ...]:
        answered: dict[int, float] = {}
        num_seen = 0
        called = time.monotonic()
        while True:
            if self.store.check(["missing"]):
                return self._read()
            num_seen = self._look(answered, num_seen)
            # A rank that began only when others had given up is what they had waited for.
            last = began + timeout_s + _TOLERANCE_S
            absent = tuple(rank for rank in ranks if answered.get(rank, last + 1) > last)
            now = time.monotonic()
            if self._hurried is not None:
                until = min(until, max(self._hurried, called) + _HURRY_S)
            if answered.keys() >= set(ranks):
                if absent:
                    return self._write(absent)
                # If this rank is the late one, or waited for ranks of another group, others will tell.
                until = min(until, now) if len(ranks) == dist.get_world_size() else until
            if now >= until + (0 if absent else _TOLERANCE_S):
                return self._write(absent) if absent else ()
            time.sleep(_POLL_S)

    def _post(self, waited_s: float) -> None:
        """Say that this rank lives: how long it has waited, since clocks of machines differ."""
        number = self.store.add("answers", 1)
        self.store.set(f"roll/{number}", f"{self._rank} {waited_s}")

    def _look(self, answered: dict[int, float], num_seen: int) -> int:
        """Add when ranks began what failed, on this process's clock; return how many posts there are."""
        number = self.store.add("answers", 0)
        keys = [f"roll/{index}" for index in range(num_seen + 1, number + 1)]
        for post in self.store.multi_get(keys) if keys else ():
            rank, waited_s = post.decode().split()
            # Of several failures of one rank the first counts.
            answered.setdefault(int(rank), time.monotonic() - float(waited_s))
        return number

    def _write(self, absent: tuple[int, ...]) -> tuple[int, ...]:
        if self.store.add("authors", 1) == 1:
            self.store.set("missing", " ".join(map(str, absent)))
        return self._read()

    def _read(self) -> tuple[int, ...]:
        missing = tuple(map(int, self.store.get("missing").decode().split()))
        self.take_leave("missing", self.store.add("answers", 0))
        return missing

    def take_leave(self, subject: str, num_ranks: int) -> None:
        """Let the rank that holds the store stay until others have read what they may exit for."""
        self.store.add(f"read/{subject}", 1)
        until = time.monotonic() + _STORE_S
        while self._rank == self.host and time.monotonic() < until:
            if self.store.add(f"read/{subject}", 0) >= num_ranks:
                return
            time.sleep(_POLL_S)


def _host(store: dist.Store) -> int | None:
    """Return the rank whose process holds the store; None: none of them, or it is not known."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    # torchrun holds the store itself, and says so.
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not is_launchers else None


@contextlib.contextmanager
def named_losses(
    roll: Callable[[], Roll],
    ranks: Sequence[int],
    *,
    what: str,
    began: float,
    timeout_s: Callable[[], float],
) -> Iterator[None]:
    """Make one error of all ways in which backends and stores fail, on all ranks.

    Args:
        roll: returns the roll of the default group.
        ranks: that take part.
        what: they do, as text.
        began: when, as `time.monotonic` says.
        timeout_s: returns after how many seconds it fails.

    Raises:
        LostRanksError: in place of any RuntimeError, with the ranks that are missing.
    """
    try:
        yield
    except (torch.OutOfMemoryError, LostRanksError):
        raise
    except RuntimeError as error:
        waited_s = time.monotonic() - began
        try:
            if isinstance(error, StoreLostError):
                raise error
            missing = roll().call(ranks, waited_s=waited_s, timeout_s=timeout_s())
        except StoreLostError as lost:
            raise _store_lost(roll().host, ranks, what, lost) from error
        raise _lost(missing, ranks, what, timeout_s(), error) from error


def _store_lost(
    host: int | None, ranks: Sequence[int], what: str, lost: RuntimeError
) -> LostRanksError:
    found = () if host is None else (host,)
    holder = f"rank {host}, which holds the store" if found else "the store"
    return _error(
        f"no answer from {holder} by which ranks find each other, in {what} ({lost})",
        ranks,
        "Whether others are missing too cannot be told. ",
        found,
    )


def _lost(
    missing: tuple[int, ...], ranks: Sequence[int], what: str, timeout_s: float, error: RuntimeError
) -> LostRanksError:
    if not missing:
        got = f"{what} that failed although all ranks answer ({error})"
    elif dist.get_rank() in missing:
        got = f"{what} for which {named(missing)} came later than {timeout_s:g} s"
    else:
        got = f"no answer from {named(missing)} in {what} within {timeout_s:g} s"
    return _error(got, ranks, "", missing)


def _error(got: str, ranks: Sequence[int], more: str, missing: tuple[int, ...]) -> LostRanksError:
    remedy = (
        f"{more}Read the output of the missing ranks first: they were killed, raised an error, hang, or "
        "need longer than the timeout of torch.distributed.init_process_group. Then start all again."
    )
    wanted = f"{named(ranks)} to take part in each collective"
    return LostRanksError(
        complaint("process_group", got=got, wanted=wanted, remedy=remedy), missing
    )


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0–3 and 7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [
        text
        for span in spans
        for text in (map(str, span) if len(span) < 3 else [f"{span[0]}–{span[-1]}"])
    ]
    listed = ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else texts[0]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
