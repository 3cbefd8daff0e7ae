"""One data table per model family: a glob on the parameter's name, how it is cut, and why.

The first glob that matches decides. Names and shapes were taken from the modules of `transformers`
and are checked against tiny instances of its classes. Vectors (biases, norms) never reach a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from muonloom.errors import complaint
from muonloom.layout.blocks import BlockSpec
from muonloom.layout.describe import (
    Description,
    Fixed,
    Groups,
    HeadColumns,
    HeadRows,
    Part,
    RowBlocks,
    Sections,
    Transposed,
)

Entry = Description | BlockSpec | str
Table = Mapping[str, Entry | tuple[Entry, str]]


@dataclass(frozen=True)
class FamilyRule:
    """One line of a table. `description` is None for AdamW."""

    glob: str
    description: Description | None
    reason: str


_WHOLE, _ADAMW = "muon", "adamw"
_HEAD_DIM = "head_dim"
_Q, _KV = HeadRows("num_attention_heads"), HeadRows("num_key_value_heads")

_ENDS: Table = {
    "*embed_tokens.weight": (_ADAMW, "embedding"),
    "*lm_head.weight": (_ADAMW, "output head"),
    "*.shared_head.head.weight": (_ADAMW, "output head of a prediction layer"),
}
_OUTPUT: Table = {
    "*.self_attn.o_proj.weight": (
        HeadColumns("num_attention_heads", _HEAD_DIM),
        "attention output",
    ),
}
_ATTENTION: Table = {
    "*.self_attn.q_proj.weight": (_Q, "query"),
    "*.self_attn.k_proj.weight": (_KV, "key"),
    "*.self_attn.v_proj.weight": (_KV, "value"),
    **_OUTPUT,
}
_GATED_ATTENTION: Table = {
    **_ATTENTION,
    "*.self_attn.q_proj.weight": (
        HeadRows("num_attention_heads", parts=(_HEAD_DIM, _HEAD_DIM)),
        "query and gate, apart",
    ),
}
_MLA: Table = {
    "*.self_attn.indexer.*": (_WHOLE, "sparse-attention indexer, whole"),
    "*.self_attn.q_a_proj.weight": (_WHOLE, "query down-projection, whole"),
    **dict.fromkeys(
        ("*.self_attn.q_b_proj.weight", "*.self_attn.q_proj.weight"),
        (
            HeadRows(
                "num_attention_heads", parts=("qk_nope_head_dim", "qk_rope_head_dim"), joint=True
            ),
            "query up-projection",
        ),
    ),
    "*.self_attn.kv_a_proj_with_mqa.weight": (_WHOLE, "key/value down-projection, whole"),
    "*.self_attn.kv_b_proj.weight": (
        HeadRows("num_attention_heads", parts=("qk_nope_head_dim", "v_head_dim"), joint=True),
        "key/value up-projection",
    ),
    "*.self_attn.o_proj.weight": (
        HeadColumns("num_attention_heads", "v_head_dim"),
        "attention output",
    ),
}
_DELTA_QKV = (Part("linear_key_head_dim * linear_num_key_heads"),) * 2
_DELTA_VALUES = "linear_num_value_heads // linear_num_key_heads"
_DELTA_NET: Table = {
    "*.linear_attn.conv1d.weight": (_ADAMW, "depthwise convolution: a filter per channel"),
    "*.linear_attn.in_proj_qkvz.weight": (
        Groups(
            "linear_num_key_heads",
            (Part("linear_key_head_dim"),) * 2
            + (Part(f"linear_value_head_dim * {_DELTA_VALUES}"),) * 2,
        ),
        "delta-net query, key, value and gate, apart",
    ),
    "*.linear_attn.in_proj_ba.weight": (
        Groups("linear_num_key_heads", (Part(_DELTA_VALUES),) * 2),
        "delta-net write strength and decay, apart",
    ),
    "*.linear_attn.in_proj_qkv.weight": (
        Sections((*_DELTA_QKV, Part("linear_value_head_dim * linear_num_value_heads"))),
        "delta-net query, key and value, apart",
    ),
    "*.linear_attn.in_proj_?.weight": (_WHOLE, "delta-net projection"),
    "*.linear_attn.out_proj.weight": (_WHOLE, "delta-net output"),
}
_MLP: Table = {
    "*.gate_up_proj.weight": (BlockSpec.gate_up(), "gate and up, apart"),
    **dict.fromkeys(
        ("*.gate_proj.weight", "*.up_proj.weight", "*.down_proj.weight"), (_WHOLE, "MLP")
    ),
    **dict.fromkeys(
        ("*.experts.*.w1.weight", "*.experts.*.w2.weight", "*.experts.*.w3.weight"),
        (_WHOLE, "expert"),
    ),
}
_MOE: Table = {
    "*.mlp.gate.weight": (_WHOLE, "router: a hidden matrix"),
    "*.mlp.shared_expert_gate.weight": (_ADAMW, "shared-expert gate: one row"),
    "*.experts.gate_up_proj": (
        BlockSpec.stacked(BlockSpec.gate_up()),
        "stacked experts; gate and up, apart",
    ),
    "*.experts.down_proj": (BlockSpec.stacked(), "stacked experts"),
    **_MLP,
}
_TRANSPOSED_DOWN = BlockSpec.stacked(BlockSpec.transposed())

_DENSE: Table = {**_ENDS, **_ATTENTION, **_MLP}
_MOE_GQA: Table = {**_ENDS, **_ATTENTION, **_MOE}
_MOE_MLA: Table = {**_ENDS, **_MLA, **_MOE}
_QWEN_HYBRID: Table = {**_ENDS, **_GATED_ATTENTION, **_DELTA_NET, **_MOE}

_GPT_OSS: Table = {
    **_ENDS,
    **_ATTENTION,
    "*.mlp.router.weight": (_WHOLE, "router: a hidden matrix"),
    "*.experts.*_bias": (_ADAMW, "expert biases: a vector per expert"),
    "*.experts.gate_up_proj": (
        BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True))),
        "stacked experts, stored (in, out); gate and up interleaved, apart",
    ),
    "*.experts.down_proj": (_TRANSPOSED_DOWN, "stacked experts, stored (in, out)"),
}
_LLAMA4: Table = {
    **_ENDS,
    **_ATTENTION,
    "*.feed_forward.router.weight": (_WHOLE, "router: a hidden matrix"),
    "*.experts.gate_up_proj": (
        BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up())),
        "stacked experts, stored (in, out); gate and up, apart",
    ),
    "*.experts.down_proj": (_TRANSPOSED_DOWN, "stacked experts, stored (in, out)"),
    **_MLP,
}
_DEEPSEEK_V4: Table = {
    **_ENDS,
    "*.position_bias": (_ADAMW, "bias added per position"),
    "*.compressor.*": (_WHOLE, "key/value compressor and its indexer, whole"),
    "*.self_attn.q_a_proj.weight": (_WHOLE, "query down-projection, whole"),
    "*.self_attn.q_b_proj.weight": (_Q, "query up-projection"),
    "*.self_attn.kv_proj.weight": (_WHOLE, "the one key/value head"),
    "*.self_attn.o_a_proj.weight": (RowBlocks("o_groups"), "block-diagonal: a matrix per group"),
    "*.self_attn.o_b_proj.weight": (_WHOLE, "attention output"),
    "*.attn_hc.fn": (_WHOLE, "hyper-connection mixing"),
    "*.ffn_hc.fn": (_WHOLE, "hyper-connection mixing"),
    "*hc_head.hc_fn": (_WHOLE, "hyper-connection mixing"),
    **_MOE,
}
_Q_ROWS, _KV_ROWS = f"num_attention_heads * {_HEAD_DIM}", f"num_key_value_heads * {_HEAD_DIM}"
_PHI3: Table = {
    **_ENDS,
    "*.self_attn.qkv_proj.weight": (
        Sections(
            (
                Part(_Q_ROWS, "num_attention_heads"),
                *(Part(_KV_ROWS, "num_key_value_heads"),) * 2,
            )
        ),
        "query, key and value one below the other, apart",
    ),
    **_OUTPUT,
    **_MLP,
}
_GPT_NEOX: Table = {
    "*embed_in.weight": (_ADAMW, "embedding"),
    "*embed_out.weight": (_ADAMW, "output head"),
    **_ENDS,
    "*.attention.query_key_value.weight": (
        Groups("num_attention_heads", (Part(_HEAD_DIM, "num_attention_heads"),) * 3),
        "query, key and value interleaved by head, apart",
    ),
    "*.attention.dense.weight": (
        HeadColumns("num_attention_heads", _HEAD_DIM),
        "attention output",
    ),
    "*.mlp.dense_h_to_4h.weight": (_WHOLE, "MLP"),
    "*.mlp.dense_4h_to_h.weight": (_WHOLE, "MLP"),
}
_CONV1D = Transposed(Fixed(BlockSpec.whole()))
_GPT2: Table = {
    "*wte.weight": (_ADAMW, "embedding"),
    "*wpe.weight": (_ADAMW, "position embedding"),
    **_ENDS,
    "*.attn.c_attn.weight": (
        Transposed(Sections((Part("hidden_size", "num_attention_heads"),) * 3)),
        "stored (in, out); query, key and value, apart",
    ),
    "*.attn.c_proj.weight": (
        Transposed(HeadColumns("num_attention_heads", _HEAD_DIM)),
        "attention output, stored (in, out)",
    ),
    "*.mlp.c_fc.weight": (_CONV1D, "MLP, stored (in, out)"),
    "*.mlp.c_proj.weight": (_CONV1D, "MLP, stored (in, out)"),
}


def compile_table(table: Table, *, where: str) -> tuple[FamilyRule, ...]:
    """Check a table and bring every line into one form. Raises `TypeError` naming the glob."""
    if not isinstance(table, Mapping) or not table:
        raise TypeError(
            complaint(
                where,
                got=repr(table),
                wanted="a mapping from globs to descriptions",
                remedy="See the layout guide.",
            )
        )
    return tuple(_line(glob, entry, where) for glob, entry in table.items())


def _line(glob: str, entry: object, where: str) -> FamilyRule:
    what, reason = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, "")
    if what == _ADAMW:
        return FamilyRule(glob, None, reason)
    if what == _WHOLE:
        what = BlockSpec.whole()
    if isinstance(what, BlockSpec):
        what = Fixed(what)
    if (
        not isinstance(glob, str)
        or not isinstance(what, Description)
        or not isinstance(reason, str)
    ):
        raise TypeError(
            complaint(
                f"{where}[{glob!r}]",
                got=repr(entry),
                wanted="a description, a BlockSpec, 'muon' or 'adamw', or a pair of one and a reason",
                remedy="Correct the table.",
            )
        )
    return FamilyRule(glob, what, reason)


_BUILT_IN: Mapping[str, Table] = MappingProxyType(
    {
        "deepseek_v2": _MOE_MLA,
        "deepseek_v3": _MOE_MLA,
        "deepseek_v32": _MOE_MLA,
        "deepseek_v4": _DEEPSEEK_V4,
        "glm4_moe": _MOE_GQA,
        "glm4_moe_lite": _MOE_MLA,
        "glm_moe_dsa": _MOE_MLA,
        "gpt2": _GPT2,
        "gpt_neox": _GPT_NEOX,
        "gpt_oss": _GPT_OSS,
        "kimi_k2": _MOE_MLA,
        "llama": _DENSE,
        "llama4_text": _LLAMA4,
        "minimax_m2": _MOE_GQA,
        "mistral": _DENSE,
        "mixtral": _MOE_GQA,
        "olmoe": _MOE_GQA,
        "phi3": _PHI3,
        "qwen2": _DENSE,
        "qwen2_moe": _MOE_GQA,
        "qwen3": _DENSE,
        "qwen3_5_moe_text": _QWEN_HYBRID,
        "qwen3_5_text": _QWEN_HYBRID,
        "qwen3_moe": _MOE_GQA,
        "qwen3_next": _QWEN_HYBRID,
    }
)
_families: dict[str, tuple[FamilyRule, ...]] = {
    name: compile_table(table, where=name) for name, table in _BUILT_IN.items()
}


def register_family(model_type: str, table: Table) -> None:
    """Describe a model family by data, or replace the description of one.

    `model_type` is the config's `model_type`. `table` maps a glob on the canonical parameter name
    to a description (`HeadRows`, `HeadColumns`, `Sections`, `Groups`, `RowBlocks`, `Transposed`), a
    `BlockSpec`, `"muon"` (one whole matrix) or `"adamw"`, alone or as a pair with a short reason.
    The first glob that matches decides. Raises `TypeError` where a line is none of these.
    """
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(
            complaint(
                "model_type", got=repr(model_type), wanted="a name", remedy="Use config.model_type."
            )
        )
    _families[model_type] = compile_table(table, where=model_type)


def family_names() -> tuple[str, ...]:
    """Model types with a table, sorted."""
    return tuple(sorted(_families))


def find_family(*model_types: Any) -> tuple[str, tuple[FamilyRule, ...]] | None:
    """Return the first of `model_types` that has a table, with the table."""
    for model_type in model_types:
        if isinstance(model_type, str) and model_type in _families:
            return model_type, _families[model_type]
    return None
