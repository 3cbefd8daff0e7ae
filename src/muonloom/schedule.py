"""A plan's work in order, as plain data: what each stream does, and what it waits for.

In device placement the order is all there is::

    for each batch:   DIRECTION → ORTHOGONALIZE → UPDATE          for each pack:   ADAMW

In host placement state passes through the device in *units*. The momentum of a batch waits in a *room*
of the workspace from the first phase to the second, so that it moves once each way and is still the old
one should the iteration fail; masters, and all of a pack's state, pass through *slots*::

    load      LOAD_MOMENTUM of each unit …          LOAD of each unit, as slots get free …
    compute   DIRECTION of each unit → ORTHOGONALIZE the batch → UPDATE of each unit
    store                                                        STORE of each unit … STORE_MOMENTUM

Loads are issued as early as room and slots allow, across batches. Those at the head of the order can be
issued for the next step already in the one before, as soon as what they wait for there has been.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from muonloom.dependencies import Access, add_waits
from muonloom.errors import complaint
from muonloom.host import padded
from muonloom.plan import Pack, Plan, Run, Span, Work

_DEFAULT_SLOT_BYTES = 256 << 20
_SLOT_BYTES = {"cpu": 4 << 20}


class Op(enum.Enum):
    """The kinds of work in a schedule."""

    LOAD_MOMENTUM = "load momentum"
    LOAD = "load"
    DIRECTION = "direction"
    ORTHOGONALIZE = "orthogonalize"
    UPDATE = "update"
    ADAMW = "adamw"
    STORE = "store"
    STORE_MOMENTUM = "store momentum"

    @property
    def stream(self) -> str:
        """The stream that does it."""
        return _STREAMS.get(self, "compute")


_STREAMS = {
    Op.LOAD_MOMENTUM: "load",
    Op.LOAD: "load",
    Op.STORE: "store",
    Op.STORE_MOMENTUM: "store",
}


@dataclass(frozen=True, kw_only=True)
class StagedState:
    """Which state of one parameter lies on the host: keys, and bytes an element.

    Attributes:
        room: what waits in a room between the phases of a batch.
        slot: what passes through a slot.
    """

    room: tuple[tuple[str, int], ...] = ()
    slot: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The state `key` of part `part` of a unit, at `offset` bytes of a slot or room."""

    part: int
    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What passes through the device together: runs of one batch, or spans of one pack.

    Attributes:
        work: index into the schedule's works.
        parts: the runs or spans.
        room_index: which room its momentum waits in.
        room: pieces in that room.
        slot_index: which slot the rest passes through.
        slot: pieces in that slot; empty where nothing has to pass.
    """

    work: int
    parts: tuple[Run | Span, ...]
    room_index: int = -1
    room: tuple[Piece, ...] = ()
    slot_index: int = -1
    slot: tuple[Piece, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """One piece of work.

    Attributes:
        op: what to do.
        work: with which batch, exchange or pack.
        unit: with which unit of the schedule; -1: the whole batch.
        waits: indices of tasks of other streams to wait for. One that comes later in the order is that
            task of the step before.
    """

    op: Op
    work: int
    unit: int = -1
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of one step, in the order in which they are issued.

    Attributes:
        works: the plan's, in order.
        units: of all works, in order.
        tasks: the order.
        num_slots: how many slots there are; 0 in device placement.
        slot_bytes: the size of each.
        num_rooms: how many batches' momentum the device holds at a time.
        room_bytes: the size of each room.
        prefetch: how many of the first tasks may be issued before the step.
    """

    works: tuple[Work, ...]
    units: tuple[Unit, ...]
    tasks: tuple[Task, ...]
    num_slots: int = 0
    slot_bytes: int = 0
    num_rooms: int = 0
    room_bytes: int = 0
    prefetch: int = 0

    @cached_property
    def _units_by_work(self) -> list[list[tuple[int, Unit]]]:
        found: list[list[tuple[int, Unit]]] = [[] for _ in self.works]
        for index, unit in enumerate(self.units):
            found[unit.work].append((index, unit))
        return found

    def units_of(self, work: int) -> list[tuple[int, Unit]]:
        """Return the units of a batch or pack, with their indices."""
        return self._units_by_work[work]


