"""The same parameters of all kinds, spread over ranks in each way; gradients, weights and state of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonloom
from muonloom import BlockSpec, HostPlacement, Layout
from muonloom.dtensors import boxes, like_parameter, mesh_ranks

SHAPES: dict[str, tuple[int, ...]] = {
    "heads": (24, 16),
    "fused": (24, 8),
    "experts": (5, 12, 8),
    "odd": (3, 7),
    "embed": (37, 8),
    "norm": (13,),
    "scale": (),
}
OVERRIDES: dict[str, Any] = {
    "heads": BlockSpec.heads(6, heads_per_block=2),
    "fused": BlockSpec.rows(8, 8, 8),
    "experts": BlockSpec.stacked(BlockSpec.gate_up()),
    "odd": "muon",
    "embed": "adamw",
}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "adamw_lr": 1e-3, "ns_compute_dtype": torch.float32}

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": HostPlacement(slot_bytes=1 << 14),
    "split": HostPlacement(slot_bytes=1 << 14, master_layout="split"),
}

# How a DTensor is placed, on which mesh; None: a plain tensor that all ranks hold.
Spread = Callable[[int, Tensor], tuple[tuple[int, ...], list[Any]]] | None
SPREADS: dict[str, Spread] = {
    "ddp": None,
    "fsdp": lambda world, t: ((world,), [Shard(0)]),
    "hsdp": lambda world, t: ((2, world // 2), [Replicate(), Shard(0)]),
    "tp": lambda world, t: ((world,), [Shard(min(t.ndim, 2) - 1)]),
    "replicated": lambda world, t: ((world,), [Replicate()]),
}

Params = dict[str, nn.Parameter]


def values(name: str, seed: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    drawn = torch.randn(tuple(shape) or (1,), generator=generator)
    return (
        drawn.view(tuple(shape)).to(dtype).clone()
    )  # a gradient that is a view is kept by release


def parameters(way: str, dtype: torch.dtype, seed: int = 0) -> Params:
    """All parameters; "alone" are plain ones too."""
    spread = SPREADS.get(way)
    found: Params = {}
    for name in SHAPES:
        tensor = values(name, seed, dtype, SHAPES[name])
        if spread is not None and tensor.ndim:
            shape, placements = spread(dist.get_world_size(), tensor)
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", shape), placements)
        found[name] = nn.Parameter(tensor)
    return found


def optimizer(params: Params, **options: Any) -> muonloom.Muon:
    layout = Layout.from_shapes(SHAPES, overrides=OVERRIDES)
    return muonloom.Muon(params.items(), layout=layout, **{**OPTIONS, **options})


def give_gradients(params: Params, step: int) -> None:
    for name, param in params.items():
        gradient = values(name, 100 + step, param.dtype, param.shape)
        param.grad = placed_as(gradient, param)


def placed_as(tensor: Tensor, param: Tensor) -> Tensor:
    """What a rank has of a whole tensor, where `param` is a DTensor."""
    if not isinstance(param, DTensor):
        return tensor
    if all(type(placement) in (Shard, Replicate) for placement in param.placements):
        return distribute_tensor(tensor, param.device_mesh, param.placements)
    parts = boxes(param, "")  # torch distributes nothing as FSDP2 over tensor parallel does
    own = parts[mesh_ranks(param).index(dist.get_rank())]
    return like_parameter(tensor[own.slices].contiguous(), param)


def steps(opt: muonloom.Muon, params: Params, numbers: range) -> None:
    for number in numbers:
        give_gradients(params, number)
        opt.step()
    opt.drain()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(params: Params) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in params.items()}


def local(params: Params) -> dict[str, Tensor]:
    """What this rank has of each weight, without any communication."""
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in params.items()
    }


def masters(opt: muonloom.Muon, params: Params) -> dict[str, Tensor]:
    """All of each FP32 master, on every rank."""
    opt.drain()
    return {name: opt.gathered_master(param).clone() for name, param in params.items()}


def held(opt: muonloom.Muon, params: Params) -> dict[str, dict[str, Tensor]]:
    """A copy of this rank's state."""
    opt.drain()
    state = {name: opt.state.get(param, {}) for name, param in params.items()}
    return {name: {k: t.clone() for k, t in own.items()} for name, own in state.items()}


def assert_equal(found: Any, wanted: Any, *about: object) -> None:
    """Nested dictionaries of tensors, bit for bit."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (*about, found.keys(), wanted.keys())
        for key in wanted:
            assert_equal(found[key], wanted[key], *about, key)
        return
    assert found.dtype == wanted.dtype, (*about, found.dtype, wanted.dtype)
    assert torch.equal(found, wanted), (*about, "differs")


def settings(*ways: str) -> Iterator[tuple[str, torch.dtype, str]]:
    """How parameters are spread, and what may matter beside: dtype and placement; all on two ranks."""
    few = [(torch.bfloat16, "split"), (torch.float32, "device")]
    more = [(torch.bfloat16, "device"), (torch.bfloat16, "host")]
    is_small = not dist.is_initialized() or dist.get_world_size() <= 2
    for way in ways:
        for dtype, placement in few + (more if is_small and way in ("ddp", "fsdp") else []):
            yield way, dtype, placement


def error_of(call: Callable[[], object]) -> Exception | None:
    """What a call raises; None: nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None


# -- a model ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Heads, a matrix of an uneven number of rows, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=False)
        self.up_proj = nn.Linear(12, 7)
        self.down_proj = nn.Linear(7, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down_proj(self.up_proj(self.q_proj(x))))


class Net(nn.Module):
    """Two blocks in a list, between an embedding and a head."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.register_buffer("mask", torch.arange(3))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def sharded(net: nn.Module, *mesh: int) -> nn.Module:
    """FSDP2 of each block and of the rest; of a mesh with two dimensions HSDP."""
    names = ("replicate", "shard")[-max(1, len(mesh)) :]
    devices = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    for layer in net.layers:
        fully_shard(layer, mesh=devices)
    return fully_shard(net, mesh=devices)


def net_optimizer(net: nn.Module, **options: Any) -> muonloom.Muon:
    shapes = {name: tuple(param.shape) for name, param in Net(torch.float32).named_parameters()}
    heads = {"*.q_proj.weight": BlockSpec.heads(3, heads_per_block=1)}
    layout = Layout.from_shapes(shapes, overrides=heads)
    named = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    return muonloom.Muon(named, layout=layout, **{**OPTIONS, **options})


def batch(step: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(step))


def train(net: nn.Module, opt: muonloom.Muon, numbers: range) -> None:
    """Steps on the same batch on all ranks, so that their mean is what one process has."""
    for number in numbers:
        net(batch(number)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.drain()


def net_masters(net: nn.Module, opt: muonloom.Muon) -> dict[str, Tensor]:
    return masters(opt, dict(net.named_parameters()))


def net_state(net: nn.Module, opt: muonloom.Muon) -> dict[str, dict[str, Tensor]]:
    """All state that FSDP2 spreads, whole, and masters."""
    opt.drain()
    found = {}
    for name, param in net.named_parameters():
        own = opt.state.get(param, {})
        found[name] = {
            key: whole(like_parameter(value, param)) if key != "step" else value.clone()
            for key, value in own.items()
            if key not in ("master_low", "master_weight")
        }
        found[name]["master"] = opt.gathered_master(param).clone()
    return found
