"""Which gradient is read, and what an absent or a zero one means."""

from __future__ import annotations

import array
import weakref
from typing import Any

import pytest
import torch

import muonloom
import reference
from muonloom import BlockSpec, Layout
from optimizer.support import (
    EXACT,
    SEEDS,
    assert_weight,
    bits,
    fingerprint,
    give_gradients,
    model_parameters,
    parameter,
    randn,
    relative,
    same_bits,
    tensors_of,
    zeros_like_state,
)

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_gradient_stays_bit_for_bit(dtype: torch.dtype):
    named = model_parameters(dtype=dtype)
    opt = muonloom.Muon(named, **OPTIONS)
    give_gradients(tensors_of(named), 1)
    opt.step()
    absent = ["layers.0.mlp.up_proj.weight", "layers.1.norm.weight", "lm_head.weight"]
    give_gradients(tensors_of(named), 2)
    for name in absent:
        dict(named)[name].grad = None

    def all_bits(p: torch.Tensor) -> list[bytes]:
        return [bits(p), *(bits(v) for v in opt.state[p].values())]

    before = {name: all_bits(p) for name, p in named}
    opt.step()
    opt.drain()
    unchanged = {name for name, p in named if all_bits(p) == before[name]}
    assert unchanged == set(absent)


def test_a_step_without_any_gradient_changes_nothing():
    named = model_parameters()
    opt = muonloom.Muon(named, **OPTIONS)
    before = fingerprint(opt)
    opt.step()
    assert fingerprint(opt) == before
    assert opt.last_step["skipped"] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_gradient_without_momentum_decays_only(dtype: torch.dtype):
    named = model_parameters(dtype=dtype)
    opt = muonloom.Muon(named, lr=0.5, adamw_lr=0.25, weight_decay=0.5)
    wanted = {}
    for name, p in named:
        p.grad = torch.zeros_like(p)
        lr = 0.5 if "_proj.weight" in name else 0.25
        wanted[name] = p.detach().double() * (1 - 0.5 * lr)
    opt.step()
    for name, p in named:
        master = opt.state[p].get("master_weight", p)
        assert_weight(master.detach(), wanted[name], 1e-7)