def resident_schedule(plan: Plan) -> Schedule:
    """Return the schedule of device placement: everything that belongs together is one unit."""
    works = plan.works
    units = [Unit(work=w, parts=work.parts) for w, work in enumerate(works)]
    tasks = [task for w, work in enumerate(works) for task in _compute(w, work, [w])]
    return Schedule(works=tuple(works), units=tuple(units), tasks=tuple(tasks))


def staged_schedule(
    plan: Plan,
    staged: Mapping[int, StagedState],
    *,
    slot_bytes: int | str = "auto",
    num_slots: int = 3,
    forward_order: bool = False,
) -> Schedule:
    """Return the schedule of host placement.

    Args:
        plan: of one device.
        staged: by parameter.
        slot_bytes: of each slot. "auto" takes a constant of the device type, or more where the largest
            run or span needs it, or the masters of a batch would not fit all slots but one.
        num_slots: 1 is serial; 3 let load, compute and store of three units overlap.
        forward_order: have weights ready in the order of a forward pass. Otherwise packs, which take much
            moving and little computing, are spread among batches, which are the other way round.

    Raises:
        ValueError: a matrix or span does not fit a slot; it is named, with the bytes needed.
    """
    works = plan.works if forward_order else _spread(plan)
    size = _slot_size(works, staged, slot_bytes, num_slots)
    num_batches = sum(not isinstance(work, Pack) for work in works)
    num_rooms = min(2 if num_slots > 1 else 1, num_batches)
    units: list[Unit] = []
    tasks: list[Task] = []
    batches_before = 0
    for w, work in enumerate(works):
        own = list(_units(w, work, staged, slot_bytes=size, name=plan.names))
        if not isinstance(work, Pack):
            own = [replace(unit, room_index=batches_before % num_rooms) for unit in own]
            batches_before += 1
        tasks += _compute(w, work, range(len(units), len(units) + len(own)))
        units += own
    units = list(_with_slots(units, num_slots))
    order = list(_order(tasks, units, num_slots=num_slots, num_rooms=num_rooms))
    prefetch = next((i for i, task in enumerate(order) if task.op.stream != "load"), len(order))
    accesses = [_accesses(task, units) for task in order]
    waits = add_waits([task.op.stream for task in order], accesses)
    return Schedule(
        works=tuple(works),
        units=tuple(units),
        tasks=tuple(replace(t, waits=w) for t, w in zip(order, waits, strict=True)),
        num_slots=num_slots,
        slot_bytes=size,
        num_rooms=num_rooms,
        room_bytes=max((_end(unit.room) for unit in units), default=0),
        prefetch=prefetch,
    )


def _spread(plan: Plan) -> list[Work]:
    batches = [work for work in plan.works if not isinstance(work, Pack)]
    packs = [work for work in plan.works if isinstance(work, Pack)]
    works: list[Work] = []
    taken = 0
    for count, batch in enumerate(batches, start=1):
        due = count * len(packs) // len(batches)
        works += [batch, *packs[taken:due]]
        taken = due
    return works if batches else list(packs)


def _compute(w: int, work: Work, units: Sequence[int]) -> Iterator[Task]:
    if isinstance(work, Pack):
        yield from (Task(op=Op.ADAMW, work=w, unit=unit) for unit in units)
        return
    yield from (Task(op=Op.DIRECTION, work=w, unit=unit) for unit in units)
    yield Task(op=Op.ORTHOGONALIZE, work=w)
    yield from (Task(op=Op.UPDATE, work=w, unit=unit) for unit in units)


