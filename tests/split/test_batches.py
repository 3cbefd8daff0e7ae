"""Blocks of all layers in few batches, contiguous there, and each as if it were alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom
import muonloom.compute
from choosing import pairwise
from layout.tiny import fresh
from muonloom import Layout
from split.support import (
    EXACT,
    FP32_TOLERANCE,
    gradients_of,
    mla_sample,
    relative,
    updates,
    with_gradients,
)

# All sizes are powers of two, so that ns_batch_bytes can be a multiple of every matrix' bytes.
POWERS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
}
# kv_a_proj_with_mqa has 8 + 4 rows, the one shape that is no power of two: 12·32·4 bytes divide this.
BATCH_BYTES = 3 * 64 * 32 * 4
FP32_BYTES = 4


def stepped(model: torch.nn.Module, **options: Any) -> muonloom.Muon:
    """Step once, with a gradient for the indexer too, so that every matrix takes part."""
    opt = muonloom.Muon(model.named_parameters(), adamw_lr=1e-3, **EXACT, **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    opt.step()
    return opt


def expected_calls(layout: Layout, batch_bytes: int | None) -> int:
    """Sum of ceil(bytes ÷ batch bytes) over the shapes of the matrices; of 1 without a limit."""
    sizes: dict[tuple[int, int], int] = {}
    for rule in layout.values():
        for m, n in rule.matrices:
            sizes[m, n] = sizes.get((m, n), 0) + m * n * FP32_BYTES
    return sum(1 if batch_bytes is None else math.ceil(s / batch_bytes) for s in sizes.values())


@pytest.mark.parametrize(
    ("batch_bytes", "depth", "k"), pairwise([None, BATCH_BYTES], [2, 6], [None, 1, 2, 4, 8])
)
def test_calls_are_the_bytes_of_a_shape_over_the_batch_bytes(
    k: int | None, depth: int, batch_bytes: int | None
) -> None:
    model = fresh("glm_moe_dsa", num_hidden_layers=depth, **POWERS)
    layout = Layout.from_model(model, heads_per_block=k)
    opt = stepped(model, layout=layout, ns_batch_bytes=batch_bytes or "auto")
    assert opt.last_step["ns_calls"] == expected_calls(layout, batch_bytes)
    assert sum(count for _, count in opt.last_step["matrices"]) == sum(
        len(rule.matrices) for rule in layout.values() if rule.algorithm == "muon"
    )


def test_calls_do_not_grow_with_depth_nor_with_the_cut() -> None:
    """Without a limit reached there is a call a shape; cutting may add two shapes, never a call a block."""
    calls: dict[tuple[int | None, int], int] = {}
    for k in (None, 1, 2, 4, 8):
        for depth in (2, 6):
            # Sizes that no two kinds of matrix share, whatever k is: then every k has as many shapes.
            model = fresh(
                "glm_moe_dsa",
                num_hidden_layers=depth,
                num_attention_heads=8,
                num_key_value_heads=8,
                q_lora_rank=26,
                kv_lora_rank=14,
            )
            layout = Layout.from_model(model, heads_per_block=k)
            calls[k, depth] = stepped(model, layout=layout).last_step["ns_calls"]
    assert len(set(calls.values())) == 1


@pytest.mark.parametrize(
    "cut",
    [
        {"heads_per_block": 1},
        {"heads_per_block": 2, "mla_components": True},
        {"heads_per_block": 2, "mla_components": True, "cut_output": True},
    ],
    ids=["heads", "components", "columns"],
)
def test_strided_blocks_are_contiguous_in_the_one_workspace(
    cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mla_sample("glm_moe_dsa")
    layout = Layout.from_model(model, **cut)
    seen: list[tuple[tuple[int, ...], int]] = []
    genuine = muonloom.compute.iterate

    def iterate(x: Tensor, recipe: Any, scratch: Tensor) -> Tensor:
        assert x.is_contiguous()
        seen.append((tuple(x.shape), x.untyped_storage().data_ptr()))
        return genuine(x, recipe, scratch)

    strided = {
        rule.name
        for rule in layout.values()
        if rule.spec is not None
        for view in rule.spec.views(model.get_parameter(rule.name))
        if not view.tensor.is_contiguous()
    }
    assert bool(strided) == ("mla_components" in cut)
    monkeypatch.setattr(muonloom.compute, "iterate", iterate)
    updates(gradients_of(model), layout)
    assert len({storage for _, storage in seen}) == 1
    batched = {shape[1:]: shape[0] for shape, _ in seen}
    for rule in layout.values():
        if rule.name in strided:
            # Equal blocks of both layers, in one call.
            for shape in set(rule.matrices):
                count = batched.get(shape, 0) + batched.get(shape[::-1], 0)
                assert count >= 2 * rule.matrices.count(shape)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("components", [False, True])
def test_two_layers_in_a_batch_equal_one_at_a_time(k: int, components: bool) -> None:
    model = mla_sample("glm_moe_dsa")
    gradients = gradients_of(model)
    layout = Layout.from_model(model, heads_per_block=k, mla_components=components)
    together = updates(gradients, layout)
    for layer in (0, 1):
        part = {n: g for n, g in gradients.items() if n.startswith(f"model.layers.{layer}.")}
        for name, update in updates(part, layout).items():
            if gradients[name] is not None:
                assert relative(together[name], update) < FP32_TOLERANCE


@pytest.mark.parametrize("seed", [0, 1])
def test_a_trained_step_is_finite_and_reports_every_head(seed: int) -> None:
    model = fresh("glm_moe_dsa", num_attention_heads=8, num_key_value_heads=8)
    layout = Layout.from_model(model, heads_per_block=1)
    opt = muonloom.Muon(
        model.named_parameters(), layout=layout, adjust_lr_fn="match_rms_adamw", **EXACT
    )
    for step in range(3):
        with_gradients(model, seed=10 * seed + step)
        opt.step()
        opt.drain()
        heads = opt.last_step["heads"]
        assert {kind.split(".")[-2] for kind in heads} == {"q_b_proj", "kv_b_proj"}
        assert all(entry["blocks"] == 16 for entry in heads.values())
        assert all(entry["momentum_spread"] > 1 for entry in heads.values())
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
