"""How far a step moves the parameters, whole or cut: measured against 0.04·lr²·m·n."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import muonloom

# GLM-MoE-DSA of 4 layers and 16 heads. The tallest matrix, kv_b_proj, has 320 rows, and a batch 768 tokens.
MODEL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "pad_token_id": 0,
}
BATCH, TOKENS = 8, 96
LR = 0.02
STEPS = 4
BLOCKS = (None, 16, 4, 1)
POLYNOMIALS: Mapping[str, tuple[object, int]] = {
    "polar_express_1.01, 16 steps": ("polar_express_1.01", 16),
    "default triple, 5 steps": ((3.4445, -4.7750, 2.0315), 5),
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """Squared changes, in units of 0.04·lr²·m·n a step.

    Attributes:
        polynomial: coefficients and steps.
        heads_per_block: None: whole.
        total: of all matrix parameters in the first step.
        least: of the parameter that moved least.
        most: of the parameter that moved most.
        sum_of_steps: of all, steps summed, each in itself.
        end_to_end: of all, first to last weights; what exceeds `sum_of_steps` are cross terms.
        end_to_end_square: the same as a plain number.
    """

    polynomial: str
    heads_per_block: int | None
    total: float
    least: float
    most: float
    sum_of_steps: float
    end_to_end: float
    end_to_end_square: float


def measure_changes() -> list[Change]:
    """Train four steps for each polynomial and block size, from the same weights on the same tokens."""
    return [_measure(polynomial, k) for polynomial in POLYNOMIALS for k in BLOCKS]


def _measure(polynomial: str, heads_per_block: int | None) -> Change:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("glm_moe_dsa", **MODEL)
    )
    coefficients, ns_steps = POLYNOMIALS[polynomial]
    layout = muonloom.Layout.from_model(model, heads_per_block=heads_per_block)
    optimizer = muonloom.Muon(
        model.named_parameters(),
        layout=layout,
        lr=LR,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
        ns_coefficients=coefficients,
        ns_steps=ns_steps,
        ns_compute_dtype=torch.float32,
    )
    draw = torch.Generator().manual_seed(0)
    snapshots: list[dict[str, Tensor]] = []
    for _ in range(STEPS):
        _backward(model, torch.randint(1, 64, (BATCH, TOKENS + 1), generator=draw))
        moving = {
            name: parameter
            for name, parameter in model.named_parameters()
            if layout[name].algorithm == "muon" and parameter.grad is not None
        }
        if not snapshots:
            snapshots.append(_copies(moving))
        optimizer.step()
        snapshots.append(_copies(moving))
    optimizer.drain()
    return _summarize(polynomial, heads_per_block, snapshots)


def _backward(model: nn.Module, ids: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.autograd.backward(loss)


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().double() for name, parameter in parameters.items()}


def _squares(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float((after[name] - old).square().sum()) for name, old in before.items()}


def _summarize(
    polynomial: str, heads_per_block: int | None, snapshots: Sequence[Mapping[str, Tensor]]
) -> Change:
    units = {name: 0.04 * LR**2 * old.numel() for name, old in snapshots[0].items()}
    unit = sum(units.values())
    steps = [_squares(*pair) for pair in itertools.pairwise(snapshots)]
    ratios = [square / units[name] for name, square in steps[0].items()]
    end_to_end = sum(_squares(snapshots[0], snapshots[-1]).values())
    return Change(
        polynomial=polynomial,
        heads_per_block=heads_per_block,
        total=sum(steps[0].values()) / unit,
        least=min(ratios),
        most=max(ratios),
        sum_of_steps=math.fsum(sum(step.values()) for step in steps) / unit,
        end_to_end=end_to_end / unit,
        end_to_end_square=end_to_end,
    )
