"""Whether all ranks mean the same, found out over the store of `torch.distributed`.

Not by a collective: ranks that mean different things are about to enter different collectives, and a
backend matches them by order alone. They would hang, or take one another's bytes. The store is asked by
key, works before any backend has connected, and gives each rank the same answer. Each rank adds one to the
counter of its digest, and the last one to arrive sees whether that counter has reached the number of ranks:
a constant number of requests a rank, however many there are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from muonloom.errors import complaint
from muonloom.roll_call import GRACE_S, Roll, named, within

T = TypeVar("T")

_PATIENCE_S = 1.0
_LONGEST_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What some ranks are about to do.

    Attributes:
        ranks: that mean it.
        digest: of the plan.
        lines: that describe it.
    """

    ranks: tuple[int, ...]
    digest: str
    lines: tuple[str, ...]


class Vote:
    """One comparison, on one of the ranks.

    Args:
        roll: of the default group.
        subject: what it is stored under; differs from one comparison to the next.
        ranks: that take part.
        rank: this one.
        timeout_s: how long ranks may be late.
    """

    def __init__(
        self, roll: Roll, subject: str, *, ranks: Sequence[int], rank: int, timeout_s: float
    ) -> None:
        self._roll = roll
        self._store = dist.PrefixStore(subject, roll.store)
        self._subject = subject
        self._ranks = ranks
        self._rank = rank
        self._until = time.monotonic() + timeout_s

    def plans(self, digest: str, describe: Callable[[], list[str]]) -> list[Plan]:
        """Return the plans that there are, by their lowest rank; empty where all ranks have the same.

        Raises:
            RuntimeError: a rank does not come, or the store does not answer.
        """
        is_first, is_same = self._ask(lambda: self._arrive(digest))
        if is_same:
            return []
        lines = describe() if is_first else []
        self._until = max(self._until, time.monotonic() + GRACE_S)
        return self._ask(lambda: self._read(digest, lines if is_first else None))

    def _ask(self, call: Callable[[], T]) -> T:
        return within(max(self._until - time.monotonic(), 0) + 1.5 * _PATIENCE_S, call)

    def _arrive(self, digest: str) -> tuple[bool, bool]:
        """Return whether this rank is the first that came with its digest, and whether all have it."""
        self._store.set(f"digest/{self._rank}", digest)
        is_first = self._store.add(f"count/{digest}", 1) == 1
        if self._store.add("arrived", 1) == len(self._ranks):
            is_same = self._store.add(f"count/{digest}", 0) == len(self._ranks)
            self._store.set("is_same", "yes" if is_same else "no")
        self._await("is_same")
        return is_first, self._store.get("is_same") == b"yes"

    def _read(self, digest: str, lines: Sequence[str] | None) -> list[Plan]:
        """Return all plans, after telling this one where this rank speaks for those that have it."""
        if lines is not None:
            self._store.set(f"lines/{digest}", json.dumps(list(lines)))
        found = self._store.multi_get([f"digest/{rank}" for rank in self._ranks])
        holders: dict[str, list[int]] = {}
        for rank, other in zip(self._ranks, found, strict=True):
            holders.setdefault(other.decode(), []).append(rank)
        plans = []
        for other_digest, ranks in holders.items():
            self._await(f"lines/{other_digest}")
            told = json.loads(self._store.get(f"lines/{other_digest}"))
            plans.append(Plan(ranks=tuple(ranks), digest=other_digest, lines=tuple(told)))
        self._roll.take_leave(self._subject, len(self._ranks))
        return plans

    def _await(self, key: str) -> None:
        poll_s, asked = 0.001, time.monotonic()
        while not self._store.check([key]):
            now = time.monotonic()
            if now > self._until:
                raise RuntimeError("a rank did not come in time")
            if now > asked + _PATIENCE_S:
                asked = now
                if self._roll.is_called():
                    raise RuntimeError("another rank has given up")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _where_they_differ(versions: Sequence[str], name: str) -> list[str]:
    """Return of lines whose fields are parted by "; " those fields that are not in all of them."""
    fields = [version.removeprefix(f"{name}: ").split("; ") for version in versions]
    if len({len(own) for own in fields}) > 1:
        return ["; ".join(own) for own in fields]
    odd = [i for i, values in enumerate(zip(*fields, strict=True)) if len(set(values)) > 1]
    return ["; ".join(own[index] for index in odd) for own in fields]


def difference(plans: Sequence[Plan]) -> str:
    """Return what is wrong: the first line in which plans differ, and which ranks have what there."""
    for versions in zip_longest(*(plan.lines for plan in plans)):
        if len(set(versions)) > 1:
            break
    else:
        # Descriptions leave something out that digests do not.
        versions = tuple(f"plan: {plan.digest}" for plan in plans)
    holders: dict[str | None, list[int]] = {}
    for version, plan in zip(versions, plans, strict=True):
        holders.setdefault(version, []).extend(plan.ranks)
    name = next(version for version in versions if version is not None).partition(": ")[0]
    shown = _where_they_differ([version or "nothing" for version in holders], name)
    told = [
        f"{text} on {named(ranks)}" for text, ranks in zip(shown, holders.values(), strict=True)
    ]
    return complaint(
        name,
        got="; ".join(told),
        wanted="the same on all ranks",
        remedy="Build the model, the layout and the optimizer with the same options on each.",
    )
