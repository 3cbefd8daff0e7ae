"""One model held by ranks in many ways, trained on gradients that depend on name and step alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonloom
from muonloom import checkpoint
from muonloom.checkpoint.reader import CheckpointReader

SHAPES: dict[str, tuple[int, ...]] = {
    "attention.q": (24, 16),
    "attention.qkv": (24, 8),
    "experts.up": (5, 12, 8),
    "odd": (3, 7),
    "embedding": (37, 8),
    "norm": (13,),
    "temperature": (),
    "empty": (0, 6),
}
OVERRIDES = {
    "attention.q": muonloom.BlockSpec.heads(6, heads_per_block=2),
    "attention.qkv": muonloom.BlockSpec.rows(8, 8, 8),
    "experts.up": muonloom.BlockSpec.stacked(muonloom.BlockSpec.gate_up()),
    "odd": "muon",
    "embedding": "adamw",
    "empty": "adamw",
}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "adamw_lr": 1e-3, "ns_compute_dtype": torch.float32}
# Which parameters have no gradient at a step.
ABSENT = {1: ("odd", "norm")}

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": muonloom.HostPlacement(slot_bytes=4096, num_slots=2),
    "split": muonloom.HostPlacement(slot_bytes=4096, num_slots=3, master_layout="split"),
}


def values(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


def spread(value: Tensor, name: str, held: str) -> Tensor:
    """Return a tensor as the ranks hold it: of all kinds, what one process holds is plain."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if held == "experts":
        held = "fsdp" if name.startswith("experts") else "ddp"
    if held == "ddp":
        return value
    meshes = {"hsdp": (2, world // 2), "2d": (2, world // 2)}
    mesh = init_device_mesh("cpu", meshes.get(held, (world,)))
    last = Shard(value.ndim - 1) if value.ndim > 1 else Replicate()
    first = Shard(0) if value.ndim else Replicate()
    placements: dict[str, list[Any]] = {
        "fsdp": [first],
        "hsdp": [Replicate(), first],
        "tp": [last],
        "2d": [first, last],
        "copies": [Replicate()],
    }
    return distribute_tensor(value, mesh, placements[held])


class Model(nn.Module):
    """Holds the parameters, a frozen one, a tied name, and buffers."""

    def __init__(self, held: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            value = spread(values(name, -1 - seed, shape).to(dtype), name, held)
            put(self, name, nn.Parameter(value))
        frozen = spread(values("frozen", -1 - seed, (9, 4)), "frozen", held)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.head = nn.Module()
        self.head.weight = self.embedding
        self.register_buffer("counter", torch.full((3,), seed))


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give a module a parameter under a name with dots."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)


class Run:
    """A model and its optimizer on one rank, or in one process."""

    def __init__(
        self,
        held: str = "ddp",
        *,
        dtype: torch.dtype = torch.bfloat16,
        placement: str = "device",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.held, self.dtype = held, dtype
        self.model = Model(held, dtype, seed)
        self.opt = muonloom.Muon(
            [(n, p) for n, p in self.model.named_parameters() if p.requires_grad],
            layout=muonloom.Layout.from_shapes(SHAPES, overrides=OVERRIDES),
            placement=PLACEMENTS[placement],
            **{**OPTIONS, **options},
        )
        self.step = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            for name, parameter in self.parameters.items():
                gradient = values(name, self.step, tuple(parameter.shape)).to(self.dtype)
                is_absent = name in ABSENT.get(self.step, ())
                parameter.grad = None if is_absent else spread(gradient, name, self.held)
            self.opt.step()
            self.model.counter.add_(1)
            self.step += 1
        return self

    def save(self, path: Path | str, **options: Any) -> checkpoint.SaveHandle:
        return checkpoint.save(
            path, model=self.model, optimizer=self.opt, step=self.step, **options
        )

    def load(self, path: Path | str, **options: Any) -> dict[str, Any]:
        found = checkpoint.load(path, model=self.model, optimizer=self.opt, **options)
        self.step = found["step"]
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers, whole."""
        self.opt.drain()
        found = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: whole(tensor) for name, tensor in found.items()}

    def states(self) -> dict[str, Tensor]:
        """Return this rank's state."""
        self.opt.drain()
        return {
            f"{name}/{key}": value.clone()
            for name, parameter in self.parameters.items()
            for key, value in self.opt.state.get(parameter, {}).items()
        }


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def hold_in_boxes(rank: int, old: str, new: str) -> None:
    """Load all parameters as DTensors, cut in any dimension, and save."""
    manifest, bare = CheckpointReader(old).manifest, nn.Module()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = []
    for index, (key, saved) in enumerate(sorted(manifest.tensors.items())):
        if not key.startswith("model."):
            continue
        name = key.removeprefix("model.")
        known = manifest.parameters[name]
        value = torch.zeros(saved.shape, dtype=getattr(torch, known.dtype))
        parameter = nn.Parameter(distribute_tensor(value, mesh, [Shard(index % value.ndim)]))
        put(bare, name, parameter)
        named.append((name, parameter))
    overrides: dict[str, Any] = {name: manifest.parameters[name].algorithm for name, _ in named}
    layout = muonloom.Layout.from_shapes({n: tuple(p.shape) for n, p in named}, overrides=overrides)
    opt = muonloom.Muon(named, layout=layout, lr=1e-2, adamw_lr=1e-3)
    checkpoint.load(old, model=bare, optimizer=opt)
    checkpoint.save(new, model=bare, optimizer=opt, step=2)


def content(path: Path) -> dict[str, Tensor]:
    """Return all that a checkpoint holds, whole: tensors, and steps of AdamW."""
    reader = CheckpointReader(path)
    found = {key: reader.read(key) for key in reader.manifest.tensors}
    for name, known in reader.manifest.parameters.items():
        if known.step is not None:
            found[f"{name}/step"] = torch.tensor(known.step)
    return found


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name
