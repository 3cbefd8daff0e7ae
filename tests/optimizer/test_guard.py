"""The guard: a non-finite gradient writes nothing; a non-finite direction spares its matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import muonloom
import muonloom.compute
from muonloom import BlockSpec, Layout
from optimizer.support import (
    Named,
    bits,
    fingerprint,
    give_gradients,
    listening,
    model_parameters,
    parameter,
    randn,
    same_bits,
    tensors_of,
    weights_fingerprint,
)

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def warm(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Named, muonloom.Muon]:
    named = model_parameters(dtype=dtype)
    opt = muonloom.Muon(named, **{**OPTIONS, **options})
    give_gradients(tensors_of(named), 1)
    opt.step()
    give_gradients(tensors_of(named), 2)
    return named, opt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj.weight", "layers.0.norm.weight"])
def test_one_bad_element_skips_the_whole_step(name: str, value: str, dtype: torch.dtype):
    named, opt = warm(dtype)
    dict(named)[name].grad.reshape(-1)[-1] = BAD[value]  # type: ignore[union-attr]
    before = fingerprint(opt)
    with listening() as said:
        opt.step()
    opt.drain()
    assert fingerprint(opt) == before
    assert opt.last_step["skipped"] is True
    assert opt.last_step["consecutive_skips"] == 1
    assert said.about(name, "rank")


def test_a_bad_value_in_main_grad_skips_too():
    named, opt = warm()
    p = dict(named)["layers.0.mlp.up_proj.weight"]
    p.main_grad = torch.full(p.shape, float("nan"))  # type: ignore[attr-defined]
    before = fingerprint(opt)
    with listening():
        opt.step()
    assert opt.last_step["skipped"]
    assert fingerprint(opt) == before


def test_a_bad_grad_beside_a_good_main_grad_is_not_read():
    named, opt = warm()
    p = dict(named)["layers.0.mlp.up_proj.weight"]
    p.main_grad = torch.ones(p.shape)  # type: ignore[attr-defined]
    p.grad.fill_(float("nan"))  # type: ignore[union-attr]
    opt.step()
    assert not opt.last_step["skipped"]


def test_a_skipped_step_leaves_no_trace_in_the_next():
    named, opt = warm()
    peer_named, peer = warm()
    named[0][1].grad.fill_(float("inf"))  # type: ignore[union-attr]
    with listening():
        opt.step()
    for o, pairs in ((opt, named), (peer, peer_named)):
        give_gradients(tensors_of(pairs), 3)
        o.step()
    assert fingerprint(opt) == fingerprint(peer)
    assert opt.last_step["skipped"] is False
    assert opt.last_step["consecutive_skips"] == 0


def test_the_first_step_may_be_skipped():
    named = model_parameters()
    opt = muonloom.Muon(named, **OPTIONS)
    before = weights_fingerprint(tensors_of(named))
    give_gradients(tensors_of(named), 1)
    named[3][1].grad.fill_(float("nan"))  # type: ignore[union-attr]
    with listening():
        opt.step()
    assert weights_fingerprint(tensors_of(named)) == before
    assert opt.last_step["skipped"]
    steps_taken = [int(s["step"]) for s in opt.state.values() if "step" in s]
    assert not any(steps_taken)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_too_many_skips_in_a_row_raise(limit: int):
    named, opt = warm(max_consecutive_skips=limit)
    bad = dict(named)["layers.1.mlp.up_proj.weight"]
    bad.grad.fill_(float("nan"))  # type: ignore[union-attr]
    before = fingerprint(opt)
    with listening():
        for i in range(limit):
            opt.step()
            assert opt.last_step["consecutive_skips"] == i + 1
        with pytest.raises(FloatingPointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
            opt.step()
    assert fingerprint(opt) == before


def test_a_good_step_starts_the_count_anew():
    named, opt = warm(max_consecutive_skips=2)
    params = tensors_of(named)
    with listening():
        for i in range(6):
            give_gradients(params, i)
            if i % 3 < 2:
                params[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
            opt.step()
            assert opt.last_step["consecutive_skips"] == (i % 3 + 1) % 3


def test_a_long_run_of_skips_warns_at_once_and_then_rarely():
    named, opt = warm(max_consecutive_skips=40)
    named[0][1].grad.fill_(float("nan"))  # type: ignore[union-attr]
    with listening() as said:
        for _ in range(40):
            opt.step()
    assert 1 <= len(said.about("embed_tokens.weight")) <= 20


@pytest.mark.parametrize(
    "bad", [("layers.0.norm.weight",), ("layers.1.mlp.up_proj.weight", "lm_head.weight")]
)
def test_without_skipping_the_first_parameter_is_named_and_nothing_written(bad: tuple[str, ...]):
    named, opt = warm(skip_nonfinite=False)
    for name in bad:
        dict(named)[name].grad.fill_(float("nan"))  # type: ignore[union-attr]
    before = fingerprint(opt)
    with pytest.raises(FloatingPointError) as caught:
        opt.step()
    assert bad[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fingerprint(opt) == before
    give_gradients(tensors_of(named), 3)
    opt.step()  # and it goes on
    assert fingerprint(opt) != before


def test_large_finite_gradients_are_no_reason_to_skip():
    """Their square sum is beyond FP32, and they are finite all the same."""
    named, opt = warm()
    give_gradients(tensors_of(named), 2, size=1e30)
    opt.step()
    assert opt.last_step["skipped"] is False


def test_the_guard_sees_every_group_and_unnamed_parameters():
    params = [parameter(4, 6, seed=i) for i in range(3)]
    opt = muonloom.Muon([{"params": [p]} for p in params])
    give_gradients(params, 1)
    params[2].grad[3, 5] = float("nan")  # type: ignore[index]
    before = weights_fingerprint(params)
    with listening() as said:
        opt.step()
    assert said.lines
    assert weights_fingerprint(params) == before


# --- a direction that is not finite -------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, index: int, value: float = float("nan")) -> list[int]:
    """Make matrix ``index`` of every batched call non-finite; return the calls' counts."""
    genuine, counts = muonloom.compute.iterate, []

    def iterate(x: torch.Tensor, recipe: Any, scratch: torch.Tensor) -> torch.Tensor:
        out = genuine(x, recipe, scratch)
        counts.append(out.shape[0])
        out[index, -1, -1] = value
        return out

    monkeypatch.setattr(muonloom.compute, "iterate", iterate)
    return counts


