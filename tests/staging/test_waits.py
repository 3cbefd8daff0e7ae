"""Waits of schedules, against brute force: all conflicts are in order, and no wait can be left out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom.dependencies import Access, add_waits
from muonloom.schedule import Op, Piece, Schedule
from staging.examples import example

SEEDS = range(120)


def bytes_touched(schedule: Schedule) -> list[list[Access]]:
    """Return what each task touches, from pieces alone; slabs by unit and key."""
    found = []
    for task in schedule.tasks:
        if task.unit < 0:
            found.append([])
            continue
        unit = schedule.units[task.unit]
        touched: list[tuple[tuple[str, int], Piece, bool]] = []
        room, slot, slab = ("room", unit.room_index), ("slot", unit.slot_index), "slab"
        op = task.op
        if op is not Op.LOAD and op is not Op.STORE:
            writes = op in (Op.LOAD_MOMENTUM, Op.UPDATE)
            touched += [(room, piece, writes) for piece in unit.room]
        if op in (Op.LOAD, Op.UPDATE, Op.ADAMW, Op.STORE):
            touched += [(slot, piece, op is not Op.STORE) for piece in unit.slot]
        accesses = [access(place, piece, write) for place, piece, write in touched]
        if op.stream != "compute":
            moved = unit.slot if op in (Op.LOAD, Op.STORE) else unit.room
            write = op.stream == "store"
            accesses += [access((slab, task.unit, p.key, p.part), p, write) for p in moved]
        found.append(accesses)
    return found


def access(place: Any, piece: Piece, write: bool) -> Access:
    start, stop = piece.offset, piece.offset + piece.nbytes
    return Access(place=place, start=start, stop=stop, write=write)


Pairs = list[list[int]]
"""By task: all tasks, of its own step or of others, with which it shares bytes that either writes."""


def conflicts(accesses: Sequence[Sequence[Access]]) -> Pairs:
    """Compare all with all."""
    return [
        [
            other
            for other, others in enumerate(accesses)
            if any(conflict(a, b) for a in own for b in others)
        ]
        for own in accesses
    ]


@functools.cache
def conflicts_of(seed: int) -> Pairs:
    """Return those of an example; two tests ask."""
    return conflicts(bytes_touched(example(seed).schedule))


def conflict(one: Access, other: Access) -> bool:
    shared = range(max(one.start, other.start), min(one.stop, other.stop))
    return one.place == other.place and len(shared) > 0 and (one.write or other.write)


def unordered(
    streams: Sequence[str],
    waits: Sequence[Sequence[int]],
    pairs: Pairs,
    *,
    steps: int,
    order: Iterable[int] | None = None,
) -> set[tuple[int, int]]:
    """Return the conflicts of `steps` steps that neither streams nor waits order; by reachability.

    Task ``t`` of step ``s`` is number ``s * len(streams) + t``. All are issued in `order`, or by number;
    a wait is for the latest of its task that was issued until then.
    """
    count = len(streams)
    first = sum(1 << step * count for step in range(steps))
    shared = [sum(first << other for other in own) for own in pairs]  # bit sets, of all steps
    before: dict[int, int] = {}  # bit sets of what surely comes earlier
    last: dict[str | int, int] = {}  # issued on a stream, or of a task
    bad: set[tuple[int, int]] = set()
    for node in range(steps * count) if order is None else order:
        task = node % count
        reach = 0
        for edge in (last.get(key) for key in (streams[task], *waits[task])):
            if edge is not None:
                reach |= before[edge] | 1 << edge
        before[node] = reach
        last[streams[task]] = last[task] = node
        missing = shared[task] & ((1 << node) - 1) & ~reach
        while missing:
            bad.add((((missing & -missing).bit_length() - 1) % count, task))
            missing &= missing - 1
    return bad


def ahead_of_time(schedule: Schedule, *, steps: int) -> list[int]:
    """Issue the first loads of a step as soon as their waits allow, in the step before."""
    tasks, count = schedule.tasks, len(schedule.tasks)
    last_load = max((i for i, t in enumerate(tasks) if t.op.stream == "load"), default=-1)
    order: list[int] = []
    head = 0  # of the loads that may come early
    for step in range(steps):
        order += range(step * count + head, step * count + schedule.prefetch)
        head = 0
        for index in range(schedule.prefetch, count):
            order.append(step * count + index)
            while (
                index >= last_load
                and step + 1 < steps
                and head < schedule.prefetch
                and all(wait <= index for wait in tasks[head].waits)
            ):
                order.append((step + 1) * count + head)
                head += 1
    return order


def dropped(waits: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield the waits without the first of them, without the second, and so on."""
    for task, own in enumerate(waits):
        for wait in own:
            left = [*waits]
            left[task] = tuple(other for other in own if other != wait)
            yield left