def stack(seed: int, idle: str) -> tuple[muonloom.Muon, torch.nn.Parameter]:
    name = "layers.0.mlp.experts.down_proj"
    p = parameter(3, 8, 6, seed=seed)
    layout = Layout.from_shapes(
        {name: (3, 8, 6)}, overrides={name: BlockSpec.stacked(BlockSpec.whole())}
    )
    return muonloom.Muon([(name, p)], layout=layout, lr=0.02, idle_matrices=idle, **EXACT), p


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("idle", ["update", "skip"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_idle_matrices(idle: str, seed: int, zero: float):
    opt, p = stack(seed, idle)
    w, m = p.detach().double(), zeros_like_state(p)
    counts = []
    for step, idle_experts in enumerate([(), (1,), (0, 1), ()]):
        give_gradients([p], 10 * seed + step)
        for e in idle_experts:
            p.grad[e] = zero  # type: ignore[index]
        old = p.detach().clone(), opt.state[p].get("momentum_buffer", m).clone()
        w, m = reference.muon_parameter(
            w, m, p.grad, reference.stacked(3, 8, 6), lr=0.02, idle=idle
        )
        opt.step()
        counts.append(opt.last_step["idle"])
        if idle == "skip":
            for e in idle_experts:
                assert same_bits(p[e], old[0][e])
                assert same_bits(opt.state[p]["momentum_buffer"][e], old[1][e])
    assert_weight(p, w)
    assert relative(opt.state[p]["momentum_buffer"], m) < 1e-6
    assert counts == [0, 1, 2, 0]


def test_a_nearly_zero_gradient_is_not_idle():
    opt, p = stack(0, "skip")
    p.grad = torch.zeros_like(p)
    p.grad[1, 3, 3] = 1e-45
    before = p.detach().clone()
    opt.step()
    assert opt.last_step["idle"] == 2
    assert [same_bits(p[e], before[e]) for e in range(3)] == [True, False, True]


def test_idle_bf16_matrices_keep_their_masters():
    p = parameter(8, 6, dtype=torch.bfloat16)
    opt = muonloom.Muon([p], lr=0.02, idle_matrices="skip")
    give_gradients([p], 1)
    opt.step()
    before = [bits(p), *(bits(v) for v in opt.state[p].values())]
    p.grad = torch.zeros_like(p)
    opt.step()
    assert [bits(p), *(bits(v) for v in opt.state[p].values())] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_preferred(dtype: torch.dtype):
    named, peers = model_parameters(dtype=dtype), model_parameters(dtype=torch.float32)
    for (_, p), (_, q) in zip(named, peers, strict=True):
        q.data.copy_(p.data)
    opt, peer = muonloom.Muon(named, **OPTIONS), muonloom.Muon(peers, **OPTIONS)
    for step in range(2):
        give_gradients(tensors_of(peers), step)
        for (_, p), (_, q) in zip(named, peers, strict=True):
            p.main_grad = q.grad.clone()  # type: ignore[union-attr, attr-defined]
            p.grad = torch.full_like(p, 3.0) if step else None
        opt.step()
        peer.step()
    for (name, p), (_, q) in zip(named, peers, strict=True):
        assert same_bits(opt.state[p].get("master_weight", p.data), q.data), name


def test_an_absent_main_grad_falls_back_to_grad():
    p, q = parameter(6, 4), parameter(6, 4)
    p.main_grad = None  # type: ignore[attr-defined]
    for x in (p, q):
        opt = muonloom.Muon([x])
        give_gradients([x], 1)
        opt.step()
    assert same_bits(p, q)


def test_gradients_are_read_and_never_written():
    for dtype in (torch.float32, torch.bfloat16):
        named = model_parameters(dtype=dtype)
        opt = muonloom.Muon(named, **OPTIONS)
        give_gradients(tensors_of(named), 1)
        before = [bits(p.grad) for _, p in named]  # type: ignore[arg-type]
        opt.step()
        assert [bits(p.grad) for _, p in named] == before  # type: ignore[arg-type]


def test_clipping_before_the_step_scales_what_enters_the_momentum():
    p = parameter(8, 6)
    opt = muonloom.Muon([p], lr=0.02, **EXACT)
    w, m = p.detach().double(), zeros_like_state(p)
    for step, size in enumerate([1.0, 50.0, 0.1]):
        give_gradients([p], step, size=size)
        norm = float(torch.nn.utils.clip_grad_norm_([p], 1.0))
        assert opt is not None
        w, m = reference.muon_parameter(w, m, p.grad, reference.whole(8, 6), lr=0.02)
        opt.step()
        assert float(opt.last_step["grad_norm"]) == pytest.approx(min(norm, 1.0), rel=1e-4)
    assert_weight(p, w)
    assert relative(opt.state[p]["momentum_buffer"], m) < 1e-6


def test_zero_grad():
    named = model_parameters()
    opt = muonloom.Muon(named, **OPTIONS)
    give_gradients(tensors_of(named), 1)
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for _, p in named)
    opt.zero_grad()
    assert all(p.grad is None for _, p in named)


@pytest.mark.parametrize("read_report", [False, True])
def test_zero_grad_gives_the_memory_back(read_report: bool):
    """No record of the step may keep a gradient alive."""
    named = [("lm_head.weight", parameter(8, 4)), ("layers.0.up_proj.weight", parameter(8, 4))]
    opt = muonloom.Muon(named, **OPTIONS)
    alive = []
    for _, p in named:
        memory = array.array("f", [0.5] * 32)
        alive.append(weakref.ref(memory))
        p.grad = torch.frombuffer(memory, dtype=torch.float32).view(8, 4)
        del memory
    opt.step()
    if read_report:
        assert opt.last_step["grad_norm"] == pytest.approx(4.0)
    opt.zero_grad()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_free_gradients_gives_them_back_and_changes_no_bit(dtype: torch.dtype):
    prints = []
    for free in (False, True):
        named = model_parameters(dtype=dtype)
        opt = muonloom.Muon(named, free_gradients=free, ns_batch_bytes=2048, **OPTIONS)
        for step in range(2):
            give_gradients(tensors_of(named), step)
            opt.step()
        prints.append(fingerprint(opt))
        assert all((p.grad is None) is free for _, p in named)
        assert opt.last_step.update_rms["adamw"] > 0
    assert prints[0] == prints[1]


def test_free_gradients_falls_during_the_step_and_drops_those_of_a_skipped_step(
    monkeypatch: pytest.MonkeyPatch,
):
    first, second = parameter(8, 8), parameter(4, 12)
    opt = muonloom.Muon([first, second], free_gradients=True)
    give_gradients([first, second], 0)
    alive: list[list[bool]] = []
    real = muonloom.compute.iterate

    def watched(x: torch.Tensor, recipe: Any, scratch: torch.Tensor) -> torch.Tensor:
        alive.append([p.grad is not None for p in (first, second)])
        return real(x, recipe, scratch)

    monkeypatch.setattr("muonloom.compute.iterate", watched)
    opt.step()
    assert alive == [[True, True], [False, True]]
    give_gradients([first, second], 1)
    second.grad[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="skipped"):
        opt.step()
    assert first.grad is second.grad is None


def test_micro_batches_accumulate_into_one_orthogonalization():
    model = torch.nn.Linear(6, 4, bias=False)
    opt = muonloom.Muon(model.named_parameters(), lr=0.02)
    for i in range(4):
        model(randn(3, 6, seed=i)).square().mean().backward()
    opt.step()
    assert opt.last_step["ns_calls"] == 1


@pytest.mark.parametrize("layout", [torch.sparse_coo])
def test_sparse_gradients_are_refused_by_name_before_anything_is_written(layout: torch.layout):
    named = model_parameters()
    opt = muonloom.Muon(named, **OPTIONS)
    give_gradients(tensors_of(named), 1)
    opt.step()
    give_gradients(tensors_of(named), 2)
    p = dict(named)["lm_head.weight"]
    p.grad = p.grad.to_sparse(layout=layout)  # type: ignore[union-attr]
    before = fingerprint(opt)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"lm_head\.weight"):
        opt.step()
    assert fingerprint(opt) == before


def test_a_gradient_of_another_shape_in_main_grad_is_refused():
    p = parameter(6, 4)
    opt = muonloom.Muon([("layers.0.w.weight", p)])
    p.main_grad = torch.ones(4, 6)  # type: ignore[attr-defined]
    before = bits(p)
    with pytest.raises((ValueError, TypeError), match=r"layers\.0\.w\.weight"):
        opt.step()
    assert bits(p) == before


def test_non_contiguous_gradients_and_parameters():
    base, grad = randn(9, 14, seed=1), randn(9, 14, seed=2)
    for view in (lambda t: t.T, lambda t: t[::2, 1::3], lambda t: t[:, 3:9]):
        p = torch.nn.Parameter(view(base.clone()))
        assert not p.is_contiguous()
        p.grad = view(grad.clone())
        w, _ = reference.muon_parameter(
            p.detach(), zeros_like_state(p), p.grad, reference.whole(*p.shape), lr=0.02
        )
        muonloom.Muon([p], lr=0.02, **EXACT).step()
        assert_weight(p, w)