def snapshot(opt: muonloom.Muon, p: torch.Tensor) -> dict[str, bytes]:
    state = {k: bits(v) for k, v in opt.state[p].items() if isinstance(v, torch.Tensor)}
    return {"weight": bits(p), **state}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_of_three_matrices_is_spared_and_named(
    monkeypatch: pytest.MonkeyPatch, index: int, dtype: torch.dtype, value: float
):
    names = [f"layers.{i}.mlp.up_proj.weight" for i in range(3)]
    named = [(n, parameter(16, 8, seed=i, dtype=dtype)) for i, n in enumerate(names)]
    opt = muonloom.Muon(named, lr=0.02)
    for seed in (1, 2):
        give_gradients(tensors_of(named), seed)
        opt.step()
    opt.drain()
    before = [snapshot(opt, p) for _, p in named]
    counts = poison(monkeypatch, index, value)
    give_gradients(tensors_of(named), 3)
    with listening():
        opt.step()
        with pytest.raises(FloatingPointError) as caught:
            opt.drain()
    assert counts == [3]
    after = [snapshot(opt, p) for _, p in named]
    kept = [i for i in range(3) if after[i] == before[i]]
    assert len(kept) == 1
    assert names[kept[0]] in str(caught.value)
    for i in set(range(3)) - set(kept):
        assert all(after[i][k] != before[i][k] for k in before[i]), "the others step in full"


def test_the_spared_matrix_is_one_expert_only(monkeypatch: pytest.MonkeyPatch):
    name = "layers.0.mlp.experts.down_proj"
    p = parameter(3, 8, 16)
    layout = Layout.from_shapes(
        {name: (3, 8, 16)}, overrides={name: BlockSpec.stacked(BlockSpec.whole())}
    )
    opt = muonloom.Muon([(name, p)], layout=layout, lr=0.02)
    give_gradients([p], 1)
    opt.step()
    weight, moment = p.detach().clone(), opt.state[p]["momentum_buffer"].clone()
    poison(monkeypatch, 1)
    give_gradients([p], 2)
    with listening():
        opt.step()
        with pytest.raises(FloatingPointError, match=r"experts\.down_proj"):
            opt.drain()
    kept = [e for e in range(3) if same_bits(p[e], weight[e])]
    assert len(kept) == 1
    moments = opt.state[p]["momentum_buffer"]
    assert [e for e in range(3) if same_bits(moments[e], moment[e])] == kept


def test_the_optimizer_goes_on_after_a_spared_matrix(monkeypatch: pytest.MonkeyPatch):
    named = [(f"layers.{i}.w.weight", parameter(6, 4, seed=i)) for i in range(2)]
    opt = muonloom.Muon(named, lr=0.02)
    give_gradients(tensors_of(named), 1)
    with monkeypatch.context() as patch:
        poison(patch, 0)
        with listening():
            opt.step()
            with pytest.raises(FloatingPointError):
                opt.drain()
    before = weights_fingerprint(tensors_of(named))
    opt.step()
    opt.drain()
    assert weights_fingerprint(tensors_of(named)) != before
    assert all(bool(p.isfinite().all()) for _, p in named)


def test_a_failure_that_nobody_drained_is_raised_by_the_next_step(monkeypatch: pytest.MonkeyPatch):
    """A loop that never drains must not train on beside a matrix that fails every step."""
    named = [(f"layers.{i}.w.weight", parameter(6, 4, seed=i)) for i in range(2)]
    opt = muonloom.Muon(named, lr=0.02)
    give_gradients(tensors_of(named), 1)
    with monkeypatch.context() as patch:
        poison(patch, 0)
        opt.step()
    before = fingerprint(opt)
    with pytest.raises(FloatingPointError, match=r"layers\.0\.w\.weight"):
        opt.step()
    assert fingerprint(opt) == before
    opt.step()  # told once
    assert fingerprint(opt) != before


def test_a_failed_step_is_not_saved_in_silence(monkeypatch: pytest.MonkeyPatch):
    """``state_dict()`` drains, so that it reports the failure as well."""
    p = parameter(6, 4)
    opt = muonloom.Muon([("layers.0.w.weight", p)], lr=0.02)
    poison(monkeypatch, 0)
    p.grad = randn(6, 4, seed=1)
    with listening():
        opt.step()
        with pytest.raises(FloatingPointError, match=r"layers\.0\.w\.weight"):
            opt.state_dict()
