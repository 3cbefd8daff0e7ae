"""Where loaded tensors go: taken box by box on any thread, finished on the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from muonloom.optimizer import Muon

Box = tuple[slice, ...]


class Target(Protocol):
    """What takes one tensor.

    Attributes:
        passes: whether it takes memory for all of the tensor until it is finished, so that such are read
            one after the other.
    """

    passes: bool

    def begin(self) -> None:
        """Get ready for boxes."""

    def put(self, box: Box, values: Tensor) -> None:
        """Take a box, of the saved dtype, not to be written; called on any thread."""

    def finish(self) -> None:
        """All boxes are there."""


class _Straight:
    passes = False

    def begin(self) -> None:
        """Do nothing."""


class PlainTarget(_Straight):
    """A tensor that takes the values, in its own dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def put(self, box: Box, values: Tensor) -> None:
        """Copy."""
        self._tensor[box].copy_(values)

    def finish(self) -> None:
        """Do nothing."""


class NearMasterTarget(_Straight):
    """A master beside a weight in host memory: both are written while the values are in a cache."""

    def __init__(self, optimizer: Muon, param: Tensor, *, is_settled: bool) -> None:
        self._optimizer = optimizer
        self._param = param
        self._is_settled = is_settled
        optimizer._make_master(param)

    def put(self, box: Box, values: Tensor) -> None:
        """Write masters, and weights from them."""
        self._optimizer._take_box(self._param, box, values, is_settled=self._is_settled)

    def finish(self) -> None:
        """Take note that they agree."""
        self._optimizer._masters.note([self._param])


class MasterTarget(_Straight):
    """A whole master, from which the weight is written at the end, by the device or a writer."""

    def __init__(self, optimizer: Muon, param: Tensor, *, is_settled: bool) -> None:
        self._optimizer = optimizer
        self._param = param
        self._is_settled = is_settled
        self._master = optimizer._make_master(param)

    def put(self, box: Box, values: Tensor) -> None:
        """Copy."""
        self._master[box].copy_(values)

    def finish(self) -> None:
        """Write the weight."""
        self._optimizer._finish_master(self._param, is_settled=self._is_settled)


class PassingTarget:
    """Memory for a tensor that somebody takes as a whole."""

    passes = True

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[Tensor], None]
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._take = take
        self._memory: Tensor | None = None

    def begin(self) -> None:
        """Allocate the memory."""
        self._memory = torch.empty(self._shape, dtype=self._dtype, device="cpu")

    def put(self, box: Box, values: Tensor) -> None:
        """Copy."""
        assert self._memory is not None
        self._memory[box].copy_(values)

    def finish(self) -> None:
        """Hand it over."""
        assert self._memory is not None
        memory, self._memory = self._memory, None
        self._take(memory)
