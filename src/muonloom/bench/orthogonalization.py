"""Orthogonalization alone: ours, its peers, and the GEMM ceiling, in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from muonloom.bench.flops import counted_flops, standard_flops
from muonloom.bench.gate import Gate, summary
from muonloom.bench.peers import JORDAN, LOOPED_FP32, REFERENCE, Missing, Peer
from muonloom.bench.shapes import BatchShape
from muonloom.bench.timing import Contender, Pace, Piece, Timing, interleave
from muonloom.math import Recipe, make_recipe, orthogonalize

OURS = "muonloom"
STANDARD_BF16 = "muonloom standard BF16"
GRAM_FP32 = "muonloom Gram FP32"

GATE_MATRICES = 2
PEER_GATE_FLOPS = 2e9
"""Peers are judged where one matrix takes no more than this."""

CUT_GATE_FLOPS = 2e8
"""The same for peers that are so slow here that their work was cut."""


@dataclass(kw_only=True)
class BatchWork:
    """What was measured at one shape.

    Attributes:
        shape: the shape.
        recipe: what ``method="auto"`` chose.
        timings: ours first, then peers, then ceilings (``"gemm <dtype> <product>"``).
        gates: name of the contender -> `muonloom.bench.gate.summary`.
    """

    shape: BatchShape
    recipe: Recipe
    timings: list[Timing]
    gates: dict[str, dict[str, object]]


def measure_batch(
    shape: BatchShape,
    peers: Sequence[Peer | Missing],
    *,
    rounds: int,
    device: torch.device,
    pace: Pace,
    variants: bool,
) -> BatchWork:
    """Time and judge everything at one shape.

    Args:
        shape: which matrices.
        peers: from `muonloom.bench.peers.load_peers`.
        rounds: samples of each.
        device: where.
        pace: rates of earlier works.
        variants: also time our FP32 Gram and BF16 standard iterations.
    """
    generator = torch.Generator().manual_seed(0)
    size = (shape.count, shape.rows, shape.columns)
    x = torch.randn(size, generator=generator).to(device)
    recipe = make_recipe(shape.rows, shape.columns, device_type=device.type)
    contenders = [_ours(OURS, x, {}, recipe.compute_dtype, role="ours")]
    if variants:
        for name, options in VARIANTS.items():
            contenders.append(_ours(name, x, options, options["compute_dtype"], role="peer"))
    contenders += [
        _peer(peer, x) for peer in peers if isinstance(peer, Peer) and _has_sense(peer, shape.count)
    ]
    for dtype in (torch.bfloat16, torch.float32):
        contenders += ceilings(shape, recipe, dtype, device)
    timings = interleave(contenders, rounds=rounds, device=device, pace=pace)
    timings += [
        Timing(name=peer.name, status=peer.status) for peer in peers if isinstance(peer, Missing)
    ]
    return BatchWork(
        shape=shape,
        recipe=recipe,
        timings=timings,
        gates=_gates(shape, peers, timings, device=device, variants=variants),
    )


VARIANTS: dict[str, dict[str, object]] = {
    STANDARD_BF16: {"method": "standard", "compute_dtype": torch.bfloat16},
    GRAM_FP32: {"method": "gram", "compute_dtype": torch.float32},
}


def _has_sense(peer: Peer, count: int) -> bool:
    """For a single matrix the looped FP32 iteration is the batched one."""
    return count > 1 or peer.name != LOOPED_FP32


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _ours(
    name: str, x: Tensor, options: dict[str, object], dtype: object, *, role: str
) -> Contender:
    call: Callable[..., Tensor] = partial(orthogonalize, **options)  # type: ignore[arg-type]
    count = x.shape[0]
    flops = counted_flops(lambda: call(x[:1]))
    return Contender(
        name=name,
        role=role,
        dtype=_dtype_name(dtype),
        flops=flops * count,
        run=lambda: call(x),
        pieces=_one_matrix(count, lambda: call(x[:1]), flops) if count > 1 else (),
    )


def _one_matrix(count: int, run: Callable[[], object], flops: float) -> tuple[Piece, ...]:
    return (Piece(times=count, run=run, flops=flops, what="matrices"),)


def _peer(peer: Peer, x: Tensor) -> Contender:
    count, m, n = x.shape
    matrices = list(x.unbind())
    flops = standard_flops(m, n, len(peer.coefficients))

    def loop() -> list[Tensor]:
        return [peer.orthogonalize(matrix, 5) for matrix in matrices]

    def piece(steps: int) -> Tensor:
        return peer.orthogonalize(x[:1] if peer.batched else matrices[0], steps)

    pieces: tuple[Piece, ...] = ()
    if count > 1:
        pieces = _one_matrix(count, lambda: piece(5), flops)
    elif peer.any_steps:
        pieces = (Piece(times=5, run=lambda: piece(1), flops=flops / 5, what="iterations"),)
    return Contender(
        name=peer.name,
        role="reference" if peer.name == REFERENCE else "peer",
        dtype=peer.dtype,
        flops=flops * count,
        run=(lambda: peer.orthogonalize(x, 5)) if peer.batched else loop,
        pieces=pieces,
        note=peer.note,
    )


def ceiling_name(dtype: str, product: str) -> str:
    """Return the name under which a product's time is kept."""
    return f"gemm {dtype} {product}"


