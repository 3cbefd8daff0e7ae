"""Tiny Megatron-Core models that any number of ranks starts from the same weights.

def job(rank, tiny):
    initialize(tiny)
    model = build(tiny)
    optimizer = get_optimizer(optimizer_config(tiny), model)
    return train(tiny, model, optimizer, steps=2), gathered(model)

[(losses, weights), *_] = run_megatron(2, job, Tiny(kind="moe", expert_parallel=2))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from megatron import shim
from megatron.pieces import pieces, weight

VOCABULARY = 64
LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model, and over which ranks it is cut.

    Attributes:
        kind: "dense" (grouped queries), "gated" (also a gate on the attention's output, norms of queries
            and keys), "mla", "moe" (a dense layer, then layers of four experts and a shared one),
            "mla_moe".
        tensor_parallel: ranks.
        expert_parallel: ranks.
        expert_tensor_parallel: ranks; None: as tensor_parallel.
        pipeline_parallel: ranks.
        num_chunks: model chunks of each pipeline rank; more than one need pipeline_parallel > 1.
        num_layers: in all chunks.
        num_mtp_layers: layers that predict further tokens.
        tied: whether the output layer has the embedding's weight.
        num_microbatches: into which a rank's sequences are divided.
        dtype: of weights; float32 or bfloat16.
        recompute: all layers in backward passes.
        sequence_parallel: whether what is between tensor-parallel layers is cut along the sequence. If not,
            Megatron-Core refuses to train experts on tensor-parallel ranks, and gives the norm of MLA's
            queries the sum of equal gradients.
        buffers: "all_reduce"; "layer_wise": gradients are scattered, to each rank whole matrices and parts
            of all else; "whole": to each rank whole parameters.
        seed: of weights and data.
        scale: by which widths are multiplied.
    """

    kind: str = "dense"
    tensor_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    pipeline_parallel: int = 1
    num_chunks: int = 1
    num_layers: int = 2
    num_mtp_layers: int = 0
    tied: bool = False
    num_microbatches: int = 1
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    sequence_parallel: bool = False
    buffers: str = "all_reduce"
    seed: int = 0
    scale: int = 1

    @property
    def is_latent(self) -> bool:
        return self.kind.startswith("mla")

    @property
    def has_experts(self) -> bool:
        return self.kind.endswith("moe")


# -- building ---------------------------------------------------------------------------------------------


def initialize(tiny: Tiny) -> None:
    """Make Megatron-Core's process groups, the first or other ones; first of all in each rank."""
    shim.apply()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tiny.tensor_parallel,
        pipeline_model_parallel_size=tiny.pipeline_parallel,
        virtual_pipeline_model_parallel_size=tiny.num_chunks if tiny.num_chunks > 1 else None,
        expert_model_parallel_size=tiny.expert_parallel,
        expert_tensor_parallel_size=tiny.expert_tensor_parallel,
    )
    model_parallel_cuda_manual_seed(tiny.seed + 1)


def build(tiny: Tiny) -> list[DistributedDataParallel]:
    """Return this rank's model chunks, with the weights that `weight` gives, wrapped as for training."""
    config = model_config(tiny)
    chunks = [_chunk(tiny, config, stage) for stage in range(tiny.num_chunks)]
    if tiny.dtype == torch.bfloat16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    with torch.no_grad():
        for piece in pieces(chunks):
            whole = weight(piece.name, piece.whole_shape, tiny.seed)
            piece.parameter.copy_(piece.of(whole))
    return [_wrapped(tiny, config, chunk) for chunk in chunks]


