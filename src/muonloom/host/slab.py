"""Slabs: the host memory of the optimizer's state, allocated once and never moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.host.arena import HostArena, layout_bytes
from muonloom.host.limits import check_host_bytes, read_limits


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Room for the state `key` of one parameter."""

    parameter: Tensor
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SlabStore:
    """Gives state tensors out of slabs; each parameter's have their place from the start.

    Args:
        pin: what makes memory fit for asynchronous copies.
        unpin: undoes that.
    """

    def __init__(
        self,
        *,
        pin: Callable[[Tensor], None] | None = None,
        unpin: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._slabs: list[HostArena] = []
        self._tensors: dict[tuple[Tensor, str], Tensor] = {}
        self._used: set[tuple[Tensor, str]] = set()
        self._counters: dict[Tensor, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all slabs, whole pages."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def version(self) -> int:
        """What changes whenever somebody writes state in place; staging's own copies do not count."""
        return sum(tensor._version for tensor in self._tensors.values())

    def reserve(
        self, reservations: Iterable[Reservation], *, what: str, later_bytes: int = 0
    ) -> None:
        """Allocate one slab for all of these that have no place yet, side by side in this order.

        Args:
            reservations: what needs a place.
            what: what that is, for errors.
            later_bytes: what else will be asked for in time, and has to be there too.

        Raises:
            MemoryError: the container or the machine has not so much memory; nothing was allocated.
        """
        new = [r for r in reservations if (r.parameter, r.key) not in self._tensors]
        offsets, total = layout_bytes([r.nbytes for r in new])
        if total + later_bytes:
            check_host_bytes(total + later_bytes, what=what, limits=read_limits())
        for r in new if total == 0 else ():
            self._tensors[r.parameter, r.key] = torch.empty(r.shape, dtype=r.dtype, device="cpu")
        if total == 0:
            return
        slab = HostArena(total, pin=self._pin, unpin=self._unpin)
        self._slabs.append(slab)
        for r, offset in zip(new, offsets, strict=True):
            self._tensors[r.parameter, r.key] = slab.tensor(offset, r.shape, r.dtype)

    def new(self, parameter: Tensor, key: str, dtype: torch.dtype, *, zero: bool = True) -> Tensor:
        """Return the place of `key`.

        Args:
            parameter: whose state it is.
            key: of the state.
            dtype: that the caller counts on.
            zero: False where the caller writes all of it; what it reads for that may lie there.

        Raises:
            ValueError: no memory was reserved for that.
        """
        tensor = self.place(parameter, key)
        if tensor.dtype != dtype:
            raise _unreserved(parameter, key, dtype)
        if zero and ((parameter, key) in self._used or key == "step"):
            tensor.zero_()
        self._used.add(
            (parameter, key)
        )  # fresh pages are zero, and cost nothing until they are written
        return tensor

    def place(self, parameter: Tensor, key: str) -> Tensor:
        """Return the place of `key` as it is."""
        if key == "step":
            counter = torch.zeros((), dtype=torch.float32, device="cpu")
            return self._counters.setdefault(parameter, counter)
        if (parameter, key) not in self._tensors:
            raise _unreserved(parameter, key, None)
        return self._tensors[parameter, key]

    def memory_of(self, tensor: Tensor) -> Tensor:
        """Return the bytes of the slab that `tensor` lies in, or else of its own storage."""
        address = tensor.data_ptr()
        for slab in self._slabs:
            if slab.memory.data_ptr() <= address < slab.memory.data_ptr() + slab.nbytes:
                return slab.memory
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())

    def has_place(self, parameter: Tensor, key: str) -> bool:
        """Whether there is a place for `key`."""
        return key == "step" or (parameter, key) in self._tensors

    def holds(self, parameter: Tensor, key: str, tensor: Tensor) -> bool:
        """Whether `tensor` is the place of `key`."""
        if key == "step":
            return self._counters.get(parameter) is tensor
        return self._tensors.get((parameter, key)) is tensor


def _unreserved(parameter: Tensor, key: str, dtype: torch.dtype | None) -> ValueError:
    return ValueError(
        complaint(
            key,
            got=f"{dtype or 'some'} state of a parameter {tuple(parameter.shape)} that has no place for it",
            wanted="the state that host memory was reserved for",
            remedy="Keep dtypes and momentum_dtype as they were, or build a new optimizer.",
        )
    )
