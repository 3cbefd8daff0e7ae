"""Tiny random instances of the real model classes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_BASE, "head_dim": 10}
_MOE = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
_ROUTED = {**_MOE, "n_routed_experts": 3, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MLA = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_HYBRID = {
    **_GQA,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
_QWEN_MOE = {**_MOE, "num_experts": 3, "shared_expert_intermediate_size": 28}

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_MLA,
        **_ROUTED,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
    "deepseek_v3": {**_MLA, **_ROUTED, "first_k_dense_replace": 1},
    "deepseek_v32": {
        **_MLA,
        **_ROUTED,
        "first_k_dense_replace": 1,
        "index_n_heads": 2,
        "index_head_dim": 8,
    },
    "deepseek_v4": {
        **{key: value for key, value in _BASE.items() if key != "intermediate_size"},
        "head_dim": 16,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 20,
        "num_experts_per_tok": 2,
        "n_routed_experts": 3,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 10,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "glm4_moe": {**_GQA, **_ROUTED, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_MLA, **_ROUTED, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {
        **_MLA,
        **_ROUTED,
        "first_k_dense_replace": 1,
        "index_n_heads": 2,
        "index_head_dim": 8,
    },
    "gpt2": {
        "vocab_size": 64,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": _BASE,
    "gpt_oss": {**_GQA, "num_local_experts": 3},
    "llama": _GQA,
    "llama4_text": {**_GQA, "num_local_experts": 3},
    "minimax_m2": {**_GQA, "num_local_experts": 3},
    "mistral": _GQA,
    "mixtral": {**_GQA, "num_local_experts": 3},
    "olmoe": {**_BASE, "num_experts": 3},
    "phi3": _BASE,
    "qwen2": _BASE,
    "qwen2_moe": {**_BASE, **_QWEN_MOE},
    "qwen3": _GQA,
    "qwen3_5_moe_text": {**_HYBRID, **_QWEN_MOE},
    "qwen3_5_text": _HYBRID,
    "qwen3_moe": {**_GQA, **_MOE, "num_experts": 3, "mlp_only_layers": [0]},
    "qwen3_next": {**_HYBRID, **_QWEN_MOE},
}


@functools.cache
def tiny(model_type: str, **changes: Any) -> nn.Module:
    """The causal LM of a family with random weights; shared by tests, so not to be changed."""
    return fresh(model_type, **changes)


def fresh(model_type: str, **changes: Any) -> nn.Module:
    """The same, made anew."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model
