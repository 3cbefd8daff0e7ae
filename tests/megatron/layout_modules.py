"""Real Megatron-Core modules, each built as one rank of many builds it, and what is counted by hand.

The weights hold the numbers of their elements in Megatron's own whole weight. So the pieces of all ranks
tell themselves which part of it they are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from muonloom.integrations.megatron.layout import Described, describe
from muonloom.layout import Rule

HIDDEN = 12
LATENT = {
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 5,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
}
Matrix = list[list[int]]
Rows = Sequence[Sequence[int]]
Build = Callable[[ProcessGroupCollection], nn.Module]


class Ranks:
    """A process group as far as constructors ask: how many ranks there are, and which this one is."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class NoTracker:
    """Random numbers of no device."""

    def fork(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let constructors find process groups of one rank, and no device."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        for module in (common, mamba_mixer):
            patch.setattr(module, "get_cuda_rng_tracker", NoTracker)
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def process_groups(**ranks: Any) -> ProcessGroupCollection:
    names = ("tp", "pp", "cp", "ep", "expt_tp", "expt_dp", "dp", "dp_cp", "embd", "tp_cp", "tp_ep")
    return ProcessGroupCollection(**{name: ranks.get(name, Ranks()) for name in names})


def number(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view_as(weight))


def config_of(kind: type = TransformerConfig, **settings: Any) -> Any:
    defaults = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 8,
        "use_cpu_initialization": True,
        "init_method": number,
        "output_layer_init_method": number,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
    }
    return kind(**{**defaults, **settings})


class CoreAttention(nn.Module):
    """Plain attention, in the shapes that Megatron's attention modules ask for."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        found = F.scaled_dot_product_attention(*heads_first, enable_gqa=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def self_attention(groups: ProcessGroupCollection, **settings: Any) -> SelfAttention:
    return SelfAttention(
        config_of(**settings),
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        pg_collection=groups,
    )


def cross_attention(groups: ProcessGroupCollection) -> CrossAttention:
    linear = partial(ColumnParallelLinear, tp_group=groups.tp)
    return CrossAttention(
        config_of(kv_channels=4),
        CrossAttentionSubmodules(
            linear_q=linear,
            linear_kv=linear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
        ),
        layer_number=1,
        pg_collection=groups,
    )


def latent_attention(
    groups: ProcessGroupCollection, kind: type = MLASelfAttention, **settings: Any
) -> Any:
    column = ModuleSpec(module=ColumnParallelLinear, params={"tp_group": groups.tp})
    settings = {"multi_latent_attention": True, "rope_type": "rope", **LATENT, **settings}
    return kind(
        config_of(MLATransformerConfig, **settings),
        MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            linear_qkv_down_proj=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        pg_collection=groups,
    )


def mlp_of(groups: ProcessGroupCollection, **settings: Any) -> MLP:
    return MLP(
        config_of(**settings),
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ffn_hidden_size=8,
        tp_group=groups.tp,
    )


class GroupedLinear(nn.Module):
    """The parameters of Transformer Engine's grouped linear layer, marked by Megatron's own function."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        mode: str,
        config: TransformerConfig,
        init_method: Callable[[Tensor], None],
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        tp = pg_collection.expt_tp
        for index in range(num_gemms):
            whole = torch.empty(output_size, input_size)
            init_method(whole)
            piece = whole.chunk(tp.size(), dim=int(mode == "row"))[tp.rank()]
            self.register_parameter(f"weight{index}", nn.Parameter(piece.clone()))
        is_apart = config.expert_model_parallel_size > 1
        transformer_engine._set_expert_parameter_attributes(self, mode, is_apart)

    def forward(self, tokens: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        weights = self.parameters()
        pairs = zip(tokens.split(counts), weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in pairs]), None


def grouped_experts(groups: ProcessGroupCollection, **settings: Any) -> TEGroupedMLP:
    defaults = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 8,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "expert_model_parallel_size": groups.ep.size(),
    }
    return TEGroupedMLP(
        4 // groups.ep.size(),
        config_of(**{**defaults, **settings}),
        GroupedMLPSubmodules(
            linear_fc1=partial(GroupedLinear, mode="column"),
            linear_fc2=partial(GroupedLinear, mode="row"),
        ),
        pg_collection=groups,
    )


def gpt(groups: ProcessGroupCollection, *, stage: int | None = None, **settings: Any) -> GPTModel:
    """Build a model, or what one of two virtual pipeline stages has of it."""
    config = config_of(gated_linear_unit=True, moe_token_dispatcher_type="allgather", **settings)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    prediction = None
    if config.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    is_first, is_last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    return GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=16,
        pre_process=is_first and stage in (None, 0),
        post_process=is_last and stage in (None, 1),
        mtp_block_spec=prediction,
        vp_stage=stage,
        pg_collection=groups,
    )


def pieces_of(build: Build, name: str, *, tp: int = 1, **options: Any) -> tuple[Rule, Tensor]:
    """Return the rule, and the pieces of all ranks, one after the other."""
    found: list[Described] = []
    for rank in range(tp):
        groups = process_groups(tp=Ranks(tp, rank))
        layout, described = describe([build(groups)], pg_collection=groups, **options)
        found += [each for each in described if each.name == name]
    pieces = [each.parameter.detach() for each in found]
    dim = found[0].cut_dim
    assert (dim is None) == (found[0].group is None)
    whole = pieces[0] if dim is None else torch.cat(pieces, dim)
    assert layout[name].shape == found[0].shape == tuple(whole.shape)
    return layout[name], whole


def cut_as(rule: Rule, whole: Tensor) -> list[Matrix]:
    assert rule.spec is not None
    found = []
    for view in rule.spec.views(whole):
        batch = view.tensor.reshape(view.count, view.rows, view.columns)
        found += [(matrix.T if view.transposed else matrix).int().tolist() for matrix in batch]
    return sorted(found)


def of_rows(parts: Rows, width: int) -> list[Matrix]:
    return sorted(
        [[row * width + column for column in range(width)] for row in rows] for rows in parts
    )


def of_columns(parts: Rows, shape: Sequence[int]) -> list[Matrix]:
    height, width = shape
    return sorted(
        [[row * width + c for c in columns] for row in range(height)] for columns in parts
    )


def runs_of(*sizes: int) -> list[range]:
    stops = list(itertools.accumulate(sizes))
    return [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def blocks_of(heads: Rows, per_block: int | None) -> list[list[int]]:
    size = min(per_block or len(heads), len(heads))
    starts = range(0, len(heads), size)
    return [[row for head in heads[start : start + size] for row in head] for start in starts]
