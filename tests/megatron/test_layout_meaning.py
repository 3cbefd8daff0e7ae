"""What the matrices of a layout are in the functions of real Megatron-Core modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layout_modules import (
    HIDDEN,
    cross_attention,
    grouped_experts,
    latent_attention,
    one_process,
    process_groups,
    self_attention,
)
from muonloom.integrations.megatron.layout import describe
from muonloom.layout import MatrixView


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_process():
        yield


def _heads_as(module: nn.Module, name: str, matrices: Sequence[int], **options: Any) -> None:
    """Put matrix number `matrices[i]` of the layout in place of number `i`."""
    layout, described = describe([module], pg_collection=process_groups(), **options)
    [weight] = [each.parameter.data for each in described if each.name == name]
    spec = layout[name].spec
    assert spec is not None
    old = [matrix for view in spec.views(weight.clone()) for matrix in _each(view)]
    new = [matrix for view in spec.views(weight) for matrix in _each(view)]
    assert len(matrices) == len(new)
    for place, source in zip(new, matrices, strict=True):
        place.copy_(old[source])


def _each(view: MatrixView) -> list[Tensor]:
    shape = view.tensor.shape[: view.batch_dims]
    return [view.tensor[index] for index in itertools.product(*map(range, shape))]


def _draw(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def _attended(module: nn.Module, *states: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(5, 2, HIDDEN, generator=generator)
    with torch.no_grad():
        output, _ = module(hidden, None, *states)
    return output


@pytest.mark.parametrize("gate", [False, True])
def test_heads_may_change_places(gate: bool) -> None:
    settings = {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 4}
    attention = self_attention(process_groups(), attention_output_gate=gate, **settings)
    _draw(attention)
    before = _attended(attention)
    # Group 2 comes first, then 0, then 1; in each group, the second query head before the first.
    groups, heads = [2, 0, 1], [5, 4, 1, 0, 3, 2]
    queries = heads + [6 + head for head in heads] * gate
    others = [len(queries) + group for group in groups] + [len(queries) + 3 + g for g in groups]
    _heads_as(attention, "linear_qkv.weight", [*queries, *others], heads_per_block=1)
    assert not torch.allclose(_attended(attention), before, atol=1e-2)
    _heads_as(attention, "linear_proj.weight", heads, heads_per_block=1, cut_output=True)
    torch.testing.assert_close(_attended(attention), before, rtol=1e-4, atol=1e-4)


def test_heads_of_cross_attention_may_change_places() -> None:
    attention = cross_attention(process_groups())
    _draw(attention)
    states = torch.randn(7, 2, HIDDEN, generator=torch.Generator().manual_seed(7))
    before = _attended(attention, states)
    heads = [2, 0, 3, 1]
    _heads_as(attention, "linear_q.weight", heads, heads_per_block=1)
    _heads_as(attention, "linear_kv.weight", heads + [4 + h for h in heads], heads_per_block=1)
    assert not torch.allclose(_attended(attention, states), before, atol=1e-2)
    _heads_as(attention, "linear_proj.weight", heads, heads_per_block=1, cut_output=True)
    torch.testing.assert_close(_attended(attention, states), before, rtol=1e-4, atol=1e-4)


def test_heads_of_latent_attention_may_change_places() -> None:
    attention = latent_attention(process_groups())
    _draw(attention)
    before = _attended(attention)
    heads = [2, 0, 3, 1]
    both = [*heads, *(4 + head for head in heads)]
    cut: dict[str, Any] = {"heads_per_block": 1, "mla_components": True}
    _heads_as(attention, "linear_q_up_proj.weight", both, **cut)
    _heads_as(attention, "linear_kv_up_proj.weight", both, **cut)
    assert not torch.allclose(_attended(attention), before, atol=1e-2)
    _heads_as(attention, "linear_proj.weight", heads, heads_per_block=1, cut_output=True)
    torch.testing.assert_close(_attended(attention), before, rtol=1e-4, atol=1e-4)


def test_a_position_free_part_of_latent_heads_is_apart_from_values() -> None:
    """Keys and queries may change their sign together; neither values nor rotated parts do."""
    attention = latent_attention(process_groups())
    _draw(attention)
    before = _attended(attention)
    layout, described = describe([attention], pg_collection=process_groups(), mla_components=True)
    for name in ("linear_q_up_proj.weight", "linear_kv_up_proj.weight"):
        [weight] = [each.parameter.data for each in described if each.name == name]
        next(iter(layout[name].spec.views(weight))).tensor.neg_()  # type: ignore[union-attr]
    torch.testing.assert_close(_attended(attention), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", [None, 2])
def test_gate_and_up_are_what_the_experts_multiply(run: int | None) -> None:
    experts = grouped_experts(process_groups(), moe_mlp_glu_interleave_size=run)
    _draw(experts)
    tokens = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(8))
    counts, probabilities = torch.tensor([2, 2, 2, 2]), torch.ones(8)
    layout, described = describe([experts], pg_collection=process_groups())
    expected = []
    for expert, part in enumerate(tokens.split(2)):
        weight, down = (described[expert + shift].parameter.detach() for shift in (0, 4))
        spec = layout[f"linear_fc1.weight{expert}"].spec
        assert spec is not None
        gate, up = (m.flatten(0, -2) for view in spec.views(weight) for m in _each(view))
        expected.append(F.silu(part @ gate.T) * (part @ up.T) @ down.T)
    with torch.no_grad():
        found, _ = experts(tokens, counts, probabilities)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)
