"""Weights for a rollout engine where ranks hold parts: every rank gets all of each, within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import muonloom
from export.support import PeakBytes, model_of
from muonloom import export_weights
from ranks import spread
from ranks.spread import assert_equal, error_of
from ranks.support import run

DTYPES: tuple[Any, ...] = (torch.bfloat16, torch.float32, "float8_block")


def exported(model: nn.Module, opt: muonloom.Muon, dtype: Any, **options: Any) -> dict[str, Tensor]:
    found = dict(export_weights(model, opt, dtype=dtype, **options))
    return {name: t.view(torch.uint8) if t.itemsize == 1 else t for name, t in found.items()}


def agreed(found: dict[str, Tensor], *about: object) -> None:
    """All ranks have the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert_equal(everyone[0], found, *about)


def wrapped(way: str, net: nn.Module) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(net)
    if way in ("tp", "tp, fsdp"):
        size = dist.get_world_size()
        shape = (1, size) if way == "tp" else (size // 2, 2)
        both = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        mesh = both["tensor"]
        for layer in net.layers:
            for name, dim in (("q_proj", 0), ("up_proj", 0), ("down_proj", 1)):
                module = getattr(layer, name)
                local = distribute_tensor(module.weight.detach(), mesh, [Shard(dim)])
                module.weight = nn.Parameter(local)
        if way == "tp":
            return net
        for layer in net.layers:
            fully_shard(layer, mesh=both["data"])
        return fully_shard(net, mesh=both["data"])
    return spread.sharded(net, *((2, 2) if way == "hsdp" else ()))


def plain_twin(net: nn.Module, opt: muonloom.Muon) -> Any:
    """A model of plain tensors whose masters are those of `net`, gathered."""
    twin = spread.Net(next(net.parameters()).dtype, seed=1)
    own = spread.net_optimizer(twin, process_group=False)
    names = {name.removeprefix("module."): param for name, param in net.named_parameters()}
    for name, param in twin.named_parameters():
        master = opt.gathered_master(names[name])
        own.apply_to_masters([param], lambda _, master=master: master.clone())
    return twin, own


def export(rank: int, ways: Sequence[str]) -> None:
    for way, dtype, placement in spread.settings(*ways):
        net = wrapped(way, spread.Net(dtype))
        opt = spread.net_optimizer(net, placement=spread.PLACEMENTS[placement])
        spread.steps(opt, dict(net.named_parameters()), range(2))
        twin, own = plain_twin(net, opt)
        for kind in DTYPES:
            known = (rank, way, dtype, placement, kind)
            found = exported(net, opt, kind)
            agreed(found, *known)
            wanted = exported(twin, own, kind)
            assert_equal(found, wanted, *known)
            least = 12 * 128 * 12 if kind == "float8_block" else 12 * 12
            assert_equal(exported(net, opt, kind, max_bytes=least), wanted, *known)
        assert next(iter(found)) == "embed_tokens.weight"


@pytest.mark.parametrize(
    ("ranks", "ways"), [(2, ("ddp", "fsdp", "tp")), (3, ("ddp", "fsdp")), (4, ("hsdp", "tp, fsdp"))]
)
def test_all_ranks_get_all_of_each_tensor(ranks: int, ways: Sequence[str]):
    run(ranks, export, ways)


def released(rank: int) -> None:
    for way, dtype, placement in spread.settings("ddp"):
        net = wrapped(way, spread.Net(dtype))
        opt = spread.net_optimizer(net, placement=spread.PLACEMENTS[placement])
        spread.steps(opt, dict(net.named_parameters()), range(2))
        before = exported(net, opt, torch.float32)
        opt.release(model=net)
        assert_equal(exported(net, opt, torch.float32), before, rank, dtype, placement)
        opt.resume()
        assert_equal(exported(net, opt, torch.float32), before, rank, dtype, placement)


def test_replicated_weights_are_exported_while_released():
    run(2, released)


def others(rank: int) -> None:
    """Frozen parameters and buffers; and what FSDP2 left whole after a forward."""
    net = spread.Net(torch.bfloat16)
    net.embed_tokens.weight.requires_grad_(False)
    net.layers[0].norm.requires_grad_(False)
    mesh = init_device_mesh("cpu", (2,))
    net.register_buffer("table", distribute_tensor(torch.arange(15).view(5, 3), mesh, [Shard(1)]))
    frozen = {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}
    net = spread.sharded(net)
    opt = spread.net_optimizer(net, placement="host")
    spread.train(net, opt, range(2))
    held = {name: param for name, param in net.named_parameters() if param.requires_grad}
    wanted = {**frozen, **spread.masters(opt, held)}
    with torch.no_grad():
        net(spread.batch(0))
    assert not isinstance(net.lm_head.weight, DTensor)
    found = exported(net, opt, torch.float32)
    agreed(found)
    buffers = {"mask": torch.arange(3), "table": torch.arange(15).view(5, 3)}
    assert_equal(found, {**wanted, **buffers})


def test_what_the_optimizer_does_not_hold_is_put_together_too():
    run(2, others)


# -- models of Transformers ---------------------------------------------------------------------------


def mixture(way: str, **changes: Any) -> Any:
    """A mixture of experts: its experts apart over ranks, or all of it in FSDP2; and an optimizer."""
    model = model_of("qwen3_moe", **changes)
    layout = muonloom.Layout.from_model(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "experts":
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if param.ndim == 3:
                    local = distribute_tensor(param.detach(), mesh, [Shard(0)])
                    module.register_parameter(name, nn.Parameter(local))
    if way == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"process_group": False} if way == "alone" else {}
    opt = muonloom.Muon(
        model.named_parameters(), layout=layout, placement="host", **spread.OPTIONS, **options
    )
    return model, opt


def export_mixture(rank: int) -> None:
    for way in ("experts", "fsdp"):
        model, opt = mixture(way)
        spread.steps(opt, dict(model.named_parameters()), range(1))
        twin, own = mixture("alone")
        for name, param in twin.named_parameters():
            master = opt.gathered_master(model.get_parameter(name))
            own.apply_to_masters([param], lambda _, master=master: master.clone())
        for kind in DTYPES:
            found = exported(model, opt, kind)
            agreed(found, way, kind)
            assert_equal(found, exported(twin, own, kind), rank, way, kind)
        assert "model.layers.1.mlp.experts.0.gate_proj.weight" in found


def test_experts_are_taken_apart_wherever_they_are():
    run(2, export_mixture)


def memory(rank: int) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 2048, "num_experts": 16}
    for way in ("experts", "fsdp"):
        model, opt = mixture(way, **wide)
        spread.steps(opt, dict(model.named_parameters()), range(1))
        most = 12 * 2 * 128 * 256  # both halves of one expert, of 16
        for kind in DTYPES:
            largest = 0
            with PeakBytes() as bytes_now:
                for _, tensor in export_weights(model, opt, dtype=kind, max_bytes=most):
                    largest = max(largest, tensor.nbytes)
                    del tensor
            assert bytes_now.peak <= most + largest, (way, kind, bytes_now.peak, most, largest)


