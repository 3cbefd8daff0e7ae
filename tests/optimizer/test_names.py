"""Names, layouts, and which parameter is a matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import muonloom
from muonloom import BlockSpec, Layout
from optimizer.support import (
    Named,
    algorithms,
    give_gradients,
    listening,
    parameter,
    same_bits,
    tensors_of,
)

QUIET: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}
WRAPPERS = ["module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."]


def test_unnamed_matrices_are_what_torch_means():
    params = [parameter(4, 8), parameter(8, 4), parameter(4, 8, seed=1)]
    opt = muonloom.Muon(params)
    (group,) = opt.param_groups
    assert group["algorithm"] == "muon"
    assert [id(p) for p in group["params"]] == [id(p) for p in params]


@pytest.mark.parametrize("shape", [(4,), (), (2, 3, 4), (4, 2, 3, 3)])
def test_unnamed_parameters_that_are_not_2d_ask_for_names(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        muonloom.Muon([parameter(4, 8), parameter(*shape)])


def test_a_layout_needs_names_as_well():
    layout = Layout.from_shapes({"layers.0.a.weight": (4, 8)})
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        muonloom.Muon([parameter(4, 8)], layout=layout)


@pytest.mark.parametrize("inside", WRAPPERS)
@pytest.mark.parametrize("outside", ["", *WRAPPERS])
def test_wrapper_prefixes_are_ignored_on_both_sides(outside: str, inside: str):
    wrapped = f"{outside}layers.0.{inside}self_attn.q_proj.weight"
    plain = "layers.0.self_attn.q_proj.weight"
    spec = BlockSpec.heads(4, heads_per_block=1)
    for in_layout, given in ((plain, wrapped), (wrapped, plain)):
        layout = Layout.from_shapes({in_layout: (16, 8)}, overrides={plain: spec})
        p = parameter(16, 8)
        opt = muonloom.Muon([(given, p)], layout=layout)
        give_gradients([p], 1)
        opt.step()
        assert [(tuple(s), c) for s, c in opt.last_step["matrices"]] == [((4, 8), 4)]


def test_a_muon_parameter_that_the_layout_lacks():
    layout = Layout.from_shapes({"layers.0.a.weight": (4, 8)})
    with pytest.raises(ValueError, match=r"layers\.1\.a\.weight"):
        muonloom.Muon(
            [("layers.0.a.weight", parameter(4, 8)), ("layers.1.a.weight", parameter(4, 8))],
            layout=layout,
        )


@pytest.mark.parametrize("shape", [(8, 4), (4, 9), (0,), (32,), (4, 8, 1)])
def test_a_shape_that_is_not_the_logical_one(shape: tuple[int, ...]):
    """(0,) stands for a sharded or released matrix, whose logical shape the layout knows."""
    layout = Layout.from_shapes({"layers.0.a.weight": (4, 8)})
    with pytest.raises(ValueError, match=r"layers\.0\.a\.weight") as caught:
        muonloom.Muon([("layers.0.a.weight", nn.Parameter(torch.zeros(shape)))], layout=layout)
    assert "(4, 8)" in str(caught.value)
    assert str(shape) in str(caught.value)


def test_an_empty_placeholder_is_not_silently_a_scalar_parameter():
    placeholder = ("layers.0.mlp.up_proj.weight", nn.Parameter(torch.zeros(0)))
    beside = ("layers.1.mlp.up_proj.weight", parameter(4, 8))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        muonloom.Muon([placeholder, beside], **QUIET)


def test_a_layout_of_more_parameters_than_are_given_is_fine():
    layout = Layout.from_shapes({f"layers.{i}.a.weight": (4, 8) for i in range(3)})
    opt = muonloom.Muon([("layers.1.a.weight", parameter(4, 8))], layout=layout)
    assert len(opt.param_groups) == 1


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.a\.weight"):
        muonloom.Muon(
            [
                ("layers.0.a.weight", parameter(4, 8)),
                ("module.layers.0.a.weight", parameter(4, 8)),
            ]
        )


EXPECTED = {
    "transformer.wte.weight": ((50, 8), "adamw"),
    "transformer.wpe.weight": ((20, 8), "adamw"),
    "head.weight": ((50, 8), "adamw"),
    "output.weight": ((50, 8), "adamw"),
    "lm_head.weight": ((50, 8), "adamw"),
    "embeddings.word_embeddings.weight": ((50, 8), "adamw"),
    "embeddings.position_embeddings.weight": ((20, 8), "adamw"),
    "embeddings.token_type_embeddings.weight": ((2, 8), "adamw"),
    "model.embed_tokens.weight": ((50, 8), "adamw"),
    "layers.0.mlp.up_proj.weight": ((16, 8), "muon"),
    "layers.0.mlp.up_proj.bias": ((16,), "adamw"),
    "encoder.layer.0.attention.self.query.weight": ((8, 8), "muon"),
    "encoder.layer.0.attention.output.dense.weight": ((8, 8), "muon"),
    "layers.0.input_layernorm.weight": ((8,), "adamw"),
    "layers.0.mlp.experts.gate_up_proj": ((3, 8, 6), "muon"),
    "layers.0.mlp.experts.gate_up_proj_bias": ((3, 8), "adamw"),
    "layers.0.mlp.experts.down_proj_bias": ((3, 6), "adamw"),
    "scale": ((), "adamw"),
}


def test_which_parameters_are_matrices_by_name_and_shape():
    named: Named = [(n, parameter(*shape)) for n, (shape, _) in EXPECTED.items()]
    with listening():  # guesses may be announced
        opt = muonloom.Muon(named, **QUIET)
    assert algorithms(opt, named) == {n: algorithm for n, (_, algorithm) in EXPECTED.items()}


def test_tied_embeddings_are_one_scalar_parameter():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(11, 8)
            self.up_proj = nn.Linear(8, 8, bias=False)
            self.lm_head = nn.Linear(8, 11, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

    model = Tied()
    opt = muonloom.Muon(model.named_parameters(), **QUIET)
    (tied,) = [g for g in opt.param_groups if g["algorithm"] == "adamw"]
    assert [id(p) for p in tied["params"]] == [id(model.lm_head.weight)]


def test_stacked_experts_are_one_matrix_each_and_all_are_counted():
    named = [
        ("layers.0.mlp.experts.down_proj", parameter(3, 8, 6)),
        ("layers.1.mlp.experts.down_proj", parameter(3, 8, 6)),
        ("layers.0.mlp.other_proj.weight", parameter(8, 6)),
    ]
    opt = muonloom.Muon(named)
    for step in range(2):
        give_gradients(tensors_of(named), step)
        opt.step()
        counts = {tuple(shape): count for shape, count in opt.last_step["matrices"]}
        assert sum(counts.values()) == 7
        assert opt.last_step["ns_calls"] == 1


def test_matrices_without_gradient_are_not_counted():
    named = [(f"layers.{i}.a.weight", parameter(4, 6, seed=i)) for i in range(3)]
    opt = muonloom.Muon(named)
    give_gradients([named[0][1], named[2][1]], 1)
    opt.step()
    assert [(tuple(s), c) for s, c in opt.last_step["matrices"]] == [((4, 6), 2)]


def test_a_layout_says_adamw_for_a_matrix():
    name = "layers.0.a.weight"
    p = parameter(6, 4)
    layout = Layout.from_shapes({name: (6, 4)}, overrides={"*.a.weight": "adamw"})
    with listening():
        opt = muonloom.Muon([(name, p)], layout=layout, adamw_lr=0.1)
    assert opt.param_groups[0]["algorithm"] == "adamw"


def test_parameters_may_be_views_of_one_storage():
    flat = torch.randn(2 * 24 + 8, generator=torch.Generator().manual_seed(0))
    copies = [flat[:24].view(6, 4).clone(), flat[24:48].view(6, 4).clone(), flat[48:].clone()]
    views = [flat[:24].view(6, 4), flat[24:48].view(6, 4), flat[48:]]
    results = []
    for tensors in (copies, views):
        names = ["layers.0.a.weight", "layers.1.a.weight", "norm.weight"]
        named = [(n, nn.Parameter(t)) for n, t in zip(names, tensors, strict=True)]
        opt = muonloom.Muon(named, lr=0.02, **QUIET)
        for seed in (1, 2):
            give_gradients(tensors_of(named), seed)
            opt.step()
        results.append([p.detach() for _, p in named])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert same_bits(flat[:24].view(6, 4), results[0][0])


def test_a_depthwise_convolution_is_never_a_stack_of_rows():
    """[C, 1, K]: AdamW, or the one matrix (C, K); not C experts of 1 x K."""
    name = "layers.0.linear_attn.conv1d.weight"
    rule = Layout.from_shapes({name: (16, 1, 4)})[name]
    assert (rule.algorithm, rule.matrices) in [("adamw", ()), ("muon", ((16, 4),))]


def test_heads_that_match_nothing_are_an_error_and_not_a_whole_matrix():
    for shapes in ({"layers.0.w.weight": (16, 8)}, {"layers.0.self_attn.q_proj.weight": (16, 8)}):
        with pytest.raises(ValueError, match="heads_per_block"):
            Layout.from_shapes(shapes, heads_per_block=2)
