"""Copies between host state and staged pieces: as few contiguous ones as the bytes allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muonloom.host import PIECE_ALIGNMENT

# A strided piece is copied run by run where the runs are long or few, and element by element otherwise.
_LEAST_RUN_BYTES = 4096
_FEW_RUNS = 16


@dataclass(frozen=True, kw_only=True)
class StagedPiece:
    """One piece of state on both sides.

    Attributes:
        host: the state's, any strides.
        memory: the bytes of the slab that it lies in.
        device: shaped as `host`, in the order of its storage without the gaps.
        device_start: where `device` begins in `buffer`, in bytes.
        buffer: the slot or room, uint8.
    """

    host: Tensor
    memory: Tensor
    device: Tensor
    device_start: int
    buffer: Tensor


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One copy; both sides have the same shape."""

    host: Tensor
    device: Tensor


def stage_piece(host: Tensor, memory: Tensor, buffer: Tensor, start: int) -> StagedPiece:
    """Lay `host`, in `memory`, out at byte `start` of `buffer`, densely and in its own storage's order."""
    stop = start + host.nbytes
    flat = buffer[start:stop].view(host.dtype)
    device = flat.as_strided(host.shape, _dense_strides(host), flat.storage_offset())
    return StagedPiece(host=host, memory=memory, device=device, device_start=start, buffer=buffer)


def transfers(pieces: Iterable[StagedPiece]) -> list[Transfer]:
    """Return the copies that move all pieces, those of neighbours on both sides in one."""
    moves: list[Transfer] = []
    pending: _Range | None = None
    for found in itertools.chain.from_iterable(map(_ranges, pieces)):
        if isinstance(found, Transfer):
            moves.append(found)
        elif pending is not None and pending.continues(found):
            pending = pending.joined(found)
        else:
            moves += [pending.transfer()] if pending is not None else []
            pending = found
    moves += [pending.transfer()] if pending is not None else []
    return moves


@dataclass(frozen=True)
class _Range:
    """`nbytes` bytes from byte `host_start` of `memory` on, and from `device_start` of `buffer` on."""

    memory: Tensor
    host_start: int
    buffer: Tensor
    device_start: int
    nbytes: int

    def continues(self, other: _Range) -> bool:
        gap = other.host_start - self.host_start
        return (
            self.memory.data_ptr() == other.memory.data_ptr()
            and self.buffer is other.buffer
            and gap == other.device_start - self.device_start
            # Only padding lies between: more would be a piece that has no part in this step.
            and self.nbytes <= gap < self.nbytes + PIECE_ALIGNMENT
        )

    def joined(self, other: _Range) -> _Range:
        nbytes = other.host_start + other.nbytes - self.host_start
        return _Range(self.memory, self.host_start, self.buffer, self.device_start, nbytes)

    def transfer(self) -> Transfer:
        return Transfer(
            host=self.memory[self.host_start : self.host_start + self.nbytes],
            device=self.buffer[self.device_start : self.device_start + self.nbytes],
        )


def _ranges(piece: StagedPiece) -> Iterator[_Range | Transfer]:
    """Cut a piece into ranges that are contiguous on both sides."""
    host, itemsize = piece.host, piece.host.element_size()
    if host.numel() == 0:
        return
    ordered = host.permute(storage_order(host))
    depth = ordered.ndim
    length = 1
    while depth and (ordered.shape[depth - 1] == 1 or ordered.stride(depth - 1) == length):
        length *= ordered.shape[depth - 1]
        depth -= 1
    count = host.numel() // length
    if count > _FEW_RUNS and length * itemsize < _LEAST_RUN_BYTES:
        # An alias with a version counter of its own: staging's writes are told from those of others.
        alias = torch.empty(0, dtype=host.dtype, device="cpu").set_(host.untyped_storage())
        alias = alias.as_strided(host.shape, host.stride(), host.storage_offset())
        yield Transfer(host=alias, device=piece.device)
        return
    first = host.data_ptr() - piece.memory.data_ptr()
    outer = itertools.product(*(range(n) for n in ordered.shape[:depth]))
    for i, index in enumerate(outer):
        steps = zip(index, ordered.stride(), strict=False)
        place = first + itemsize * sum(n * stride for n, stride in steps)
        start = piece.device_start + i * length * itemsize
        yield _Range(piece.memory, place, piece.buffer, start, length * itemsize)


def storage_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the largest stride to the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def _dense_strides(tensor: Tensor) -> list[int]:
    order = storage_order(tensor)
    sizes = [tensor.shape[dim] for dim in order]
    strides = [0] * tensor.ndim
    for place, dim in enumerate(order):
        strides[dim] = math.prod(sizes[place + 1 :])
    return strides
