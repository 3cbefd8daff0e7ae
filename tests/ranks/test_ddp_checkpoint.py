"""Under DDP each rank saves what it owns, and what it was given; every rank loads, and so does one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muonloom
from muonloom import checkpoint
from muonloom.checkpoint import saving
from ranks.support import run


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


def save_and_load(rank: int, path: str, is_async: bool) -> tuple[int, dict[str, Any]]:
    model = DistributedDataParallel(build(0))
    optimizer = optimizer_of(model, "host")
    train(model, optimizer, range(2))
    told_of, point_to = [], saving._point_to

    def point(place: Path) -> None:
        told_of.append(list(place.glob("part-*")))
        point_to(place)

    saving._point_to = point
    handle = checkpoint.save(
        path, model=model, optimizer=optimizer, step=2, extra={"rank": rank}, async_=is_async
    )
    train(model, optimizer, range(2, 4))
    report = handle.result()
    # The checkpoint is there for all as soon as one of them is done.
    assert checkpoint.latest(Path(path).parent) == Path(path)
    assert [len(parts) for parts in told_of] == ([1] if rank == 0 else []), "they go last"
    other = DistributedDataParallel(build(1))
    twin = optimizer_of(other, "device")
    found = checkpoint.load(path, model=other, optimizer=twin)
    assert found == {"step": 2, "extra": {"rank": rank}}
    train(other, twin, range(2, 4))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    return report.nbytes, model.module.state_dict()


@pytest.mark.parametrize("is_async", [False, True])
def test_two_ranks_save_and_load_and_so_does_one(is_async: bool, tmp_path: Path):
    path = tmp_path / "saved"
    outcomes = run(2, save_and_load, str(path), is_async)
    data: list[Any] = list(path.glob("data-*"))
    assert len(data) == 2
    sizes = [nbytes for nbytes, _ in outcomes]
    assert max(sizes) < 0.7 * sum(sizes), "spread over the ranks"
    model = build(3)
    optimizer = optimizer_of(model, "host")
    found = checkpoint.load(path, model=model, optimizer=optimizer)
    assert found == {"step": 2, "extra": {"rank": 0}}
    train(model, optimizer, range(2, 4))
    for _, theirs in outcomes:
        for name, parameter in model.named_parameters():
            assert torch.equal(theirs[name], parameter.detach())
