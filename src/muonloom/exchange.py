"""Shared atoms on their way: fragments to the owner, results back, one message a pair of ranks each way.

A message holds pieces, each at a multiple of eight bytes, in the order of the plan's shipments, which is
the same on all ranks. On the way to the owner a piece begins with FP32 numbers: the power of two that its
values were divided by, then for each matrix of the atom whether its gradient is other than zero. On the way
back, a matrix that must stay as it is has infinities for values, or NaN where its iteration failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from muonloom.collectives import Ranks
from muonloom.cuts import flat_views
from muonloom.layout import BlockSpec, MatrixView
from muonloom.ownership import SharedAtom
from muonloom.plan import Exchange, Run, Shipment
from muonloom.sharding import Box

_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank sends another of one atom: `start` is where, in bytes of the sender's or receiver's."""

    shipment: int
    box: Box
    start: int
    header: int
    nbytes: int

    @property
    def stop(self) -> int:
        """Where the next one begins."""
        return self.start + _padded(self.header) + _padded(self.nbytes)


@dataclass(frozen=True, kw_only=True)
class Mail:
    """All pieces that a rank sends, or gets, in one direction, and the bytes of each message."""

    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all messages."""
        return sum(self.sizes)

    def of(self, shipment: int) -> Sequence[Piece]:
        """Return the pieces of one atom."""
        return self._by_shipment.get(shipment, ())

    @cached_property
    def _by_shipment(self) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.shipment, []).append(piece)
        return found


@dataclass(frozen=True, kw_only=True)
class Route:
    """The four mails of one exchange on this rank."""

    sent: Mail
    received: Mail
    returned: Mail
    results: Mail


@lru_cache(maxsize=256)
def route(exchange: Exchange) -> Route:
    """Return who sends what where."""
    own, everyone = exchange.position, range(len(exchange.ranks))
    sent: list[Letter] = [[] for _ in everyone]
    received: list[Letter] = [[] for _ in everyone]
    returned: list[Letter] = [[] for _ in everyone]
    results: list[Letter] = [[] for _ in everyone]
    for index, shipment in enumerate(exchange.shipments):
        owner = shipment.atom.owner
        for place, box in shipment.atom.sources:
            if place == own:
                sent[owner].append((index, shipment, box))
            if owner == own:
                received[place].append((index, shipment, box))
        for place, box in shipment.atom.targets:
            if owner == own:
                returned[place].append((index, shipment, box))
            if place == own:
                results[owner].append((index, shipment, box))
    return Route(
        sent=_mail(sent, has_header=True),
        received=_mail(received, has_header=True),
        returned=_mail(returned, has_header=False),
        results=_mail(results, has_header=False),
    )


Letter = list[tuple[int, Shipment, Box]]
"""The fragments for one rank, or from it."""


def _mail(letters: Sequence[Letter], *, has_header: bool) -> Mail:
    pieces: list[Piece] = []
    sizes: list[int] = []
    start = 0
    for letter in letters:
        begin = start
        for index, shipment, box in letter:
            piece = Piece(
                shipment=index,
                box=box,
                start=start,
                header=4 * (1 + num_matrices(shipment.atom)) if has_header else 0,
                nbytes=box.numel * shipment.dtype.itemsize,
            )
            pieces.append(piece)
            start = piece.stop
        sizes.append(start - begin)
    return Mail(pieces=tuple(pieces), sizes=tuple(sizes))


def num_matrices(atom: SharedAtom) -> int:
    """Return how many matrices an atom holds."""
    return len(atom.spec.matrices(atom.shape))


def exchange_bytes(exchange: Exchange) -> int:
    """Return the workspace that an exchange takes."""
    return sum(_regions(exchange))


def _regions(exchange: Exchange) -> tuple[int, int, int]:
    """This rank's fragments; what it gets and returns as an owner; its atoms, put together."""
    found = route(exchange)
    owned = [s for s in exchange.shipments if s.atom.owner == exchange.position]
    return (
        max(found.sent.nbytes, found.results.nbytes),
        max(found.received.nbytes, found.returned.nbytes),
        sum(_padded(s.atom.numel * s.dtype.itemsize) for s in owned),
    )