def ceilings(
    shape: BatchShape, recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> list[Contender]:
    """Return the iteration's three products alone, into given storage, in whole batches and in groups.

    Groups are those that the recipe cuts a batch into for the cache, so that the ceiling is not
    lower than what the iteration may reach.
    """
    count, m, n = shape.count, min(shape.rows, shape.columns), max(shape.rows, shape.columns)
    x = torch.randn(count, m, n, device=device).to(dtype)
    square = torch.randn(count, m, m, device=device).to(dtype)
    wide, small = torch.empty_like(x), torch.empty_like(square)
    products = {
        "XXt": (small, x, x.mT, 2 * m * m * n),
        "AA": (small, square, square, 2 * m**3),
        "BX": (wide, square, x, 2 * m * m * n),
    }
    group = recipe.chunk(count, m, n)
    sizes = {"": count} if group == count else {"": count, " grouped": group}
    made = []
    for product, (out, left, right, flops) in products.items():
        for label, size in sizes.items():
            made.append(
                Contender(
                    name=ceiling_name(_dtype_name(dtype), product + label),
                    role="ceiling",
                    dtype=_dtype_name(dtype),
                    flops=flops * count,
                    run=partial(_multiply, out, left, right, size),
                    pieces=_one_matrix(
                        count, partial(_multiply, out[:1], left[:1], right[:1], 1), flops
                    )
                    if count > 1
                    else (),
                )
            )
    return made


def _multiply(out: Tensor, left: Tensor, right: Tensor, size: int) -> None:
    for low in range(0, out.shape[0], size):
        high = low + size
        torch.bmm(left[low:high], right[low:high], out=out[low:high])


def _gates(
    shape: BatchShape,
    peers: Sequence[Peer | Missing],
    timings: Sequence[Timing],
    *,
    device: torch.device,
    variants: bool,
) -> dict[str, dict[str, object]]:
    count = min(GATE_MATRICES, shape.count)
    gate = Gate(count, shape.rows, shape.columns, device=device)
    judged = {OURS: summary(gate.judge(orthogonalize, (JORDAN,) * 5))}
    if variants:
        for name, options in VARIANTS.items():
            call = partial(orthogonalize, **options)  # type: ignore[arg-type]
            judged[name] = summary(gate.judge(call, (JORDAN,) * 5))
    flops = standard_flops(shape.rows, shape.columns)
    alive = {
        timing.name
        for timing in timings
        if timing.ok and flops <= (PEER_GATE_FLOPS if timing.measured == "all" else CUT_GATE_FLOPS)
    }
    for peer in peers:
        if isinstance(peer, Peer) and peer.name in alive:
            judged[peer.name] = summary(gate.judge(_on_batch(peer), peer.coefficients))
    return judged


def _on_batch(peer: Peer) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        if peer.batched:
            return peer.orthogonalize(x, 5)
        return torch.stack([peer.orthogonalize(matrix, 5) for matrix in x])

    return call
