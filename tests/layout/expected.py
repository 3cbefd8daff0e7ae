"""What each family's layout must be, written out by hand from `tiny.CONFIGS`.

A kind maps to its algorithm: None for AdamW, else the matrices {(out, in): how many} of one
parameter. `per_head` lists only what `heads_per_block=1` changes. `@.` is `model.layers.*.`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Matrices = dict[tuple[int, int], int]


@dataclass(frozen=True)
class Expected:
    whole: dict[str, Matrices | None]
    per_head: dict[str, Matrices] = field(default_factory=dict)


def _full(table: dict) -> dict:
    return {kind.replace("@.", "model.layers.*."): value for kind, value in table.items()}


def _expected(whole: dict, per_head: dict) -> Expected:
    return Expected(_full(whole), _full(per_head))


ENDS = {"model.embed_tokens.weight": None, "lm_head.weight": None}
MLP = {
    "@.mlp.gate_proj.weight": {(48, 32): 1},
    "@.mlp.up_proj.weight": {(48, 32): 1},
    "@.mlp.down_proj.weight": {(32, 48): 1},
}
# 4 query heads and 2 key/value heads of 10 (GQA) or of 8 (SMALL).
GQA = {
    "@.self_attn.q_proj.weight": {(40, 32): 1},
    "@.self_attn.k_proj.weight": {(20, 32): 1},
    "@.self_attn.v_proj.weight": {(20, 32): 1},
    "@.self_attn.o_proj.weight": {(32, 40): 1},
}
GQA_HEADS = {
    "@.self_attn.q_proj.weight": {(10, 32): 4},
    "@.self_attn.k_proj.weight": {(10, 32): 2},
    "@.self_attn.v_proj.weight": {(10, 32): 2},
}
SMALL = {
    "@.self_attn.q_proj.weight": {(32, 32): 1},
    "@.self_attn.k_proj.weight": {(16, 32): 1},
    "@.self_attn.v_proj.weight": {(16, 32): 1},
    "@.self_attn.o_proj.weight": {(32, 32): 1},
}
SMALL_HEADS = {
    "@.self_attn.q_proj.weight": {(8, 32): 4},
    "@.self_attn.k_proj.weight": {(8, 32): 2},
    "@.self_attn.v_proj.weight": {(8, 32): 2},
}
GATED = {**GQA, "@.self_attn.q_proj.weight": {(40, 32): 2}}
GATED_HEADS = {**GQA_HEADS, "@.self_attn.q_proj.weight": {(10, 32): 8}}
MLA = {
    "@.self_attn.q_a_proj.weight": {(24, 32): 1},
    "@.self_attn.q_b_proj.weight": {(48, 24): 1},
    "@.self_attn.kv_a_proj_with_mqa.weight": {(20, 32): 1},
    "@.self_attn.kv_b_proj.weight": {(80, 16): 1},
    "@.self_attn.o_proj.weight": {(32, 48): 1},
}
MLA_HEADS = {
    "@.self_attn.q_b_proj.weight": {(12, 24): 4},
    "@.self_attn.kv_b_proj.weight": {(20, 16): 4},
}
INDEXER = {
    "@.self_attn.indexer.wq_b.weight": {(16, 24): 1},
    "@.self_attn.indexer.wk.weight": {(8, 32): 1},
    "@.self_attn.indexer.weights_proj.weight": {(2, 32): 1},
}
ROUTER = {"@.mlp.gate.weight": {(3, 32): 1}}
# Three experts, of width 20 or (BIG) of 48.
EXPERTS = {
    **ROUTER,
    "@.mlp.experts.gate_up_proj": {(20, 32): 6},
    "@.mlp.experts.down_proj": {(32, 20): 3},
}
BIG_EXPERTS = {
    **ROUTER,
    "@.mlp.experts.gate_up_proj": {(48, 32): 6},
    "@.mlp.experts.down_proj": {(32, 48): 3},
}
SHARED = {
    "@.mlp.shared_experts.gate_proj.weight": {(20, 32): 1},
    "@.mlp.shared_experts.up_proj.weight": {(20, 32): 1},
    "@.mlp.shared_experts.down_proj.weight": {(32, 20): 1},
}
QWEN_SHARED = {
    "@.mlp.shared_expert.gate_proj.weight": {(28, 32): 1},
    "@.mlp.shared_expert.up_proj.weight": {(28, 32): 1},
    "@.mlp.shared_expert.down_proj.weight": {(32, 28): 1},
    "@.mlp.shared_expert_gate.weight": None,
}
# 2 key heads of 8, 4 value heads of 6: query 16, key 16, value 24, gate 24 rows.
DELTA = {"@.linear_attn.conv1d.weight": None, "@.linear_attn.out_proj.weight": {(32, 24): 1}}
DELTA_FUSED = {
    **DELTA,
    "@.linear_attn.in_proj_qkvz.weight": {(16, 32): 2, (24, 32): 2},
    "@.linear_attn.in_proj_ba.weight": {(4, 32): 2},
}
DELTA_APART = {
    **DELTA,
    "@.linear_attn.in_proj_qkv.weight": {(16, 32): 2, (24, 32): 1},
    "@.linear_attn.in_proj_z.weight": {(24, 32): 1},
    "@.linear_attn.in_proj_b.weight": {(4, 32): 1},
    "@.linear_attn.in_proj_a.weight": {(4, 32): 1},
}
V4 = {
    **ENDS,
    "@.self_attn.q_a_proj.weight": {(24, 32): 1},
    "@.self_attn.q_b_proj.weight": {(64, 24): 1},
    "@.self_attn.kv_proj.weight": {(16, 32): 1},
    "@.self_attn.o_a_proj.weight": {(10, 32): 2},
    "@.self_attn.o_b_proj.weight": {(32, 20): 1},
    "@.self_attn.compressor.position_bias": None,
    "@.self_attn.compressor.kv_proj.weight": {(32, 32): 1},
    "@.self_attn.compressor.gate_proj.weight": {(32, 32): 1},
    "@.self_attn.compressor.indexer.position_bias": None,
    "@.self_attn.compressor.indexer.kv_proj.weight": {(16, 32): 1},
    "@.self_attn.compressor.indexer.gate_proj.weight": {(16, 32): 1},
    "@.self_attn.compressor.indexer.q_b_proj.weight": {(16, 24): 1},
    "@.self_attn.compressor.indexer.scorer.weights_proj.weight": {(2, 32): 1},
    # The other kind of layer has a compressor of half the width; a full name comes before a kind.
    "model.layers.2.self_attn.compressor.kv_proj.weight": {(16, 32): 1},
    "model.layers.2.self_attn.compressor.gate_proj.weight": {(16, 32): 1},
    "@.attn_hc.fn": {(24, 128): 1},
    "@.ffn_hc.fn": {(24, 128): 1},
    "model.hc_head.hc_fn": {(4, 128): 1},
    **EXPERTS,
    **SHARED,
}
PHI3 = {
    **ENDS,
    "@.self_attn.qkv_proj.weight": {(32, 32): 1, (16, 32): 2},
    "@.self_attn.o_proj.weight": {(32, 32): 1},
    "@.mlp.gate_up_proj.weight": {(48, 32): 2},
    "@.mlp.down_proj.weight": {(32, 48): 1},
}
GPT_NEOX = {
    "gpt_neox.embed_in.weight": None,
    "lm_head.weight": None,
    "gpt_neox.layers.*.attention.query_key_value.weight": {(32, 32): 3},
    "gpt_neox.layers.*.attention.dense.weight": {(32, 32): 1},
    "gpt_neox.layers.*.mlp.dense_h_to_4h.weight": {(48, 32): 1},
    "gpt_neox.layers.*.mlp.dense_4h_to_h.weight": {(32, 48): 1},
}
GPT2 = {
    "transformer.wte.weight": None,
    "transformer.wpe.weight": None,
    "transformer.h.*.attn.c_attn.weight": {(32, 32): 3},
    "transformer.h.*.attn.c_proj.weight": {(32, 32): 1},
    "transformer.h.*.mlp.c_fc.weight": {(128, 32): 1},
    "transformer.h.*.mlp.c_proj.weight": {(32, 128): 1},
}
GPT_OSS = {
    **ENDS,
    **GQA,
    "@.mlp.router.weight": {(3, 32): 1},
    "@.mlp.experts.gate_up_proj": {(48, 32): 6},
    "@.mlp.experts.gate_up_proj_bias": None,
    "@.mlp.experts.down_proj": {(32, 48): 3},
    "@.mlp.experts.down_proj_bias": None,
}
LLAMA4 = {
    **ENDS,
    **GQA,
    "@.feed_forward.router.weight": {(3, 32): 1},
    "@.feed_forward.experts.gate_up_proj": {(48, 32): 6},
    "@.feed_forward.experts.down_proj": {(32, 48): 3},
    "@.feed_forward.shared_expert.gate_proj.weight": {(48, 32): 1},
    "@.feed_forward.shared_expert.up_proj.weight": {(48, 32): 1},
    "@.feed_forward.shared_expert.down_proj.weight": {(32, 48): 1},
}
V2 = {
    **{kind: value for kind, value in MLA.items() if ".q_" not in kind},
    "@.self_attn.q_proj.weight": {(48, 32): 1},
}
V2_HEADS = {
    "@.self_attn.q_proj.weight": {(12, 32): 4},
    "@.self_attn.kv_b_proj.weight": {(20, 16): 4},
}

EXPECTED = {
    "deepseek_v2": _expected({**ENDS, **V2, **MLP, **EXPERTS, **SHARED}, V2_HEADS),
    "deepseek_v3": _expected({**ENDS, **MLA, **MLP, **EXPERTS, **SHARED}, MLA_HEADS),
    "deepseek_v32": _expected({**ENDS, **MLA, **INDEXER, **MLP, **EXPERTS, **SHARED}, MLA_HEADS),
    "deepseek_v4": _expected(V4, {"@.self_attn.q_b_proj.weight": {(16, 24): 4}}),
    "glm4_moe": _expected({**ENDS, **GQA, **MLP, **EXPERTS, **SHARED}, GQA_HEADS),
    "glm4_moe_lite": _expected({**ENDS, **MLA, **MLP, **EXPERTS, **SHARED}, MLA_HEADS),
    "glm_moe_dsa": _expected({**ENDS, **MLA, **INDEXER, **MLP, **EXPERTS, **SHARED}, MLA_HEADS),
    "gpt2": _expected(GPT2, {"transformer.h.*.attn.c_attn.weight": {(8, 32): 12}}),
    "gpt_neox": _expected(
        GPT_NEOX, {"gpt_neox.layers.*.attention.query_key_value.weight": {(8, 32): 12}}
    ),
    "gpt_oss": _expected(GPT_OSS, GQA_HEADS),
    "llama": _expected({**ENDS, **GQA, **MLP}, GQA_HEADS),
    "llama4_text": _expected(LLAMA4, GQA_HEADS),
    "minimax_m2": _expected({**ENDS, **GQA, **BIG_EXPERTS}, GQA_HEADS),
    "mistral": _expected({**ENDS, **GQA, **MLP}, GQA_HEADS),
    "mixtral": _expected({**ENDS, **GQA, **BIG_EXPERTS}, GQA_HEADS),
    "olmoe": _expected({**ENDS, **SMALL, **BIG_EXPERTS}, SMALL_HEADS),
    "phi3": _expected(PHI3, {"@.self_attn.qkv_proj.weight": {(8, 32): 8}}),
    "qwen2": _expected({**ENDS, **SMALL, **MLP}, SMALL_HEADS),
    "qwen2_moe": _expected({**ENDS, **SMALL, **EXPERTS, **QWEN_SHARED}, SMALL_HEADS),
    "qwen3": _expected({**ENDS, **GQA, **MLP}, GQA_HEADS),
    "qwen3_5_moe_text": _expected(
        {**ENDS, **GATED, **DELTA_APART, **EXPERTS, **QWEN_SHARED}, GATED_HEADS
    ),
    "qwen3_5_text": _expected({**ENDS, **GATED, **DELTA_APART, **MLP}, GATED_HEADS),
    "qwen3_moe": _expected({**ENDS, **GQA, **MLP, **EXPERTS}, GQA_HEADS),
    "qwen3_next": _expected(
        {**ENDS, **GATED, **DELTA_FUSED, **EXPERTS, **QWEN_SHARED}, GATED_HEADS
    ),
}