class Crossing:
    """One exchange as it happens: `memory` is uint8, of `exchange_bytes`."""

    def __init__(self, exchange: Exchange, ranks: Ranks, memory: Tensor) -> None:
        self._exchange = exchange
        self._ranks = ranks
        self._route = route(exchange)
        first, second, third = _regions(exchange)
        self._mine = memory[:first]
        self._theirs = memory[first : first + second]
        self._atoms = _atoms(exchange, memory[first + second : first + second + third])
        self._idle: dict[int, Tensor] = {}

    def sends(self, run: int) -> bool:
        """Whether the owner gets a fragment from this rank, and not from another that holds the same."""
        return bool(self._route.sent.of(run))

    def send(self, run: int, direction: Tensor, gradient: Tensor, *, scratch: Tensor) -> None:
        """Put a fragment into its message; `direction` is FP32, and overwritten."""
        shipment = self._exchange.shipments[run]
        for piece in self._route.sent.of(run):
            numbers, values = self._piece(self._mine, piece)
            scale = _power_of_two(direction)
            torch.mul(direction, 1 / scale, out=scratch)
            # One column is cut as one row: the same elements in the same order.
            values.copy_(scratch.view(values.shape))
            numbers[0] = torch.where(direction.any(), scale, 0)
            numbers[1:] = _nonzero(shipment.atom, piece.box, gradient.reshape(values.shape))

    def leave_out(self, run: int) -> None:
        """Put zeros in place of a fragment without gradient."""
        for piece in self._route.sent.of(run):
            self._mine[piece.start : piece.stop].zero_()

    def go(self) -> None:
        """Have all fragments at their owners, and put together there."""
        found = self._route
        self._ranks.exchange(
            self._theirs[: found.received.nbytes],
            found.received.sizes,
            self._mine[: found.sent.nbytes],
            found.sent.sizes,
        )
        for index, atom in self._atoms.items():
            pieces = found.received.of(index)
            numbers = [self._piece(self._theirs, piece)[0] for piece in pieces]
            scales = torch.stack([own[0] for own in numbers])
            # Powers of two: the quotients are exact.
            factors = scales / scales.max().clamp_min(torch.finfo(torch.float32).tiny)
            for piece, factor in zip(pieces, factors, strict=True):
                part = atom[piece.box.slices]
                torch.mul(self._piece(self._theirs, piece)[1], factor.to(part.dtype), out=part)
            self._idle[index] = ~torch.stack([own[1:] for own in numbers]).any(0)

    def views(self, shipment: int) -> list[MatrixView]:
        """Return the matrices of an atom that this rank owns, in its compute dtype."""
        return flat_views(self._exchange.shipments[shipment].atom.spec, self._atoms[shipment])

    def idle(self, shipment: int, run: Run) -> Tensor:
        """Return for each matrix of a run whether its gradient is zero everywhere."""
        atom = self._exchange.shipments[shipment].atom
        before = sum(_view_counts(atom.spec, atom.shape)[: run.view])
        return self._idle[shipment][before + run.first : before + run.first + run.count]

    @staticmethod
    def mark(results: Tensor, *, keep: Tensor, held: Tensor) -> None:
        """Tell those who get results which matrices must stay as they are, and why."""
        results.masked_fill_((~keep).view(-1, 1, 1), math.nan)
        results.masked_fill_(held.view(-1, 1, 1), math.inf)

    def come_back(self) -> None:
        """Have all results, which are where the directions were, with those who hold the fragments."""
        found = self._route
        for piece in found.returned.pieces:
            atom = self._atoms[piece.shipment]
            self._piece(self._theirs, piece)[1].copy_(atom[piece.box.slices])
        self._ranks.exchange(
            self._mine[: found.results.nbytes],
            found.results.sizes,
            self._theirs[: found.returned.nbytes],
            found.returned.sizes,
        )

    def result(self, run: int) -> Tensor:
        """Return the result for one of this rank's fragments, shaped as that is cut."""
        (piece,) = self._route.results.of(run)
        return self._piece(self._mine, piece)[1].view(_cut_shape(piece.box.sizes))

    def scaled(self, run: int, factor: Callable[[int, int], float]) -> tuple[Tensor, float]:
        """Return the same with the factor of its matrices' shape; multiplied by it where shapes differ."""
        result = self.result(run)
        shipment = self._exchange.shipments[run]
        factors = [factor(*shape) for shape in shipment.matrix_shapes]
        if len(set(factors)) == 1:
            return result, factors[0]
        atom = shipment.atom
        spread = torch.empty(atom.shape, dtype=torch.float32, device=result.device)
        start = 0
        for view in flat_views(atom.spec, spread):
            own = torch.tensor(factors[start : start + view.count], device=result.device)
            view.tensor.copy_(
                own.view([-1] * view.batch_dims + [1] * (view.tensor.ndim - view.batch_dims))
            )
            start += view.count
        (piece,) = self._route.results.of(run)
        return result * spread[piece.box.slices].reshape(result.shape), 1.0

    def _piece(self, memory: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return the numbers and the values of a piece."""
        dtype = self._exchange.shipments[piece.shipment].dtype
        begin = piece.start + _padded(piece.header)
        numbers = memory[piece.start : piece.start + piece.header].view(torch.float32)
        values = memory[begin : begin + piece.nbytes].view(dtype).view(piece.box.sizes)
        return numbers, values


def _atoms(exchange: Exchange, memory: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    start = 0
    for index, shipment in enumerate(exchange.shipments):
        if shipment.atom.owner == exchange.position:
            nbytes = shipment.atom.numel * shipment.dtype.itemsize
            flat = memory[start : start + nbytes].view(shipment.dtype)
            found[index] = flat.view(shipment.atom.shape)
            start += _padded(nbytes)
    return found


def _power_of_two(direction: Tensor) -> Tensor:
    """Return the power of two next to the largest magnitude: values divided by it fit any dtype."""
    largest = torch.linalg.vector_norm(direction, math.inf)
    exponent = torch.frexp(largest).exponent.clamp(-125, 126)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _nonzero(atom: SharedAtom, box: Box, gradient: Tensor) -> Tensor:
    """Return for each matrix of an atom whether a fragment of its gradient is other than zero, as FP32."""
    if num_matrices(atom) == 1:
        return gradient.any().to(torch.float32)
    flags = torch.zeros(atom.shape, dtype=torch.bool, device=gradient.device)
    flags[box.slices] = gradient != 0
    found = []
    for view in flat_views(atom.spec, flags):
        dims = tuple(range(view.batch_dims, view.tensor.ndim))
        found.append(torch.sum(view.tensor, dims).view(-1))
    return (torch.cat(found) > 0).to(torch.float32)


@lru_cache(maxsize=4096)
def _view_counts(spec: BlockSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(view.count for view in flat_views(spec, torch.empty(shape, device="meta")))


def _cut_shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a fragment's view: the dimension that is dense in memory comes last."""
    return sizes if math.prod(sizes[1:]) > 1 else (*sizes[1:], sizes[0])


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
