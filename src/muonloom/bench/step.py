"""The whole step on a small mixture of experts; peers take one matrix a parameter."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from muonloom.bench.flops import counted_flops, standard_flops
from muonloom.bench.orthogonalization import OURS
from muonloom.bench.peers import REFERENCE, Missing, Peer
from muonloom.bench.shapes import MoeSize
from muonloom.bench.timing import Contender, Pace, Piece, Timing, interleave
from muonloom.layout import BlockSpec, Layout
from muonloom.math import make_recipe
from muonloom.optimizer import Muon


@dataclass(kw_only=True)
class StepWork:
    """What was measured of whole steps.

    Attributes:
        size: the model.
        numel: its elements.
        matrices: (rows, columns, count) of each distinct logical matrix.
        timings: ours first.
        phases_s: seconds of each phase of our step, one entry a call, as `Muon.last_step` tells.
    """

    size: MoeSize
    numel: int
    matrices: list[tuple[int, int, int]]
    timings: list[Timing]
    phases_s: list[dict[str, float]]


def measure_step(
    size: MoeSize,
    peers: Sequence[Peer | Missing],
    *,
    rounds: int,
    device: torch.device,
    pace: Pace,
) -> StepWork:
    """Time one optimizer step of every contender on the same gradients, weights and matrices."""
    weights = {
        name: torch.randn(shape, device=device) / math.sqrt(shape[-1])
        for name, shape in size.parameters().items()
    }
    gradients = {name: torch.randn_like(weight) for name, weight in weights.items()}
    matrices = _matrices(gradients)
    ours, phases = our_step(weights, gradients, moe_layout(size))
    contenders = [ours]
    contenders += [
        _peer(peer, _matrices(weights), matrices)
        for peer in peers
        if isinstance(peer, Peer) and peer.optimizer is not None
    ]
    timings = interleave(contenders, rounds=rounds, device=device, pace=pace)
    timings += [
        Timing(name=peer.name, status=peer.status) for peer in peers if isinstance(peer, Missing)
    ]
    shapes = Counter(tuple(matrix.shape) for matrix in matrices)
    return StepWork(
        size=size,
        numel=sum(weight.numel() for weight in weights.values()),
        matrices=[(rows, columns, count) for (rows, columns), count in shapes.items()],
        timings=timings,
        phases_s=phases.seconds(),
    )


def moe_layout(size: MoeSize) -> Layout:
    """Return the layout of the benchmark's model: experts stacked, gate and up apart."""
    return Layout.from_shapes(
        size.parameters(), overrides={"*.gate_up_proj": BlockSpec.stacked(BlockSpec.gate_up())}
    )


def _matrices(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Cut the tensors into their logical matrices: contiguous views."""
    cut: list[Tensor] = []
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            cut += [half for expert in tensor for half in expert.chunk(2)]
        else:
            cut += tensor.unbind() if tensor.ndim == 3 else [tensor]
    return cut


class PhaseLog:
    """Seconds of each phase of an optimizer's steps, read between the timed calls."""

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self._taken: list[dict[str, float]] = []

    @property
    def ns_calls(self) -> int:
        """Batched Newton–Schulz calls of the last step."""
        return int(self._optimizer.last_step["ns_calls"])

    def take(self) -> None:
        """Keep the phases of the step before."""
        self._taken.append(dict(self._optimizer.last_step["seconds"]))

    def seconds(self) -> list[dict[str, float]]:
        """Return what was taken, and the last step's; the counted and the warm-up step are left out."""
        return [*self._taken[2:], dict(self._optimizer.last_step["seconds"])]


def our_step(
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    layout: Layout,
    *,
    name: str = OURS,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Contender, PhaseLog]:
    """Return `muonloom.Muon`'s step on copies of the weights, and what tells its phases.

    Args:
        weights: FP32, by name.
        gradients: of the same names; shared, not copied.
        layout: of these parameters; it may know more.
        name: of the contender.
        options: further ones of `muonloom.Muon`.
    """
    parameters = {name: Parameter(weight.clone()) for name, weight in weights.items()}
    for key, parameter in parameters.items():
        parameter.grad = gradients[key]
    optimizer = Muon(parameters.items(), layout=layout, lr=1e-3, weight_decay=0.1, **options)
    device = next(iter(weights.values())).device
    dtype = options.get("ns_compute_dtype")
    dtype = dtype or make_recipe(1, 1, device_type=device.type).compute_dtype
    flops = counted_flops(optimizer.step)
    log = PhaseLog(optimizer)
    contender = Contender(
        name=name,
        role="ours",
        dtype=str(dtype).removeprefix("torch."),
        flops=flops,
        run=optimizer.step,
        prepare=log.take,
    )
    return contender, log


def _peer(peer: Peer, weights: list[Tensor], gradients: list[Tensor]) -> Contender:
    make = peer.optimizer
    assert make is not None
    pieces = []
    for shape, count in Counter(tuple(g.shape) for g in gradients).items():
        index = next(i for i, g in enumerate(gradients) if tuple(g.shape) == shape)
        step, prepare = _stepper(make, weights[index : index + 1], gradients[index : index + 1])
        pieces.append(
            Piece(
                times=count,
                run=step,
                flops=standard_flops(*shape),
                what=f"{shape[0]}x{shape[1]} matrices",
                prepare=prepare,
            )
        )
    step, prepare = _stepper(make, weights, gradients)
    return Contender(
        name=peer.name,
        role="reference" if peer.name == REFERENCE else "peer",
        dtype=peer.dtype,
        flops=sum(piece.times * piece.flops for piece in pieces),
        run=step,
        prepare=prepare,
        pieces=tuple(pieces),
        note=peer.note,
    )


def _stepper(
    make: Callable[[Sequence[Tensor]], Optimizer],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> tuple[Callable[[], object], Callable[[], None]]:
    """Return one step on copies of the weights, and what gives the gradients back before it.

    HeavyBall drops gradients, and writes into them.
    """
    parameters = [Parameter(weight.clone()) for weight in weights]
    buffers = [torch.empty_like(gradient) for gradient in gradients]
    optimizer = make(parameters)

    def prepare() -> None:
        for parameter, buffer, gradient in zip(parameters, buffers, gradients, strict=True):
            parameter.grad = buffer.copy_(gradient)

    return optimizer.step, prepare


def share_outside(phases_s: Sequence[dict[str, float]]) -> float:
    """Return the median share of a step's seconds that the iteration does not take.

    Normalization counts as outside.
    """
    shares = []
    for phases in phases_s:
        shares.append(1.0 - phases.get("orthogonalize", 0.0) / sum(phases.values()))
    return statistics.median(shares)
