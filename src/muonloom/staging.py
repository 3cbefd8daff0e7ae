"""Slots and rooms: the device memory through which host state passes, and what is in it at present."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muonloom.bound import cut
from muonloom.cuts import flat_views
from muonloom.layout import BlockSpec
from muonloom.plan import Run
from muonloom.schedule import Op, Piece, Schedule, Task, Unit
from muonloom.transfers import StagedPiece, Transfer, stage_piece, transfers


@dataclass(frozen=True, kw_only=True)
class Source:
    """A parameter's state on the host, and how it is cut (None for AdamW)."""

    state: Mapping[str, Tensor]
    spec: BlockSpec | None


class Phase(enum.Enum):
    """What one half of a unit, in its slot or in its room, holds."""

    EMPTY = "empty"
    LOADED = "loaded"  # what the slab holds
    NEWER = "newer"  # what the slab has yet to get


_LEGAL = {
    (Phase.EMPTY, Phase.LOADED),
    (Phase.LOADED, Phase.LOADED),
    (Phase.LOADED, Phase.NEWER),
    (Phase.NEWER, Phase.NEWER),
    (Phase.NEWER, Phase.EMPTY),
    (Phase.LOADED, Phase.EMPTY),  # no part of it had a gradient
}


@dataclass
class _Half:
    """One unit's pieces in a slot, or in a room.

    Attributes:
        pieces: the plan's.
        buffer: the slot or room.
        requested: the parts that the last load issued brings, or has brought, in; None after a store was
            issued. What the host has asked for so far; all else here is what the streams have done.
        phase: what it holds.
        newer: the parts that the slab has yet to get.
        owners: the parts that have pieces.
        kept: the state tensors, by part and key.
        staged: pieces of these, made as they are first needed.
        moves: copies for a set of parts.
    """

    pieces: tuple[Piece, ...]
    buffer: Tensor
    requested: frozenset[int] | None = None
    phase: Phase = Phase.EMPTY
    newer: set[int] = field(default_factory=set)
    owners: frozenset[int] = frozenset()
    kept: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    staged: dict[tuple[int, str], StagedPiece] = field(default_factory=dict)
    moves: dict[frozenset[int], list[Transfer]] = field(default_factory=dict)

    def enter(self, phase: Phase) -> None:
        assert (self.phase, phase) in _LEGAL, f"a unit cannot go from {self.phase} to {phase}"
        self.phase = phase

    def drop_tensors(self) -> None:
        for tensors in (self.kept, self.staged, self.moves):
            tensors.clear()


