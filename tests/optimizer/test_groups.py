"""Groups: which algorithm, whose options, which learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import muonloom
from muonloom import Layout
from optimizer.support import (
    QUIET,
    Named,
    algorithms,
    fingerprint,
    give_gradients,
    group_of,
    listening,
    mixed,
    model_parameters,
    parameter,
    same_bits,
    tensors_of,
)


def test_a_mixed_group_becomes_two_with_the_same_options():
    named = mixed()
    group = {"params": named, "lr": 0.3, "weight_decay": 0.7, "tag": "mine", "schedule": [1, 2]}
    opt = muonloom.Muon([group], **QUIET)
    assert sorted(g["algorithm"] for g in opt.param_groups) == ["adamw", "muon"]
    for g in opt.param_groups:
        assert (g["lr"], g["weight_decay"], g["tag"], g["schedule"]) == (0.3, 0.7, "mine", [1, 2])
        assert len(g["params"]) == 1
    assert algorithms(opt, named) == {named[0][0]: "muon", named[1][0]: "adamw"}


def test_options_of_one_group_do_not_reach_another():
    first, second = mixed("layers.0"), mixed("layers.1")
    opt = muonloom.Muon(
        [
            {"params": first, "momentum": 0.5, "nesterov": False, "adamw_betas": (0.5, 0.6)},
            {"params": second, "ns_steps": 2, "eps": 1e-5, "adjust_lr_fn": "spectral",
             "idle_matrices": "skip"},
        ],
        **QUIET,
    )  # fmt: skip
    a, b = group_of(opt, first[0][1]), group_of(opt, second[0][1])
    assert (a["momentum"], a["nesterov"], a["ns_steps"]) == (0.5, False, 5)
    assert (b["momentum"], b["nesterov"], b["ns_steps"]) == (0.95, True, 2)
    assert (a["adjust_lr_fn"], b["adjust_lr_fn"]) == ("match_rms_adamw", "spectral")


@pytest.mark.parametrize("option", ["momentum", "nesterov", "ns_steps", "eps", "adjust_lr_fn",
                                    "weight_decay", "lr", "idle_matrices"])  # fmt: skip
def test_each_group_option_acts_as_if_it_were_the_default(option: str):
    value = {"momentum": 0.5, "nesterov": False, "ns_steps": 2, "eps": 100.0, "adjust_lr_fn": "none",
             "weight_decay": 0.9, "lr": 0.7, "idle_matrices": "skip"}[option]  # fmt: skip
    results = []
    for by_group in (False, True):
        p, q = parameter(16, 8), parameter(16, 8)
        groups: list[dict[str, Any]] = [{"params": [p]}, {"params": [q]}]
        if by_group:
            groups[0][option] = value
        opt = muonloom.Muon(groups, **({} if by_group else {option: value}))
        for seed in (1, 2):
            give_gradients([p, q], seed)
            if seed == 2:
                p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
            opt.step()
        results.append((p.detach(), q.detach()))
    (all_p, all_q), (one_p, one_q) = results
    assert same_bits(all_p, one_p)
    assert not same_bits(all_q, one_q)


@pytest.mark.parametrize("option", [("adamw_betas", (0.5, 0.6)), ("adamw_eps", 1e-2)])
def test_adamw_options_of_a_group_act(option: tuple[str, Any]):
    key, value = option
    results = []
    for by_group in (False, True):
        named = model_parameters(depth=1)
        groups = {"params": named, **({key: value} if by_group else {})}
        opt = muonloom.Muon([groups], adamw_lr=0.1, **({} if by_group else {key: value}))
        for seed in (1, 2):
            give_gradients(tensors_of(named), seed)
            opt.step()
        results.append(fingerprint(opt))
    plain = model_parameters(depth=1)
    opt = muonloom.Muon(plain, adamw_lr=0.1)
    for seed in (1, 2):
        give_gradients(tensors_of(plain), seed)
        opt.step()
    assert results[0] == results[1] != fingerprint(opt)


@pytest.mark.parametrize(
    ("group", "defaults", "wanted"),
    [
        ({}, {"lr": 0.1}, (0.1, 0.1)),
        ({}, {"lr": 0.1, "adamw_lr": 0.2}, (0.1, 0.2)),
        ({"lr": 0.3}, {"lr": 0.1, "adamw_lr": 0.2}, (0.3, 0.3)),
        ({"lr": 0.3, "adamw_lr": 0.4}, {"lr": 0.1, "adamw_lr": 0.2}, (0.3, 0.4)),
        ({"adamw_lr": 0.4}, {"lr": 0.1, "adamw_lr": 0.2}, (0.1, 0.4)),
        ({"adamw_lr": 0.0}, {"lr": 0.1, "adamw_lr": 0.2}, (0.1, 0.0)),
        ({"lr": 0.0}, {"lr": 0.1, "adamw_lr": 0.2}, (0.0, 0.0)),
        ({}, {"lr": 0.0, "adamw_lr": 0.2}, (0.0, 0.2)),
        ({}, {"lr": 0.1, "adamw_lr": 0.0}, (0.1, 0.0)),
    ],
)
def test_precedence_of_learning_rates(
    group: dict[str, Any], defaults: dict[str, Any], wanted: tuple[float, float]
):
    named = mixed()
    opt = muonloom.Muon([{"params": named, **group}], **defaults, **QUIET)
    assert tuple(group_of(opt, p)["lr"] for _, p in named) == wanted


@pytest.mark.parametrize(
    ("group", "defaults", "wanted"),
    [
        ({}, {}, (0.1, 0.1)),
        ({}, {"weight_decay": 0.5}, (0.5, 0.5)),
        ({}, {"weight_decay": 0.5, "adamw_weight_decay": 0.0}, (0.5, 0.0)),
        ({}, {"weight_decay": 0.0, "adamw_weight_decay": 0.3}, (0.0, 0.3)),
        ({}, {"weight_decay": 0.0}, (0.0, 0.0)),
        ({"weight_decay": 0.0}, {"weight_decay": 0.5}, (0.0, 0.0)),
        ({"weight_decay": 0.0}, {"adamw_weight_decay": 0.5}, (0.0, 0.0)),
        ({"adamw_weight_decay": 0.0}, {"weight_decay": 0.5}, (0.5, 0.0)),
    ],
)
def test_weight_decay_of_zero_stays_zero(
    group: dict[str, Any], defaults: dict[str, Any], wanted: tuple[float, float]
):
    named = mixed()
    opt = muonloom.Muon([{"params": named, **group}], lr=0.5, **defaults, **QUIET)
    assert tuple(group_of(opt, p)["weight_decay"] for _, p in named) == wanted
    before = [p.detach().clone() for _, p in named]
    for _, p in named:
        p.grad = torch.zeros_like(p)
    opt.step()
    for (_, p), old, decay in zip(named, before, wanted, strict=True):
        assert torch.allclose(p, old * (1 - 0.5 * decay), rtol=1e-6, atol=0)


def test_an_lr_of_zero_changes_nothing():
    named = model_parameters()
    before = [p.detach().clone() for _, p in named]
    opt = muonloom.Muon(named, lr=0.0, **QUIET)
    give_gradients(tensors_of(named), 1)
    opt.step()
    assert all(same_bits(p, old) for (_, p), old in zip(named, before, strict=True))


def test_the_algorithm_of_a_group_is_obeyed():
    a, b, c = parameter(6, 4), parameter(6, 4), parameter(4)
    opt = muonloom.Muon(
        [
            {"params": [("layers.0.a.weight", a)], "algorithm": "muon"},
            {"params": [("layers.0.b.weight", b)], "algorithm": "adamw"},
            {"params": [("layers.0.c.bias", c)], "algorithm": "adamw"},
        ],
        **QUIET,
    )
    assert [g["algorithm"] for g in opt.param_groups] == ["muon", "adamw", "adamw"]
    give_gradients([a, b, c], 1)
    opt.step()
    assert "momentum_buffer" in opt.state[a]
    assert "exp_avg" in opt.state[b]


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_an_algorithm_that_conflicts_with_the_layout(algorithm: str):
    other = "adamw" if algorithm == "muon" else "muon"
    name = "layers.0.a.weight"
    layout = Layout.from_shapes({name: (6, 4)}, overrides={name: other})
    with pytest.raises(ValueError, match=r"layers\.0\.a\.weight") as caught:
        muonloom.Muon(
            [{"params": [(name, parameter(6, 4))], "algorithm": algorithm}], layout=layout
        )
    assert "muon" in str(caught.value)
    assert "adamw" in str(caught.value)


@pytest.mark.parametrize("shape", [(4,), ()])
def test_muon_asked_for_what_is_no_matrix(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"layers\.0\.norm\.weight"):
        muonloom.Muon(
            [{"params": [("layers.0.norm.weight", parameter(*shape))], "algorithm": "muon"}]
        )


def test_an_unknown_algorithm():
    with pytest.raises(ValueError, match="algorithm"):
        muonloom.Muon([{"params": [parameter(4, 4)], "algorithm": "sgd"}])


def test_all_one_dimensional_is_not_silently_adamw():
    named = [("a.bias", parameter(4)), ("norm.weight", parameter(8))]
    with listening() as said:
        try:
            muonloom.Muon(named, adamw_lr=0.1)
        except ValueError as error:
            said.lines.append(str(error))
    assert said.lines
    assert any("matri" in line or "Muon" in line for line in said.lines)


# --- frozen parameters and empty lists ----------------------------------------------------------


def freeze(named: Named, *words: str) -> Named:
    for name, p in named:
        if any(word in name for word in words):
            p.requires_grad_(False)
    return named


def test_a_group_of_frozen_parameters_is_dropped():
    named, frozen = mixed("layers.0"), freeze(mixed("layers.1"), "layers")
    opt = muonloom.Muon([{"params": named}, {"params": frozen}], **QUIET)
    held = {id(p) for g in opt.param_groups for p in g["params"]}
    assert held == {id(p) for _, p in named}
    assert all(g["params"] for g in opt.param_groups)


@pytest.mark.parametrize("words", [("_proj.weight",), ("norm", "bias", "embed", "lm_head")])
def test_freezing_all_matrices_or_all_others_still_steps(words: tuple[str, ...]):
    named = freeze(model_parameters(), *words)
    with listening():  # no matrix left may be worth a warning
        opt = muonloom.Muon(named, **QUIET)
    give_gradients([p for _, p in named if p.requires_grad], 1)
    before = {n: p.detach().clone() for n, p in named}
    opt.step()
    for name, p in named:
        assert same_bits(p, before[name]) is not p.requires_grad, name


def test_frozen_neighbours_change_nothing():
    alone, beside = model_parameters(), model_parameters()
    frozen = freeze([("layers.9.mlp.up_proj.weight", parameter(16, 8))], "layers")
    prints = []
    for named, extra in ((alone, []), (beside, frozen)):
        opt = muonloom.Muon([*named, *extra], **QUIET)
        give_gradients(tensors_of(named), 1)
        opt.step()
        prints.append([p.detach() for _, p in named])
    assert all(same_bits(a, b) for a, b in zip(*prints, strict=True))


def test_empty_lists():
    opt = muonloom.Muon([{"params": []}, {"params": mixed()}], **QUIET)
    assert sum(len(g["params"]) for g in opt.param_groups) == 2
    for nothing in ([], iter(()), [{"params": []}]):
        opt = muonloom.Muon(nothing)
        opt.step()
        opt.zero_grad()
        assert opt.last_step["skipped"] is False
        opt.load_state_dict(opt.state_dict())
        p = parameter(4, 6)
        opt.add_param_group({"params": [p]})
        p.grad = torch.ones_like(p)
        opt.step()
        assert opt.last_step["ns_calls"] == 1


def test_everything_frozen_steps_over_nothing():
    opt = muonloom.Muon([{"params": freeze(mixed(), "layers")}], **QUIET)
    opt.step()
    assert opt.last_step["skipped"] is False
    opt.load_state_dict(opt.state_dict())
    opt.step()


# --- add_param_group ----------------------------------------------------------------------------


def test_add_param_group_splits_and_steps_like_construction():
    prints = []
    for late in (False, True):
        first, second = mixed("layers.0"), mixed("layers.1")
        if late:
            opt = muonloom.Muon([{"params": first}], lr=0.02, **QUIET)
            opt.add_param_group({"params": second, "lr": 0.5, "tag": "late"})
        else:
            groups = [{"params": first}, {"params": second, "lr": 0.5, "tag": "late"}]
            opt = muonloom.Muon(groups, lr=0.02, **QUIET)
        for seed in (1, 2):
            give_gradients(tensors_of(first + second), seed)
            opt.step()
        prints.append([p.detach().clone() for _, p in first + second])
        assert group_of(opt, second[1][1])["tag"] == "late"
        assert group_of(opt, second[1][1])["algorithm"] == "adamw"
    assert all(same_bits(a, b) for a, b in zip(*prints, strict=True))


def test_add_param_group_between_steps_keeps_the_old_state():
    first, second = mixed("layers.0"), mixed("layers.1")
    opt = muonloom.Muon([{"params": first}], lr=0.02, **QUIET)
    give_gradients(tensors_of(first), 1)
    opt.step()
    moment = opt.state[first[0][1]]["momentum_buffer"].clone()
    opt.add_param_group({"params": second})
    assert same_bits(opt.state[first[0][1]]["momentum_buffer"], moment)
    give_gradients(tensors_of(first + second), 2)
    opt.step()
    assert int(opt.state[first[1][1]]["step"]) == 2
    assert int(opt.state[second[1][1]]["step"]) == 1


def test_add_param_group_refuses_duplicates_and_leaves_the_optimizer_whole():
    named = mixed()
    opt = muonloom.Muon(named, **QUIET)
    with pytest.raises(ValueError, match="once"):
        opt.add_param_group({"params": [named[0]]})
    give_gradients(tensors_of(named), 1)
    opt.step()
    assert sum(len(g["params"]) for g in opt.param_groups) == 2


def test_a_parameter_in_two_groups_is_refused():
    p = parameter(4, 4)
    with pytest.raises(ValueError, match="once"):
        muonloom.Muon([{"params": [p]}, {"params": [p]}])


def test_add_param_group_with_frozen_parameters_only_adds_nothing():
    opt = muonloom.Muon(mixed(), **QUIET)
    count = len(opt.param_groups)
    opt.add_param_group({"params": freeze(mixed("layers.1"), "layers")})
    assert len(opt.param_groups) == count
