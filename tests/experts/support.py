"""Tiny models whose expert shapes suit torch's own grouped product, and their plain twins."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from layout.tiny import fresh
from muonloom.experts import Float8Experts

_LOCAL = {"num_local_experts": 5, "intermediate_size": 48}
_ROUTED = {"n_routed_experts": 5, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 24},
    "glm_moe_dsa": _ROUTED,
    "deepseek_v3": _ROUTED,
    "gpt_oss": _LOCAL,
}
# A workspace for one or two experts of these: several runs in each product.
WORKSPACE_BYTES = 12_288


def expert_model(
    family: str = "mixtral", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A model of `family` with expert weights that are large enough for errors to show."""
    model = fresh(family, **{**FAMILIES[family], **changes}).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def attached(
    family: str = "mixtral", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Float8Experts]:
    """A model with its engine."""
    model = expert_model(family, dtype)
    return model, Float8Experts.attach(model, **{"workspace_bytes": WORKSPACE_BYTES, **options})


def twins(
    family: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Float8Experts, Any]:
    """An attached model, its engine, and the same model with plain parameters of the same values."""
    model = expert_model(family, dtype)
    plain = copy.deepcopy(model)
    engine = Float8Experts.attach(model, **{"workspace_bytes": WORKSPACE_BYTES, **options})
    plain.load_state_dict(model.state_dict())
    return model, engine, plain


def token_ids(batch: int = 3, tokens: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def backward(model: Any, **options: Any) -> Tensor:
    """One forward with loss and its backward; the logits."""
    ids = token_ids(**options)
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach()


def stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    """The stacked expert weights by name."""
    return {name: p for name, p in model.named_parameters() if p.ndim == 3}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Bit for bit, and absent on both sides alike."""
    for (name, one), (_, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert one.grad.dtype == one.dtype, name
            assert torch.equal(one.grad, other.grad), name