def earlier(
    streams: Sequence[str], waits: Sequence[tuple[int, ...]]
) -> Iterator[list[tuple[int, ...]]]:
    """Yield the waits with the first of them for the task before, of that stream; and so on."""
    for task, own in enumerate(waits):
        for wait in own:
            before = [i for i in range(wait) if streams[i] == streams[wait]]
            # Across the border of the step there is no name for the task before.
            if before and not before[-1] < task < wait:
                left = [*waits]
                left[task] = tuple(before[-1] if other == wait else other for other in own)
                yield left


@pytest.mark.parametrize("seed", SEEDS)
def test_waits_order_all_conflicts_and_none_is_needless(seed: int):
    """Against brute force, from the bytes of pieces: neither fewer waits nor earlier ones would do."""
    schedule = example(seed).schedule
    streams = [task.op.stream for task in schedule.tasks]
    waits = [task.waits for task in schedule.tasks]
    pairs = conflicts_of(seed)
    assert not unordered(streams, waits, pairs, steps=4)
    assert all(unordered(streams, left, pairs, steps=2) for left in dropped(waits))
    assert all(unordered(streams, left, pairs, steps=2) for left in earlier(streams, waits))


@pytest.mark.parametrize("seed", SEEDS)
def test_loads_may_be_issued_as_soon_as_what_they_wait_for(seed: int):
    """As the engine does: its order is another one, and has the same waits."""
    schedule = example(seed).schedule
    streams = [task.op.stream for task in schedule.tasks]
    waits = [task.waits for task in schedule.tasks]
    order = ahead_of_time(schedule, steps=4)
    assert sorted(order) == list(range(4 * len(streams)))
    assert not unordered(streams, waits, conflicts_of(seed), steps=4, order=order)


def test_many_loads_can_be_issued_early():
    orders = [ahead_of_time(example(seed).schedule, steps=2) for seed in SEEDS]
    assert sum(order != sorted(order) for order in orders) > len(SEEDS) // 2


@pytest.mark.parametrize("seed", range(0, 120, 4))
def test_every_step_waits_as_the_one_before(seed: int):
    """Two steps taken for one have the waits of one, twice."""
    schedule = example(seed).schedule
    streams = [task.op.stream for task in schedule.tasks]
    accesses = bytes_touched(schedule)
    count = len(streams)
    doubled = add_waits(streams * 2, accesses * 2)
    for task, own in enumerate(add_waits(streams, accesses)):
        wanted = {(task - wait) % count for wait in own}
        for place in (task, task + count):
            assert {(place - wait) % (2 * count) for wait in doubled[place]} == wanted
        assert own == schedule.tasks[task].waits


ACCESSES = st.builds(
    lambda place, start, length, write: Access(
        place=place, start=start, stop=start + length, write=write
    ),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(ACCESSES, max_size=3)), min_size=1, max_size=8
    )
)
def test_waits_of_any_tasks_are_enough_and_needed(tasks: list[tuple[str, list[Access]]]):
    streams, accesses = [stream for stream, _ in tasks], [own for _, own in tasks]
    waits = add_waits(streams, accesses)
    pairs = conflicts(accesses)
    assert not unordered(streams, waits, pairs, steps=4)
    assert all(unordered(streams, left, pairs, steps=3) for left in dropped(waits))
