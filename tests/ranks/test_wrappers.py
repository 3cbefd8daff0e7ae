"""Weights without storage inside DDP and FSDP, and forwards that overlap the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

import muonloom
from experts.support import attached, backward, stacks
from ranks import spread
from ranks.spread import assert_equal
from ranks.support import run

# -- constructors -------------------------------------------------------------------------------------


def ddp(model: nn.Module) -> None:
    DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> None:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


def fsdp1(model: nn.Module) -> None:
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))


REMEDIES = {
    ddp: "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['1.weight'])",
    fsdp2: "fully_shard(module, ignored_params={model.get_parameter('1.weight')})",
    fsdp1: "FullyShardedDataParallel(module, ignored_states=[model.get_parameter('1.weight')])",
}


def wrap_released(rank: int) -> None:
    for wrap, remedy in REMEDIES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
        opt = muonloom.Muon(model.named_parameters(), **spread.OPTIONS)
        before = [param.detach().clone() for param in model.parameters()]
        opt.release([model[1].weight])
        with pytest.raises(RuntimeError) as raised:
            wrap(model)
        text = str(raised.value)
        assert text.startswith("1.weight: "), text
        assert "Call resume() of its optimizer first." in text
        assert remedy in text, text
        opt.resume()
        if wrap is ddp:  # the others have taken some parameters over by then
            found = [param.detach() for param in model.parameters()]
            assert_equal(dict(enumerate(found)), dict(enumerate(before)))
            wrap(model)


def test_wrappers_of_released_weights_say_what_to_do():
    run(2, wrap_released)


def outside_of_wrappers(rank: int) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    opt = muonloom.Muon([weight])
    opt.release()
    with pytest.raises(RuntimeError) as raised:
        weight.detach()
    assert "wrapper" not in str(raised.value)


def test_elsewhere_nothing_is_said_of_wrappers():
    outside_of_wrappers(0)


# -- FP8 experts --------------------------------------------------------------------------------------

FAMILY = "qwen3_moe"


def ignoring(way: str, model: nn.Module) -> nn.Module:
    hollow = stacks(model)
    if way == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(hollow))
        return DistributedDataParallel(model)
    if way == "ddp, not synchronized":
        return DistributedDataParallel(model, init_sync=False)
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(hollow.values())}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    return model


def fp8_run(
    way: str, mine: Sequence[int], **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """FP8 bytes and all masters after three steps, each of the mean over the batches that are mine."""
    model, engine = attached(FAMILY)
    layout = muonloom.Layout.from_model(model)
    wrapped = ignoring(way, model)
    options = {**spread.OPTIONS, "engine": engine, "placement": "host", **options}
    opt = muonloom.Muon(wrapped.named_parameters(), layout=layout, **options)
    for step in range(3):
        for number in mine:
            backward(wrapped, seed=10 * step + number)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(len(mine))
        opt.step()
        opt.zero_grad()
    opt.drain()
    names = {param: name for name, param in model.named_parameters()}
    held = {
        f"{names[param]}, {i}": tensor.view(torch.uint8).clone()
        for param, writer in engine.named_writers()
        for i, tensor in enumerate(writer.tensors())
    }
    return held, {name: opt.gathered_master(param).clone() for param, name in names.items()}


def train_fp8(rank: int) -> None:
    for way in ("ddp", "ddp, not synchronized", "fsdp2"):
        # Whom a wrapper leaves out has gradients of this rank's batch: all have the same one then.
        is_reduced = way == "ddp, not synchronized"
        held, masters = fp8_run(way, [rank if is_reduced else 0])
        _, wanted = fp8_run("alone", [0, 1] if is_reduced else [0], process_group=False)
        assert masters.keys() == wanted.keys()
        for name, master in wanted.items():
            torch.testing.assert_close(
                masters[name], master, rtol=1e-3, atol=1e-4, msg=f"{way} {name}"
            )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, held)
        assert_equal(everyone[0], held, way)


def test_fp8_experts_train_beside_what_is_wrapped():
    run(2, train_fp8)


def wrap_fp8(rank: int) -> None:
    model, _ = attached(FAMILY)
    name = next(iter(stacks(model)))
    with pytest.raises(RuntimeError) as raised:
        DistributedDataParallel(model)
    assert str(raised.value).startswith(f"{name}: ")
    assert f"_set_params_and_buffers_to_ignore_for_model(model, ['{name}'])" in str(raised.value)
    with pytest.raises(RuntimeError, match="ignored_params="):
        fully_shard(model)


def test_wrappers_of_fp8_experts_say_what_to_do():
    run(2, wrap_fp8)


# -- forwards that overlap the step -------------------------------------------------------------------


def overlapped(rank: int) -> None:
    for way in ("ddp", "fsdp", "hsdp"):
        for placement in spread.PLACEMENTS:
            found = []
            for overlap in (False, True):
                net: nn.Module = spread.Net(torch.bfloat16)
                if way == "ddp":
                    net = DistributedDataParallel(net)
                else:
                    net = spread.sharded(net, *((2,) if way == "fsdp" else (2, 1)))
                opt = spread.net_optimizer(net, placement=spread.PLACEMENTS[placement])
                handle = opt.overlap_forward(net) if overlap else None
                losses = []
                for step in range(4):
                    loss = net(spread.batch(step)).float().square().mean()
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    losses.append(loss.detach())
                losses.append(net(spread.batch(9)).detach())
                for module in net.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # no backward pass did
                if handle is not None:
                    handle.remove()
                opt.drain()
                found.append(
                    {
                        "losses": dict(enumerate(losses)),
                        "weights": spread.local(dict(net.named_parameters())),
                        "masters": spread.net_masters(net, opt),
                    }
                )
            assert_equal(found[1], found[0], rank, way, placement)


def test_overlapped_forwards_read_finished_weights():
    run(2, overlapped)


def waits_first(rank: int) -> None:
    net = spread.sharded(spread.Net(torch.bfloat16))
    opt = spread.net_optimizer(net, placement=spread.PLACEMENTS["host"])
    opt.overlap_forward(net)
    spread.train(net, opt, range(1))
    seen: list[Any] = []
    wait_for, unshard = opt._assembly.wait_for, FSDPParamGroup.unshard

    def waiting(parameters: Iterable[Tensor]) -> None:
        seen.append(set(parameters))
        wait_for(parameters)

    def gathering(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        seen.append("gathers")
        unshard(group, *args, **kwargs)

    with (
        mock.patch.object(opt._assembly, "wait_for", waiting),
        mock.patch.object(FSDPParamGroup, "unshard", gathering),
    ):
        net(spread.batch(1)).float().square().mean().backward()
    # FSDP2 gathers the weights of modules ahead, so all of them have to be there before the first.
    assert seen[0] == set(net.parameters())
    assert seen.count("gathers") > 2
    assert sum(isinstance(entry, set) for entry in seen) == 1


def test_weights_that_fsdp_gathers_ahead_are_waited_for_first():
    run(2, waits_first)
