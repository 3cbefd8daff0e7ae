"""Grouped-query, fused and gated attention of real tiny models, cut by heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from muonloom import BlockSpec, Layout
from split.support import FP32_TOLERANCE, alone, gradients_of, relative, sample, updates

HEADS, KV_HEADS, HEAD = 4, 2, 10  # of the tiny grouped-query models
PREFIX = "model.layers.0.self_attn."


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_each_projection_is_cut_by_its_own_heads(model_type: str, k: int) -> None:
    model = sample(model_type)
    gradients = gradients_of(model)
    layout = Layout.from_model(model, heads_per_block=k)
    step = updates(gradients, layout)
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        name = f"{PREFIX}{part}_proj.weight"
        gradient = gradients[name]
        assert gradient is not None
        rows = HEAD * min(k, heads)
        assert gradient.shape[0] == HEAD * heads
        for got, block in zip(step[name].split(rows), gradient.split(rows), strict=True):
            assert relative(got, alone(block)) < FP32_TOLERANCE
        assert ("exceeds them" in layout[name].reason) == (k > heads)


Cut = Callable[[Tensor], Sequence[Tensor]]


def _gated(weight: Tensor) -> Sequence[Tensor]:
    heads = weight.view(HEADS, 2, HEAD, -1)
    return [heads[h, half] for h in range(HEADS) for half in (0, 1)]


@pytest.mark.parametrize(
    ("model_type", "name", "cut"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", lambda w: w.split(8)),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", lambda w: w.split(8)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", lambda w: w.T.split(8)),
        ("qwen3_next", "model.layers.1.self_attn.q_proj.weight", _gated),
    ],
)
def test_fused_and_gated_projections_are_cut_by_head(model_type: str, name: str, cut: Cut) -> None:
    # GPT-2 has a table of positions, and the tiny one is shorter than the batch.
    model = sample(model_type, **({"n_positions": 64} if model_type == "gpt2" else {}))
    gradient = gradients_of(model)[name]
    assert gradient is not None
    step = updates({name: gradient}, Layout.from_model(model, heads_per_block=1))[name]
    for got, block in zip(cut(step), cut(gradient), strict=True):
        assert relative(got, alone(block)) < FP32_TOLERANCE


@pytest.mark.parametrize("k", [1, 2, 4])
def test_sections_and_groups_hold_the_same_heads(k: int) -> None:
    """[all Q | all K | all V] and (Q, Q, K, V) a group give the same updates after permutation."""
    model = sample("phi3")
    name, rows = "model.layers.0.self_attn.qkv_proj.weight", 8
    gradient = gradients_of(model)[name]
    assert gradient is not None
    heads = torch.arange(HEADS + 2 * KV_HEADS)
    # Queries 0-3, keys 4-5, values 6-7; a group holds its two queries, its key and its value.
    grouped = torch.tensor([0, 1, 4, 6, 2, 3, 5, 7])
    assert torch.equal(grouped.sort().values, heads)
    order = (grouped[:, None] * rows + torch.arange(rows)).flatten()
    spec = BlockSpec.heads(
        KV_HEADS,
        components=(
            (rows * HEADS // KV_HEADS, BlockSpec.heads(HEADS, heads_per_block=k)),
            (rows, BlockSpec.heads(KV_HEADS, heads_per_block=k)),
            (rows, BlockSpec.heads(KV_HEADS, heads_per_block=k)),
        ),
    )
    sections = updates({name: gradient}, Layout.from_model(model, heads_per_block=k))
    groups = updates(
        {name: gradient[order]}, Layout.from_shapes({name: (64, 32)}, overrides={name: spec})
    )
    assert relative(groups[name], sections[name][order]) < FP32_TOLERANCE
    assert relative(groups[name], sections[name]) > 0.1


@pytest.mark.parametrize("k", [1, 2])
def test_interleaved_heads_of_a_real_model_equal_the_sectioned_ones(k: int) -> None:
    model = sample("gpt_neox")
    name, rows = "gpt_neox.layers.0.attention.query_key_value.weight", 8
    gradient = gradients_of(model)[name]
    assert gradient is not None
    order = torch.arange(3 * HEADS * rows).view(HEADS, 3, rows).transpose(0, 1).flatten()
    part = BlockSpec.heads(HEADS, heads_per_block=k)
    spec = BlockSpec.rows(*((HEADS * rows, part),) * 3)
    interleaved = updates({name: gradient}, Layout.from_model(model, heads_per_block=k))
    sections = updates(
        {name: gradient[order]}, Layout.from_shapes({name: (96, 32)}, overrides={name: spec})
    )
    assert relative(sections[name], interleaved[name][order]) < FP32_TOLERANCE
