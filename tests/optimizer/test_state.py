"""``state_dict`` and back: bitwise resume, dtypes, refusals, and torch's distributed helpers."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonloom
from optimizer.support import (
    Named,
    fingerprint,
    give_gradients,
    group_of,
    model_parameters,
    parameter,
    relative,
    same_bits,
    steps,
    tensors_of,
    through_a_file,
    weights_fingerprint,
)

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}
DTYPES = [torch.float32, torch.bfloat16]


def build(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Named, muonloom.Muon]:
    named = model_parameters(dtype=dtype)
    return named, muonloom.Muon(named, **{**OPTIONS, **options})


def resume(
    named: Named, opt: muonloom.Muon, through: Callable[[Any], Any], **options: Any
) -> tuple[Named, muonloom.Muon]:
    """A fresh optimizer over copies of the weights, with the state of ``opt`` loaded."""
    state = through(opt.state_dict())
    fresh = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
    twin = muonloom.Muon(fresh, **{**OPTIONS, **options})
    twin.load_state_dict(state)
    return fresh, twin


@pytest.mark.parametrize("through", [through_a_file, copy.deepcopy], ids=["file", "deepcopy"])
@pytest.mark.parametrize("momentum_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_resumed_run_is_bitwise_the_same(
    at: int, dtype: torch.dtype, momentum_dtype: torch.dtype, through: Callable[[Any], Any]
):
    named, opt = build(dtype, momentum_dtype=momentum_dtype)
    steps(opt, tensors_of(named), range(at))
    fresh, twin = resume(named, opt, through, momentum_dtype=momentum_dtype)
    assert fingerprint(twin) == fingerprint(opt) or at == 0
    steps(opt, tensors_of(named), range(10, 13))
    steps(twin, tensors_of(fresh), range(10, 13))
    assert fingerprint(twin) == fingerprint(opt)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_keys_of_the_state(dtype: torch.dtype):
    named, opt = build(dtype)
    steps(opt, tensors_of(named), range(2))
    for owner in (opt, resume(named, opt, through_a_file)[1]):
        for group in owner.param_groups:
            for p in group["params"]:
                state = owner.state[p]
                wanted = {"momentum_buffer"}
                if group["algorithm"] == "adamw":
                    wanted = {"exp_avg", "exp_avg_sq", "step"}
                if dtype is not torch.float32:
                    wanted |= {"master_weight"}
                assert set(state) == wanted
                assert all(v.dtype is torch.float32 for v in state.values())
                assert all(v.shape == p.shape for k, v in state.items() if k != "step")


def test_the_form_is_that_of_torch():
    named, opt = build()
    steps(opt, tensors_of(named), range(1))
    state = opt.state_dict()
    assert set(state) == {"state", "param_groups"}
    numbers = [i for g in state["param_groups"] for i in g["params"]]
    assert numbers == list(range(len(named)))
    assert set(state["state"]) <= set(numbers)
    assert {g["algorithm"] for g in state["param_groups"]} == {"muon", "adamw"}


def test_the_groups_own_keys_come_back():
    named = model_parameters()
    opt = muonloom.Muon([{"params": named, "tag": "x", "lr": 0.5, "custom": 7}], **OPTIONS)
    for g in opt.param_groups:
        g["weight_decay"], g["momentum_note"] = 0.77, g["algorithm"]
    fresh, twin = resume(named, opt, through_a_file)
    for g in twin.param_groups:
        assert (g["tag"], g["lr"], g["custom"], g["weight_decay"]) == ("x", 0.5, 7, 0.77)
        assert g["momentum_note"] == g["algorithm"]
    assert group_of(twin, fresh[0][1])["algorithm"] == "adamw"


def test_a_changed_lr_and_decay_are_right_in_the_first_step_after_resume():
    named, opt = build()
    params = tensors_of(named)
    schedule = {0: (0.02, 0.1), 1: (0.5, 0.3), 2: (0.25, 0.0)}

    def set_rates(owner: muonloom.Muon) -> Callable[[int], None]:
        def apply(step: int) -> None:
            for g in owner.param_groups:
                g["lr"], g["weight_decay"] = schedule[step]

        return apply

    steps(opt, params, [0, 1], set_rates(opt))
    for g in opt.param_groups:  # the scheduler steps, then the run is saved
        g["lr"], g["weight_decay"] = schedule[2]
    fresh, twin = resume(named, opt, through_a_file)
    steps(opt, params, [2])
    steps(twin, tensors_of(fresh), [2])
    assert fingerprint(opt) == fingerprint(twin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_before_any_step_saving_and_loading_work(dtype: torch.dtype):
    named, opt = build(dtype)
    before = weights_fingerprint(tensors_of(named))
    opt.load_state_dict(through_a_file(opt.state_dict()))
    assert weights_fingerprint(tensors_of(named)) == before
    steps(opt, tensors_of(named), [1])
    other, plain = build(dtype)
    steps(plain, tensors_of(other), [1])
    assert fingerprint(opt) == fingerprint(plain)


def test_loading_a_state_of_before_any_step_clears_what_was_gathered():
    named, opt = build()
    empty = through_a_file(opt.state_dict())
    start = [p.detach().clone() for _, p in named]
    steps(opt, tensors_of(named), [5, 6])
    for (_, p), old in zip(named, start, strict=True):
        p.data.copy_(old)
    opt.load_state_dict(empty)
    steps(opt, tensors_of(named), [1])
    other, plain = build()
    steps(plain, tensors_of(other), [1])
    assert weights_fingerprint(tensors_of(named)) == weights_fingerprint(tensors_of(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_that_never_got_a_gradient(dtype: torch.dtype):
    named, opt = build(dtype)
    params = tensors_of(named)
    late = ["layers.0.mlp.up_proj.weight", "lm_head.weight", "layers.1.norm.weight"]

    def drop(_: int) -> None:
        for name in late:
            dict(named)[name].grad = None

    steps(opt, params, [1, 2], drop)
    fresh, twin = resume(named, opt, through_a_file)
    steps(opt, params, [3])
    steps(twin, tensors_of(fresh), [3])
    assert weights_fingerprint(params) == weights_fingerprint(tensors_of(fresh))


def test_absent_state_is_zero():
    """What torch saves for a parameter without gradient: no entry at all."""
    named, opt = build()
    steps(opt, tensors_of(named), [1])
    state = through_a_file(opt.state_dict())
    muon = next(g for g in state["param_groups"] if g["algorithm"] == "muon")
    gone = muon["params"][0]
    state["state"].pop(gone, None)
    opt.load_state_dict(state)
    p = next(g for g in opt.param_groups if g["algorithm"] == "muon")["params"][0]
    moment = opt.state.get(p, {}).get("momentum_buffer", torch.zeros(1))
    assert not moment.any()
    steps(opt, tensors_of(named), [2])


@pytest.mark.parametrize("key", ["momentum_buffer", "master_weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_masters_and_momentum_are_refused(key: str, value: float):
    named, opt = build(torch.bfloat16)
    steps(opt, tensors_of(named), [1])
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        if key in entry:
            entry[key].reshape(-1)[-1] = value
            break
    before = fingerprint(opt)
    with pytest.raises(ValueError, match=r"\.weight.*" + key + "|" + key + r".*\.weight"):
        opt.load_state_dict(state)
    assert fingerprint(opt) == before


@pytest.mark.parametrize("damage", ["shape", "fewer groups", "fewer parameters", "algorithm"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: str):
    named, opt = build()
    steps(opt, tensors_of(named), [1])
    state = copy.deepcopy(opt.state_dict())
    muon = next(g for g in state["param_groups"] if g["algorithm"] == "muon")
    if damage == "shape":
        entry = state["state"][muon["params"][0]]
        entry["momentum_buffer"] = entry["momentum_buffer"].T.contiguous()
    elif damage == "fewer groups":
        state["param_groups"].pop()
    elif damage == "fewer parameters":
        muon["params"].pop()
        if "param_names" in muon:
            muon["param_names"].pop()
    else:
        for g in state["param_groups"]:
            g["algorithm"] = {"muon": "adamw", "adamw": "muon"}[g["algorithm"]]
    before, options = fingerprint(opt), [dict(g, params=0) for g in opt.param_groups]
    with pytest.raises(ValueError, match=r"."):
        opt.load_state_dict(state)
    assert fingerprint(opt) == before
    assert [dict(g, params=0) for g in opt.param_groups] == options
    steps(opt, tensors_of(named), [2])


@pytest.mark.parametrize("seed", [0, 1])
def test_another_order_of_parameters_never_swaps_state(seed: int):
    """Named state goes by name, or the load is refused; it never lands on a namesake's place."""
    named = [(f"layers.{i}.a.weight", parameter(6, 4, seed=i)) for i in range(4)]
    opt = muonloom.Muon(named, lr=0.02)
    steps(opt, tensors_of(named), [1, 2])
    shuffled = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
    random.Random(seed).shuffle(shuffled)
    assert [n for n, _ in shuffled] != [n for n, _ in named]
    twin = muonloom.Muon(shuffled, lr=0.02)
    try:
        twin.load_state_dict(through_a_file(opt.state_dict()))
    except ValueError:
        return
    for name, p in named:
        q = dict(shuffled)[name]
        assert same_bits(twin.state[q]["momentum_buffer"], opt.state[p]["momentum_buffer"]), name


