"""How ranks share published models out, and what they send: ``python -m muonloom.bench.ownership``.

Nothing is allocated: the shares follow from the shapes. The first table has every parameter on every rank,
as with DDP; the second has all of them cut along dimension 0, as with FSDP2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from muonloom.bench.flops import standard_flops
from muonloom.bench.text import write_between
from muonloom.layout import Layout, Rule
from muonloom.ownership import Candidate, Ledger, matrix_cost, scalar_cost
from muonloom.ownership.assign import ADAMW_BYTES, MUON_BYTES
from muonloom.sharding import row_box, whole_box

RANKS, QUICK_RANKS = (8, 16, 32, 64, 128, 256, 512), (8,)
GOAL = 1.1
MARKERS = {
    name: (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in ("ownership", "traffic")
}
_SENT_BYTES = 2  # an element in BF16
COLUMNS = (
    "model",
    "matrices",
    "ranks",
    "heaviest ÷ max(mean, largest matrix)",
    "heaviest ÷ lightest",
    "most FLOPs ÷ mean",
    "most state ÷ mean",
    "parameters",
    "pieces",
    "most pieces of a rank",
)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention; `indexer_heads` of 128 (DeepSeek sparse attention) where not 0."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    indexer_heads: int = 0

    def parameters(self, hidden: int) -> Shapes:
        """Return its weights as Transformers names and shapes them."""
        shapes: Shapes = {
            "q_a_proj.weight": (self.q_lora, hidden),
            "q_a_layernorm.weight": (self.q_lora,),
            "q_b_proj.weight": (self.heads * (self.nope + self.rope), self.q_lora),
            "kv_a_proj_with_mqa.weight": (self.kv_lora + self.rope, hidden),
            "kv_a_layernorm.weight": (self.kv_lora,),
            "kv_b_proj.weight": (self.heads * (self.nope + self.value), self.kv_lora),
            "o_proj.weight": (hidden, self.heads * self.value),
        }
        if self.indexer_heads:
            shapes |= {
                "indexer.wq_b.weight": (self.indexer_heads * 128, self.q_lora),
                "indexer.wk.weight": (128, hidden),
                "indexer.k_norm.weight": (128,),
                "indexer.k_norm.bias": (128,),
                "indexer.weights_proj.weight": (self.indexer_heads, hidden),
            }
        return shapes

    def fields(self) -> dict[str, int]:
        """Return what a layout reads of the configuration."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
        }


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Grouped-query attention with norms of queries and keys."""

    heads: int
    key_heads: int
    head: int

    def parameters(self, hidden: int) -> Shapes:
        """Return its weights as Transformers names and shapes them."""
        return {
            "q_proj.weight": (self.heads * self.head, hidden),
            "k_proj.weight": (self.key_heads * self.head, hidden),
            "v_proj.weight": (self.key_heads * self.head, hidden),
            "o_proj.weight": (hidden, self.heads * self.head),
            "q_norm.weight": (self.head,),
            "k_norm.weight": (self.head,),
        }

    def fields(self) -> dict[str, int]:
        """Return what a layout reads of the configuration."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head,
        }


@dataclass(frozen=True, kw_only=True)
class Published:
    """A mixture of experts in its published size; the first `dense_layers` have a dense MLP."""

    model_type: str
    hidden: int
    vocabulary: int
    layers: int
    attention: Latent | Grouped
    experts: int
    expert_width: int
    dense_layers: int = 0
    dense_width: int = 0
    has_shared_expert: bool = False

    def parameters(self) -> Shapes:
        """Return all parameters as Transformers names and shapes them."""
        ends = (self.vocabulary, self.hidden)
        shapes: Shapes = {"model.embed_tokens.weight": ends}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            attention = self.attention.parameters(self.hidden)
            shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}
            shapes |= {f"{prefix}.mlp.{name}": shape for name, shape in self._mlp(layer).items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}.{norm}.weight"] = (self.hidden,)
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": ends}

    def _mlp(self, layer: int) -> Shapes:
        if layer < self.dense_layers:
            return self._projections("", self.dense_width)
        shared = self._projections("shared_experts.", self.expert_width)
        return {
            "gate.weight": (self.experts, self.hidden),
            "experts.gate_up_proj": (self.experts, 2 * self.expert_width, self.hidden),
            "experts.down_proj": (self.experts, self.hidden, self.expert_width),
        } | (shared if self.has_shared_expert else {})

    def _projections(self, prefix: str, width: int) -> Shapes:
        return {
            f"{prefix}gate_proj.weight": (width, self.hidden),
            f"{prefix}up_proj.weight": (width, self.hidden),
            f"{prefix}down_proj.weight": (self.hidden, width),
        }

    def layout(self, heads_per_block: int | None) -> Layout:
        """Return its layout."""
        fields = self.attention.fields()
        config = SimpleNamespace(model_type=self.model_type, hidden_size=self.hidden, **fields)
        return Layout.from_shapes(self.parameters(), config=config, heads_per_block=heads_per_block)


