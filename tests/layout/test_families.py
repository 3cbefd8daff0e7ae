"""Each family's table against tiny instances of the real classes, and matrices written by hand."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from layout.expected import EXPECTED, Matrices
from layout.tiny import CONFIGS, tiny
from muonloom.layout import BlockSpec, Layout, Rule, family_names


def _matrices(rule: Rule) -> Matrices | None:
    return None if rule.algorithm == "adamw" else dict(Counter(rule.matrices))


def _by_kind(layout: Layout) -> dict[str, list[Rule]]:
    kinds: dict[str, list[Rule]] = {}
    for rule in layout.values():
        if len(rule.shape) >= 2:
            kinds.setdefault(rule.kind, []).append(rule)
    return kinds


def test_the_list_of_families_is_public() -> None:
    assert family_names() == (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "kimi_k2",
        "llama",
        "llama4_text",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
    )
    instances = set(family_names()) - {"kimi_k2"}  # which has the modules of deepseek_v3
    assert CONFIGS.keys() == EXPECTED.keys() == instances


@pytest.mark.parametrize("heads_per_block", [None, 1])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_matrix_is_as_written_by_hand(model_type: str, heads_per_block: int | None) -> None:
    expected = EXPECTED[model_type]
    wanted = {**expected.whole, **(expected.per_head if heads_per_block else {})}
    layout = Layout.from_model(tiny(model_type), heads_per_block=heads_per_block)
    kinds = _by_kind(layout)
    assert kinds.keys() == {kind for kind in wanted if ".layers.2." not in kind}
    for kind, rules in kinds.items():
        for rule in rules:
            assert _matrices(rule) == wanted.get(rule.name, wanted[kind]), rule.name


@pytest.mark.parametrize("heads_per_block", [None, 1])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_parameter_is_covered_and_none_is_guessed(
    model_type: str, heads_per_block: int | None
) -> None:
    model = tiny(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = Layout.from_model(model, heads_per_block=heads_per_block)
    assert list(layout) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        rule = layout[name]
        assert rule.shape == tuple(parameter.shape)
        assert not rule.guessed
        assert rule.reason
        assert (rule.spec is None) == (rule.algorithm == "adamw")
        if parameter.dim() < 2:
            assert rule.algorithm == "adamw"
        if rule.spec is not None:
            views = rule.spec.views(parameter)
            assert sum(view.tensor.numel() for view in views) == parameter.numel()
            assert rule.matrices == tuple(v.shape for v in views for _ in range(v.count))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_base_models_without_a_head_are_known_too(model_type: str) -> None:
    model = tiny(model_type)
    inner = next(child for _, child in model.named_children())
    whole, alone = Layout.from_model(model), Layout.from_model(inner)
    prefix = next(name for name, _ in model.named_children())
    for name, rule in alone.items():
        assert rule.spec == whole[f"{prefix}.{name}"].spec


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm_moe_dsa", "glm4_moe_lite"])
@pytest.mark.parametrize(
    ("heads_per_block", "mla_components", "q_b", "kv_b"),
    [
        (1, False, {(12, 24): 4}, {(20, 16): 4}),
        (2, False, {(24, 24): 2}, {(40, 16): 2}),
        (4, False, {(48, 24): 1}, {(80, 16): 1}),
        (9, False, {(48, 24): 1}, {(80, 16): 1}),
        (1, True, {(8, 24): 4, (4, 24): 4}, {(8, 16): 4, (12, 16): 4}),
        (2, True, {(16, 24): 2, (8, 24): 2}, {(16, 16): 2, (24, 16): 2}),
        (None, True, {(32, 24): 1, (16, 24): 1}, {(32, 16): 1, (48, 16): 1}),
    ],
)
def test_every_mla_up_projection_is_cut_and_nothing_else(
    model_type: str,
    heads_per_block: int | None,
    mla_components: bool,
    q_b: Matrices,
    kv_b: Matrices,
) -> None:
    model = tiny(model_type)
    layout = Layout.from_model(
        model, heads_per_block=heads_per_block, mla_components=mla_components
    )
    plain = Layout.from_model(model)
    for name, rule in layout.items():
        if name.endswith("self_attn.q_b_proj.weight"):
            assert _matrices(rule) == q_b
        elif name.endswith("self_attn.kv_b_proj.weight"):
            assert _matrices(rule) == kv_b
        else:
            assert rule == plain[name]


def test_mla_head_rows_are_the_heads_rows() -> None:
    model = tiny("glm_moe_dsa")
    weight = model.get_parameter("model.layers.1.self_attn.kv_b_proj.weight").detach()
    rule = Layout.from_model(model, 1, mla_components=True)[
        "model.layers.1.self_attn.kv_b_proj.weight"
    ]
    assert rule.spec is not None
    key, value = rule.spec.views(weight)
    heads = weight.view(4, 20, 16)
    assert torch.equal(key.tensor.reshape(4, 8, 16), heads[:, :8])
    assert torch.equal(value.tensor.reshape(4, 12, 16), heads[:, 8:])


@pytest.mark.parametrize(
    ("heads_per_block", "query", "key"),
    [
        (1, {(10, 32): 4}, {(10, 32): 2}),
        (2, {(20, 32): 2}, {(20, 32): 1}),
        (4, {(40, 32): 1}, {(20, 32): 1}),
        (64, {(40, 32): 1}, {(20, 32): 1}),
    ],
)
def test_grouped_queries_are_cut_by_their_own_heads(
    heads_per_block: int, query: Matrices, key: Matrices
) -> None:
    layout = Layout.from_model(tiny("qwen3_moe"), heads_per_block)
    prefix = "model.layers.0.self_attn."
    assert _matrices(layout[prefix + "q_proj.weight"]) == query
    assert _matrices(layout[prefix + "k_proj.weight"]) == key
    assert _matrices(layout[prefix + "v_proj.weight"]) == key
    if heads_per_block >= 4:
        assert layout[prefix + "q_proj.weight"].spec == BlockSpec.whole()
    exceeded = heads_per_block > 2
    assert ("exceeds them" in layout[prefix + "k_proj.weight"].reason) == exceeded


def test_gated_attention_keeps_query_and_gate_of_each_block_apart() -> None:
    model = tiny("qwen3_next")
    name = "model.layers.1.self_attn.q_proj.weight"
    weight = model.get_parameter(name).detach()
    rule = Layout.from_model(model, heads_per_block=2)[name]
    assert _matrices(rule) == {(20, 32): 4}
    assert rule.spec is not None
    query, gate = rule.spec.views(weight)
    # As the forward does it: (heads, 2 * head_dim), then halves.
    heads = weight.view(4, 2, 10, 32)
    assert torch.equal(query.tensor.reshape(2, 20, 32), heads[:, 0].reshape(2, 20, 32))
    assert torch.equal(gate.tensor.reshape(2, 20, 32), heads[:, 1].reshape(2, 20, 32))


def test_delta_net_projections_are_cut_as_the_model_reorders_them() -> None:
    model = tiny("qwen3_next")
    block = model.get_submodule("model.layers.0.linear_attn")
    layout = Layout.from_model(model, heads_per_block=1)
    qkvz = block.in_proj_qkvz.weight.detach()
    ba = block.in_proj_ba.weight.detach()
    # The module's own reordering, applied to the identity: columns of the input stand for rows.
    parts = block.fix_query_key_value_ordering(qkvz.T[None], ba.T[None])
    wanted = [part.reshape(32, -1).T for part in parts]
    got = []
    for name, weight in (("in_proj_qkvz", qkvz), ("in_proj_ba", ba)):
        spec = layout[f"model.layers.0.linear_attn.{name}.weight"].spec
        assert spec is not None
        for view in spec.views(weight):
            got += list(view.tensor.reshape(view.count, view.rows, view.columns))
    assert [tuple(m.shape) for m in got] == [(16, 32)] * 2 + [(24, 32)] * 2 + [(4, 32)] * 2
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_neox_heads_are_interleaved_as_the_model_chunks_them() -> None:
    model = tiny("gpt_neox")
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    weight = model.get_parameter(name).detach()
    spec = Layout.from_model(model)[name].spec
    assert spec is not None
    parts = [view.tensor.reshape(32, 32) for view in spec.views(weight)]
    chunks = weight.view(4, 3, 8, 32).unbind(1)
    assert all(
        torch.equal(part, chunk.reshape(32, 32)) for part, chunk in zip(parts, chunks, strict=True)
    )


_Read = Callable[[Tensor], Sequence[Tensor]]


@pytest.mark.parametrize(
    ("model_type", "name", "read"),
    [
        # Each as the module's own forward reads its weight.
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", lambda w: w.split([32, 16, 16])),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", lambda w: w.chunk(2)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", lambda w: w.T.split(32)),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", lambda w: [w.T]),
        (
            "qwen3_5_text",
            "model.layers.0.linear_attn.in_proj_qkv.weight",
            lambda w: w.split([16, 16, 24]),
        ),
        ("deepseek_v4", "model.layers.0.self_attn.o_a_proj.weight", lambda w: w.chunk(2)),
        (
            "mixtral",
            "model.layers.0.mlp.experts.gate_up_proj",
            lambda w: [half for expert in w for half in expert.chunk(2)],
        ),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts.gate_up_proj",
            lambda w: [expert[:, half::2].T for expert in w for half in (0, 1)],
        ),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts.down_proj",
            lambda w: [expert.T for expert in w],
        ),
        (
            "llama4_text",
            "model.layers.0.feed_forward.experts.gate_up_proj",
            lambda w: [half.T for expert in w for half in expert.chunk(2, dim=-1)],
        ),
    ],
)
def test_fused_and_transposed_weights_are_cut_as_the_model_reads_them(
    model_type: str, name: str, read: _Read
) -> None:
    model = tiny(model_type)
    weight = model.get_parameter(name).detach()
    if weight.unique().numel() < 3:  # some experts start from constants
        weight = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    spec = Layout.from_model(model)[name].spec
    assert spec is not None
    got = [
        m.mT if view.transposed else m
        for view in spec.views(weight)
        for m in view.tensor.reshape(view.count, view.rows, view.columns)
    ]
    wanted = read(weight)
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("model_type", "name", "matrices"),
    [
        ("llama", "model.layers.0.self_attn.o_proj.weight", {(32, 20): 2}),
        ("glm_moe_dsa", "model.layers.0.self_attn.o_proj.weight", {(32, 24): 2}),
        ("gpt_neox", "gpt_neox.layers.0.attention.dense.weight", {(32, 16): 2}),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", {(32, 16): 2}),
    ],
)
def test_the_output_projection_is_cut_by_head_columns_on_request(
    model_type: str, name: str, matrices: Matrices
) -> None:
    model = tiny(model_type)
    cut = Layout.from_model(model, heads_per_block=2, cut_output=True)
    assert _matrices(cut[name]) == matrices
    whole = Layout.from_model(model, heads_per_block=2)
    assert len(whole[name].matrices) == 1
    assert {n: r for n, r in cut.items() if r.spec != whole[n].spec}.keys() == {
        n for n in cut if n.endswith(name.rpartition(".0.")[2])
    }


def test_published_names_of_kimi_k2_read_the_table_of_deepseek_v3() -> None:
    config = SimpleNamespace(model_type="kimi_k2", **CONFIGS["deepseek_v3"])
    shapes = {n: tuple(p.shape) for n, p in tiny("deepseek_v3").named_parameters()}
    kimi = Layout.from_shapes(shapes, config=config, heads_per_block=1)
    assert kimi == Layout.from_model(tiny("deepseek_v3"), heads_per_block=1)


def test_experts_that_are_modules_of_their_own_are_whole_matrices() -> None:
    """Checkpoints keep one tensor an expert; names of Mixtral and of the others."""
    config = SimpleNamespace(model_type="mixtral", **CONFIGS["mixtral"])
    names = [
        *(
            f"model.layers.0.mlp.experts.{e}.{p}_proj.weight"
            for e in (0, 1)
            for p in ("up", "gate")
        ),
        *(f"model.layers.0.block_sparse_moe.experts.0.w{i}.weight" for i in (1, 2, 3)),
    ]
    layout = Layout.from_shapes(dict.fromkeys(names, (48, 32)), config=config)
    assert [rule.matrices for rule in layout.values()] == [((48, 32),)] * len(names)
    assert not any(rule.guessed for rule in layout.values())


def test_vision_language_configs_are_read_by_their_text_part() -> None:
    from transformers import AutoModelForImageTextToText, Qwen3_5MoeConfig

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    config = Qwen3_5MoeConfig(text_config=CONFIGS["qwen3_5_moe_text"], vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    with pytest.warns(UserWarning, match=r"visual\.blocks\.\*\.attn\.qkv"):
        layout = Layout.from_model(model)
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    assert _matrices(layout[name]) == {(40, 32): 2}
    # Fused q|k|v of the vision tower, by name and shape.
    assert _matrices(layout["model.visual.blocks.0.attn.qkv.weight"]) == {(16, 16): 3}
    with pytest.raises(
        ValueError, match=r"^model\.visual\.blocks\.0\.attn\.qkv\.weight: got heads"
    ):
        Layout.from_model(model, heads_per_block=1)
    with pytest.warns(UserWarning, match="visual"):
        cut = Layout.from_model(
            model, heads_per_block=1, overrides={"*.visual.*.attn.qkv.weight": "muon"}
        )
    assert _matrices(cut[name]) == {(10, 32): 8}