def test_two_live_optimizers_share_no_state_after_a_load():
    named, opt = build()
    steps(opt, tensors_of(named), [1])
    fresh, twin = resume(named, opt, lambda state: state)
    before = fingerprint(opt)
    steps(twin, tensors_of(fresh), [2])
    assert fingerprint(opt) == before


def test_a_state_dict_is_a_view_as_in_torch_or_a_copy_but_not_a_mixture():
    named, opt = build()
    steps(opt, tensors_of(named), [1])
    state = opt.state_dict()
    held = [v for s in state["state"].values() for v in s.values() if isinstance(v, Tensor)]
    before = [v.clone() for v in held]
    steps(opt, tensors_of(named), [2])
    moved = {not torch.equal(a, b) for a, b in zip(held, before, strict=True)}
    assert len(moved) == 1


@pytest.mark.parametrize("saved", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
def test_momentum_is_kept_in_the_dtype_that_the_group_says(saved: torch.dtype, asked: torch.dtype):
    """Saved options come back, as in torch; momentum follows its group's and never mixes."""
    named, opt = build(momentum_dtype=saved)
    steps(opt, tensors_of(named), [1])
    fresh, twin = resume(named, opt, through_a_file, momentum_dtype=asked)
    for _ in range(2):
        for (name, p), (_, q) in zip(named, fresh, strict=True):
            if "momentum_buffer" in opt.state[p]:
                moment = twin.state[q]["momentum_buffer"]
                assert moment.dtype is group_of(twin, q)["momentum_dtype"], name
                assert relative(moment, opt.state[p]["momentum_buffer"]) < 2**-7, name
        steps(twin, tensors_of(fresh), [2])
        steps(opt, tensors_of(named), [2])


def test_masters_come_back_with_all_their_bits():
    named, opt = build(torch.bfloat16)
    steps(opt, tensors_of(named), range(3))
    fresh, twin = resume(named, opt, through_a_file)
    for (_, p), (_, q) in zip(named, fresh, strict=True):
        master = opt.state[p]["master_weight"]
        assert not torch.equal(master, p.detach().float()), "the test needs bits below BF16"
        assert same_bits(twin.state[q]["master_weight"], master)
        assert same_bits(q.detach(), master.bfloat16())


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_weights_and_state_load_in_either_order(optimizer_first: bool):
    named, opt = build(torch.bfloat16)
    steps(opt, tensors_of(named), range(2))
    fresh = [(n, nn.Parameter(torch.zeros_like(p))) for n, p in named]
    twin = muonloom.Muon(fresh, **OPTIONS)
    state = through_a_file(opt.state_dict())
    if optimizer_first:
        twin.load_state_dict(state)
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, fresh, strict=True):
            q.copy_(p)
    if not optimizer_first:
        twin.load_state_dict(state)
    steps(opt, tensors_of(named), [5])
    steps(twin, tensors_of(fresh), [5])
    assert fingerprint(opt) == fingerprint(twin)


