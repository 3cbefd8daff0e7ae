"""Step time beside Megatron-Core's own Muon, in one run: `make bench-megatron`.

Two data-parallel ranks on a CPU, a small MoE in BF16, gradients in place; what is timed is
`optimizer.step()` to the point where all weights are there. Steps take turns; medians of the slower rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, overrides

from megatron import shim  # noqa: F401  Megatron-Core can be imported after this
from megatron.models import Tiny, build, initialize
from megatron.pieces import pieces, weight
from megatron.steps import megatron_muon, optimizer_config
from megatron.support import run_megatron
from muonloom.integrations.megatron import get_optimizer

WORLD, ROUNDS, WARM_UP = 2, 15, 3
SIZES = ((2, 1), (8, 1), (4, 4))
SETTINGS = {"muon_extra_scale_factor": 0.2, "muon_coefficient_type": "simple"}


def compared(rank: int, num_layers: int, scale: int) -> dict[str, tuple[list[float], int]]:
    """Return for each optimizer the seconds of its steps, and Newton-Schulz calls of the last one."""
    tiny = Tiny(kind="moe", dtype=torch.bfloat16, num_layers=num_layers, scale=scale)
    initialize(tiny)
    theirs = Tiny(**{**vars(tiny), "buffers": "layer_wise"})
    models = [build(theirs), build(tiny), build(tiny)]
    config = optimizer_config(tiny, **SETTINGS)
    baseline = megatron_muon(theirs, models[0], **SETTINGS)
    ours = get_optimizer(config, models[1])
    in_fp32 = get_optimizer(config, models[2], ns_compute_dtype=torch.float32)
    calls = _counted()
    steps: dict[str, tuple[Callable[[], Any], Callable[[], int]]] = {
        "Megatron-Core": (baseline.step, lambda: calls[0]),
        "muonloom": (ours.step, lambda: ours.muon.last_step["ns_calls"]),
        "muonloom, FP32 products": (in_fp32.step, lambda: in_fp32.muon.last_step["ns_calls"]),
    }
    for model in models:
        for piece in pieces(model):
            drawn = weight(f"gradient of {piece.name}", piece.whole_shape, rank)
            piece.parameter.main_grad.copy_(drawn)
    _lighten()
    found: dict[str, tuple[list[float], int]] = {name: ([], 0) for name in steps}
    for _ in range(WARM_UP + ROUNDS):
        for name, (step, count) in steps.items():
            calls[0] = 0
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            found[name][0].append(time.perf_counter() - began)
            found[name] = (found[name][0], count())
    return {name: (seconds[WARM_UP:], number) for name, (seconds, number) in found.items()}


def _lighten() -> None:
    """Have the shim look at the few calls that steps make for CUDA, rather than at every call of torch."""
    overrides._pop_mode()

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, device=None, **settings: make(*args, device="cpu", **settings)

    for name in ("zeros", "tensor"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    of_cpu = Tensor.type
    Tensor.type = lambda tensor: of_cpu(tensor).replace("torch.", "torch.cuda.")  # type: ignore[method-assign]


def _counted() -> list[int]:
    from megatron.core.optimizer import emerging_optimizers  # not before the shim

    calls, inner = [0], emerging_optimizers.newton_schulz_tp

    def counting(*args: Any, **settings: Any) -> Any:
        calls[0] += 1
        return inner(*args, **settings)

    emerging_optimizers.newton_schulz_tp = counting
    return calls


def main() -> None:
    """Print a table for each of three sizes."""
    for num_layers, scale in SIZES:
        ranks = run_megatron(WORLD, compared, num_layers, scale, limit_s=300.0)
        medians = {name: max(statistics.median(own[name][0]) for own in ranks) for name in ranks[0]}
        slowest = medians["Megatron-Core"]
        print(f"\n{num_layers} layers of width {32 * scale}, 4 experts each, on {WORLD} ranks\n")
        print("| optimizer | ms a step | speed | Newton-Schulz calls |\n|---|---|---|---|")
        for name, seconds in medians.items():
            calls = sum(own[name][1] for own in ranks)
            print(f"| {name} | {1e3 * seconds:.1f} | {slowest / seconds:.2f}x | {calls} |")


if __name__ == "__main__":
    main()
