"""Batches: few calls, a bounded workspace, and results that do not depend on company."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonloom
import muonloom.compute
from muonloom import BlockSpec, Layout
from optimizer.support import (
    EXACT,
    SEEDS,
    Named,
    give_gradients,
    parameter,
    relative,
    same_bits,
    tensors_of,
)


def layers(depth: int, shapes: dict[str, tuple[int, int]], seed: int = 0) -> Named:
    return [
        (f"layers.{i}.{n}.weight", parameter(*s, seed=1000 * seed + 10 * i + j))
        for i in range(depth)
        for j, (n, s) in enumerate(shapes.items())
    ]


@pytest.mark.parametrize("depth", [1, 3, 12])
def test_calls_do_not_grow_with_depth(depth: int):
    named = layers(depth, {"a": (16, 8), "b": (8, 16), "c": (8, 8), "d": (16, 8)})
    opt = muonloom.Muon(named)
    give_gradients(tensors_of(named), 1)
    opt.step()
    assert opt.last_step["ns_calls"] <= 3  # one for each stored shape
    assert sum(count for _, count in opt.last_step["matrices"]) == 4 * depth


def test_layers_with_options_of_their_own_that_the_iteration_does_not_see_share_a_call():
    named = layers(4, {"a": (16, 8)})
    groups = [
        {"params": [pair], "lr": 0.1 * i, "weight_decay": 0.01 * i, "momentum": 0.2 * i}
        for i, pair in enumerate(named)
    ]
    opt = muonloom.Muon(groups)
    give_gradients(tensors_of(named), 1)
    opt.step()
    assert opt.last_step["ns_calls"] == 1


@settings(max_examples=12, deadline=None, derandomize=True)
@given(count=st.integers(1, 9), in_a_batch=st.integers(1, 10), slack=st.integers(0, 500))
def test_calls_are_the_ceiling_of_bytes_over_batch_bytes(count: int, in_a_batch: int, slack: int):
    named = layers(count, {"a": (16, 8)})
    matrix_bytes = 16 * 8 * 4
    opt = muonloom.Muon(
        named, ns_batch_bytes=in_a_batch * matrix_bytes + min(slack, matrix_bytes - 1), **EXACT
    )
    give_gradients(tensors_of(named), 1)
    opt.step()
    assert opt.last_step["ns_calls"] == math.ceil(count / in_a_batch)
    assert opt.last_step["matrices"] == [((16, 8), count)]


def test_a_stack_is_split_over_batches(monkeypatch: pytest.MonkeyPatch):
    name = "layers.0.mlp.experts.down_proj"
    spec = BlockSpec.stacked(BlockSpec.whole())
    counts: list[int] = []
    genuine = muonloom.compute.iterate

    def iterate(x: torch.Tensor, recipe: Any, scratch: torch.Tensor) -> torch.Tensor:
        counts.append(x.shape[0])
        return genuine(x, recipe, scratch)

    monkeypatch.setattr(muonloom.compute, "iterate", iterate)
    results = []
    for batch_bytes in ("auto", 3 * 8 * 6 * 4):
        p = parameter(7, 8, 6)
        layout = Layout.from_shapes({name: (7, 8, 6)}, overrides={name: spec})
        opt = muonloom.Muon(
            [(name, p)], layout=layout, ns_batch_bytes=batch_bytes, lr=0.02, **EXACT
        )
        give_gradients([p], 1)
        opt.step()
        results.append(p.detach().clone())
    assert counts == [7, 3, 3, 1]
    assert relative(*results) < 1e-6


def test_a_matrix_larger_than_a_batch_is_an_error_that_names_it_and_its_bytes():
    named = layers(1, {"small": (4, 4), "large": (64, 32)})
    with pytest.raises(ValueError, match=r"layers\.0\.large\.weight") as caught:
        muonloom.Muon(named, ns_batch_bytes=1000, **EXACT)
    assert str(64 * 32 * 4) in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_company_changes_nothing_beyond_rounding(seed: int):
    """Any batch, in any order, gives what each parameter alone would get."""
    together = layers(5, {"a": (16, 8), "b": (8, 16)}, seed)
    apart = layers(5, {"a": (16, 8), "b": (8, 16)}, seed)
    backwards = layers(5, {"a": (16, 8), "b": (8, 16)}, seed)
    one = muonloom.Muon(together, lr=0.02, **EXACT)
    reverse = muonloom.Muon(backwards[::-1], lr=0.02, **EXACT)
    singles = [muonloom.Muon([pair], lr=0.02, **EXACT) for pair in apart]
    for step in range(2):
        for named in (together, apart, backwards):
            give_gradients(tensors_of(named), step)
        one.step()
        reverse.step()
        for single in singles:
            single.step()
    for (_, a), (_, b), (_, c) in zip(together, apart, backwards, strict=True):
        assert relative(a, b) < 1e-6
        assert relative(a, c) < 1e-6


def test_the_same_batch_gives_the_same_bits():
    """A block, and a parameter of its own in the same batch, at the same place."""
    cut, alone = parameter(12, 8), [parameter(4, 8, seed=9) for _ in range(3)]
    for i, p in enumerate(alone):
        p.data.copy_(cut.data[4 * i : 4 * i + 4])
    name = "layers.0.qkv.weight"
    layout = Layout.from_shapes({name: (12, 8)}, overrides={name: BlockSpec.rows(4, 4, 4)})
    first = muonloom.Muon([(name, cut)], layout=layout, lr=0.02)
    second = muonloom.Muon([(f"layers.{i}.p.weight", p) for i, p in enumerate(alone)], lr=0.02)
    for step in range(2):
        give_gradients([cut], step)
        for i, p in enumerate(alone):
            p.grad = cut.grad[4 * i : 4 * i + 4].clone()  # type: ignore[index]
        first.step()
        second.step()
    assert same_bits(cut.detach(), torch.cat([p.detach() for p in alone]))


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 64.0, 1e12])
def test_scaling_one_heads_gradient_changes_no_heads_update(factor: float):
    name = "layers.0.self_attn.q_proj.weight"
    spec = BlockSpec.heads(4, heads_per_block=1)
    layout = Layout.from_shapes({name: (16, 24)}, overrides={name: spec})
    results = []
    for by in (1.0, factor):
        p = parameter(16, 24)
        opt = muonloom.Muon([(name, p)], layout=layout, lr=0.5, momentum=0.0, **EXACT)
        give_gradients([p], 1)
        p.grad[4:8] *= by  # type: ignore[index]
        opt.step()
        results.append(p.detach().clone())
    assert relative(results[0][4:8], results[1][4:8]) < 1e-6
    others = torch.tensor([i for i in range(16) if not 4 <= i < 8])
    assert same_bits(results[0][others], results[1][others])


def test_two_layers_each_with_its_own_blocks_equal_one_at_a_time():
    shapes = {"layers.0.w.weight": (12, 8), "layers.1.w.weight": (12, 8)}
    specs = {
        "layers.0.w.weight": BlockSpec.rows(6, 6),
        "layers.1.w.weight": BlockSpec.rows(4, 8),
    }
    layout = Layout.from_shapes(shapes, overrides=specs)
    named: Named = [(n, parameter(*s, seed=i)) for i, (n, s) in enumerate(shapes.items())]
    apart: Named = [(n, parameter(*s, seed=i)) for i, (n, s) in enumerate(shapes.items())]
    give_gradients(tensors_of(named), 1)
    give_gradients(tensors_of(apart), 1)
    muonloom.Muon(named, layout=layout, lr=0.02, **EXACT).step()
    for pair in apart:
        muonloom.Muon([pair], layout=layout, lr=0.02, **EXACT).step()
    for (_, a), (_, b) in zip(named, apart, strict=True):
        assert relative(a, b) < 1e-6


def test_a_missing_gradient_does_not_change_the_others_bits():
    """The batch keeps its partition, whoever has a gradient."""
    results = []
    for missing in (False, True):
        named = layers(4, {"a": (16, 8)})
        opt = muonloom.Muon(named, lr=0.02)
        give_gradients(tensors_of(named), 1)
        if missing:
            named[1][1].grad = None
        opt.step()
        results.append([p.detach().clone() for _, p in named])
    for i in (0, 2, 3):
        assert same_bits(results[0][i], results[1][i])


def test_leftovers_in_the_workspace_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    """A matrix without gradient keeps its place in the batch, whatever lies there."""
    genuine = muonloom.compute.iterate

    def dirty(x: torch.Tensor, recipe: Any, scratch: torch.Tensor) -> torch.Tensor:
        out = genuine(x, recipe, scratch).clone()
        x.fill_(float("nan"))
        scratch.fill_(float("nan"))
        return out

    results = []
    for iterate in (genuine, dirty):
        monkeypatch.setattr(muonloom.compute, "iterate", iterate)
        named = layers(3, {"a": (16, 8), "b": (8, 16)})
        opt = muonloom.Muon(named, lr=0.02)
        for step in range(3):
            give_gradients(tensors_of(named), step)
            named[step][1].grad = None
            opt.step()
            opt.drain()
        results.append([p.detach().clone() for _, p in named])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_the_workspace_is_made_once_and_stays_within_its_bound():
    named = layers(6, {"a": (32, 16)})
    opt = muonloom.Muon(named, ns_batch_bytes=2 * 32 * 16 * 4, **EXACT)
    sizes = []
    for step in range(4):
        give_gradients(tensors_of(named), step)
        opt.step()
        sizes.append(opt.memory()["device_workspace"])
    assert len(set(sizes)) == 1
    wide = muonloom.Muon(layers(24, {"a": (32, 16)}), ns_batch_bytes=2 * 32 * 16 * 4, **EXACT)
    give_gradients([p for g in wide.param_groups for p in g["params"]], 1)
    wide.step()
    assert wide.memory()["device_workspace"] <= 1.2 * sizes[0] + 22 * 32 * 16 * 4


@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_methods_and_dtypes_agree(method: str, dtype: torch.dtype | None):
    exact, p = parameter(8, 40), parameter(8, 40)
    exact.data.zero_()
    p.data.zero_()
    give_gradients([exact], 1)
    give_gradients([p], 1)
    muonloom.Muon([exact], lr=1.0, **EXACT).step()
    muonloom.Muon([p], lr=1.0, ns_method=method, ns_compute_dtype=dtype).step()
    assert relative(p, exact) < (1e-4 if dtype is torch.float32 else 2e-2)
