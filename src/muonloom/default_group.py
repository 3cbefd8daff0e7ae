"""The default process group, and what is kept for as long as it is the same one."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist

from muonloom.agreement import Vote
from muonloom.roll_call import Roll


@dataclass(kw_only=True)
class _World:
    roll: Roll
    votes: Counter[str] = field(default_factory=Counter)


# A group lives, with its threads and connections, as long as anybody refers to it.
_worlds: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()


def default_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None: `torch.distributed` is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def this_rank() -> int:
    """Return this process's rank; 0 where it is alone."""
    return 0 if default_group() is None else dist.get_rank()


def _world() -> _World:
    group = default_group()
    assert group is not None
    if group not in _worlds:
        store = dist.distributed_c10d._get_default_store()
        _worlds[group] = _World(roll=Roll(store, dist.get_rank()))
    return _worlds[group]


def roll() -> Roll:
    """Return the roll of the default group."""
    return _world().roll


def vote(kind: str, ranks: tuple[int, ...], timeout_s: float) -> Vote:
    """Return the next comparison of some kind among some ranks, which all of them make.

    Args:
        kind: what is compared.
        ranks: that take part; this one is among them.
        timeout_s: how late they may come.
    """
    world = _world()
    subject = f"{kind}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    world.votes[subject] += 1
    return Vote(
        world.roll,
        f"{subject}/{world.votes[subject]}",
        ranks=ranks,
        rank=dist.get_rank(),
        timeout_s=timeout_s,
    )
