"""What ranks give one another arrives, is counted, and is compared before anything else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muonloom import collectives
from muonloom.agreement import Vote
from muonloom.collectives import Ranks, Traffic, agree, ranks_of
from muonloom.roll_call import Roll
from ranks.support import run


def message(source: int, target: int, size: int) -> Tensor:
    """Bytes that tell who sent them to whom."""
    return (torch.arange(size) * 7 + 31 * source + 101 * target).to(torch.uint8)


# -- control messages -----------------------------------------------------------------------------------


def give_small(rank: int) -> tuple[Tensor, Traffic]:
    ranks = Ranks()
    first = ranks.gather_small(message(rank, 0, 64))
    strided = message(rank, 1, 6)[::2]
    second = ranks.gather_small(strided)
    assert ranks.gather_small(strided[:0]).shape == (ranks.size, 0)
    assert torch.equal(second, torch.stack([message(r, 1, 6)[::2] for r in ranks.ranks]))
    return first, ranks.traffic


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_control_message_reaches_all(n: int):
    wanted = torch.stack([message(rank, 0, 64) for rank in range(n)])
    for gathered, traffic in run(n, give_small):
        assert torch.equal(gathered, wanted)
        assert traffic == Traffic(control_bytes=64 + 3, control_messages=2)


def give_objects(rank: int) -> tuple[list[Any], int]:
    ranks = Ranks()
    return ranks.gather_objects(
        {"rank": rank, "names": ["x"] * 10**rank}
    ), ranks.traffic.control_bytes


def test_objects_of_any_size_reach_all():
    for found, control_bytes in run(4, give_objects):
        assert found == [{"rank": rank, "names": ["x"] * 10**rank} for rank in range(4)]
        assert control_bytes > 8 + 1000


# -- exchanges ------------------------------------------------------------------------------------------


def swap(rank: int, sizes: Sequence[Sequence[int]]) -> tuple[Tensor, Traffic]:
    """Exchange messages of `sizes[source][target]` bytes, twice."""
    ranks = Ranks()
    receive_sizes = [sizes[source][rank] for source in ranks.ranks]
    parts = [message(rank, target, size) for target, size in enumerate(sizes[rank])]
    received = torch.zeros(sum(receive_sizes), dtype=torch.uint8)
    for _ in range(2):
        ranks.exchange(received, receive_sizes, torch.cat(parts), sizes[rank])
    return received, ranks.traffic


UNEVEN = {
    "all": [[3, 5, 7], [2, 4, 6], [1, 9, 8]],
    "one way": [[0, 5, 0], [0, 0, 6], [7, 0, 0]],
    "one gives": [[1000, 2000, 3000], [0, 0, 0], [0, 0, 0]],
    "one owns": [[0, 0, 11], [0, 0, 12], [0, 0, 13]],
    "nothing": [[0, 0, 0]] * 3,
    "two": [[1, 2], [0, 4]],
    "four": [[r * c % 5 for c in range(4)] for r in range(4)],
}


@pytest.mark.parametrize("name", UNEVEN)
def test_an_exchange_brings_each_message_to_its_rank(name: str):
    sizes = UNEVEN[name]
    n = len(sizes)
    for rank, (received, traffic) in enumerate(run(n, swap, sizes)):
        wanted = [message(source, rank, sizes[source][rank]) for source in range(n)]
        assert torch.equal(received, torch.cat(wanted))
        sent = sum(size for target, size in enumerate(sizes[rank]) if target != rank)
        assert traffic == Traffic(collectives=2, payload_bytes=2 * sent)


# -- gathers --------------------------------------------------------------------------------------------


def gather(
    rank: int, rounds: Sequence[Sequence[int]], in_place: bool
) -> tuple[list[Tensor], Traffic]:
    """Have all gathers on their way before the first is waited for."""
    ranks = Ranks()
    buffers, flying = [], []
    for index, sizes in enumerate(rounds):
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = list(torch.split(buffer, list(sizes)))
        own = message(rank, index, sizes[rank])
        if in_place:
            own = parts[rank].copy_(own)
        buffers.append(buffer)
        flying.append(ranks.start_gather(parts, own))
        del parts, own
    for pending in flying:
        pending.wait()
        pending.wait()  # nothing more happens
    return buffers, ranks.traffic


ROUNDS = {
    2: [(5, 5), (5, 0), (0, 7), (0, 0), (1, 100_000)],
    3: [(4, 4, 4), (3, 0, 9), (0, 0, 0), (0, 0, 2)],
    4: [(1, 2, 3, 4), (8, 8, 8, 8), (0, 50_000, 0, 3)],
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", ROUNDS)
def test_a_gather_fills_parts_of_any_size(n: int, in_place: bool):
    rounds = ROUNDS[n]
    for rank, (buffers, traffic) in enumerate(run(n, gather, rounds, in_place)):
        for index, (sizes, buffer) in enumerate(zip(rounds, buffers, strict=True)):
            wanted = torch.cat([message(r, index, size) for r, size in enumerate(sizes)])
            assert torch.equal(buffer, wanted)
        assert traffic == Traffic(
            collectives=sum(1 for sizes in rounds if any(sizes)),
            payload_bytes=sum(sizes[rank] for sizes in rounds) * (n - 1),
        )


# -- groups ---------------------------------------------------------------------------------------------


def in_pairs(rank: int) -> tuple[tuple[int, ...], int, Tensor, Traffic]:
    """Ranks 1 and 3 make a group of their own, and the others know nothing of it; then 0 and 2."""
    mine = (1, 3) if rank % 2 else (0, 2)
    ranks = ranks_of(mine)
    assert ranks_of(mine) is ranks
    assert ranks_of((0, 1, 2, 3)) is ranks_of((0, 1, 2, 3))
    assert ranks_of((rank,)).size == 1
    buffer = torch.zeros(6, dtype=torch.uint8)
    sizes = (2, 4)
    parts = list(torch.split(buffer, list(sizes)))
    ranks.start_gather(parts, message(rank, 0, sizes[ranks.position])).wait()
    received = torch.zeros(2, dtype=torch.uint8)
    ranks.exchange(received, [1, 1], message(rank, 5, 2), [1, 1])
    other = mine[1 - ranks.position]
    assert received.tolist()[1 - ranks.position] == message(other, 5, 2)[ranks.position]
    return ranks.ranks, ranks.position, buffer, ranks.traffic


def test_groups_within_the_default_one():
    for rank, (ranks, position, buffer, traffic) in enumerate(run(4, in_pairs)):
        assert ranks == ((1, 3) if rank % 2 else (0, 2))
        assert position == rank // 2
        assert torch.equal(buffer, torch.cat([message(ranks[0], 0, 2), message(ranks[1], 0, 4)]))
        assert traffic == Traffic(collectives=2, payload_bytes=(2, 4)[position] + 1)


def only_some(rank: int) -> list[Any]:
    """Two of four make a group; the default group's own messages go on beside it."""
    if rank in (0, 3):
        assert ranks_of((0, 3)).gather_objects(rank) == [0, 3]
        assert ranks_of((0, 3)).timeout_s == 60
    return Ranks().gather_objects(rank)