def test_state_without_its_weights_is_an_error_at_the_next_step():
    """Masters of one model, weights of another: neither may silently win."""
    named, opt = build(torch.bfloat16)
    steps(opt, tensors_of(named), range(2))
    fresh = [(n, nn.Parameter(torch.zeros_like(p))) for n, p in named]
    twin = muonloom.Muon(fresh, **OPTIONS)
    twin.load_state_dict(through_a_file(opt.state_dict()))
    give_gradients(tensors_of(fresh), 5)
    with pytest.raises(muonloom.StaleMasterError, match="refresh_masters"):
        twin.step()
    assert all(not q.any() for _, q in fresh)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_deepcopy_and_pickle_carry_parameters_and_optimizer_together(
    copier: Callable[[Any], Any], dtype: torch.dtype
):
    named, opt = build(dtype)
    steps(opt, tensors_of(named), [1])
    twin_named, twin = copier((named, opt))
    assert all(group_of(twin, p) for _, p in twin_named)
    before = fingerprint(opt)
    steps(twin, tensors_of(twin_named), [2])
    assert fingerprint(opt) == before
    steps(opt, tensors_of(named), [2])
    assert fingerprint(opt) == fingerprint(twin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading_makes_no_second_copy(dtype: torch.dtype):
    """The state's storage stays where it is, for whoever holds views of it."""
    named, opt = build(dtype)
    steps(opt, tensors_of(named), [1])
    state = through_a_file(opt.state_dict())
    steps(opt, tensors_of(named), [2])

    def places() -> list[int]:
        entries = [opt.state[p] for _, p in named]
        return [v.data_ptr() for entry in entries for _, v in sorted(entry.items())]

    before = places()
    opt.load_state_dict(state)
    assert places() == before
