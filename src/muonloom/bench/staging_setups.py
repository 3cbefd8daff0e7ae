"""What the benchmark of host placement compares: matrices, where their state is, and what copies it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from muonloom.config import HostPlacement
from muonloom.device import Backend, ThreadedBackend, backend_for
from muonloom.math import make_recipe
from muonloom.optimizer import Muon

DEVICE, HOST, THREADS = "device", "host", "host, copies in threads"
SPLIT, SWAP = "host, split masters, BF16 momentum", "all state in, step, all state out"
OVERLAPPED, TRANSFER_BOUND, SPLIT_BOUND = 0.4, 1.2, 2.4
"""Links, in T: transfers can hide; the full layout is transfer-bound; the split layout is so too."""

SLOTS = (3, 2, 1)
_FULL_BYTES = 8  # an element, each way: FP32 master and momentum
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StagingSize:
    """Equal square BF16 matrices, in batches of one unit each.

    Attributes:
        side: rows and columns of a matrix.
        per_unit: matrices of a unit.
        units: how many.
        steps: of one sample, back to back.
    """

    side: int
    per_unit: int
    units: int = 12
    steps: int = 3

    @property
    def numel(self) -> int:
        """The elements of all matrices."""
        return self.units * self.per_unit * self.side**2

    @property
    def slot_bytes(self) -> int:
        """The bytes of a unit's FP32 masters."""
        return self.per_unit * self.side**2 * _FP32_BYTES

    @property
    def full_bytes(self) -> int:
        """The bytes of a step's state in the full layout, each way."""
        return self.numel * _FULL_BYTES


SIZES = {"cpu": StagingSize(side=512, per_unit=2), "cuda": StagingSize(side=4096, per_unit=2)}
QUICK_SIZE = StagingSize(side=16, per_unit=2, units=4, steps=2)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where the state is, and how it moves.

    Attributes:
        name: shown and stored; unique together with `link`.
        link: what the full layout's state takes each way, in T; None: as fast as memory, or the real link.
        num_slots: 0 in device placement.
        threads: copy in threads beside the computing one, on a CPU.
        options: further ones of `muonloom.Muon`.
        layout: of the masters on the host.
    """

    name: str
    link: float | None = None
    num_slots: int = 0
    threads: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "full"

    def placement(self, size: StagingSize) -> str | HostPlacement:
        """Return what `muonloom.Muon` is told."""
        if not self.num_slots:
            return "device"
        return HostPlacement(
            slot_bytes=size.slot_bytes, num_slots=self.num_slots, master_layout=self.layout
        )


def slots_name(num_slots: int) -> str:
    """Return the name of the full layout with so many slots."""
    return f"host, {num_slots} slot{'s' if num_slots > 1 else ''}"


def setups(device: torch.device) -> list[Setup]:
    """Return what is compared; the first is device placement, which tells T."""
    resident, host = Setup(name=DEVICE), Setup(name=HOST, num_slots=SLOTS[0])
    if device.type != "cpu":
        return [resident, host, _split(None), Setup(name=SWAP)]
    limited = [_full(slots, OVERLAPPED) for slots in SLOTS]
    limited.append(Setup(name=SWAP, link=OVERLAPPED, threads=True))
    limited += [_full(SLOTS[0], TRANSFER_BOUND), _split(TRANSFER_BOUND)]
    limited.append(Setup(name=SWAP, link=TRANSFER_BOUND, threads=True))
    limited += [_full(SLOTS[0], SPLIT_BOUND), _split(SPLIT_BOUND)]
    return [resident, host, Setup(name=THREADS, num_slots=SLOTS[0], threads=True), *limited]


def _full(num_slots: int, link: float) -> Setup:
    return Setup(name=slots_name(num_slots), link=link, num_slots=num_slots, threads=True)


def _split(link: float | None) -> Setup:
    return Setup(
        name=SPLIT,
        link=link,
        num_slots=SLOTS[0],
        threads=True,
        options={"momentum_dtype": torch.bfloat16},
        layout="split",
    )


def matrices(size: StagingSize, device: torch.device, *, seed: int) -> list[Tensor]:
    """Return BF16 matrices: weights, or gradients."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.side, size.side)
    return [
        (torch.randn(shape, generator=generator) / math.sqrt(size.side)).bfloat16().to(device)
        for _ in range(size.units * size.per_unit)
    ]


def make_muon(
    setup: Setup,
    size: StagingSize,
    gradients: Sequence[Tensor],
    device: torch.device,
    *,
    backend: Backend,
) -> Muon:
    """Return an optimizer of fresh weights with these gradients, whose units are a batch each.

    Args:
        setup: where its state is.
        size: of the matrices.
        gradients: shared, not copied.
        device: of the weights.
        backend: what copies.
    """
    parameters = [Parameter(weight) for weight in matrices(size, device, seed=0)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # CPUs without BF16 instructions would take minutes for a step that computes in BF16.
    wanted = torch.float32 if device.type == "cpu" else None
    dtype = make_recipe(1, 1, device_type=device.type, compute_dtype=wanted).compute_dtype
    return _on(backend)(
        parameters,
        lr=1e-3,
        ns_compute_dtype=dtype,
        ns_batch_bytes=size.per_unit * size.side**2 * dtype.itemsize,
        placement=setup.placement(size),
        **setup.options,
    )


def _on(backend: Backend) -> type[Muon]:
    class MuonOnBackend(Muon):
        @staticmethod
        def _make_backend(device: torch.device) -> Backend:
            return backend

    return MuonOnBackend


def backend_of(
    setup: Setup, size: StagingSize, device: torch.device, resident_s: float
) -> tuple[Backend, float | None]:
    """Return what copies for a setup, and its bytes a second each way, where they are limited.

    Args:
        setup: which.
        size: of the matrices.
        device: a CPU gets threads where the setup wants them.
        resident_s: T.
    """
    if device.type != "cpu" or not setup.threads:
        return backend_for(device), None
    rate = None if setup.link is None else size.full_bytes / (setup.link * resident_s)
    return ThreadedBackend(copy_bytes_per_s=rate), rate