def test_only_members_make_a_group():
    assert run(4, only_some) == [[0, 1, 2, 3]] * 4


def in_a_given_group(rank: int) -> list[Any]:
    given = dist.new_group([1, 2])
    return Ranks(given).gather_objects(rank) if rank else []


def test_a_given_group():
    assert run(3, in_a_given_group) == [[], [1, 2], [1, 2]]


def overlapping(rank: int) -> str:
    """Rank 1 has made a group with rank 0 before that with rank 2."""
    if rank < 2:
        ranks_of((0, 1))
    if rank > 0:
        with pytest.raises(ValueError, match="process_group: ") as caught:
            ranks_of((1, 2))
        return str(caught.value)
    return ""


def test_a_group_that_torch_would_hang_in_is_refused():
    began = time.monotonic()
    _, one, two = run(3, overlapping)
    assert one == two
    assert "2 on rank 1" in one
    assert "1 on rank 2" in one
    assert "ranks 1 and 2" in one
    assert time.monotonic() - began < 20  # of a timeout of 60 s


def again_and_again(rank: int, directory: str) -> None:
    for generation in range(3):
        ranks = ranks_of((0, 1))
        assert ranks is ranks_of((0, 1))
        agree(f"plan {generation}", list, ranks)
        assert ranks.gather_objects(generation) == [generation] * 2
        assert len(collectives._made) == 1  # nothing keeps what was destroyed
        dist.barrier()
        dist.destroy_process_group()
        assert Ranks().size == 1
        where = f"file://{directory}/{generation}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
        assert ranks_of((0, 1)) is not ranks


