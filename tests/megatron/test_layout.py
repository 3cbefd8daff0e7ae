"""Layouts of real Megatron-Core modules, against rows and columns counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import FusedSharedExpertMLP
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention
from torch import nn

from megatron.layout_modules import (
    HIDDEN,
    Ranks,
    blocks_of,
    config_of,
    cross_attention,
    cut_as,
    grouped_experts,
    latent_attention,
    mlp_of,
    of_columns,
    of_rows,
    one_process,
    pieces_of,
    process_groups,
    runs_of,
    self_attention,
)
from muonloom.integrations.megatron.layout import describe


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_process():
        yield


def _qkv_heads(heads: int, groups: int, size: int, *, gate: bool) -> dict[str, list[range]]:
    """Rows of each head: in turn for each query group its queries, their gates, its key, its value."""
    per_group = heads // groups
    order = ["query"] * per_group + ["gate"] * per_group * gate + ["key", "value"]
    found: dict[str, list[range]] = {part: [] for part in order}
    for part, rows in zip(order * groups, runs_of(*[size] * len(order) * groups), strict=True):
        found[part].append(rows)
    return found


@pytest.mark.parametrize(
    ("heads", "groups", "gate", "tp", "per_block"),
    [
        (4, 4, False, 1, None),
        (4, 2, False, 2, None),
        (8, 4, True, 1, None),
        (8, 4, False, 2, 1),
        (8, 4, True, 2, 2),
        (8, 4, False, 1, 4),
        (8, 4, False, 1, 8),
        (8, 2, False, 4, 1),  # more ranks than query groups
        (8, 2, True, 4, 2),
        (6, 2, False, 1, 3),
        (6, 1, False, 2, 2),
    ],
)
def test_fused_attention_weight(
    heads: int, groups: int, gate: bool, tp: int, per_block: int | None
) -> None:
    settings = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": 4}
    build = partial(self_attention, attention_output_gate=gate, **settings)
    rule, whole = pieces_of(build, "linear_qkv.weight", tp=tp, heads_per_block=per_block)
    parts = _qkv_heads(heads, groups, 4, gate=gate)
    blocks = [block for part in parts.values() for block in blocks_of(part, per_block)]
    assert cut_as(rule, whole) == of_rows(blocks, HIDDEN)


@pytest.mark.parametrize(("tp", "per_block"), [(1, 2), (2, 1), (4, 4)])
def test_attention_output_is_cut_by_head_columns_on_request_alone(tp: int, per_block: int) -> None:
    build = partial(self_attention, num_query_groups=2, kv_channels=4)
    for cut in (False, True):
        options = {"tp": tp, "heads_per_block": per_block, "cut_output": cut}
        rule, whole = pieces_of(build, "linear_proj.weight", **options)
        parts = blocks_of(runs_of(4, 4, 4, 4), per_block if cut else None)
        assert cut_as(rule, whole) == of_columns(parts, whole.shape)


@pytest.mark.parametrize(("tp", "per_block"), [(1, None), (2, 1), (2, 2)])
def test_cross_attention_weights(tp: int, per_block: int | None) -> None:
    rule, whole = pieces_of(cross_attention, "linear_q.weight", tp=tp, heads_per_block=per_block)
    assert cut_as(rule, whole) == of_rows(blocks_of(runs_of(4, 4, 4, 4), per_block), HIDDEN)
    rule, whole = pieces_of(cross_attention, "linear_kv.weight", tp=tp, heads_per_block=per_block)
    both = runs_of(*[4] * 8)
    expected = blocks_of(both[0::2], per_block) + blocks_of(both[1::2], per_block)
    assert cut_as(rule, whole) == of_rows(expected, HIDDEN)


@pytest.mark.parametrize(
    ("tp", "per_block", "components"),
    [(1, None, False), (2, 1, False), (2, 2, True), (1, None, True)],
)
@pytest.mark.parametrize(
    ("name", "q_lora_rank", "sizes", "width"),
    [
        ("linear_q_up_proj", 8, (4, 2), 8),
        ("linear_q_proj", None, (4, 2), HIDDEN),
        ("linear_kv_up_proj", 8, (4, 5), 6),
    ],
)
def test_latent_up_projections(
    name: str,
    q_lora_rank: int | None,
    sizes: tuple[int, int],
    width: int,
    tp: int,
    per_block: int | None,
    components: bool,
) -> None:
    build = partial(latent_attention, q_lora_rank=q_lora_rank)
    options = {"heads_per_block": per_block, "mla_components": components}
    rule, whole = pieces_of(build, f"{name}.weight", tp=tp, **options)
    if components:
        both = runs_of(*sizes * 4)
        expected = blocks_of(both[0::2], per_block) + blocks_of(both[1::2], per_block)
    else:
        expected = blocks_of(runs_of(*[sum(sizes)] * 4), per_block)
    assert cut_as(rule, whole) == of_rows(expected, width)


@pytest.mark.parametrize("tp", [1, 2])
def test_latent_down_projections_are_whole(tp: int) -> None:
    for name in ("linear_q_down_proj.weight", "linear_kv_down_proj.weight"):
        rule, whole = pieces_of(
            latent_attention, name, tp=tp, heads_per_block=1, mla_components=True
        )
        assert cut_as(rule, whole) == of_rows([range(8)], HIDDEN)


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_latent_down_projection(tp: int) -> None:
    build = partial(latent_attention, kind=FusedMLASelfAttention)
    rule, whole = pieces_of(build, "linear_qkv_down_proj.weight", tp=tp, heads_per_block=1)
    # Each rank takes the first 8 / tp of its rows as queries, the other (6 + 2) / tp as keys and values.
    both = runs_of(*[8 // tp] * 2 * tp)
    expected = blocks_of(both[0::2], None) + blocks_of(both[1::2], None)
    assert cut_as(rule, whole) == of_rows(expected, HIDDEN)


def test_output_of_latent_attention_is_cut_by_value_heads() -> None:
    options = {"heads_per_block": 2, "cut_output": True}
    rule, whole = pieces_of(latent_attention, "linear_proj.weight", tp=2, **options)
    assert cut_as(rule, whole) == of_columns([range(10), range(10, 20)], whole.shape)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gated_mlp(tp: int) -> None:
    build = partial(mlp_of, gated_linear_unit=True, add_bias_linear=True)
    rule, whole = pieces_of(build, "linear_fc1.weight", tp=tp)
    assert cut_as(rule, whole) == of_rows([range(8), range(8, 16)], HIDDEN)
    rule, whole = pieces_of(build, "linear_fc2.weight", tp=tp)
    assert cut_as(rule, whole) == of_rows([range(HIDDEN)], 8)
    rule, whole = pieces_of(build, "linear_fc1.bias", tp=tp)
    assert rule.algorithm == "adamw"
    assert rule.shape == (16,)


@pytest.mark.parametrize("tp", [1, 2])
def test_mlp_without_a_gate_is_whole(tp: int) -> None:
    rule, whole = pieces_of(mlp_of, "linear_fc1.weight", tp=tp)
    assert cut_as(rule, whole) == of_rows([range(8)], HIDDEN)


def test_gate_and_up_of_a_gated_mlp_whose_weight_is_not_strided() -> None:
    build = partial(mlp_of, gated_linear_unit=True, use_kitchen=True)
    rule, whole = pieces_of(build, "linear_fc1.weight", tp=2)
    expected = [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]
    assert cut_as(rule, whole) == of_rows(expected, HIDDEN)


@pytest.mark.parametrize("run", [None, 2])
def test_grouped_experts(run: int | None) -> None:
    pieces, found = [], []
    for rank in range(2):
        groups = process_groups(ep=Ranks(2, 1), expt_tp=Ranks(2, rank))
        build = grouped_experts(groups, moe_mlp_glu_interleave_size=run)
        layout, described = describe([build], pg_collection=groups)
        pieces.append(described[1].parameter.detach())
        found.append(described)
    assert [each.name for each in found[0]] == [
        "linear_fc1.weight2",
        "linear_fc1.weight3",
        "linear_fc2.weight2",
        "linear_fc2.weight3",
    ]
    assert all(each.is_expert and each.group is groups.expt_tp for each in found[1])
    assert [each.cut_dim for each in found[0]] == [0, 0, 1, 1]
    # A grouped weight is cut as it lies, and each rank takes half of its rows, or every other run, as gate.
    runs = runs_of(*[run or 4] * (16 // (run or 4)))
    expected = [blocks_of(runs[part::2], None)[0] for part in (0, 1)]
    rule = layout["linear_fc1.weight3"]
    assert cut_as(rule, torch.cat(pieces)) == of_rows(expected, HIDDEN)
    assert layout["linear_fc2.weight3"].matrices == ((HIDDEN, 8),)


def test_shared_expert_of_interleaved_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedSharedExpertMLP, "_validate_fused_grouped_swiglu", lambda self: None)

    def build(groups: ProcessGroupCollection) -> nn.Module:
        config = config_of(
            gated_linear_unit=True,
            moe_shared_expert_intermediate_size=8,
            moe_shared_expert_glu_interleave_size=2,
        )
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return FusedSharedExpertMLP(config, linears, gate=True, pg_collection=groups)

    rule, whole = pieces_of(build, "linear_fc1.weight")
    runs = runs_of(*[2] * 8)
    assert cut_as(rule, whole) == of_rows([blocks_of(runs[i::2], None)[0] for i in (0, 1)], HIDDEN)
    rule, _ = pieces_of(build, "gate_weight")
    assert (rule.algorithm, rule.reason) == ("adamw", "shared-expert gate: one row")


@pytest.mark.parametrize("tp", [1, 2])
def test_delta_net(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "HAVE_FLA", True)

    def build(groups: ProcessGroupCollection) -> nn.Module:
        config = config_of(
            linear_conv_kernel_dim=3,
            linear_key_head_dim=4,
            linear_value_head_dim=5,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            deterministic_mode=True,
        )
        parts = common.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=IdentityOp, out_proj=RowParallelLinear
        )
        return gdn.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)

    # Query, key, value, gate, write strength and decay, of each rank.
    sizes = [size // tp for size in (8, 8, 20, 20, 4, 4)]
    rule, whole = pieces_of(build, "in_proj.weight", tp=tp)
    runs = runs_of(*sizes * tp)
    expected = [blocks_of(runs[part::6], None)[0] for part in range(6)]
    assert cut_as(rule, whole) == of_rows(expected, HIDDEN)
    assert pieces_of(build, "conv1d.weight", tp=tp)[0].algorithm == "adamw"
    assert pieces_of(build, "out_proj.weight", tp=tp)[0].matrices == ((HIDDEN, 20),)


@pytest.mark.parametrize("tp", [1, 2])
def test_state_space(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mamba_mixer, mamba_context_parallel):
        monkeypatch.setattr(module, "HAVE_EINOPS", True)
    monkeypatch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", True)

    def build(groups: ProcessGroupCollection) -> nn.Module:
        config = config_of(mamba_state_dim=4, mamba_head_dim=4, mamba_num_groups=2)
        parts = mamba_mixer.MambaMixerSubmodules(
            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
        )
        return mamba_mixer.MambaMixer(config, parts, 16, rmsnorm=False, pg_collection=groups)

    # Gate, input, B, C and step, of each rank.
    sizes = [size // tp for size in (32, 32, 8, 8, 8)]
    rule, whole = pieces_of(build, "in_proj.weight", tp=tp)
    runs = runs_of(*sizes * tp)
    expected = [blocks_of(runs[part::5], None)[0] for part in range(5)]
    assert cut_as(rule, whole) == of_rows(expected, 16)
    assert pieces_of(build, "conv1d_weight", tp=tp)[0].algorithm == "adamw"


@pytest.mark.parametrize(
    ("role", "algorithm"),
    [
        *dict.fromkeys(("fc1_latent_proj", "fc2_latent_proj", "eh_proj"), "muon").items(),
        *dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), "muon").items(),
        ("conv1d", "adamw"),
    ],
)
def test_what_a_module_calls_its_weight_decides(role: str, algorithm: str) -> None:
    holder = MegatronModule(config_of())
    holder.add_module(role, nn.Linear(4, 6))
    layout, _ = describe([nn.ModuleDict({"a": holder})], pg_collection=process_groups())
    rule = layout[f"a.{role}.weight"]
    assert (rule.algorithm, rule.guessed) == (algorithm, False)
    foreign = nn.ModuleDict({role: nn.Linear(4, 6)})
    layout, _ = describe([foreign], pg_collection=process_groups())
    assert layout[f"{role}.weight"].guessed
