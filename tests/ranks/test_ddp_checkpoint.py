"""Under DDP the first rank saves for all, with what each gave; every rank loads, and so does one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muonloom
from muonloom import checkpoint

RANKS = 2


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8)).to(torch.bfloat16)


def optimizer_of(model: nn.Module, placement: str) -> muonloom.Muon:
    return muonloom.Muon(model.named_parameters(), lr=1e-2, adamw_lr=1e-3, placement=placement)


def train(model: nn.Module, optimizer: muonloom.Muon, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)  # the same on all ranks
        data = torch.randn(4, 12, generator=generator).to(torch.bfloat16)
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def worker(rank: int, directory: str, is_async: bool) -> None:
    store = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(build(0))
    optimizer = optimizer_of(model, "host")
    train(model, optimizer, range(2))
    handle = checkpoint.save(
        f"{directory}/saved",
        model=model,
        optimizer=optimizer,
        step=2,
        extra={"rank": rank},
        async_=is_async,
    )
    train(model, optimizer, range(2, 4))
    assert (handle.result().nbytes > 0) == (rank == 0)
    dist.barrier()  # whoever loads has to know that the first rank is done
    other = DistributedDataParallel(build(1))
    twin = optimizer_of(other, "device")
    found = checkpoint.load(f"{directory}/saved", model=other, optimizer=twin)
    assert found == {"step": 2, "extra": {"rank": rank}}
    train(other, twin, range(2, 4))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    torch.save(model.module.state_dict(), f"{directory}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("is_async", [False, True])
def test_two_ranks_save_and_load_and_so_does_one(is_async: bool, tmp_path: Path):
    mp.spawn(worker, args=(str(tmp_path), is_async), nprocs=RANKS)
    data: list[Any] = list((tmp_path / "saved").glob("data-*"))
    assert len(data) == 1
    model = build(3)
    optimizer = optimizer_of(model, "host")
    found = checkpoint.load(tmp_path / "saved", model=model, optimizer=optimizer)
    assert found == {"step": 2, "extra": {"rank": 0}}
    train(model, optimizer, range(2, 4))
    for rank in range(RANKS):
        theirs = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, parameter in model.named_parameters():
            assert torch.equal(theirs[name], parameter.detach())