def test_a_group_ends_with_its_default_group(tmp_path: Path):
    run(2, again_and_again, str(tmp_path))


def test_a_store_that_outlives_default_groups():
    store = dist.HashStore()

    def compared(rank: int, digest: str) -> int:
        vote = Vote(Roll(store, rank), "plan/1", ranks=(0, 1), rank=rank, timeout_s=10)
        return len(vote.plans(digest, list))

    with ThreadPoolExecutor(2) as pool:
        for digests, num_plans in ((("a", "a"), 0), (("a", "b"), 2), (("c", "c"), 0)):
            assert list(pool.map(compared, (0, 1), digests)) == [num_plans] * 2


def test_alone_nothing_is_sent():
    ranks = Ranks()
    given = message(1, 2, 5)
    assert (ranks.ranks, ranks.position, ranks.size) == ((0,), 0, 1)
    assert torch.equal(ranks.gather_small(given), given[None])
    received = torch.zeros(5, dtype=torch.uint8)
    ranks.exchange(received, [5], given, [5])
    assert torch.equal(received, given)
    part = torch.zeros(5, dtype=torch.uint8)
    ranks.start_gather([part], given).wait()
    assert torch.equal(part, given)
    assert ranks.gather_objects("thing") == ["thing"]
    agree("digest", list, ranks)
    assert ranks.traffic == Traffic()


# -- one plan -------------------------------------------------------------------------------------------

LINES = ["a.weight: (4, 4), muon", "b.weight: (2, 2), muon", "c.bias: (2,), adamw"]


def compare(rank: int, plans: Sequence[tuple[str, Sequence[str]]]) -> str:
    digest, lines = plans[rank]
    try:
        agree(digest, lambda: list(lines), Ranks())
    except ValueError as error:
        return str(error)
    return ""


def test_equal_plans_pass_and_are_not_described():
    assert run(4, compare, [("x", [str(rank)]) for rank in range(4)]) == [""] * 4


def test_different_plans_are_one_error():
    other = [LINES[0], "b.weight: (2, 2), adamw", "c.bias: (2,), muon"]
    plans = [("x", LINES), ("y", other), ("x", LINES), ("x", LINES)]
    found = set(run(4, compare, plans))
    assert found == {
        "b.weight: got (2, 2), muon on ranks 0, 2 and 3; (2, 2), adamw on rank 1; wanted the same on all "
        "ranks. Build the model, the layout and the optimizer with the same options on each."
    }


@pytest.mark.parametrize("short", [0, 2])
def test_plans_of_different_length(short: int):
    plans = [("x", LINES)] * 3
    plans[short] = ("y", LINES[:2])
    (found,) = set(run(3, compare, plans))
    both = sorted(set(range(3)) - {short})
    assert found.startswith("c.bias: got ")
    assert f"nothing on rank {short}" in found
    assert f"(2,), adamw on ranks {both[0]} and {both[1]}" in found


def test_plans_that_differ_in_what_is_not_described():
    (found,) = set(run(2, compare, [("x", LINES), ("y", LINES)]))
    assert found.startswith("plan: got x on rank 0; y on rank 1; ")


def test_three_plans_of_which_two_agree_in_a_line():
    third = [LINES[0], LINES[1], "c.bias: (3,), adamw"]
    fourth = ["a.weight: (4, 4), adamw", *LINES[1:]]
    plans = [("x", LINES), ("y", third), ("z", fourth)]
    (found,) = set(run(3, compare, plans))
    assert found.startswith("a.weight: got (4, 4), muon on ranks 0 and 1; (4, 4), adamw on rank 2;")


def compare_often(rank: int) -> None:
    everyone, pair = Ranks(), ranks_of((0, 1))
    for index in range(20):
        agree(f"digest {index}", list, everyone)
        agree("the same", list, pair)
        with pytest.raises(ValueError, match="same on all ranks"):
            agree(f"{index} of {rank}", lambda: [f"a: {rank}"], everyone)


def test_comparisons_do_not_meet_one_another():
    run(2, compare_often)
