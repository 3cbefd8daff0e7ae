"""Which matrices each parameter of a Megatron-Core model has, and over which ranks it is cut.

Shapes and specs are those of the whole parameter: the pieces of its tensor-parallel ranks, one after the
other. That is Megatron's own order but where each rank has a piece of each part of a fused weight: a gated
`linear_fc1` is (gate of rank 0, up of rank 0, gate of rank 1, ...). Each module tells the sizes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.shared_experts import FusedSharedExpertMLP
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import nn

from muonloom.errors import complaint
from muonloom.layout import BlockSpec, Groups, HeadColumns, HeadRows, Layout, Part, canonical_name
from muonloom.layout.build import Family, Override, Parameter, build_rules
from muonloom.layout.describe import Description, Dims, Fixed, HeadOptions
from muonloom.layout.families import FamilyRule
from muonloom.layout.guess import Hints
from muonloom.layout.model import model_parameters

Cut = tuple[Description | None, str]
"""How a parameter is cut (None: AdamW), and why; without a cut, name and shape decide."""
Known = dict[str, tuple[Parameter, Cut | None]]

_REASONS = {
    "router": "router: a hidden matrix",
    "linear_fc1": "MLP",
    "linear_fc2": "MLP",
    "fc1_latent_proj": "latent space of experts",
    "fc2_latent_proj": "latent space of experts",
    "eh_proj": "projection of a prediction layer",
    "linear_q_down_proj": "query down-projection, whole",
    "linear_kv_down_proj": "key/value down-projection, whole",
    "linear_wq_b": "sparse-attention indexer, whole",
    "linear_wk": "sparse-attention indexer, whole",
    "linear_weights_proj": "sparse-attention indexer, whole",
    "out_proj": "delta-net or state-space output",
    "gate_weight": "shared-expert gate: one row",
    "conv1d": "depthwise convolution: a filter per channel",
    "conv1d_weight": "depthwise convolution: a filter per channel",
}
_ADAMW = ("gate_weight", "conv1d", "conv1d_weight")


@dataclass(frozen=True, kw_only=True, eq=False)
class Described:
    """One parameter of this rank's chunks.

    Attributes:
        name: the layout's; unique over ranks and chunks.
        parameter: this rank's piece.
        cut_dim: the dimension that is cut over tensor-parallel ranks; None: it is whole here.
        is_expert: whether the ranks with the same weights are the expert-data-parallel ones.
        group: the tensor-parallel ranks that hold the pieces, or None.
    """

    name: str
    parameter: nn.Parameter
    cut_dim: int | None
    is_expert: bool
    group: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        pieces = get_pg_size(self.group)
        sizes = enumerate(self.parameter.shape)
        return tuple(size * pieces if dim == self.cut_dim else size for dim, size in sizes)


def describe(
    model_chunks: Sequence[nn.Module],
    *,
    pg_collection: ProcessGroupCollection,
    heads_per_block: int | None = None,
    mla_components: bool = False,
    cut_output: bool = False,
    overrides: Mapping[str, Override] | None = None,
) -> tuple[Layout, list[Described]]:
    """Describe what is trained in this rank's chunks; the options as in `Layout.from_model`.

    All ranks of the model call it, with the same options, and decide for all parameters of the model: an
    option or override may concern other stages alone. Raises `ValueError`, leading with the name.
    """
    for name in ("gtp_remat", "expt_gtp_remat"):
        if (size := get_pg_size(getattr(pg_collection, name, None))) > 1:
            raise _error(
                f"pg_collection.{name}",
                got=f"weights cut over {size} ranks that rematerialize them",
                wanted="one rank",
                remedy="Leave generalized tensor parallelism (gtp) off.",
            )
    found, known = [], Known()
    for described, hints, cut in _walk(model_chunks, pg_collection):
        found.append(described)
        parameter = Parameter(name=described.name, shape=described.shape, hints=hints)
        known[described.name] = parameter, cut
    options = HeadOptions(
        heads_per_block=heads_per_block, mla_components=mla_components, cut_output=cut_output
    )
    if overrides or options != HeadOptions():
        known = _of_all_stages(known, pg_collection)
    rules = build_rules(
        [parameter for parameter, _ in known.values()],
        # No config: every size is a number.
        family=Family(model_type="megatron", lines=_lines(known), dims=Dims(None)),
        model_type="megatron",
        options=options,
        overrides=overrides or {},
    )
    decided = {rule.name: rule for rule in rules}
    return Layout(decided[described.name] for described in found), found


def _walk(
    model_chunks: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Iterator[tuple[Described, Hints, Cut | None]]:
    seen: set[int] = set()
    for chunk in model_chunks:
        hints = {parameter.name: parameter.hints for parameter in model_parameters(chunk)}
        modules = dict(chunk.named_modules())
        paths = _global_paths(modules)
        for path, module in modules.items():
            above, _, last = path.rpartition(".")
            for attribute, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or not parameter.requires_grad:
                    continue
                seen.add(id(parameter))
                local = canonical_name(f"{path}.{attribute}".lstrip("."))
                # What gives a weight its meaning is the module that calls it `linear_qkv`.
                numbered = re.fullmatch(r"(weight|bias)(\d*)", attribute)
                holder, role = (modules[above], last) if numbered else (module, attribute)
                if numbered and isinstance(holder, TEGroupedMLP):
                    attribute = _of_expert(local, numbered, holder)
                name = canonical_name(f"{paths[path]}.{attribute}".lstrip("."))
                described = _described(name, parameter, groups)
                yield described, hints[local], _cut(described, role, holder)


def _global_paths(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Number layers and experts through all ranks and chunks, by the path of each module."""
    paths = {"": ""}
    for path, module in modules.items():
        above, _, last = path.rpartition(".")
        holder, layer = modules[above.rpartition(".")[0]], getattr(module, "layer_number", None)
        if last.isdigit() and isinstance(layer, int):
            last = str(layer - 1)
        elif last.isdigit() and isinstance(holder, SequentialMLP):
            last = str(_first_expert(holder) + int(last))
        paths[path] = f"{paths[above]}.{last}".lstrip(".")
    return paths


