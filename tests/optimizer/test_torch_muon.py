"""A drop-in for ``torch.optim.Muon``: the same updates step by step, the same calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import muonloom
from optimizer.support import SEEDS, TORCH_LIKE, parameter, randn, relative

SHAPES = [(16, 32), (32, 16), (24, 24), (1, 40), (48, 3)]


def both(seed: int, **options: Any):
    ours = [parameter(*s, seed=seed + i) for i, s in enumerate(SHAPES)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    return (
        ours,
        theirs,
        muonloom.Muon(ours, **options, **TORCH_LIKE),
        torch.optim.Muon(theirs, **options),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 0.02},
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3},
        {"weight_decay": 0.0, "lr": 0.3},
    ],
    ids=["defaults", "plain", "match_rms", "coefficients", "no decay"],
)
def test_each_update_is_within_one_percent(options: dict[str, Any], seed: int):
    ours, theirs, opt, peer = both(seed, **options)
    for step in range(4):
        before = [
            (p.detach().clone(), q.detach().clone()) for p, q in zip(ours, theirs, strict=True)
        ]
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = randn(*p.shape, seed=100 * step + i)
            q.grad = p.grad.clone()
        opt.step()
        peer.step()
        for (p0, q0), p, q in zip(before, ours, theirs, strict=True):
            decay = 1 - opt.param_groups[0]["lr"] * opt.param_groups[0]["weight_decay"]
            assert relative(p - decay * p0, q - decay * q0) < 1e-2
            assert (
                relative(opt.state[p]["momentum_buffer"], peer.state[q]["momentum_buffer"]) < 1e-6
            )


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1e3, 1e15])
def test_gradient_norms_down_to_1e_minus_6(size: float):
    for shape in SHAPES:
        p, q = parameter(*shape), parameter(*shape)
        p.data.zero_()
        q.data.zero_()
        grad = randn(*shape, seed=4)
        # Above eps in torch's sense too: U is (1 - 0.95²)·grad in the first step.
        p.grad = grad / grad.norm() * size
        q.grad = p.grad.clone()
        muonloom.Muon([p], lr=1.0, nesterov=False, momentum=0.0, **TORCH_LIKE).step()
        torch.optim.Muon([q], lr=1.0, nesterov=False, momentum=0.0).step()
        assert relative(p, q) < 1e-2


def test_state_dict_of_torch_loads():
    ours, theirs, opt, peer = both(0)
    for i, q in enumerate(theirs):
        q.grad = randn(*q.shape, seed=i)
    peer.step()
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    opt.load_state_dict(peer.state_dict())
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(opt.state[p]["momentum_buffer"], peer.state[q]["momentum_buffer"])
        p.grad = q.grad = randn(*q.shape, seed=50 + i)
    opt.step()
    peer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert relative(p, q) < 1e-3


def test_only_keywords_after_params():
    with pytest.raises(TypeError):
        muonloom.Muon([parameter(2, 2)], 0.1)  # type: ignore[misc]


def test_is_a_torch_optimizer():
    opt = muonloom.Muon([parameter(2, 2)])
    assert isinstance(opt, torch.optim.Optimizer)
    assert "lr: 0.001" in repr(opt)