MODELS = {
    "GLM-5": Published(
        model_type="glm_moe_dsa",
        hidden=6144,
        vocabulary=154880,
        layers=78,
        attention=Latent(
            heads=64, q_lora=2048, kv_lora=512, nope=192, rope=64, value=256, indexer_heads=32
        ),
        experts=256,
        expert_width=2048,
        dense_layers=3,
        dense_width=12288,
        has_shared_expert=True,
    ),
    "Qwen3-30B-A3B": Published(
        model_type="qwen3_moe",
        hidden=2048,
        vocabulary=151936,
        layers=48,
        attention=Grouped(heads=32, key_heads=4, head=128),
        experts=128,
        expert_width=768,
    ),
    "DeepSeek-V3": Published(
        model_type="deepseek_v3",
        hidden=7168,
        vocabulary=129280,
        layers=61,
        attention=Latent(heads=128, q_lora=1536, kv_lora=512, nope=128, rope=64, value=128),
        experts=256,
        expert_width=2048,
        dense_layers=3,
        dense_width=18432,
        has_shared_expert=True,
    ),
}
"""From the config.json of each; multi-token prediction layers, which Transformers leaves out, are too."""

CUTS = {"whole": None, "one head each": 1}
"""`heads_per_block` of attention projections; experts and MLPs are whole either way."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What the ranks of a group got.

    Attributes:
        heaviest: cost of the heaviest rank, by the mean or the largest matrix if that is more.
        spread: of the heaviest rank, by the lightest.
        flops: most of a rank, by the mean.
        state: bytes likewise.
        pieces: of all ranks: parts of parameters, at least one a parameter.
        most_pieces: of a rank.
    """

    heaviest: float
    spread: float
    flops: float
    state: float
    pieces: int
    most_pieces: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a step sends under FSDP2, where every parameter is cut along dimension 0.

    Attributes:
        shared: bytes of matrices that lie on several ranks, by those of all matrices.
        exchanged: bytes sent, both ways, by those of shared matrices.
        most_sent: bytes of the rank that sends most.
        matrix_bytes: of all matrices, in the dtype that travels.
    """

    shared: float
    exchanged: float
    most_sent: int
    matrix_bytes: int


def balance(layout: Layout, num_ranks: int) -> Balance:
    """Share a model out, and add up what each rank got."""
    costs, flops, state = ([0.0] * num_ranks for _ in range(3))
    pieces = [0] * num_ranks
    rules = list(layout.values())
    shares = Ledger().share([_candidate(rule, num_ranks) for rule in rules])
    for rule, share in zip(rules, shares, strict=True):
        cost = _cost(rule)
        iteration = sum(standard_flops(*shape) for shape in rule.matrices)
        nbytes = _numel(rule) * (MUON_BYTES if rule.matrices else ADAMW_BYTES)
        for rank, box in enumerate(share.holding.states):
            if box.numel:
                part = box.numel / _numel(rule)
                costs[rank] += part * cost
                flops[rank] += part * iteration
                state[rank] += part * nbytes
                pieces[rank] += 1
    largest = max(matrix_cost(*shape) for rule in rules for shape in rule.matrices)
    return Balance(
        heaviest=max(costs) / max(sum(costs) / num_ranks, largest),
        spread=max(costs) / min(costs),
        flops=max(flops) * num_ranks / sum(flops),
        state=max(state) * num_ranks / sum(state),
        pieces=sum(pieces),
        most_pieces=max(pieces),
    )


def _candidate(rule: Rule, num_ranks: int) -> Candidate:
    return Candidate(
        shape=rule.shape,
        spec=rule.spec,
        ranks=tuple(range(num_ranks)),
        position=0,
        weights=(whole_box(rule.shape),) * num_ranks,
        as_held=False,
    )


def _numel(rule: Rule) -> int:
    return whole_box(rule.shape).numel


def _cost(rule: Rule) -> float:
    if rule.algorithm == "adamw":
        return scalar_cost(_numel(rule))
    return sum(matrix_cost(*shape) for shape in rule.matrices)


def table(ranks: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table: a row for each model, cut and number of ranks."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, model in MODELS.items():
        for cut, heads_per_block in CUTS.items():
            layout = model.layout(heads_per_block)
            for num_ranks in ranks:
                found = balance(layout, num_ranks)
                ratios = (found.heaviest, found.spread, found.flops, found.state)
                cells = [name, cut, str(num_ranks), *(f"{ratio:.3f}" for ratio in ratios)]
                counts = (len(layout), found.pieces, found.most_pieces)
                lines.append(f"| {' | '.join([*cells, *(f'{count:,}' for count in counts)])} |")
    return lines


def traffic(layout: Layout, num_ranks: int) -> Traffic:
    """Cut all parameters along dimension 0, as FSDP2 does, and add up what a step sends."""
    sent = [0] * num_ranks
    matrix_bytes = shared_bytes = 0
    candidates = [_sharded(rule, num_ranks) for rule in layout.values()]
    for share in Ledger().share(candidates):
        if share.spec is not None:
            matrix_bytes += math.prod(share.holding.shape) * _SENT_BYTES
        for atom in share.atoms:
            shared_bytes += atom.numel * _SENT_BYTES
            for position, box in atom.sources:
                sent[position] += box.numel * _SENT_BYTES * (position != atom.owner)
            for position, box in atom.targets:
                sent[atom.owner] += box.numel * _SENT_BYTES * (position != atom.owner)
    return Traffic(
        shared=shared_bytes / matrix_bytes,
        exchanged=sum(sent) / max(1, shared_bytes),
        most_sent=max(sent),
        matrix_bytes=matrix_bytes,
    )


def _sharded(rule: Rule, num_ranks: int) -> Candidate:
    length = rule.shape[0] if rule.shape else 1
    chunk = -(-length // num_ranks)
    rows = [(min(i * chunk, length), min((i + 1) * chunk, length)) for i in range(num_ranks)]
    held = tuple(row_box(rule.shape, part) for part in rows)
    return replace(_candidate(rule, num_ranks), weights=held, as_held=True)


def traffic_table(ranks: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table of what exchanges send under FSDP2."""
    columns = ("model", "cut", "ranks", "shared", "sent ÷ shared", "most of a rank", "÷ own part")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, model in MODELS.items():
        for cut, heads_per_block in CUTS.items():
            layout = model.layout(heads_per_block)
            for num_ranks in ranks:
                found = traffic(layout, num_ranks)
                own = found.most_sent * num_ranks / found.matrix_bytes
                cells = (
                    f"{found.shared:.1%}",
                    f"{found.exchanged:.2f}",
                    f"{found.most_sent / 2**20:,.0f} MiB",
                    f"{own:.3f}",
                )
                lines.append(f"| {name} | {cut} | {num_ranks} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Share the models out, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m muonloom.bench.ownership", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 ranks alone")
    parser.add_argument("--out", type=Path, default=None, help="a page with the markers")
    options = parser.parse_args(arguments)
    ranks = QUICK_RANKS if options.quick else RANKS
    tables = {"ownership": table(ranks), "traffic": traffic_table(ranks)}
    for name, lines in tables.items():
        print("\n".join([f"{name}:", *lines, ""]))
        if options.out is not None:
            write_between(options.out, lines, begin=MARKERS[name][0], end=MARKERS[name][1])


if __name__ == "__main__":
    main()