def test_memory_of_gathering_is_bounded():
    run(2, memory)


# -- ranks that differ --------------------------------------------------------------------------------


def own_experts(rank: int) -> None:
    """Experts that each rank has alone come out there alone."""
    net = nn.Module()
    net.shared = nn.Parameter(torch.full((8, 6), 2.0))
    net.mine = nn.Parameter(torch.full((2, 8, 6), float(rank)))
    opt = muonloom.Muon(
        [
            {"params": [("shared", net.shared)]},
            {"params": [("mine", net.mine)], "process_group": False},
        ]
    )
    found = exported(net, opt, torch.float32)
    assert_equal(
        found, {"shared": torch.full((8, 6), 2.0), "mine": torch.full((2, 8, 6), float(rank))}
    )


def test_what_a_rank_has_alone_comes_out_there_alone():
    run(2, own_experts)


def refused(rank: int) -> None:
    net = wrapped("fsdp", spread.Net(torch.bfloat16))
    opt = spread.net_optimizer(net)
    with mock.patch.object(opt, "drain", side_effect=FloatingPointError("mine") if rank else None):
        error = error_of(lambda: export_weights(net, opt))
    assert isinstance(error, FloatingPointError if rank else RuntimeError), error
    with pytest.raises(ValueError, match="max_bytes: got 100; wanted at least"):
        export_weights(net, opt, max_bytes=100)
    assert exported(net, opt, torch.bfloat16)


def test_where_one_rank_cannot_export_none_does():
    run(2, refused)