class Staging:
    """Owns slots and rooms, made once, and knows which unit's state each of them holds."""

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        memory_of: Callable[[Tensor], Tensor],
    ) -> None:
        """Allocate slots and rooms.

        Args:
            schedule: whose units pass.
            device: of slots and rooms.
            memory_of: returns the bytes of the slab that a state tensor lies in.
        """
        self._memory_of = memory_of
        self._units = schedule.units
        self.slots = _buffers(schedule.num_slots, schedule.slot_bytes, device)
        self.rooms = _buffers(schedule.num_rooms, schedule.room_bytes, device)
        self._room_halves = [_half(u.room, self.rooms, u.room_index) for u in schedule.units]
        self._slot_halves = [_half(u.slot, self.slots, u.slot_index) for u in schedule.units]
        self._keys = [_keys(unit) for unit in schedule.units]

    # -- what the host asks for ---------------------------------------------------------------------

    def parts_with_state(self, unit: int, sources: Sequence[Source]) -> frozenset[int]:
        """Return the parts of a unit whose state exists."""
        return frozenset(
            index
            for index, part in enumerate(self._units[unit].parts)
            if self._keys[unit][index] <= sources[part.parameter].state.keys()
        )

    def request(
        self, task: Task, sources: Sequence[Source], parts: frozenset[int]
    ) -> list[Transfer]:
        """Return the copies that bring `parts` of a unit in."""
        half = self._half_of(task)
        half.requested = parts
        if not self._is_current(half, task.unit, sources):
            half.drop_tensors()
        return self._moves(half, task.unit, sources, parts)

    def is_requested(self, task: Task, sources: Sequence[Source], parts: frozenset[int]) -> bool:
        """Whether a load task was issued already, for all of `parts`, and of the present tensors."""
        half = self._half_of(task)
        if half.requested is None or not parts <= half.requested:
            return False
        return self._is_current(half, task.unit, sources)

    def requested_bytes(self, task: Task) -> int:
        """Return the bytes that the last load of a unit brings in."""
        half = self._half_of(task)
        return sum(p.nbytes for p in half.pieces if p.part in (half.requested or ()))

    def dismiss(
        self, task: Task, sources: Sequence[Source], parts: frozenset[int]
    ) -> list[Transfer]:
        """Return the copies that take `parts` of a unit out."""
        half = self._half_of(task)
        half.requested = None
        return self._moves(half, task.unit, sources, parts)

    def forget(self) -> None:
        """Drop what is loaded: the slabs have changed, or their tensors have."""
        for half in (*self._room_halves, *self._slot_halves):
            half.requested, half.phase = None, Phase.EMPTY
            half.newer.clear()
            half.drop_tensors()

    # -- what the streams do ------------------------------------------------------------------------

    def moved(self, task: Task) -> None:
        """Note that the copies of a task are done."""
        half = self._half_of(task)
        if task.op in (Op.LOAD, Op.LOAD_MOMENTUM):
            half.enter(Phase.LOADED)
        else:
            half.enter(Phase.EMPTY)
            half.newer.clear()

    def wrote(self, unit: int, part: int) -> None:
        """Note that a part holds, in both halves, what the slabs have yet to get."""
        for half in (self._room_halves[unit], self._slot_halves[unit]):
            if part in half.owners:
                half.enter(Phase.NEWER)
                half.newer.add(part)

    def keys(self, unit: int, part: int) -> frozenset[str]:
        """Return which state of a part is staged."""
        return self._keys[unit][part]

    def piece(self, unit: int, part: int, key: str) -> Tensor:
        """Return a part's state on the device, shaped as on the host."""
        half = self._half_with(unit, part, key)
        assert half.phase is not Phase.EMPTY, "a unit is used before it was loaded"
        return half.staged[part, key].device

    def host_piece(self, unit: int, part: int, key: str) -> Tensor:
        """Return a part's state on the host, of a unit that was requested."""
        return self._half_with(unit, part, key).staged[part, key].host

    def unsaved(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield unit, part, slab and staged piece of what the slabs have yet to get."""
        for halves in (self._room_halves, self._slot_halves):
            for unit, half in enumerate(halves):
                for (part, _), piece in half.staged.items():
                    if part in half.newer:
                        yield unit, part, piece.host, piece.device

    # -- tensors ------------------------------------------------------------------------------------

    def _half_of(self, task: Task) -> _Half:
        in_room = task.op in (Op.LOAD_MOMENTUM, Op.STORE_MOMENTUM)
        return (self._room_halves if in_room else self._slot_halves)[task.unit]

    def _half_with(self, unit: int, part: int, key: str) -> _Half:
        in_room = (part, key) in self._room_halves[unit].staged
        return (self._room_halves if in_room else self._slot_halves)[unit]

    def _is_current(self, half: _Half, unit: int, sources: Sequence[Source]) -> bool:
        """Whether nobody has put another tensor into the state."""
        parts = self._units[unit].parts
        return all(
            sources[parts[part].parameter].state.get(key) is kept
            for (part, key), kept in half.kept.items()
        )

    def _moves(
        self, half: _Half, unit: int, sources: Sequence[Source], parts: frozenset[int]
    ) -> list[Transfer]:
        chosen = [piece for piece in half.pieces if piece.part in parts]
        for piece in chosen:
            if (piece.part, piece.key) not in half.staged:
                source = sources[self._units[unit].parts[piece.part].parameter]
                half.kept[piece.part, piece.key] = source.state[piece.key]
                half.staged[piece.part, piece.key] = stage_piece(
                    self._host(unit, piece, source),
                    self._memory_of(source.state[piece.key]),
                    half.buffer,
                    piece.offset,
                )
        if parts not in half.moves:
            half.moves.clear()  # which parts have gradients seldom changes: one answer is kept
            staged = [half.staged[piece.part, piece.key] for piece in chosen]
            half.moves[parts] = transfers(staged)
        return half.moves[parts]

    def _host(self, unit: int, piece: Piece, source: Source) -> Tensor:
        part = self._units[unit].parts[piece.part]
        tensor = source.state[piece.key]
        if isinstance(part, Run):
            assert source.spec is not None
            return cut(flat_views(source.spec, tensor), part)
        return tensor.view(-1)[part.start : part.stop]


def _buffers(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]


def _half(pieces: tuple[Piece, ...], buffers: Sequence[Tensor], index: int) -> _Half:
    buffer = buffers[index] if pieces else torch.empty(0, dtype=torch.uint8, device="cpu")
    return _Half(pieces, buffer, owners=frozenset(piece.part for piece in pieces))


def _keys(unit: Unit) -> list[frozenset[str]]:
    pieces = (*unit.room, *unit.slot)
    keys: list[set[str]] = [set() for _ in unit.parts]
    for piece in pieces:
        keys[piece.part].add(piece.key)
    return [frozenset(own) for own in keys]
