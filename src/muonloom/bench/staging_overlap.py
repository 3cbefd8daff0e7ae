"""A step and the forward pass after it: one after the other, and with `Muon.overlap_forward`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from muonloom.bench.results import Plain
from muonloom.bench.staging_setups import (
    SLOTS,
    TRANSFER_BOUND,
    Setup,
    StagingSize,
    backend_of,
    make_muon,
    matrices,
)
from muonloom.bench.text import Block, number
from muonloom.bench.timing import Contender, interleave, synchronize
from muonloom.optimizer import Muon

FORWARD = 0.5
"""The forward pass, in T."""

FORWARD_ALONE, RESIDENT = "forward alone", "device, step, then forward"
APART, OVERLAPPING = "host, step, then forward", "host, overlap_forward"
OVERLAP_COLUMNS = ("state", "ms", "÷ device")

_LEAST_CALIBRATION_S = 0.1


class _Block(nn.Module):
    """Weights of one unit, and a forward pass of FP32 products in place of one with the weights.

    It starts when the weights are there, as a layer does; but CPUs without BF16 instructions could not
    read them at a useful speed.
    """

    def __init__(self, weights: list[Parameter], factor: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self._factor = factor

    def forward(self, x: Tensor, products: int) -> Tensor:
        for _ in range(products):
            x = x @ self._factor
        return x


class _Model(nn.Module):
    """Blocks in a module list, as the layers of a transformer."""

    def __init__(self, weights: list[Parameter], size: StagingSize, device: torch.device) -> None:
        super().__init__()
        factor = torch.eye(size.side, device=device)
        count = size.per_unit
        self.blocks = nn.ModuleList(
            _Block(weights[unit * count : (unit + 1) * count], factor) for unit in range(size.units)
        )

    @torch.no_grad()
    def forward(self, x: Tensor, products: int) -> Tensor:
        for block in self.blocks:
            x = block(x, products)
        return x


class _Training:
    """Steps, each with a forward pass after it."""

    def __init__(
        self, optimizer: Muon, model: _Model, x: Tensor, products: int, steps: int
    ) -> None:
        self._optimizer = optimizer
        self._model = model
        self._x = x
        self._products = products
        self._steps = steps

    def run(self) -> None:
        """Take some steps in a row."""
        for _ in range(self._steps):
            self._optimizer.step()
            self._model(self._x, self._products)
        self._optimizer.drain()


def _products(model: _Model, x: Tensor, *, wanted_s: float, device: torch.device) -> int:
    """Return the products a block with which a forward pass takes about `wanted_s`."""
    products = 1
    while True:
        synchronize(device)
        begin = time.perf_counter()
        model(x, products)
        synchronize(device)
        took = time.perf_counter() - begin
        if took >= min(wanted_s, _LEAST_CALIBRATION_S):
            return max(1, round(products * wanted_s / took))
        products *= 2


def measure_overlap(
    size: StagingSize, *, resident_s: float, rounds: int, device: torch.device
) -> Plain:
    """Time steps with forward passes, with state on the device, on the host, and overlapped.

    Args:
        size: the matrices.
        resident_s: T, for the link and for the length of the forward pass.
        rounds: samples of each.
        device: where.
    """
    gradients = matrices(size, device, seed=1)
    x = torch.ones(size.side, size.side, device=device)
    link = TRANSFER_BOUND if device.type == "cpu" else None
    products = 0
    contenders = []
    with ExitStack() as closing:
        for name in (RESIDENT, APART, OVERLAPPING):
            num_slots = 0 if name == RESIDENT else SLOTS[0]
            setup = Setup(name=name, link=link, num_slots=num_slots, threads=True)
            backend, _ = backend_of(setup, size, device, resident_s)
            closing.callback(backend.close)
            optimizer = make_muon(setup, size, gradients, device, backend=backend)
            model = _Model(optimizer.param_groups[0]["params"], size, device)
            if not products:
                products = _products(model, x, wanted_s=FORWARD * resident_s, device=device)
                contenders.append(_contender(FORWARD_ALONE, partial(model, x, products)))
            if name == OVERLAPPING:
                closing.enter_context(optimizer.overlap_forward(model))
            run = _Training(optimizer, model, x, products, size.steps).run
            contenders.append(_contender(name, run))
        timings = interleave(contenders, rounds=rounds, device=device)
    for timing in timings[1:]:
        timing.samples_s = [sample / size.steps for sample in timing.samples_s]
    rows = [
        {
            "name": timing.name,
            "samples_s": timing.samples_s,
            "median_s": timing.median_s,
            "quartiles_s": list(timing.quartiles_s()),
            "ratio": timing.median_s / timings[1].median_s,
        }
        for timing in timings
    ]
    return {"forward": FORWARD, "link": link, "rows": rows}


def _contender(name: str, run: Callable[[], object]) -> Contender:
    return Contender(name=name, role="ours", dtype="", flops=0.0, run=run)


def overlap_table(overlap: Plain) -> Block:
    """Return the table of steps with forward passes."""
    link = "the real link" if overlap["link"] is None else f"a link of {overlap['link']} T"
    title = f"Host placement, a step and a forward pass of {overlap['forward']} T, over {link}"
    rows = [
        [row["name"], number(1e3 * row["median_s"]), number(row["ratio"])]
        for row in overlap["rows"]
    ]
    return (title, OVERLAP_COLUMNS, rows)
