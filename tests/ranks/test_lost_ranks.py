"""Ranks that are killed, hang or come late are named on all others, within the group's timeout and 5 s."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muonloom.collectives import Ranks, agree, ranks_of
from muonloom.errors import LostRanksError
from ranks.support import Outcome, run, spawn

TIMEOUT_S = 3.0
SLACK_S = 5.0


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


# -- what the survivors do ------------------------------------------------------------------------------


def control(ranks: Ranks) -> None:
    ranks.gather_small(zeros(64))


def objects(ranks: Ranks) -> None:
    ranks.gather_objects("thing")


def exchange(ranks: Ranks) -> None:
    sizes = [8] * ranks.size
    ranks.exchange(zeros(sum(sizes)), sizes, zeros(sum(sizes)), sizes)


def even(ranks: Ranks) -> None:
    gathers(ranks, [1 << 16] * ranks.size)


def uneven(ranks: Ranks) -> None:
    gathers(ranks, [1000 * position for position in range(ranks.size)])


def gathers(ranks: Ranks, sizes: Sequence[int]) -> None:
    """More gathers in flight than gloo has threads."""
    flying = []
    for _ in range(3):
        parts = list(torch.split(zeros(sum(sizes)), list(sizes)))
        flying.append(ranks.start_gather(parts, zeros(sizes[ranks.position])))
    for pending in flying:
        pending.wait()


def compare(ranks: Ranks) -> None:
    agree("digest", list, ranks)


def make(ranks: Ranks) -> None:
    """Rank 0 has no part in it."""
    if dist.get_rank() == 0:
        control(ranks)
    else:
        ranks_of(tuple(range(1, ranks.size)))


def in_pairs(ranks: Ranks) -> None:
    """Rank 0 waits for rank 1, which waits for the lost one."""
    if dist.get_rank() == 0:
        control(ranks_of((0, 1)))
    else:
        control(ranks)


def in_a_pair(ranks: Ranks) -> None:
    """Ranks 1 and 2 have a group of their own."""
    control(ranks_of((1, 2)))


def polled(ranks: Ranks) -> None:
    """As where the backend orders streams, and tells the host nothing."""
    ranks._backend_name = lambda device: "other"  # type: ignore[method-assign]
    control(ranks)


def disagree(ranks: Ranks) -> None:
    """Plans differ, and the rank that has to tell its own is lost."""
    agree(f"digest {ranks.position}", list, ranks)


# -- what the lost ones do ------------------------------------------------------------------------------


def killed(ranks: Ranks, act: Callable[[Ranks], None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_inside(ranks: Ranks, act: Callable[[Ranks], None]) -> None:
    """Killed while the others wait."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(ranks: Ranks, act: Callable[[Ranks], None]) -> None:
    while True:
        time.sleep(60)


def stopped(ranks: Ranks, act: Callable[[Ranks], None]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed_or_hangs(ranks: Ranks, act: Callable[[Ranks], None]) -> None:
    (killed if dist.get_rank() == 1 else hangs)(ranks, act)


def killed_describing(ranks: Ranks, act: Callable[[Ranks], None]) -> None:
    agree("another digest", lambda: killed(ranks, act), ranks)  # type: ignore[arg-type, return-value]


# -- cases ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who is lost, and how.

    Attributes:
        act: what the others do.
        fate: what becomes of the lost, which may still do the same.
        delays: by how much survivors begin later.
        within: the group that is in it; empty: all.
        text: is in the error.
    """

    act: Callable[[Ranks], None]
    fate: Callable[[Ranks, Callable[[Ranks], None]], None]
    lost: tuple[int, ...] = (2,)
    n: int = 4
    store: str = "file"
    delays: tuple[tuple[int, float], ...] = ()
    timeout_s: float = TIMEOUT_S
    within: tuple[int, ...] = ()
    text: str = ""


CASES = {
    f"{fate.__name__} {act.__name__}": Case(act=act, fate=fate)
    for act in (control, objects, exchange, even, uneven, compare)
    for fate in (killed_inside, hangs)
} | {
    "killed before": Case(act=exchange, fate=killed),
    "one of two": Case(act=even, fate=killed, lost=(1,), n=2),
    "several": Case(act=control, fate=killed_or_hangs, lost=(1, 3)),
    "all but one": Case(act=control, fate=killed_or_hangs, lost=(1, 2), n=3),
    "making a group": Case(act=make, fate=hangs),
    "making a group, killed": Case(act=make, fate=killed),
    "waiting for one that waits": Case(act=in_pairs, fate=hangs, lost=(3,)),
    "next to one that gave up": Case(act=in_pairs, fate=killed_inside, lost=(3,)),
    "in a group": Case(act=in_a_pair, fate=hangs, within=(1, 2)),
    "polled": Case(act=polled, fate=hangs, n=3),
    "killed describing": Case(act=disagree, fate=killed_describing),
    "store over tcp": Case(act=exchange, fate=killed_inside, store="tcp"),
    "store over tcp, hangs": Case(act=control, fate=hangs, lost=(0,), store="tcp"),
    "the store's holder": Case(
        act=control, fate=killed_inside, lost=(0,), store="tcp", text="which holds the store"
    ),
    "the store's holder in a comparison": Case(
        act=compare, fate=killed_inside, lost=(0,), store="tcp", text="which holds the store"
    ),
    "the store's holder out of reach": Case(
        act=control, fate=stopped, lost=(0,), store="tcp", text="which holds the store"
    ),
    "the store's holder out of reach in a comparison": Case(
        act=compare, fate=stopped, lost=(0,), store="tcp", text="which holds the store"
    ),
    # Rank 0 is connected to neither, and begins when ranks 1 and 3 have long failed.
    "a survivor begins later": Case(act=even, fate=killed, delays=((0, 4.5),), timeout_s=6.0),
    "survivors begin one after another": Case(
        act=control, fate=hangs, delays=((0, 1.0), (1, 2.0), (3, 0.0)), store="tcp"
    ),
}


def end_after(timeout_s: float, ranks: Ranks) -> None:
    """Shorten the timeout, which is too short for the start of processes on a busy machine."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), ranks.group)
    assert ranks.timeout_s == timeout_s


def take_part(rank: int, name: str) -> tuple[str, tuple[int, ...], float] | None:
    """Return the error, whom it names, and after how many seconds it was raised."""
    case = CASES[name]
    ranks = Ranks()
    dist.barrier()  # all have begun, and gloo is connected
    if case.within and rank not in case.within:
        return None
    if case.within:
        end_after(case.timeout_s, ranks_of(case.within))
    end_after(case.timeout_s, ranks)
    if rank in case.lost:
        case.fate(ranks, case.act)
    time.sleep(dict(case.delays).get(rank, 0.0))
    began = time.monotonic()
    try:
        case.act(ranks)
    except LostRanksError as error:
        return str(error), error.ranks, time.monotonic() - began
    return None


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future[list[Outcome]]]]:
    """All cases, of which several run at a time: they do nothing but wait."""
    with ThreadPoolExecutor(16) as pool:
        found = {
            name: pool.submit(spawn, case.n, take_part, name, lost=case.lost, store=case.store)
            for name, case in CASES.items()
        }
        yield {"late": pool.submit(spawn, 3, comes_late)} | found


