"""Rules by name, shape and module class, for parameters that no family table describes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from muonloom.layout.blocks import BlockSpec
from muonloom.layout.rules import Rule

_EMBEDDING = re.compile(
    r"(^|\.)(?!patch_)(w[tpx]e|emb|embeds?|embedder|embeddings?|embed_\w+|\w+_emb|\w+_embed"
    r"|\w+_embeddings?)(\.|$)|^shared\.weight$"
)
_HEAD = re.compile(
    r"(^|\.)(\w+_head|head|heads|output|output_layer|embed_out|score|scores|classifier"
    r"|qa_outputs|cls\.\w+\.decoder)\.weight$"
)
_IN_A_STACK = re.compile(r"(^|\.)\d+\.")
_BIAS = re.compile(r"(^|[._])bias(es)?$")
_TOKEN = re.compile(r"(^|[._])tokens?$")
_FUSED_QKV = re.compile(r"(^|\.)(qkv|qkv_proj|to_qkv|Wqkv|in_proj_weight)(\.weight)?$")
_GATE_UP = re.compile(r"(^|\.)gate_up_proj(\.weight)?$")


@dataclass(frozen=True, kw_only=True)
class ExpertFlags:
    """How an experts module says that its stacked weights are stored."""

    is_transposed: bool
    is_concatenated: bool
    has_gate: bool


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What the owning module tells about a parameter; all empty where there is no model."""

    adamw: str = ""
    """Why AdamW is certain; a family's table still comes first."""
    integer: bool = False
    convolution: bool = False
    transposed: bool = False
    experts: ExpertFlags | None = None


def guess(name: str, shape: tuple[int, ...], hints: Hints | None = None) -> Rule:
    """Decide without a table; `guessed` is set where the parameter could be meant otherwise."""
    hints = Hints() if hints is None else hints
    certain = hints.adamw
    if hints.integer:
        certain = "not a floating-point parameter"
    elif len(shape) < 2:
        certain = "scalar or vector"
    reason = certain or _adamw_by_name(name, shape, hints)
    spec = None
    if not reason:
        spec, reason = _by_shape(name, shape, hints)
    return Rule(
        name=name,
        shape=shape,
        algorithm="adamw" if spec is None else "muon",
        spec=spec,
        reason=reason,
        guessed=not certain,
    )


def whole_by_shape(shape: tuple[int, ...]) -> BlockSpec:
    """A matrix, stacked matrices (3-D) or a convolution kernel (4-D and more)."""
    if len(shape) == 2:
        return BlockSpec.whole()
    return BlockSpec.stacked() if len(shape) == 3 else BlockSpec.conv()


def _adamw_by_name(name: str, shape: tuple[int, ...], hints: Hints) -> str:
    if _BIAS.search(name):
        return "bias, by name"
    if _TOKEN.search(name):
        return "learned token, by name"
    if _EMBEDDING.search(name):
        return "embedding, by name"
    if _HEAD.search(name) and not _IN_A_STACK.search(name):
        return "output head, by name"
    if len(shape) == 3 and shape[1] == 1 and (hints.convolution or "conv" in name):
        return "depthwise convolution: a filter per channel, by shape"
    return ""


def _by_shape(name: str, shape: tuple[int, ...], hints: Hints) -> tuple[BlockSpec, str]:
    if hints.experts is not None and len(shape) == 3:
        return _experts(name, hints.experts), "stacked experts, by the module's flags"
    if hints.convolution:
        return BlockSpec.conv(), "convolution kernel, by module"
    if hints.transposed and len(shape) == 2:
        return BlockSpec.transposed(), "stored (in, out), by module"
    if len(shape) == 2 and _FUSED_QKV.search(name) and shape[0] == 3 * shape[1]:
        parts = (shape[1],) * 3
        return BlockSpec.rows(*parts), "query, key and value, apart, by name and shape"
    if len(shape) == 2 and _GATE_UP.search(name) and shape[0] % 2 == 0:
        return BlockSpec.gate_up(), "gate and up, apart, by name"
    words = {2: "matrix, by shape", 3: "stacked experts, by shape"}
    return whole_by_shape(shape), words.get(len(shape), "convolution kernel, by shape")


def _experts(name: str, flags: ExpertFlags) -> BlockSpec:
    spec = BlockSpec.whole()
    if flags.has_gate and _GATE_UP.search(name):
        spec = BlockSpec.gate_up(interleaved=not flags.is_concatenated)
    return BlockSpec.stacked(BlockSpec.transposed(spec) if flags.is_transposed else spec)
