"""FP32 masters of BF16 and FP16 parameters: kept, refreshed, edited, read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import muonloom
import reference
from optimizer.support import (
    EXACT,
    SEEDS,
    assert_weight,
    fingerprint,
    give_gradients,
    model_parameters,
    parameter,
    randn,
    relative,
    same_bits,
    steps,
    tensors_of,
    zeros_like_state,
)

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", SEEDS)
def test_three_steps_of_a_low_precision_model(dtype: torch.dtype, seed: int):
    named = model_parameters(seed=seed, dtype=dtype)
    opt = muonloom.Muon(named, **OPTIONS, **EXACT)
    wanted = {
        n: [p.detach().double(), zeros_like_state(p), zeros_like_state(p), 0] for n, p in named
    }
    for step in range(3):
        give_gradients(tensors_of(named), 10 * seed + step)
        for name, p in named:
            old = wanted[name]
            if "_proj.weight" in name:
                old[:2] = reference.muon_matrix(
                    old[0], old[1], p.grad, lr=0.02, rule="match_rms_adamw"
                )
            else:
                old[:] = reference.adamw(*old, p.grad, lr=0.02, weight_decay=0.1)
        opt.step()
    for name, p in named:
        assert p.dtype is dtype
        master = opt.state[p]["master_weight"]
        assert master.dtype is torch.float32
        assert_weight(master, wanted[name][0])
        assert same_bits(p.detach(), master.to(dtype))


def test_masters_keep_updates_too_small_for_the_weight():
    p = torch.nn.Parameter(torch.full((8, 4), 256.0, dtype=torch.bfloat16))
    opt = muonloom.Muon([p], lr=1e-4, weight_decay=0.1)
    for step in range(20):
        give_gradients([p], step)
        opt.step()
    master = opt.state[p]["master_weight"].double()
    assert relative(master, torch.full_like(master, 256.0 * (1 - 1e-5) ** 20)) < 1e-5
    assert relative(master, torch.full_like(master, 256.0)) > 1.5e-4


@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
def test_momentum_dtype(momentum_dtype: torch.dtype):
    p = parameter(16, 8)
    opt = muonloom.Muon([p], lr=0.02, momentum_dtype=momentum_dtype, **EXACT)
    w, m = p.detach().double(), zeros_like_state(p)
    for step in range(4):
        give_gradients([p], step)
        w, m = reference.muon_matrix(w, m, p.grad, lr=0.02)
        m = m.to(momentum_dtype).double()  # stored rounded; U is made before that
        opt.step()
    stored = opt.state[p]["momentum_buffer"]
    assert stored.dtype is momentum_dtype
    assert relative(stored, m) < (1e-6 if momentum_dtype is torch.float32 else 2**-8)
    assert_weight(p, w, 1e-6 if momentum_dtype is torch.float32 else 1e-3)


def test_bf16_gradients_enter_fp32_momentum_exactly():
    p = parameter(6, 4, dtype=torch.bfloat16)
    opt = muonloom.Muon([p], momentum=0.5)
    total = torch.zeros(6, 4)
    for step in range(3):
        give_gradients([p], step)
        total = 0.5 * total + 0.5 * p.grad.float()  # type: ignore[union-attr]
        opt.step()
    assert relative(opt.state[p]["momentum_buffer"], total) < 1e-7


OUTSIDE: dict[str, Callable[[torch.nn.Parameter, torch.Tensor], object]] = {
    "copy_": lambda p, new: p.copy_(new),
    "data.copy_": lambda p, new: p.data.copy_(new),
    "data =": lambda p, new: setattr(p, "data", new.clone()),
}


@pytest.mark.parametrize("how", OUTSIDE)
@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_written_from_outside_never_come_back_as_the_old_ones(name: str, how: str):
    named = model_parameters(dtype=torch.bfloat16)
    opt = muonloom.Muon(named, **OPTIONS)
    steps(opt, tensors_of(named), range(2))
    p = dict(named)[name]
    new = torch.full(p.shape, 8.0, dtype=torch.bfloat16)
    with torch.no_grad():
        OUTSIDE[how](p, new)
    give_gradients(tensors_of(named), 9)
    before = fingerprint(opt)
    with pytest.raises(muonloom.StaleMasterError, match=f"^{re.escape(name)}.*refresh_masters"):
        opt.step()
    assert fingerprint(opt) == before
    opt.refresh_masters()
    opt.step()
    assert float((p.detach().float() - 8.0).abs().max()) < 1.0


@pytest.mark.parametrize("how", OUTSIDE)
def test_weights_written_before_the_first_step_are_the_ones_that_are_trained(how: str):
    """Built before the checkpoint was loaded: the common order."""
    named = model_parameters(dtype=torch.bfloat16)
    opt = muonloom.Muon(named, **OPTIONS)
    with torch.no_grad():
        for _, p in named:
            OUTSIDE[how](p, torch.full(p.shape, 8.0, dtype=torch.bfloat16))
    steps(opt, tensors_of(named), [9])
    assert all(float((p.detach().float() - 8.0).abs().max()) < 1.0 for _, p in named)


@pytest.mark.parametrize("chosen", ["all", "one"])
def test_refresh_takes_masters_from_weights_and_keeps_momentum(chosen: str):
    named = model_parameters(dtype=torch.bfloat16)
    opt = muonloom.Muon(named, **OPTIONS)
    steps(opt, tensors_of(named), range(2))
    p = dict(named)["layers.0.mlp.up_proj.weight"]
    q = dict(named)["layers.1.mlp.up_proj.weight"]
    moment, untouched = (
        opt.state[p]["momentum_buffer"].clone(),
        opt.state[q]["master_weight"].clone(),
    )
    p.data.fill_(3.0)
    opt.refresh_masters(None if chosen == "all" else [p])
    assert same_bits(opt.state[p]["master_weight"], torch.full((16, 8), 3.0))
    assert same_bits(opt.state[p]["momentum_buffer"], moment)
    if chosen == "one":
        assert same_bits(opt.state[q]["master_weight"], untouched)
    else:
        assert same_bits(opt.state[q]["master_weight"], q.detach().float())


def test_fp32_weights_loaded_from_outside_are_simply_used():
    p = parameter(6, 4)
    opt = muonloom.Muon([p], lr=0.02)
    steps(opt, [p], [1])
    p.data.fill_(8.0)
    opt.refresh_masters()
    steps(opt, [p], [2])
    assert float((p.detach() - 8.0).abs().max()) < 1.0
    assert "master_weight" not in opt.state[p]


def test_refresh_refuses_a_stranger():
    opt = muonloom.Muon([parameter(4, 4)])
    with pytest.raises(ValueError, match="optimizer"):
        opt.refresh_masters([parameter(4, 4)])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_apply_to_masters(dtype: torch.dtype, in_place: bool, steps_before: int):
    named = model_parameters(dtype=dtype)
    opt = muonloom.Muon(named, **OPTIONS)
    steps(opt, tensors_of(named), range(steps_before))
    p, other = dict(named)["layers.0.mlp.up_proj.weight"], dict(named)["lm_head.weight"]
    opt.drain()
    before, aside = opt.get_full_parameter_master(p), other.detach().clone()
    assert before is not None
    seen: list[torch.Tensor] = []

    def halve(master: torch.Tensor) -> torch.Tensor | None:
        seen.append(master.clone())
        if not in_place:
            return master * 0.5
        master.mul_(0.5)
        return None

    opt.apply_to_masters([p], halve)
    assert len(seen) == 1
    assert seen[0].dtype is torch.float32
    assert same_bits(seen[0], before)
    after = opt.get_full_parameter_master(p)
    assert after is not None
    assert same_bits(after, before * 0.5)
    assert same_bits(p.detach(), (before * 0.5).to(dtype))
    assert same_bits(other.detach(), aside)
    steps(opt, tensors_of(named), [7])


@pytest.mark.parametrize("bad", ["nan", "shape", "stranger"])
def test_a_bad_edit_is_refused_and_changes_nothing(bad: str):
    named = model_parameters(dtype=torch.bfloat16)
    opt = muonloom.Muon(named, **OPTIONS)
    steps(opt, tensors_of(named), range(2))
    before = fingerprint(opt)
    target = parameter(16, 8) if bad == "stranger" else dict(named)["layers.0.mlp.up_proj.weight"]

    def edit(master: torch.Tensor) -> torch.Tensor:
        if bad == "nan":
            return master.fill_(float("nan"))
        return master.T if bad == "shape" else master

    with pytest.raises(ValueError, match="param" if bad == "stranger" else r"layers\.0\.mlp"):
        opt.apply_to_masters([target], edit)
    assert fingerprint(opt) == before


def test_an_edit_of_several_is_all_or_nothing():
    named = model_parameters(dtype=torch.bfloat16)
    opt = muonloom.Muon(named, **OPTIONS)
    steps(opt, tensors_of(named), range(2))
    before, calls = fingerprint(opt), []

    def edit(master: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return master * (0.5 if len(calls) < 3 else float("inf"))

    with pytest.raises(ValueError, match="finite"):
        opt.apply_to_masters(tensors_of(named), edit)
    assert fingerprint(opt) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_full_master_needs_a_drain_and_is_a_copy(dtype: torch.dtype):
    named = model_parameters(dtype=dtype)
    opt = muonloom.Muon(named, **OPTIONS)
    p = dict(named)["layers.0.mlp.up_proj.weight"]
    first = opt.get_full_parameter_master(p)  # no step yet
    assert first is not None
    assert same_bits(first, p.detach().float())
    for seed in (1, 2):
        steps(opt, tensors_of(named), [seed])
        with pytest.raises(RuntimeError, match=r"drain\(\)"):
            opt.get_full_parameter_master(p)
        opt.drain()
        master = opt.get_full_parameter_master(p)
        assert master is not None
        assert (master.device.type, master.dtype, master.shape) == ("cpu", torch.float32, p.shape)
        assert same_bits(master, opt.state[p].get("master_weight", p.detach()))
    before = fingerprint(opt)
    master.zero_()
    assert fingerprint(opt) == before


def test_the_full_master_of_a_stranger():
    opt = muonloom.Muon([parameter(4, 4)])
    opt.drain()
    with pytest.raises(ValueError, match="optimizer"):
        opt.get_full_parameter_master(parameter(4, 4))


def test_mixed_bf16_and_fp32_parameters():
    full, half = parameter(16, 8), parameter(16, 8, seed=1, dtype=torch.bfloat16)
    alone = [torch.nn.Parameter(t.detach().clone()) for t in (full, half)]
    opt = muonloom.Muon([full, half], lr=0.02)
    singles = [muonloom.Muon([p], lr=0.02) for p in alone]
    for seed in (1, 2):
        give_gradients([full, half], seed)
        give_gradients(alone, seed)
        opt.step()
        for single in singles:
            single.step()
    assert "master_weight" not in opt.state[full]
    assert relative(full, alone[0]) < 1e-3
    assert relative(half, alone[1]) < 1e-2
    assert half.dtype is torch.bfloat16


def test_training_in_bf16_follows_training_in_fp32():
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(randn(16, 8, seed=0).bfloat16().to(dtype))
        opt = muonloom.Muon([p], lr=0.02, **EXACT)
        for step in range(5):
            p.grad = randn(16, 8, seed=step).bfloat16().to(dtype)
            opt.step()
        results.append(opt.state[p].get("master_weight", p.detach()))
    assert same_bits(*results)
