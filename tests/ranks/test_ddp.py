"""Under DDP every rank applies the update of the averaged gradient, and all weights stay equal."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muonloom
from ranks.support import run

STEPS, RANKS = 3, 2
OPTIONS = {"lr": 1e-2, "adamw_lr": 1e-3, "ns_compute_dtype": torch.float32}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))


def digest(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


def worker(rank: int, directory: str) -> None:
    wrapped = DistributedDataParallel(build())
    layout = muonloom.Layout.from_shapes({n: tuple(p.shape) for n, p in build().named_parameters()})
    # Names with DDP's prefix meet a layout without it.
    optimizer = muonloom.Muon(wrapped.named_parameters(), layout=layout, **OPTIONS)
    for step in range(STEPS):
        wrapped(batch(step, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # One rank's NaN reaches all gradients, so that all ranks skip together.
    data = batch(99, rank)
    if rank == 1:
        data[0, 0] = float("nan")
    wrapped(data).square().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        optimizer.step()
    assert optimizer.last_step.skipped
    torch.save(wrapped.module.state_dict(), f"{directory}/{rank}.pt")
    Path(f"{directory}/{rank}.sha256").write_text(digest(wrapped.module))


def test_two_ranks_take_the_step_of_the_mean(tmp_path: Path):
    run(RANKS, worker, str(tmp_path))
    digests = {(tmp_path / f"{rank}.sha256").read_text() for rank in range(RANKS)}
    assert len(digests) == 1

    model = build()
    optimizer = muonloom.Muon(model.named_parameters(), **OPTIONS)
    for step in range(STEPS):
        losses = [model(batch(step, rank)).square().sum() for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    theirs = torch.load(tmp_path / "0.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        # The mean is taken in another order of FP32 sums.
        torch.testing.assert_close(theirs[name], parameter.detach(), rtol=1e-4, atol=1e-6)
