"""FP8 experts outside of a wrapper: their engine reduces gradients, and all ranks write the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import muonloom
from experts.support import WORKSPACE_BYTES, expert_model, token_ids
from muonloom.experts import Float8Experts
from ranks.support import run

STEPS = 2
OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "adamw_lr": 1e-3,
    "ns_compute_dtype": torch.float32,
    "placement": "host",
}


def build(process_group: dist.ProcessGroup | None) -> tuple[nn.Module, Float8Experts]:
    model = expert_model("mixtral")
    engine = Float8Experts.attach(
        model, workspace_bytes=WORKSPACE_BYTES, process_group=process_group
    )
    return model, engine


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    tokens = token_ids(seed=10 * step + part)
    return model(input_ids=tokens, labels=tokens).loss


def of_rank(rank: int, wrapper: str) -> dict[str, torch.Tensor]:
    model, engine = build(dist.group.WORLD)
    layout = muonloom.Layout.from_model(model)
    experts = {parameter for parameter, _ in engine.named_writers()}
    wrapped = model
    if wrapper == "fsdp2":
        fully_shard(model, ignored_params=experts)
    else:
        names = [name for name, parameter in model.named_parameters() if parameter in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
    optimizer = muonloom.Muon(wrapped.named_parameters(), layout=layout, engine=engine, **OPTIONS)
    for step in range(STEPS):
        loss_of(wrapped, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    found = {}
    for name, parameter in model.named_parameters():
        master = optimizer.get_full_parameter_master(parameter)
        if parameter in experts:
            assert master is not None  # each rank keeps all that it writes
            found[name] = master.clone()
            found[name + ".bytes"] = engine.dequantize(parameter).clone()
    return found


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_two_ranks_train_experts_as_one_process_does(wrapper: str):
    first, second = run(2, of_rank, wrapper)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name

    model, engine = build(None)
    layout = muonloom.Layout.from_model(model)
    optimizer = muonloom.Muon(model.named_parameters(), layout=layout, engine=engine, **OPTIONS)
    before = {n: optimizer.get_full_parameter_master(p) for n, p in model.named_parameters()}
    before = {name: master.clone() for name, master in before.items() if master is not None}
    for step in range(STEPS):
        for part in range(2):
            (loss_of(model, step, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    for name, parameter in model.named_parameters():
        if name in first:
            master = optimizer.get_full_parameter_master(parameter)
            moved = (master - before[name]).norm()
            assert (first[name] - master).norm() <= 1e-3 * moved, name  # sums in another order


def reduced(rank: int) -> list[Any]:
    _, engine = build(dist.group.WORLD)
    parameters = [parameter for parameter, _ in engine.named_writers()]
    if rank == 0:
        parameters[0].grad = torch.full(parameters[0].shape, 6.0)
        parameters[1].grad = torch.full(parameters[1].shape, 2.0)
    else:
        parameters[1].grad = torch.full(parameters[1].shape, 4.0)
    engine.before_step(None)
    found = [None if p.grad is None else p.grad.unique().tolist() for p in parameters]
    return found[:3]


def test_absent_gradients_count_as_zero_and_stay_absent_where_nobody_has_one():
    assert run(2, reduced) == [[[3.0], [3.0], None]] * 2


def refused(rank: int) -> list[str]:
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = muonloom.Muon([("w", parameter)], lr=1e-2)
    messages = []
    for _ in range(2):  # nothing was changed the first time
        with pytest.raises(ValueError, match="several ranks update") as error:
            optimizer.register_writer(parameter, muonloom.BFloat16Writer())
        messages.append(str(error.value))
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    return messages


def test_a_writer_for_what_ranks_share_is_refused():
    found = run(2, refused)
    assert all(message.startswith("w: ") for messages in found for message in messages)