@pytest.mark.parametrize("name", CASES)
def test_the_lost_are_named_by_all_others(name: str, outcomes: dict[str, Future[list[Outcome]]]):
    case = CASES[name]
    found = outcomes[name].result()
    for rank in sorted(set(case.within or range(case.n)) - set(case.lost)):
        outcome = found[rank]
        assert outcome.error is None, outcome.error
        assert outcome.exitcode == 0
        assert outcome.value is not None, f"rank {rank} noticed nothing"
        text, named, seconds = outcome.value
        assert named == case.lost, text
        assert text.startswith("process_group: got ")
        for lost in case.lost:
            assert str(lost) in text.partition(" in ")[0]
        assert case.text in text
        assert seconds < case.timeout_s + SLACK_S


# -- others ---------------------------------------------------------------------------------------------


def comes_late(rank: int) -> tuple[str, tuple[int, ...]]:
    ranks = Ranks()
    dist.barrier()
    end_after(TIMEOUT_S, ranks)
    if rank == 1:
        time.sleep(TIMEOUT_S + 1.5)
    with pytest.raises(LostRanksError) as caught:
        control(ranks)
    return str(caught.value), caught.value.ranks


def test_a_rank_that_comes_after_the_timeout_is_named_and_told(
    outcomes: dict[str, Future[list[Outcome]]],
):
    found = [outcome.value for outcome in outcomes["late"].result()]
    assert [named for _, named in found] == [(1,)] * 3
    assert "no answer from rank 1 in a control message within 3 s" in found[0][0]
    assert "rank 1 came later than 3 s" in found[1][0]


def asks_wrongly(rank: int) -> tuple[str, tuple[int, ...], float]:
    ranks = Ranks()
    began = time.monotonic()
    with pytest.raises(LostRanksError) as caught:
        ranks.exchange(zeros(1), [1, 1], zeros(4), [2, 2])
    return str(caught.value), caught.value.ranks, time.monotonic() - began


def test_a_failure_that_all_ranks_survive_names_none_and_is_told():
    for text, named, seconds in run(2, asks_wrongly):
        assert named == ()
        assert "failed although all ranks answer" in text
        assert seconds < 5  # of a timeout of 60 s


def differs(rank: int) -> str:
    with pytest.raises(ValueError, match="a: got 0 on rank 0") as caught:
        agree(f"digest {rank}", lambda: [f"a: {rank}"], Ranks())
    return str(caught.value)


def test_the_holder_of_the_store_stays_until_all_know_that_plans_differ():
    found = spawn(3, differs, store="tcp")
    assert [outcome.exitcode for outcome in found] == [0] * 3
    assert len({outcome.value for outcome in found}) == 1


def fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("a test of tests")
    dist.barrier()


def test_a_rank_that_raises_ends_a_job_with_its_traceback():
    began = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"rank 1: Traceback[\s\S]*KeyError: 'a test of tests'"
    ):
        run(2, fails)
    assert time.monotonic() - began < 20


def never_ends(rank: int) -> Any:
    while rank:
        time.sleep(1)


def test_a_job_that_takes_too_long_is_ended_and_tells_where():
    with pytest.raises(AssertionError, match=r"rank 1: did not finish[\s\S]*in never_ends"):
        run(2, never_ends, limit_s=2.0)
