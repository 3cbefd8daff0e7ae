"""What host placement holds on the device: the same for 2 layers and 48, at step 3 and at step 50."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from muonloom.bench.results import Plain
from muonloom.config import HostPlacement
from muonloom.layout import Layout
from muonloom.optimizer import Muon

LAYERS = (2, 48)
GROWTH_STEPS, QUICK_GROWTH_STEPS = (3, 50), (2, 3)
NUM_SLOTS, SLOT_BYTES, BATCH_BYTES = 3, 64 << 10, 128 << 10

_HIDDEN, _WIDTH, _VOCABULARY = 64, 192, 512
_ON_DEVICE = ("device_state", "device_slots", "device_workspace")


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a small transformer's parameters."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (_VOCABULARY, _HIDDEN)}
    for layer in range(layers):
        prefix = f"layers.{layer}"
        for name in ("q", "k", "v", "o"):
            found[f"{prefix}.{name}_proj.weight"] = (_HIDDEN, _HIDDEN)
        for name in ("gate", "up"):
            found[f"{prefix}.{name}_proj.weight"] = (_WIDTH, _HIDDEN)
        found[f"{prefix}.down_proj.weight"] = (_HIDDEN, _WIDTH)
        found[f"{prefix}.norm.weight"] = (_HIDDEN,)
    return found


def make_model(layers: int, device: torch.device) -> tuple[list[Parameter], Muon]:
    """Return BF16 parameters with gradients, and their optimizer in host placement."""
    generator = torch.Generator().manual_seed(0)
    own = shapes(layers)
    named = {
        name: Parameter(torch.randn(shape, generator=generator).bfloat16().to(device))
        for name, shape in own.items()
    }
    for parameter in named.values():
        parameter.grad = parameter.detach().clone()
    optimizer = Muon(
        named.items(),
        layout=Layout.from_shapes(own, overrides={"embed.weight": "adamw"}),
        lr=1e-3,
        adamw_lr=1e-3,
        ns_compute_dtype=torch.float32,
        ns_batch_bytes=BATCH_BYTES,
        placement=HostPlacement(slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS),
    )
    return list(named.values()), optimizer


def measure_memory(*, quick: bool, device: torch.device) -> Plain:
    """Return bytes by place for each depth, and before and after some steps of the deepest."""
    depths = []
    for layers in LAYERS:
        parameters, optimizer = make_model(layers, device)
        optimizer.step()
        optimizer.drain()
        numel = sum(parameter.numel() for parameter in parameters)
        depths.append({"layers": layers, "parameters": numel, "bytes": optimizer.memory()})
    early, late = QUICK_GROWTH_STEPS if quick else GROWTH_STEPS
    growth = []
    taken = 1
    for steps in (early, late):
        for _ in range(steps - taken):
            optimizer.step()
        taken = steps
        optimizer.drain()
        growth.append({"steps": steps, "bytes": optimizer.memory() | _reserved(device)})
    return {
        "num_slots": NUM_SLOTS,
        "slot_bytes": SLOT_BYTES,
        "ns_batch_bytes": BATCH_BYTES,
        "depths": depths,
        "growth": growth,
    }


def _reserved(device: torch.device) -> dict[str, int]:
    return {"reserved": torch.cuda.memory_reserved(device)} if device.type == "cuda" else {}


def on_device(found: Plain) -> int:
    """Return the bytes of state, slots and workspace (rooms are part of it) on the device."""
    return sum(found[key] for key in _ON_DEVICE)