def _first_expert(experts: Any) -> int:
    return int(get_pg_rank(experts.ep_group) * experts.num_local_experts)


def _of_expert(name: str, numbered: re.Match[str], experts: Any) -> str:
    if not numbered[2]:
        raise _error(
            name,
            got="the weights of all experts in one grouped tensor",
            wanted="a parameter for each expert",
            remedy="Set moe_single_grouped_weight=False and moe_single_grouped_bias=False.",
        )
    return f"{numbered[1]}{_first_expert(experts) + int(numbered[2])}"


def _described(name: str, parameter: nn.Parameter, groups: ProcessGroupCollection) -> Described:
    is_expert = not getattr(parameter, "allreduce", True)
    group, dim = None, None
    if getattr(parameter, "tensor_model_parallel", False):
        group_name = "expt_tp" if is_expert else "tp"
        group = getattr(groups, group_name, None)
        dim = getattr(parameter, "partition_dim", None)
        if group is None or dim not in range(min(parameter.dim(), 2)):
            raise _error(
                name,
                got=f"tensor_model_parallel with partition_dim={dim} and group {group}",
                wanted=f"one of its first two dimensions, and pg_collection.{group_name}",
                remedy="Pass the process groups that the model was built with.",
            )
        if group.size() == 1:
            group, dim = None, None
    return Described(name=name, parameter=parameter, cut_dim=dim, is_expert=is_expert, group=group)


def _cut(described: Described, role: str, holder: Any) -> Cut | None:
    """Tell how a parameter is cut; None: by its name and shape."""
    parameter = described.parameter
    if parameter.dim() < 2:
        return None
    is_gated = isinstance(holder, MLP | TEGroupedMLP) and role == "linear_fc1"
    is_gated = is_gated and bool(holder.config.gated_linear_unit)
    stride = getattr(parameter, "partition_stride", 1)
    if stride not in (1, 2 if is_gated else 1):
        raise _error(
            described.name,
            got=f"partition_stride={stride}",
            wanted="1, or 2 for the first layer of a gated MLP",
            remedy="Nothing tells which rows of this weight belong together.",
        )
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return None, "embedding or output layer"
    ranks = get_pg_size(described.group)
    if is_gated:
        return _gated(holder, described.shape[0], ranks)
    if isinstance(holder, Attention) and (cut := _attention(holder, role, ranks)):
        return cut
    # Of one rank: state space (gate, input, B, C, step), delta net (query, key, value, gate, ...).
    parts = getattr(parameter, "partition_sizes", getattr(holder, "in_proj_split_sections", None))
    if role == "in_proj" and parts is not None:
        return _by_rank(ranks, parts), "fused projections, apart"
    if role not in _REASONS or not isinstance(holder, MegatronModule):
        return None
    return None if role in _ADAMW else Fixed(BlockSpec.whole()), _REASONS[role]


