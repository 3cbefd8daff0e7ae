"""Groups made by ``parameter_groups``, and what construction says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import muonloom
from muonloom import BlockSpec, Layout
from optimizer.support import (
    QUIET,
    give_gradients,
    group_of,
    listening,
    mixed,
    model_parameters,
    parameter,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(8)
        self.up_proj = nn.Linear(8, 16)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 11, bias=False)


def test_parameter_groups_turns_decay_off_for_norms_and_biases():
    model = Tiny()
    layout = Layout.from_shapes({n: tuple(p.shape) for n, p in model.named_parameters()})
    opt = muonloom.Muon(
        muonloom.parameter_groups(model, layout), layout=layout, weight_decay=0.3, **QUIET
    )
    held = [id(p) for g in opt.param_groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    for name, p in model.named_parameters():
        plain = "norm" in name or name.endswith("bias")
        assert group_of(opt, p)["weight_decay"] == (0.0 if plain else 0.3), name


def test_parameter_groups_takes_other_patterns():
    model = Tiny()
    layout = Layout.from_shapes({n: tuple(p.shape) for n, p in model.named_parameters()})
    groups = muonloom.parameter_groups(model, layout, no_decay=("lm_head*",))
    opt = muonloom.Muon(groups, layout=layout, weight_decay=0.3, **QUIET)
    zero = {n for n, p in model.named_parameters() if group_of(opt, p)["weight_decay"] == 0.0}
    assert zero == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"lr": 0.02}, True),
        ({"lr": 0.02, "adjust_lr_fn": "spectral"}, True),
        ({"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}, False),
        ({"lr": 0.02, "adamw_lr": 0.003}, False),
    ],
)
def test_a_shared_lr_of_different_meaning_warns_once(options: dict[str, Any], warns: bool):
    with listening() as said:
        muonloom.Muon(model_parameters(), **options)
    assert len(said.lines) == (1 if warns else 0)
    if warns:
        assert "0.02" in said.lines[0]
        assert "RMS" in said.lines[0]
        assert "adamw_lr" in said.lines[0]


def test_no_warning_about_rates_without_adamw_parameters():
    with listening() as said:
        muonloom.Muon([parameter(4, 8)], lr=0.02)
        muonloom.Muon([{"params": mixed(), "adamw_lr": 0.1}], lr=0.02)
    assert said.lines == []


def test_construction_says_one_line(caplog: pytest.LogCaptureFixture):
    named = model_parameters(depth=3)
    with caplog.at_level(logging.INFO, logger="muonloom"):
        muonloom.Muon(named, **QUIET)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("muonloom")]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "6" in lines[0]  # six parameters that are six matrices
    assert "AdamW" in lines[0]
    assert "bytes" in lines[0] or "B" in lines[0]


def test_block_specs_never_enter_groups_or_state():
    name = "layers.0.a.weight"
    p = parameter(6, 4)
    layout = Layout.from_shapes({name: (6, 4)}, overrides={name: BlockSpec.rows(2, 4)})
    opt = muonloom.Muon([(name, p)], layout=layout)
    give_gradients([p], 1)
    opt.step()
    state = opt.state_dict()
    plain = (bool, int, float, str, type(None), tuple, list)
    assert all(
        isinstance(v, (*plain, torch.dtype)) for g in state["param_groups"] for v in g.values()
    )
    assert all(isinstance(v, torch.Tensor) for s in state["state"].values() for v in s.values())
