"""Host placement against state that stays on the device, over a link of a given speed.

A CPU has no link between host and device, so copies go through threads that sleep until a link of that
speed would have done them. Its speed is given by *T*, the step in device placement on the same matrices:
a link of 0.4 T takes 0.4 T for all of a step's state, each way. On a CUDA device the link is real.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from muonloom.bench.staging_setups import (
    DEVICE,
    SWAP,
    Setup,
    StagingSize,
    backend_of,
    make_muon,
    matrices,
    setups,
)
from muonloom.bench.timing import Contender, Timing, interleave, synchronize
from muonloom.device import Backend, backend_for
from muonloom.optimizer import Muon
from muonloom.telemetry import StepReport

CALIBRATION_STEPS = 5


@dataclass(kw_only=True)
class SetupTiming:
    """What was measured of one setup.

    Attributes:
        setup: which.
        bytes_per_s: of the link, each way; None where it was not limited.
        bytes_a_step: of state, each way.
        back_to_back: samples are seconds a step of some steps in a row, the last one's stores included.
        alone: seconds of one step after which everything is stored.
        phases_s: of each step alone, as `Muon.last_step` tells.
    """

    setup: Setup
    bytes_per_s: float | None
    bytes_a_step: int
    back_to_back: Timing
    alone: Timing
    phases_s: list[dict[str, float]]


@dataclass(kw_only=True)
class StagingWork:
    """All setups on the same matrices; the first is device placement."""

    size: StagingSize
    rows: list[SetupTiming]

    @property
    def resident_s(self) -> float:
        """T."""
        return self.rows[0].back_to_back.median_s


def floor_s(
    *, resident_s: float, transfer_s: float, units: int, steps: int, in_turn: bool = False
) -> float:
    """Return the least seconds a step of some in a row, with batches of one unit each.

    Nothing is faster than any of these, whatever the schedule (half of a unit's bytes are momentum)::

        computing   the first unit's momentum comes in → all steps are computed → the last unit goes out
        loads       all state comes in, every step     → the last unit goes out
        stores      the first unit's momentum comes in → it is computed → all state goes out, every step

    Args:
        resident_s: a step without transfers.
        transfer_s: of all state, each way.
        units: of a step.
        steps: in a row.
        in_turn: all state comes in, a step, all state goes out.
    """
    if in_turn:
        return resident_s + 2 * transfer_s
    unit_s, moving_s = transfer_s / units, steps * transfer_s
    computing = unit_s / 2 + steps * resident_s + unit_s
    stores = unit_s / 2 + resident_s / units + moving_s
    return max(computing, moving_s + unit_s, stores if transfer_s else 0.0) / steps


class Optimizer(Protocol):
    """What is timed."""

    def step(self) -> None:
        """Take a step."""

    def drain(self) -> None:
        """Wait until all of it is done."""

    @property
    def last_step(self) -> StepReport:
        """See `muonloom.Muon.last_step`."""


class WholeStateSwap:
    """A step in device placement between two moves of all state, as trainers do that offload optimizers.

    The device's tensors are kept in between, so that allocating them costs nothing here.
    """

    def __init__(self, optimizer: Muon, backend: Backend, device: torch.device) -> None:
        """Take the optimizer after its first step, and what copies."""
        self._optimizer = optimizer
        self._backend = backend
        states = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        self._pairs = [(tensor, _on_host(tensor, device)) for tensor in states]

    @property
    def bytes_a_step(self) -> int:
        """What moves each way."""
        return sum(tensor.nbytes for tensor, _ in self._pairs)

    @property
    def last_step(self) -> StepReport:
        """Of the step in between."""
        return self._optimizer.last_step

    def step(self) -> None:
        """Bring all state in, take a step, take all state out."""
        for tensor, host in self._pairs:
            self._backend.copy(tensor, host)
        self._optimizer.step()
        for tensor, host in self._pairs:
            self._backend.copy(host, tensor)

    def drain(self) -> None:
        """See `muonloom.Muon.drain`."""
        self._optimizer.drain()


def _on_host(tensor: Tensor, device: torch.device) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device.type == "cuda")
    return host.copy_(tensor)


def measure_placements(size: StagingSize, *, rounds: int, device: torch.device) -> StagingWork:
    """Time steps of all setups on the same gradients, interleaved."""
    gradients = matrices(size, device, seed=1)
    resident = make_muon(Setup(name=DEVICE), size, gradients, device, backend=backend_for(device))
    resident.step()
    resident_s = statistics.median(_seconds(resident, device) for _ in range(CALIBRATION_STEPS))
    with ExitStack() as closing:
        runners = [
            _runner(setup, size, gradients, device, resident_s, closing) for setup in setups(device)
        ]
        contenders = [
            contender for runner in runners for contender in runner.contenders(size.steps)
        ]
        timings = interleave(contenders, rounds=rounds, device=device)
        rows = [
            runner.timing(size.steps, timings[2 * index : 2 * index + 2])
            for index, runner in enumerate(runners)
        ]
    return StagingWork(size=size, rows=rows)


def _seconds(optimizer: Optimizer, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    optimizer.step()
    optimizer.drain()
    synchronize(device)
    return time.perf_counter() - begin


@dataclass(kw_only=True)
class _Runner:
    setup: Setup
    optimizer: Optimizer
    bytes_per_s: float | None
    bytes_a_step: int
    phases_s: list[dict[str, float]] = field(default_factory=list)

    def contenders(self, steps: int) -> list[Contender]:
        """Return some steps in a row, and one alone."""
        name = f"{self.setup.name}, link {self.setup.link}"

        def row() -> None:
            for _ in range(steps):
                self.optimizer.step()
            self.optimizer.drain()

        def alone() -> None:
            self.optimizer.step()
            self.optimizer.drain()

        # Before a row, the last step was one alone.
        return [_contender(name, row, self._take), _contender(f"{name}, alone", alone, None)]

    def _take(self) -> None:
        self.phases_s.append(dict(self.optimizer.last_step["seconds"]))

    def timing(self, steps: int, timings: Sequence[Timing]) -> SetupTiming:
        """Return what the two contenders gave."""
        self._take()
        row, alone = timings
        row.samples_s = [sample / steps for sample in row.samples_s]
        return SetupTiming(
            setup=self.setup,
            bytes_per_s=self.bytes_per_s,
            bytes_a_step=self.bytes_a_step,
            back_to_back=row,
            alone=alone,
            phases_s=self.phases_s[2:],  # without the steps before the rounds
        )


def _contender(
    name: str, run: Callable[[], object], prepare: Callable[[], None] | None
) -> Contender:
    return Contender(name=name, role="ours", dtype="", flops=0.0, run=run, prepare=prepare)


def _runner(
    setup: Setup,
    size: StagingSize,
    gradients: Sequence[Tensor],
    device: torch.device,
    resident_s: float,
    closing: ExitStack,
) -> _Runner:
    backend, rate = backend_of(setup, size, device, resident_s)
    closing.callback(backend.close)
    muon = make_muon(setup, size, gradients, device, backend=backend)
    muon.step()
    muon.step()
    muon.drain()
    bytes_a_step = int(muon.last_step["bytes_in"])
    optimizer: Optimizer = muon
    if setup.name == SWAP:
        swap = WholeStateSwap(muon, backend, device)
        optimizer, bytes_a_step = swap, swap.bytes_a_step
    return _Runner(setup=setup, optimizer=optimizer, bytes_per_s=rate, bytes_a_step=bytes_a_step)
