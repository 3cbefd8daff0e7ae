"""What code written for any ``torch.optim.Optimizer`` may do: closures, hooks, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import muonloom
from optimizer.support import (
    fingerprint,
    give_gradients,
    listening,
    model_parameters,
    parameter,
    randn,
    relative,
    same_bits,
    tensors_of,
)

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}


def test_a_closure_runs_once_with_gradients_on_and_its_loss_comes_back():
    model = nn.Linear(6, 4)
    opt = muonloom.Muon(model.named_parameters(), **OPTIONS)
    calls: list[bool] = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = model(randn(3, 6, seed=1)).square().mean()
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    with torch.no_grad():
        loss = opt.step(closure)
    assert calls == [True]
    assert float(loss.detach()) > 0
    assert not same_bits(model.weight, before)
    assert opt.step() is None
    assert opt.step(closure=closure) is not None


def test_a_skipped_step_returns_the_loss_of_its_closure():
    p = parameter(4, 4)
    opt = muonloom.Muon([p], skip_nonfinite=True)

    def closure() -> float:
        p.grad = torch.full_like(p, float("nan"))
        return 1.5

    with listening():
        assert opt.step(closure) == 1.5
    assert opt.last_step["skipped"]


def test_hooks_run_around_the_step():
    p = parameter(6, 4)
    opt = muonloom.Muon([p], lr=0.02)
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(p.detach().clone()))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(p.detach().clone()))
    old = p.detach().clone()
    p.grad = torch.ones_like(p)
    opt.step()
    assert len(seen) == 2
    assert same_bits(seen[0], old)
    assert same_bits(seen[1], p)
    assert not same_bits(old, p)


def test_global_hooks_and_state_dict_hooks_run():
    p = parameter(6, 4)
    opt = muonloom.Muon([p], lr=0.02)
    seen: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda o, state: seen.append("post"))
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post", "load pre", "load post"]
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("global"))
    try:
        p.grad = torch.ones_like(p)
        opt.step()
    finally:
        handle.remove()
    assert seen[-1] == "global"


def test_an_lr_changed_between_steps_is_used_by_the_next():
    p = parameter(6, 4)
    opt = muonloom.Muon([p], lr=0.02, weight_decay=0.0)
    give_gradients([p], 1)
    start = p.detach().clone()
    opt.step()
    assert not same_bits(p, start)
    opt.param_groups[0]["lr"] = 0.0
    start = p.detach().clone()
    opt.step()
    assert same_bits(p, start)


def test_a_changed_momentum_decay_and_nesterov_are_used_by_the_next_step():
    for key, value in {"momentum": 0.1, "weight_decay": 0.9, "nesterov": False}.items():
        results = []
        for late in (False, True):
            p = parameter(6, 4)
            opt = muonloom.Muon([p], lr=0.02)
            give_gradients([p], 1)
            opt.step()
            if late:
                opt.param_groups[0][key] = value
            give_gradients([p], 2)
            opt.step()
            results.append(p.detach().clone())
        assert not same_bits(*results), key


@pytest.mark.parametrize("lr", [torch.tensor(0.02), torch.tensor([0.02])])
def test_a_tensor_lr_is_taken_as_torch_takes_it(lr: torch.Tensor):
    a, b = model_parameters(), model_parameters()
    first = muonloom.Muon(a, lr=lr, adjust_lr_fn="match_rms_adamw")
    second = muonloom.Muon(b, lr=float(lr), adjust_lr_fn="match_rms_adamw")
    for opt, named in ((first, a), (second, b)):
        give_gradients(tensors_of(named), 1)
        opt.step()
    for (_, p), (_, q) in zip(a, b, strict=True):
        assert relative(p, q) < 1e-6


def test_a_tensor_lr_of_two_elements_is_refused():
    with pytest.raises(ValueError, match=r"^lr"):
        muonloom.Muon([parameter(4, 4)], lr=torch.tensor([0.1, 0.2]))


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_hand_set_rates_would(name: str):
    named, plain_named = model_parameters(), model_parameters()
    opt, plain = muonloom.Muon(named, **OPTIONS), muonloom.Muon(plain_named, **OPTIONS)
    scheduler = SCHEDULERS[name](opt)
    rates = []
    for step in range(4):
        rates.append(opt.param_groups[0]["lr"])
        for to, source in zip(plain.param_groups, opt.param_groups, strict=True):
            to["lr"], to["momentum"] = source["lr"], source["momentum"]
        give_gradients(tensors_of(named), step)
        give_gradients(tensors_of(plain_named), step)
        opt.step()
        plain.step()
        scheduler.step()
    assert len(set(rates)) > 1
    for (_, p), (_, q) in zip(named, plain_named, strict=True):
        assert same_bits(p, q)


def test_reduce_on_plateau():
    opt = muonloom.Muon([parameter(4, 4)], lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.1)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_scheduler_resumes_with_the_optimizer():
    def run(split: int | None) -> str:
        named = model_parameters()
        opt = muonloom.Muon(named, **OPTIONS)
        scheduler = lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
        for step in range(4):
            if step == split:
                saved = opt.state_dict(), scheduler.state_dict()
                named = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
                opt = muonloom.Muon(named, **OPTIONS)
                scheduler = lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
                opt.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            give_gradients(tensors_of(named), step)
            opt.step()
            scheduler.step()
        return fingerprint(opt)

    assert run(None) == run(2)


def test_averaged_models_and_swa_work_beside_it():
    model = nn.Linear(6, 4)
    opt = muonloom.Muon(model.named_parameters(), **OPTIONS)
    average = torch.optim.swa_utils.AveragedModel(model)
    for seed in (1, 2):
        give_gradients(model.parameters(), seed)
        opt.step()
        average.update_parameters(model)
    assert relative(average.module.weight, model.weight) < 1.0


def test_step_inside_no_grad_and_after_backward_leaves_autograd_usable():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    opt = muonloom.Muon(model.named_parameters(), **OPTIONS)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = (model(randn(16, 6, seed=1)) - randn(16, 4, seed=2)).square().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_grad_scaler_unscales_before_the_step():
    torch.manual_seed(0)
    prints = []
    for scale in (1.0, 2.0**10):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        opt = muonloom.Muon(model.named_parameters(), lr=1e-2, adamw_lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        prints.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*prints, strict=True):
        assert torch.equal(a, b)  # a power of two scales exactly
