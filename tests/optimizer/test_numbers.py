"""Extremes: sizes of gradients, ranks, empty tensors; finite input never gives NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonloom
import reference
from muonloom import BlockSpec, Layout
from optimizer.support import EXACT, SEEDS, parameter, randn, relative, same_bits

SIZES = [1e-30, 1e-15, 1e-8, 1e-4, 1.0, 1e4, 1e8, 1e15, 1e30]
HUGE = torch.finfo(torch.float32).max


def direction(grad: torch.Tensor, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """The update of one step from zero state, lr 1 and no decay."""
    p = torch.nn.Parameter(torch.zeros(grad.shape, dtype=dtype))
    opt = muonloom.Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn="none", **options)
    p.grad = grad.to(dtype)
    opt.step()
    opt.drain()
    assert opt.last_step["skipped"] is False
    return -opt.state[p].get("master_weight", p.detach())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_size_of_a_gradient_does_not_matter(size: float, seed: int):
    grad = randn(16, 32, seed=seed)
    wanted = reference.direction(grad)
    assert relative(direction(grad * size, torch.float32, **EXACT), wanted) < 1e-5
    assert relative(direction(grad * size, torch.float32), wanted) < 2e-2
    rounded = (grad * size).to(torch.bfloat16)
    wanted = reference.direction(rounded)
    assert relative(direction(rounded, torch.bfloat16, **EXACT), wanted) < 1e-5


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_fp16_gradients_within_their_range(size: float):
    grad = (randn(16, 32, seed=0) * size).to(torch.float16)
    assert relative(direction(grad, torch.float16, **EXACT), reference.direction(grad)) < 1e-5


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (6, 40)])
def test_rank_one_gradients(shape: tuple[int, int]):
    grad = torch.outer(randn(shape[0], seed=1), randn(shape[1], seed=2))
    got = direction(grad, torch.float32, **EXACT)
    values = torch.linalg.svdvals(got.double())
    assert float(values[0]) == pytest.approx(0.7, abs=0.05)
    assert len(values) == 1 or float(values[1]) < 1e-3


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6])
@pytest.mark.parametrize(
    "options", [EXACT, {}, {"ns_method": "gram"}], ids=["fp32", "auto", "gram"]
)
def test_ill_conditioned_gradients(condition: float, options: dict[str, Any]):
    u, _ = torch.linalg.qr(randn(16, 16, seed=1).double())
    v, _ = torch.linalg.qr(randn(48, 16, seed=2).double())
    values = torch.logspace(
        0, -float(torch.log10(torch.tensor(condition))), 16, dtype=torch.float64
    )
    grad = (u * values @ v.T).float()
    got = direction(grad, torch.float32, **options)
    assert relative(got, reference.direction(grad)) < (1e-4 if options is EXACT else 2e-2)
    assert float(torch.linalg.svdvals(got.double())[0]) <= 1.2


@pytest.mark.parametrize("name", muonloom.ns_coefficient_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_near_one_stay_bounded(name: str, dtype: torch.dtype):
    u, _ = torch.linalg.qr(randn(24, 24, seed=1).double())
    v, _ = torch.linalg.qr(randn(40, 24, seed=2).double())
    grad = (u * torch.linspace(1.0, 1.1, 24, dtype=torch.float64) @ v.T).float()
    got = direction(grad, torch.float32, ns_coefficients=name, ns_compute_dtype=dtype)
    values = torch.linalg.svdvals(got.double())
    assert float(values[-1]) > 0.3
    assert float(values[0]) < 1.4


@pytest.mark.parametrize(
    "grads",
    [
        [HUGE, -HUGE, HUGE],
        [-HUGE, HUGE, 0.0],
        [1e-45, -1e-45, 1e-45],
        [HUGE, 1e-45, -HUGE],
        [0.0, 0.0, HUGE],
    ],
)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_gradients_and_state_cannot_give_nan(
    grads: list[float], nesterov: bool, dtype: torch.dtype
):
    """Flips between the largest finite values overflow a difference, and must not reach a weight."""
    p = parameter(4, 6, dtype=dtype)
    largest = torch.finfo(dtype).max
    opt = muonloom.Muon([p], lr=0.02, nesterov=nesterov)
    signs = torch.where(randn(4, 6, seed=1) > 0, 1.0, -1.0)
    for value in grads:
        p.grad = (signs * max(-largest, min(largest, value))).to(dtype)
        opt.step()
        opt.drain()
        assert opt.last_step["skipped"] is False
        assert bool(p.isfinite().all())
        assert bool(opt.state[p]["momentum_buffer"].isfinite().all())
    assert float(p.detach().abs().max()) < 10


def test_one_giant_element_among_small_ones():
    grad = randn(8, 12, seed=1)
    grad[3, 4] = 1e30
    got = direction(grad, torch.float32, **EXACT)
    assert relative(got, reference.direction(grad)) < 1e-4


def test_adamw_with_extreme_gradients_stays_finite():
    p = parameter(8)
    matrix = parameter(2, 2)
    opt = muonloom.Muon([("norm.weight", p), ("a.weight", matrix)], lr=0.02, adamw_lr=0.02)
    for value in (1e30, -1e30, HUGE, 1e-45, 0.0, -HUGE):
        p.grad = torch.full((8,), value)
        opt.step()
        assert bool(p.isfinite().all())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    exponents=st.lists(st.floats(-44, 38), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_any_finite_history(m: int, n: int, exponents: list[float], seed: int):
    p = parameter(m, n)
    opt = muonloom.Muon([p], lr=0.02)
    for i, exponent in enumerate(exponents):
        grad = torch.tanh(randn(m, n, seed=10 * seed + i)).double() * 10.0**exponent
        p.grad = grad.float()
        opt.step()
        opt.drain()
    assert bool(p.isfinite().all())
    assert float(p.detach().abs().max()) < 10


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]):
    empty, beside = torch.nn.Parameter(torch.zeros(shape)), parameter(4, 6)
    opt = muonloom.Muon([empty, beside], lr=0.02)
    for seed in (1, 2):
        for p in (empty, beside):
            p.grad = randn(*p.shape, seed=seed)
        opt.step()
        opt.drain()
    assert bool(beside.isfinite().all())
    assert opt.last_step["skipped"] is False
    assert sum(count for shape, count in opt.last_step["matrices"] if 0 not in shape) == 1
    opt.load_state_dict(opt.state_dict())
    opt.step()


def test_empty_stacks_and_empty_scalar_parameters():
    shapes = {"layers.0.experts.w": (0, 4, 6), "layers.1.experts.w": (3, 0, 6), "norm.weight": (0,)}
    specs = {"*experts.w": BlockSpec.stacked(BlockSpec.whole())}
    layout = Layout.from_shapes(shapes, overrides=specs)
    named = [(n, torch.nn.Parameter(torch.zeros(s))) for n, s in shapes.items()]
    opt = muonloom.Muon(named, layout=layout, adjust_lr_fn="match_rms_adamw")
    for _, p in named:
        p.grad = torch.zeros_like(p)
    opt.step()
    opt.step()
    opt.drain()
    assert opt.last_step["ns_calls"] == 0


def test_idle_and_empty_matrices_have_no_nan_in_the_report():
    p = torch.nn.Parameter(torch.zeros(4, 6))
    opt = muonloom.Muon([p], idle_matrices="skip")
    p.grad = torch.zeros_like(p)
    opt.step()
    assert opt.last_step["update_rms"] == {"muon": 0.0, "unnamed": 0.0}


def test_negative_zero_gradients_are_zero():
    results = []
    for zero in (0.0, -0.0):
        p = parameter(4, 6)
        opt = muonloom.Muon([p], lr=0.5)
        p.grad = torch.full((4, 6), zero)
        opt.step()
        results.append(p.detach().clone())
    assert same_bits(*results)
