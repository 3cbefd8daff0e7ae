"""Odd tensors: strides, shared and moved storage, duplicates, foreign gradient dtypes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import muonloom
from muonloom import BlockSpec, Layout
from optimizer.support import (
    bits,
    fingerprint,
    give_gradients,
    group_of,
    parameter,
    randn,
    relative,
    same_bits,
    steps,
)

QUIET: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}
STACK = {"*": BlockSpec.stacked(BlockSpec.whole())}
CONV = {"*": BlockSpec.conv()}


def stepped(p: nn.Parameter, grad: torch.Tensor, overrides: Any = None, **options: Any) -> Any:
    name = "layers.0.w.weight"
    layout = (
        None
        if overrides is None
        else Layout.from_shapes({name: tuple(p.shape)}, overrides=overrides)
    )
    opt = muonloom.Muon([(name, p)], layout=layout, lr=0.1, **options)
    for factor in (1.0, -0.5):
        p.grad = factor * grad
        opt.step()
    opt.drain()
    return opt


@pytest.mark.parametrize(
    ("shape", "permutation", "overrides"),
    [
        ((6, 9), (1, 0), None),
        ((4, 6, 5), (1, 2, 0), STACK),
        ((4, 6, 5), (2, 1, 0), STACK),
        ((8, 3, 2, 2), (0, 2, 3, 1), CONV),
    ],
)
def test_strided_storage_changes_the_result_by_rounding_at_most(
    shape: tuple[int, ...], permutation: tuple[int, ...], overrides: Any
):
    base, grad = randn(*shape, seed=1), randn(*shape, seed=2)
    inverse = [permutation.index(i) for i in range(len(shape))]
    strided = nn.Parameter(base.permute(permutation).contiguous().permute(inverse))
    assert not strided.is_contiguous()
    stride = strided.stride()
    plain = nn.Parameter(base.clone())
    stepped(strided, grad, overrides)
    stepped(plain, grad, overrides)
    assert relative(strided, plain) < 1e-3
    assert strided.stride() == stride


def test_strided_scalar_parameters():
    base, grad = randn(6, 9, seed=1), randn(6, 9, seed=2)
    results = []
    for p in (nn.Parameter(base.T.contiguous().T), nn.Parameter(base.clone())):
        opt = muonloom.Muon([("lm_head.weight", p), ("a.weight", parameter(2, 2))], **QUIET)
        for g in (grad, grad.T.contiguous().T, -grad):
            p.grad = g
            opt.step()
        results.append(p.detach().clone())
    assert relative(*results) < 1e-6


def test_expanded_gradients():
    p, q = parameter(6, 4), parameter(6, 4)
    stepped(p, torch.ones(1, 1).expand(6, 4))
    stepped(q, torch.ones(6, 4))
    assert same_bits(p, q)


def test_storage_that_moved_between_steps_is_followed():
    """``p.data = …`` after ``.to()``, a released shard or a flattened bucket."""
    moved, plain = parameter(6, 4), parameter(6, 4)
    first, second = muonloom.Muon([moved], lr=0.1), muonloom.Muon([plain], lr=0.1)
    steps(first, [moved], [1])
    steps(second, [plain], [1])
    old = moved.data
    kept = bits(old)
    moved.data = old.clone()
    steps(first, [moved], [2])
    steps(second, [plain], [2])
    assert same_bits(moved, plain)
    assert bits(old) == kept


@pytest.mark.parametrize("spec", [BlockSpec.whole(), BlockSpec.rows(2, 4)], ids=["whole", "rows"])
def test_a_transposed_view_of_the_same_storage_is_noticed(spec: BlockSpec):
    """Same address, same shape, other strides: views of before would write elsewhere."""
    name, results = "layers.0.w.weight", []
    layout = Layout.from_shapes({name: (6, 6)}, overrides={name: spec})
    for same_storage in (True, False):
        p = parameter(6, 6)
        opt = muonloom.Muon([(name, p)], layout=layout, lr=0.1)
        steps(opt, [p], [1])
        p.data = p.data.T if same_storage else p.data.T.contiguous()
        steps(opt, [p], [2])
        results.append(p.detach().clone())
    assert relative(*results) < 1e-3


def test_the_same_parameter_twice_is_refused():
    p = parameter(4, 4)
    for params in ([p, p], [("a.weight", p), ("b.weight", p)]):
        with pytest.raises(ValueError, match="once"):
            muonloom.Muon(params)


@pytest.mark.parametrize("duplicate", ["matrix", "scalar"])
def test_a_mixed_group_with_a_duplicate_is_not_half_added(duplicate: str):
    matrix, scalar = ("a.weight", parameter(4, 4)), ("a.bias", parameter(4))
    opt = muonloom.Muon([matrix, scalar], **QUIET)
    new = [("c.weight", parameter(4, 4)), ("c.bias", parameter(4))]
    new[duplicate == "scalar"] = scalar if duplicate == "scalar" else matrix
    with pytest.raises(ValueError, match="param"):
        opt.add_param_group({"params": new})
    assert [len(g["params"]) for g in opt.param_groups] == [1, 1]
    opt.add_param_group({"params": [("d.weight", parameter(4, 4))]})


def test_named_and_unnamed_do_not_mix_in_one_list():
    with pytest.raises(TypeError, match="named_parameters"):
        muonloom.Muon([("a.weight", parameter(4, 4)), parameter(4, 4)])


def test_generators_are_read_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for params in (
        (pair for pair in model.named_parameters()),
        [{"params": model.named_parameters(), "lr": 0.5}],
    ):
        opt = muonloom.Muon(params, **QUIET)
        assert sorted(len(g["params"]) for g in opt.param_groups) == [2, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_gradients_that_are_no_floats_are_refused_by_name(dtype: torch.dtype):
    p = parameter(4, 4)
    opt = muonloom.Muon([("layers.0.a.weight", p)])
    p.main_grad = torch.ones(4, 4, dtype=dtype)  # type: ignore[attr-defined]
    before = bits(p)
    with pytest.raises((ValueError, TypeError), match=r"layers\.0\.a\.weight"):
        opt.step()
    assert bits(p) == before


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("then", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_that_changes_its_dtype_after_construction(
    first: torch.dtype, then: torch.dtype
):
    model = nn.Linear(6, 30).to(first)
    opt = muonloom.Muon(model.named_parameters(), lr=0.01, **QUIET)
    steps(opt, list(model.parameters()), [1])
    model.to(then)
    before = [p.detach().float().clone() for p in model.parameters()]
    if torch.float32 not in (first, then) and first is not then:
        with pytest.raises(muonloom.StaleMasterError, match="refresh_masters"):
            steps(opt, list(model.parameters()), [2])
    opt.refresh_masters()
    steps(opt, list(model.parameters()), [2, 3])
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.dtype is then
        assert 0 < float((p.detach().float() - old).abs().max()) < 0.2
        assert ("master_weight" in opt.state[p]) is (then is not torch.float32)
        if then is not torch.float32:
            assert same_bits(opt.state[p]["master_weight"].to(then), p.detach())


def test_a_parameter_that_changes_its_shape_is_refused():
    p = parameter(4, 6)
    opt = muonloom.Muon([("layers.0.a.weight", p)])
    p.data = torch.zeros(0)
    p.grad = torch.zeros(0)
    with pytest.raises(ValueError, match=r"layers\.0\.a\.weight"):
        opt.step()


def test_a_closure_that_raises_leaves_the_optimizer_usable():
    p = parameter(4, 4)
    opt = muonloom.Muon([p])

    def closure() -> float:
        raise KeyError("data")

    with pytest.raises(KeyError):
        opt.step(closure)
    steps(opt, [p], [1])
    assert opt.last_step["skipped"] is False


def test_grad_scaler_drives_it():
    scaler = torch.amp.GradScaler("cpu")
    p, q = parameter(4, 4), parameter(4, 4)
    opt, plain = muonloom.Muon([p], lr=0.1), muonloom.Muon([q], lr=0.1)
    weights = randn(4, 4, seed=1)
    scaler.scale((p * weights).sum()).backward()
    scaler.step(opt)
    scaler.update()
    (q * weights).sum().backward()
    plain.step()
    assert relative(p, q) < 1e-6


def test_an_optimizer_holds_no_cycle_that_keeps_its_parameters():
    p = parameter(16, 16)
    opt = muonloom.Muon([p])
    steps(opt, [p], [1])
    assert opt.last_step
    alive = weakref.ref(opt)
    del opt
    assert alive() is None


def test_the_default_dtype_of_the_process_does_not_matter():
    prints = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        named = [("a.weight", parameter(4, 6)), ("a.bias", parameter(6))]
        give_gradients([p for _, p in named], 1)
        torch.set_default_dtype(dtype)
        try:
            opt = muonloom.Muon(named, lr=0.1, **QUIET)
            opt.step()
        finally:
            torch.set_default_dtype(torch.float32)
        prints.append(fingerprint(opt))
    assert len(set(prints)) == 1


def test_a_random_number_generator_is_not_touched():
    p = parameter(4, 6)
    before = torch.get_rng_state()
    steps(muonloom.Muon([p]), [p], [1, 2])
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_unfrozen_after_construction_are_taken_up():
    p, q = parameter(4, 6), parameter(4, 6)
    q.requires_grad_(False)
    opt = muonloom.Muon([p, q])
    q.requires_grad_(True)
    if not any(x is q for g in opt.param_groups for x in g["params"]):
        opt.add_param_group({"params": [q]})
    before = q.detach().clone()
    steps(opt, [p, q], [1])
    assert not same_bits(q, before)
    assert group_of(opt, q)["algorithm"] == "muon"