def model_config(tiny: Tiny) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": tiny.num_layers,
        "hidden_size": 32 * tiny.scale,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48 * tiny.scale,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_output_gate": tiny.kind == "gated",
        "qk_layernorm": tiny.kind == "gated" or tiny.is_latent,
        "tensor_model_parallel_size": tiny.tensor_parallel,
        "pipeline_model_parallel_size": tiny.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": tiny.num_chunks if tiny.num_chunks > 1 else None,
        "expert_model_parallel_size": tiny.expert_parallel,
        "expert_tensor_parallel_size": tiny.expert_tensor_parallel,
        "sequence_parallel": tiny.sequence_parallel,
        "mtp_num_layers": tiny.num_mtp_layers or None,
        "bf16": tiny.dtype == torch.bfloat16,
        "params_dtype": tiny.dtype,
        "pipeline_dtype": tiny.dtype,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        # Fused ones are for CUDA.
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if tiny.recompute:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if tiny.has_experts:
        settings |= {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 24 * tiny.scale,
            "moe_shared_expert_intermediate_size": 24 * tiny.scale,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [0] + [1] * (tiny.num_layers - 1),
            "moe_token_dispatcher_type": "allgather",
        }
    if not tiny.is_latent:
        return TransformerConfig(**settings)
    latent = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "rope_type": "rope",
    }
    return MLATransformerConfig(**{**settings, **latent, "num_query_groups": 4})


class Norm(nn.RMSNorm):
    """A norm that Megatron-Core has beside sequence parallelism too, unlike those of torch."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class LatentCore(DotProductAttention):
    """Megatron-Core's own attention, for heads of which values have another size than keys."""

    def __init__(
        self, *args: Any, k_channels: int = 0, v_channels: int = 0, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentAttention(MLASelfAttention):
    """Megatron-Core's own, where the keys' shared part has its gradient from the heads of all ranks.

    Without Transformer Engine the down projection is cut over tensor-parallel ranks, and Megatron-Core
    0.19.2 has each rank send back there what its own heads alone make of the part that all heads share.
    """

    def get_query_key_value_tensors(self, *args: Any, **settings: Any) -> Any:
        query, key, *others = super().get_query_key_value_tensors(*args, **settings)
        sizes = [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim]
        own, shared = key.split(sizes, dim=-1)
        shared = copy_to_tensor_model_parallel_region(shared, self.pg_collection.tp)
        return query, torch.cat([own, shared], dim=-1), *others


def _chunk(tiny: Tiny, config: TransformerConfig, stage: int) -> GPTModel:
    vp_stage = stage if tiny.num_chunks > 1 else None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    block = replace(
        block, layer_norm=Norm, layer_specs=[_layer(config, spec) for spec in block.layer_specs]
    )
    mtp = None
    if tiny.num_mtp_layers:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=vp_stage)
    for spec in mtp.layer_specs if mtp else ():
        spec.submodules = replace(spec.submodules, enorm=Norm, hnorm=Norm, layer_norm=Norm)
    return GPTModel(
        config,
        block,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=rank == 0 and stage == 0,
        post_process=rank == tiny.pipeline_parallel - 1 and stage == tiny.num_chunks - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tiny.tied,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def _layer(config: TransformerConfig, spec: Any) -> Any:
    attention = spec.submodules.self_attention
    if config.multi_latent_attention:
        norms = {"q_layernorm": Norm, "kv_layernorm": Norm}
        parts = replace(attention.submodules, core_attention=LatentCore, **norms)
        attention = replace(attention, module=LatentAttention, submodules=parts)
    elif config.qk_layernorm:
        parts = replace(attention.submodules, q_layernorm=Norm, k_layernorm=Norm)
        attention = replace(attention, submodules=parts)
    norms = {"input_layernorm": Norm, "pre_mlp_layernorm": Norm}
    return replace(spec, submodules=replace(spec.submodules, self_attention=attention, **norms))


def _wrapped(tiny: Tiny, config: TransformerConfig, chunk: nn.Module) -> DistributedDataParallel:
    scatters = tiny.buffers != "all_reduce"
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=scatters, bucket_size=2000
    )
    layout = None
    if scatters:
        tag_params_for_buffer_routing([chunk])
        if tiny.buffers == "whole":
            for parameter in chunk.parameters():
                parameter.is_managed_by_layer_wise_optimizer = True
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(chunk.parameters()),
            ddp.bucket_size,
            parallel_state.get_data_parallel_world_size(),
            ddp,
            parallel_state.get_expert_data_parallel_world_size(),
        )
    return DistributedDataParallel(config, ddp, chunk, full_param_layout=layout)