def _attention(attention: Any, role: str, ranks: int) -> Cut | None:
    config = attention.config
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    if role == "linear_qkv":
        query, key = Part(heads // groups * size, heads), Part(size, groups)
        gate, word = ((query,), "gate, ") if config.attention_output_gate else ((), "")
        words = f"query, {word}key and value interleaved by query group, apart"
        return Groups(groups, (query, *gate, key, key)), words
    if role == "linear_q":
        return HeadRows(heads), "query"
    if role == "linear_kv":
        return Groups(heads, (Part(size, heads),) * 2), "key and value interleaved by head, apart"
    if role == "linear_proj":
        return HeadColumns(heads, attention.query_projection_size // heads), "attention output"
    if role in ("linear_q_proj", "linear_q_up_proj"):
        parts = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        return HeadRows(heads, parts=parts, joint=True), "query up-projection"
    if role == "linear_kv_up_proj":
        parts = (config.qk_head_dim, config.v_head_dim)
        return HeadRows(heads, parts=parts, joint=True), "key/value up-projection"
    if role == "linear_qkv_down_proj":
        rows = (config.q_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        down = _by_rank(ranks, [size // ranks for size in rows])
        return down, "query and key/value down-projections, apart"
    return None


def _gated(mlp: Any, rows: int, ranks: int) -> Cut:
    run = mlp.config.moe_mlp_glu_interleave_size if isinstance(mlp, TEGroupedMLP) else None
    if isinstance(mlp, FusedSharedExpertMLP):
        run = mlp.config.moe_shared_expert_glu_interleave_size
    if run is not None:
        return _by_rank(max(1, rows // (2 * run)), (run, run)), f"gate and up by {run} rows, apart"
    if ranks == 1:
        return Fixed(BlockSpec.gate_up()), "gate and up, apart"
    return _by_rank(ranks, (rows // ranks // 2,) * 2), "gate and up of each rank, apart"


def _by_rank(times: int, parts: Sequence[int]) -> Description:
    """Rows are `times` times all of these parts; the same part of each time is one matrix."""
    return Fixed(BlockSpec.heads(times, components=parts))


def _of_all_stages(known: Known, groups: ProcessGroupCollection) -> Known:
    for group in (getattr(groups, name, None) for name in ("pp", "ep")):
        if (size := get_pg_size(group)) > 1:
            gathered: list[Any] = [None] * size
            dist.all_gather_object(gathered, known, group=group)
            known = {name: entry for part in gathered for name, entry in part.items()}
    return known


def _lines(known: Known) -> tuple[FamilyRule, ...]:
    """One line for parameters that differ in numbers alone, if they are cut alike."""
    kinds: dict[str, dict[Cut, list[str]]] = {}
    for name, cut in ((name, cut) for name, (_, cut) in known.items() if cut):
        glob = re.sub(r"(?<=\.)\d+(?=\.)|(?<=[a-z])\d+$", "*", name)
        kinds.setdefault(glob, {}).setdefault(cut, []).append(name)
    lines = [
        FamilyRule(line, *cut)
        for glob, found in kinds.items()
        for cut, names in found.items()
        for line in ([glob] if len(found) == 1 else names)
    ]
    # A `*` spans dots too. Of globs that fit a name, its own is the longest, with the fewest of them.
    return tuple(sorted(lines, key=lambda line: (-len(line.glob), line.glob.count("*"))))


def _error(name: str, *, got: object, wanted: object, remedy: str) -> ValueError:
    return ValueError(complaint(name, got=got, wanted=wanted, remedy=remedy))
