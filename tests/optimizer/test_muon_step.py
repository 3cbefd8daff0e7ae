"""Muon's step against the FP64 reference: momentum, scale, decay, order, blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonloom
import reference
from muonloom import BlockSpec, Layout
from optimizer.support import (
    EXACT,
    SEEDS,
    assert_weight,
    give_gradients,
    parameter,
    randn,
    relative,
    same_bits,
    zeros_like_state,
)

POLAR = (15 / 8, -10 / 8, 3 / 8)  # converges to the polar factor


def run_both(
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    num_steps: int = 3,
    spec: BlockSpec | None = None,
    tables: list[torch.Tensor] | None = None,
    ref: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[muonloom.Muon, torch.nn.Parameter, torch.Tensor, torch.Tensor]:
    """Step a parameter and its FP64 twin together; return (opt, p, reference weight, momentum)."""
    p = parameter(*shape, seed=seed)
    name = "layers.0.proj.weight"
    layout = None
    if spec is not None:
        layout = Layout.from_shapes({name: shape}, overrides={name: spec})
    opt = muonloom.Muon([(name, p)], layout=layout, **EXACT, **options)
    if tables is None:
        tables = reference.whole(shape[0], math.prod(shape[1:]))
    same = {k: v for k, v in options.items() if k in ("lr", "weight_decay", "momentum", "nesterov",
                                                      "eps", "ns_steps")}  # fmt: skip
    w, m = p.detach().double(), zeros_like_state(p)
    for i in range(num_steps):
        give_gradients([p], 10 * seed + i + 1)
        w, m = reference.muon_parameter(w, m, p.grad, tables, **same, **(ref or {}))
        opt.step()
    return opt, p, w, m


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (16, 16), (1, 24), (24, 1), (1, 1), (3, 50)])
def test_three_steps_equal_the_reference(shape: tuple[int, int], nesterov: bool, seed: int):
    opt, p, w, m = run_both(shape, seed=seed, nesterov=nesterov, lr=0.02, weight_decay=0.1)
    assert_weight(p, w)
    assert relative(opt.state[p]["momentum_buffer"], m) < 1e-6


def test_defaults_are_those_of_torch():
    opt = muonloom.Muon([parameter(4, 8)])
    wanted = torch.optim.Muon([parameter(4, 8)]).defaults
    assert {k: opt.defaults[k] for k in wanted} == wanted
    (group,) = opt.param_groups
    assert {k: group[k] for k in wanted} == wanted


def test_defaults_stay_near_the_reference_update():
    """The default method and dtype: the direction within BF16 error of FP64."""
    p = parameter(32, 64)
    p.data.zero_()
    opt = muonloom.Muon([p], lr=1.0, weight_decay=0.0)
    give_gradients([p], 3)
    opt.step()
    assert relative(-p, reference.direction(p.grad)) < 2e-2


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95, 0.999])
def test_momentum_is_a_moving_average(momentum: float):
    opt, p, w, m = run_both((8, 12), momentum=momentum, num_steps=4, lr=0.02)
    assert_weight(p, w)
    assert relative(opt.state[p]["momentum_buffer"], m) < 2e-6


@pytest.mark.parametrize(("lr", "weight_decay"), [(1e-4, 0.1), (0.02, 0.0), (0.0, 0.1), (0.5, 1.0)])
def test_decay_of_1e_minus_5_is_visible(lr: float, weight_decay: float):
    p = parameter(16, 8)
    p.data.mul_(0.0).add_(1000.0)  # the decay alone moves it by 0.01, its rounding by 3e-5
    before = p.detach().double()
    opt = muonloom.Muon([p], lr=lr, weight_decay=weight_decay, **EXACT)
    give_gradients([p], 1)
    w, _ = reference.muon_matrix(
        before, zeros_like_state(p), p.grad, lr=lr, weight_decay=weight_decay
    )
    opt.step()
    assert_weight(p, w, 1e-7)
    if lr * weight_decay > 0:
        undecayed, _ = reference.muon_matrix(
            before, zeros_like_state(p), p.grad, lr=lr, weight_decay=0.0
        )
        assert float((p.detach().double() - undecayed).abs().max()) > 50 * 1e-7 * 1000


def test_decay_comes_before_the_update():
    opt, p, w, _ = run_both((8, 12), lr=0.5, weight_decay=0.5, num_steps=1, ref={"rule": "none"},
                            adjust_lr_fn="none")  # fmt: skip
    del opt
    assert_weight(p, w)
    late = (randn(8, 12, seed=0).double() - 0.5 * reference.direction(0.0975 * p.grad)) * 0.75
    assert float((p.detach().double() - late).abs().max()) > 1e-3


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw", "spectral", "none"])
@pytest.mark.parametrize("shape", [(128, 32), (32, 128), (7, 7)])
def test_scale_rules(rule: str | None, shape: tuple[int, int]):
    _, p, w, _ = run_both(shape, lr=0.02, adjust_lr_fn=rule, ref={"rule": rule}, num_steps=2)
    assert_weight(p, w)


def test_known_factor_of_match_rms_adamw():
    """(128, 32): 0.2·sqrt(128) = 2.263, and no second rule on top."""
    p = parameter(128, 32)
    p.data.zero_()
    opt = muonloom.Muon(
        [p], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_coefficients=POLAR,
        ns_steps=30, **EXACT,
    )  # fmt: skip
    give_gradients([p], 1)
    opt.step()
    values = torch.linalg.svdvals(p.detach().double())
    assert torch.allclose(values, torch.full_like(values, 2.2627417), rtol=1e-4)


@pytest.mark.parametrize(
    "shape", [(64, 1, 3, 3), (64, 1, 1, 7), (64, 1, 7, 1), (8, 3, 2, 2), (6, 2, 5)]
)
def test_convolution_kernels_are_one_matrix(shape: tuple[int, ...]):
    flat = (shape[0], math.prod(shape[1:]))
    _, p, w, _ = run_both(shape, spec=BlockSpec.conv(), tables=reference.whole(*flat), lr=0.02)
    assert_weight(p, w)


@pytest.mark.parametrize("shape", [(64, 1, 3, 3), (64, 1, 1, 7), (64, 1, 7, 1)])
def test_depthwise_convolution_without_a_layout(shape: tuple[int, ...]):
    _, p, w, _ = run_both(shape, lr=0.02)  # original: sqrt(64 / 9) and sqrt(64 / 7)
    assert_weight(p, w)


BLOCKS = {
    "rows": ((12, 8), BlockSpec.rows(3, 4, 5), reference.row_blocks((3, 4, 5), 8)),
    "columns": ((8, 12), BlockSpec.columns(3, 4, 5), reference.column_blocks(8, (3, 4, 5))),
    "heads": ((24, 10), BlockSpec.heads(6, heads_per_block=2), reference.row_blocks((8, 8, 8), 10)),
    "stacked": ((3, 6, 10), BlockSpec.stacked(BlockSpec.whole()), reference.stacked(3, 6, 10)),
    "transposed": (
        (32, 128),
        BlockSpec.transposed(BlockSpec.whole()),
        reference.transposed(32, 128),
    ),
    "gate_up": ((12, 8), BlockSpec.gate_up(), reference.row_blocks((6, 6), 8)),
    "interleaved": (
        (12, 8),
        BlockSpec.gate_up(interleaved=True),
        reference.interleaved_rows(12, 8),
    ),
    "stacked gate_up": (
        (3, 12, 8),
        BlockSpec.stacked(BlockSpec.gate_up()),
        reference.stacked(3, 12, 8, lambda m, n, at: reference.row_blocks((m // 2, m // 2), n, at)),
    ),
    "stacked transposed": (
        (3, 12, 8),
        BlockSpec.stacked(BlockSpec.transposed(BlockSpec.whole())),
        reference.stacked(3, 12, 8, reference.transposed),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_equal_index_loops(kind: str, seed: int):
    shape, spec, tables = BLOCKS[kind]
    opt, p, w, m = run_both(shape, seed=seed, spec=spec, tables=tables, lr=0.02)
    assert_weight(p, w)
    assert relative(opt.state[p]["momentum_buffer"], m) < 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(m=st.integers(1, 20), n=st.integers(1, 20), seed=st.integers(0, 99))
def test_any_shape(m: int, n: int, seed: int):
    _, p, w, _ = run_both((m, n), seed=seed, num_steps=2, lr=0.02)
    assert_weight(p, w, 2e-6)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), n=st.integers(1, 9))
def test_any_row_cut(sizes: list[int], n: int):
    shape = (sum(sizes), n)
    _, p, w, _ = run_both(
        shape,
        spec=BlockSpec.rows(*sizes),
        tables=reference.row_blocks(sizes, n),
        lr=0.02,
        num_steps=2,
    )
    assert_weight(p, w, 2e-6)


@pytest.mark.parametrize(
    ("given_", "triples"),
    [
        ((2.0, -1.5, 0.5), ((2.0, -1.5, 0.5),)),
        (((4.0, -6.0, 3.0), (2.0, -1.5, 0.5)), ((4.0, -6.0, 3.0), (2.0, -1.5, 0.5))),
    ],
)
@pytest.mark.parametrize("ns_steps", [0, 1, 2, 6])
def test_coefficients_and_steps(given_: Any, triples: Any, ns_steps: int):
    _, p, w, _ = run_both(
        (8, 12),
        ns_coefficients=given_,
        ns_steps=ns_steps,
        ref={"triples": triples},
        lr=0.02,
        num_steps=2,
    )
    assert_weight(p, w, 2e-6)


@pytest.mark.parametrize("name", muonloom.ns_coefficient_names())
def test_named_coefficients_keep_a_bounded_update(name: str):
    p = parameter(16, 32)
    p.data.zero_()
    opt = muonloom.Muon([p], lr=1.0, weight_decay=0.0, ns_coefficients=name)
    give_gradients([p], 1)
    opt.step()
    values = torch.linalg.svdvals(p.detach().double())
    assert float(values[-1]) > 0.3
    assert float(values[0]) < 1.4


def test_doubling_lr_doubles_the_update_exactly_and_decay_uses_the_base_lr():
    updates = []
    for lr in (0.25, 0.5):
        p = parameter(24, 16)
        p.data.zero_()
        opt = muonloom.Muon([p], lr=lr, adjust_lr_fn="match_rms_adamw")
        give_gradients([p], 5)
        opt.step()
        updates.append(p.detach().clone())
    assert same_bits(2 * updates[0], updates[1])
    p = parameter(24, 16)
    before = p.detach().double()
    opt = muonloom.Muon([p], lr=0.5, weight_decay=0.25, adjust_lr_fn="match_rms_adamw")
    p.grad = torch.zeros_like(p)
    opt.step()
    assert_weight(p, before * (1 - 0.5 * 0.25), 1e-7)


@pytest.mark.parametrize("heads_per_block", [1, 2, 4, 8])
def test_exact_polar_factor_has_rms_of_two_tenths_lr_however_it_is_cut(heads_per_block: int):
    shape, lr = (64, 96), 0.5
    p = parameter(*shape)
    before = p.detach().double()
    name = "layers.0.self_attn.q_proj.weight"
    spec = BlockSpec.heads(8, heads_per_block=heads_per_block)
    layout = Layout.from_shapes({name: shape}, overrides={name: spec})
    opt = muonloom.Muon(
        [(name, p)], layout=layout, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw",
        ns_coefficients=POLAR, ns_steps=30, **EXACT,
    )  # fmt: skip
    give_gradients([p], 1)
    opt.step()
    change = float((p.detach().double() - before).square().sum())
    assert change == pytest.approx(0.04 * lr**2 * 64 * 96, rel=1e-4)


def test_one_block_of_all_heads_is_the_whole_matrix():
    whole, cut = parameter(24, 10), parameter(24, 10)
    name = "layers.0.self_attn.q_proj.weight"
    layout = Layout.from_shapes(
        {name: (24, 10)}, overrides={name: BlockSpec.heads(6, heads_per_block=6)}
    )
    for p, chosen in ((whole, None), (cut, layout)):
        opt = muonloom.Muon([(name, p)], layout=chosen, lr=0.02)
        give_gradients([p], 1)
        opt.step()
    assert same_bits(whole, cut)


def test_transposed_storage_takes_the_transposed_update():
    stored, logical = parameter(32, 128), parameter(128, 32)
    logical.data.copy_(stored.data.T)
    name = "layers.0.mlp.proj.weight"
    layout = Layout.from_shapes(
        {name: (32, 128)}, overrides={name: BlockSpec.transposed(BlockSpec.whole())}
    )
    first = muonloom.Muon([(name, stored)], layout=layout, lr=0.02, **EXACT)
    second = muonloom.Muon([(name, logical)], lr=0.02, **EXACT)
    give_gradients([stored], 1)
    logical.grad = stored.grad.T.contiguous()
    first.step()
    second.step()
    assert_weight(stored.detach().T, logical.detach().double())
