"""The reusable device memory of a step: one aligned allocation a device, cut into what a batch needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from muonloom.exchange import exchange_bytes
from muonloom.plan import Batch, Plan

# GEMM inputs start at this, in every placement: libraries choose kernels by alignment.
_ALIGNMENT = 256


class Workspace:
    """Buffers for one plan on one device, allocated once and overwritten by every batch."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._device = device
        batches = [batch for batch in plan.all_batches if batch.device == device]
        packs = [pack for pack in plan.packs if pack.device == device]
        exchanges = [exchange for exchange in plan.exchanges if exchange.device == device]
        self._x_bytes = _padded(max((batch.x_bytes for batch in batches), default=0))
        scratch = max(
            (b.scratch_numel * b.recipe.compute_dtype.itemsize for b in batches), default=0
        )
        numels = [run.numel for batch in batches for run in batch.runs]
        numels += [run.numel for exchange in exchanges for run in exchange.runs]
        numels += [pack.numel for pack in packs]
        self._scratch_bytes = _padded(scratch)
        self._fp32_bytes = _padded(torch.float32.itemsize * max(numels, default=0))
        counters = max((len(pack.spans) for pack in packs), default=0)
        self._counter_bytes = _padded(torch.float32.itemsize * counters)
        self._exchange_bytes = _padded(max(map(exchange_bytes, exchanges), default=0))
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """The bytes that are really allocated."""
        return self._buffer.untyped_storage().nbytes()

    def x(self, batch: Batch) -> Tensor:
        """Return the (count, rows, columns) matrices of `batch`, in its compute dtype."""
        flat = self._cut(0, batch.numel, batch.recipe.compute_dtype)
        return flat.view(batch.count, batch.rows, batch.columns)

    def scratch(self, batch: Batch) -> Tensor:
        """Return the iteration's scratch, 1-D in `batch`'s compute dtype."""
        return self._cut(self._x_bytes, batch.scratch_numel, batch.recipe.compute_dtype)

    def fp32(self, index: int, shape: Sequence[int], *, start: int = 0) -> Tensor:
        """Return FP32 buffer `index` (0 or 1), from its element `start` on, in `shape`."""
        place = self._x_bytes + self._scratch_bytes + index * self._fp32_bytes
        place += start * torch.float32.itemsize
        return self._cut(place, math.prod(shape), torch.float32).view(shape)

    def counter(self, index: int) -> Tensor:
        """Return the `index`-th FP32 scalar, for a span's count of steps."""
        place = self._x_bytes + self._scratch_bytes + 2 * self._fp32_bytes
        return self._cut(place + index * torch.float32.itemsize, 1, torch.float32).view(())

    def exchange(self) -> Tensor:
        """Return the bytes for what travels between ranks."""
        place = self._x_bytes + self._scratch_bytes + 2 * self._fp32_bytes + self._counter_bytes
        return self._cut(place, self._exchange_bytes, torch.uint8)

    def _cut(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        if self._buffer.numel() == 0:
            self._allocate()
        return self._buffer[start : start + numel * dtype.itemsize].view(dtype)

    def _allocate(self) -> None:
        total = self._x_bytes + self._scratch_bytes + 2 * self._fp32_bytes
        total += self._counter_bytes + self._exchange_bytes
        raw = torch.empty(total + _ALIGNMENT, dtype=torch.uint8, device=self._device)
        offset = -raw.data_ptr() % _ALIGNMENT
        self._buffer = raw[offset : offset + total]


class Workspaces:
    """One workspace a device, each made when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_device: dict[torch.device, Workspace] = {}

    @property
    def nbytes(self) -> int:
        """The bytes that are really allocated."""
        return sum(workspace.nbytes for workspace in self._by_device.values())

    def of(self, device: torch.device) -> Workspace:
        """Return the workspace of `device`."""
        if device not in self._by_device:
            self._by_device[device] = Workspace(self._plan, device)
        return self._by_device[device]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
