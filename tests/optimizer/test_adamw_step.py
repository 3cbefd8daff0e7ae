"""Scalar parameters: AdamW against the FP64 reference and against torch."""

from __future__ import annotations

import pytest
import torch

import muonloom
import muonloom.planning
import reference
from optimizer.support import (
    SEEDS,
    Named,
    assert_weight,
    give_gradients,
    parameter,
    relative,
    same_bits,
    tensors_of,
    zeros_like_state,
)

SHAPES = {
    "embed_tokens.weight": (11, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.mlp.bias": (70,),
    "temperature": (),
}


def with_a_matrix(named: Named) -> Named:
    """Add one matrix, without gradient: an optimizer of scalar parameters alone may warn."""
    return [*named, ("layers.0.mlp.up_proj.weight", parameter(4, 4))]


def scalars(seed: int, dtype: torch.dtype = torch.float32) -> Named:
    return [
        (n, parameter(*s, seed=seed + i, dtype=dtype)) for i, (n, s) in enumerate(SHAPES.items())
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_three_steps_equal_the_reference(seed: int):
    named = scalars(seed)
    options = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    opt = muonloom.Muon(
        with_a_matrix(named),
        adamw_lr=3e-3,
        weight_decay=0.1,
        adamw_betas=(0.8, 0.9),
        adamw_eps=1e-6,
    )
    refs = [[p.detach().double(), zeros_like_state(p), zeros_like_state(p), 0] for _, p in named]
    for step in range(3):
        give_gradients(tensors_of(named), 10 * seed + step)
        refs = [
            list(reference.adamw(*ref, p.grad, **options))  # type: ignore[arg-type]
            for ref, (_, p) in zip(refs, named, strict=True)
        ]
        opt.step()
    for (w, first, second, count), (_, p) in zip(refs, named, strict=True):
        assert_weight(p, w, 4e-7)
        state = opt.state[p]
        assert relative(state["exp_avg"], first) < 1e-6
        assert relative(state["exp_avg_sq"], second) < 1e-6
        assert int(state["step"]) == count == 3


def test_equals_torch_adamw_on_its_defaults():
    named, peers = scalars(0), scalars(0)
    opt = muonloom.Muon(
        with_a_matrix(named), adamw_lr=1e-2, adamw_weight_decay=0.05, adamw_betas=(0.9, 0.999)
    )
    peer = torch.optim.AdamW(tensors_of(peers), lr=1e-2, weight_decay=0.05, betas=(0.9, 0.999))
    for step in range(3):
        give_gradients(tensors_of(named), step)
        give_gradients(tensors_of(peers), step)
        opt.step()
        peer.step()
    for (_, p), (_, q) in zip(named, peers, strict=True):
        assert_weight(p, q.detach().double(), 2e-7)


def test_a_decay_of_1e_minus_5_is_visible():
    p = torch.nn.Parameter(torch.full((8,), 1000.0))
    opt = muonloom.Muon(with_a_matrix([("norm.weight", p)]), adamw_lr=1e-4, weight_decay=0.1)
    p.grad = torch.ones(8)
    opt.step()
    assert_weight(p, torch.full((8,), 1000.0 * (1 - 1e-5) - 1e-4, dtype=torch.float64), 1e-7)


def test_the_output_head_moves_by_the_lr_that_was_asked_for():
    head = ("lm_head.weight", parameter(11, 8))
    matrix = ("layers.0.mlp.up_proj.weight", parameter(16, 8))
    before = head[1].detach().clone()
    opt = muonloom.Muon(
        [head, matrix], lr=0.5, adamw_lr=0.25, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    give_gradients([head[1], matrix[1]], 1)
    opt.step()
    moved = (head[1].detach() - before).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.25), rtol=1e-4)


def test_every_scalar_parameter_keeps_its_own_step_count():
    named = scalars(0)
    opt = muonloom.Muon(with_a_matrix(named), adamw_lr=0.1)
    late = named[1][1]
    for step in range(3):
        give_gradients(tensors_of(named), step)
        if step < 2:
            late.grad = None
        opt.step()
    counts = {name: int(opt.state[p]["step"]) for name, p in named}
    assert counts == {name: 1 if p is late else 3 for name, p in named}
    before = parameter(8, seed=1).detach()  # its first step: bias-corrected, by lr
    moved = (late.detach() - before * (1 - 0.1 * 0.1)).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.1), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [127, 128, 129, 1000])
def test_a_parameter_cut_into_spans_is_updated_as_if_it_were_whole(
    monkeypatch: pytest.MonkeyPatch, numel: int, dtype: torch.dtype
):
    """Large embeddings pass in pieces; the counter moves once, and no bit depends on the cut."""
    results = []
    for pack_numel in (1 << 16, 128):
        monkeypatch.setitem(muonloom.planning._PACK_NUMEL, "cpu", pack_numel)
        p, small = parameter(numel, dtype=dtype), parameter(5, dtype=dtype)
        named = with_a_matrix([("embed.bias", p), ("norm.bias", small)])
        opt = muonloom.Muon(named, adamw_lr=0.1)
        for step in range(3):
            give_gradients([p, small], step)
            opt.step()
        assert int(opt.state[p]["step"]) == 3
        results.append([p.detach().clone(), small.detach().clone(), opt.state[p]["exp_avg_sq"]])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