def default_slot_bytes(device: torch.device) -> int:
    """Return the least size of a slot that "auto" takes on a device."""
    return _SLOT_BYTES.get(device.type, _DEFAULT_SLOT_BYTES)


# -- units ------------------------------------------------------------------------------------------


def _slot_size(
    works: Sequence[Work],
    staged: Mapping[int, StagedState],
    slot_bytes: int | str,
    num_slots: int,
) -> int:
    if not isinstance(slot_bytes, str):
        return slot_bytes
    sizes = [0]
    for work in works:
        parts: tuple[Run | Span, ...] = work.parts
        sizes += [max(_part_bytes(part, staged)) for part in parts]
        sizes.append(default_slot_bytes(work.device))
        if not isinstance(work, Pack):
            # What does not fit all slots but one cannot be loaded while the batch is iterated.
            masters = sum(_part_bytes(part, staged)[0] for part in parts)
            sizes.append(-(-masters // max(1, num_slots - 1)))
    return max(sizes)


def _part_bytes(part: Run | Span, staged: Mapping[int, StagedState]) -> tuple[int, int]:
    """Return the bytes that a part takes in a slot and in a room; those of a unit are the sums."""
    state = staged[part.parameter]
    slot = sum(padded(part.numel * itemsize) for _, itemsize in state.slot)
    return slot, sum(padded(part.numel * itemsize) for _, itemsize in state.room)


def _units(
    w: int,
    work: Work,
    staged: Mapping[int, StagedState],
    *,
    slot_bytes: int,
    name: Sequence[str],
) -> Iterator[Unit]:
    start = slot = room = 0
    parts: list[Run | Span] = []
    for part in work.parts:
        more_slot, more_room = _part_bytes(part, staged)
        _check_fits(part, max(more_slot, more_room), slot_bytes=slot_bytes, name=name)
        if parts and max(slot + more_slot, room + more_room) > slot_bytes:
            yield _unit(w, tuple(parts), staged, room_start=start)
            start, slot, room, parts = start + room, 0, 0, []
        parts.append(part)
        slot, room = slot + more_slot, room + more_room
    yield _unit(w, tuple(parts), staged, room_start=start)


def _unit(
    w: int,
    parts: tuple[Run | Span, ...],
    staged: Mapping[int, StagedState],
    *,
    room_start: int,
) -> Unit:
    room = _pieces(parts, {p.parameter: staged[p.parameter].room for p in parts}, room_start)
    slot = _pieces(parts, {p.parameter: staged[p.parameter].slot for p in parts})
    return Unit(work=w, parts=parts, room=tuple(room), slot=tuple(slot))


def _pieces(
    parts: Sequence[Run | Span],
    keys: Mapping[int, tuple[tuple[str, int], ...]],
    offset: int = 0,
) -> list[Piece]:
    """Put pieces one after the other, key by key: as slabs do, so that neighbours move in one copy."""
    pieces: list[Piece] = []
    for key in dict.fromkeys(key for part in parts for key, _ in keys[part.parameter]):
        for index, part in enumerate(parts):
            itemsize = dict(keys[part.parameter]).get(key)
            if itemsize is not None:
                nbytes = part.numel * itemsize
                pieces.append(Piece(part=index, key=key, offset=offset, nbytes=nbytes))
                offset += padded(nbytes)
    return pieces


def _end(pieces: Sequence[Piece], start: int = 0) -> int:
    return pieces[-1].offset + padded(pieces[-1].nbytes) if pieces else start


def _check_fits(part: Run | Span, needed: int, *, slot_bytes: int, name: Sequence[str]) -> None:
    if needed <= slot_bytes:
        return
    what = "a span"
    if isinstance(part, Run):
        many = f", with {part.count - 1} more at once," if part.count > 1 else ""
        what = f"a {part.shape[0]}×{part.shape[1]} matrix{many}"
    raise ValueError(
        complaint(
            name[part.parameter],
            got=f"{what} that stages {needed} bytes and slot_bytes={slot_bytes}",
            wanted="a slot that holds it",
            remedy=f"Set slot_bytes to {needed} or more, or to 'auto'.",
        )
    )


def _with_slots(units: Sequence[Unit], num_slots: int) -> Iterator[Unit]:
    """Give slots out in turn, to the units that need one."""
    count = 0
    for unit in units:
        if unit.slot:
            yield replace(unit, slot_index=count % num_slots)
            count += 1
        else:
            yield unit


# -- order ------------------------------------------------------------------------------------------


def _order(
    compute: Sequence[Task], units: Sequence[Unit], *, num_slots: int, num_rooms: int
) -> Iterator[Task]:
    """Put loads before the work that needs them as early as their place is free, and stores after it.

    A place is free as soon as the store of what it held has been issued: later loads of another place
    never stand behind one that has to wait for work not yet issued.
    """
    batches = dict.fromkeys(t.work for t in compute if t.op is Op.ORTHOGONALIZE)
    turn = {w: i for i, w in enumerate(batches)}
    momentum = _Queue([t for t in compute if t.op is Op.DIRECTION and units[t.unit].room])
    slots = _Queue([t for t in compute if t.op in (Op.UPDATE, Op.ADAMW) and units[t.unit].slot])
    position = {task: index for index, task in enumerate(compute)}
    batches_done, units_stored = 0, 0
    waiting: list[Task] = []  # a batch's momentum goes home when all of it is done
    for index, task in enumerate(compute):
        while True:
            ready = []
            if (head := momentum.head) and turn[head.work] < batches_done + num_rooms:
                ready.append((position[head], Op.LOAD_MOMENTUM, momentum))
            if (head := slots.head) and slots.taken < units_stored + num_slots:
                ready.append((position[head], Op.LOAD, slots))
            if not ready:
                break
            _, op, queue = min(ready, key=lambda entry: entry[0])
            yield replace(queue.take(), op=op)
        yield task
        if task.op not in (Op.UPDATE, Op.ADAMW):
            continue
        stores = [replace(task, op=Op.STORE)] if units[task.unit].slot else []
        units_stored += len(stores)
        if units[task.unit].room:
            waiting.append(replace(task, op=Op.STORE_MOMENTUM))
        if index + 1 == len(compute) or compute[index + 1].work != task.work:
            batches_done += task.op is Op.UPDATE
            # Whichever is scarcer is freed first: rooms where a batch takes few slots, else slots.
            stores = waiting + stores if len(waiting) < num_slots else stores + waiting
            waiting = []
        yield from stores


class _Queue:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self.taken = 0

    @property
    def head(self) -> Task | None:
        return self._tasks[self.taken] if self.taken < len(self._tasks) else None

    def take(self) -> Task:
        self.taken += 1
        return self._tasks[self.taken - 1]


def _accesses(task: Task, units: Sequence[Unit]) -> list[Access]:
    """Return what a task touches of what several streams touch.

    Slabs are not among it: a unit always has the same slot and room, whose order is that of its slab too.
    """
    if task.unit < 0:
        return []
    unit = units[task.unit]
    begin = unit.room[0].offset if unit.room else 0
    room = Access(place=("room", unit.room_index), start=begin, stop=_end(unit.room, begin))
    slot = Access(place=("slot", unit.slot_index), start=0, stop=1 if unit.slot else 0)
    touched = {
        Op.LOAD_MOMENTUM: [replace(room, write=True)],
        Op.LOAD: [replace(slot, write=True)],
        Op.DIRECTION: [room],
        Op.UPDATE: [replace(room, write=True), replace(slot, write=True)],
        Op.ADAMW: [replace(slot, write=True)],
        Op.STORE: [slot],
        Op.STORE_MOMENTUM: [room],
    }
    return touched[task.op]
