"""Real tiny models, their gradients, and what one step of the optimizer does to them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import muonloom
from layout.tiny import fresh
from muonloom import Layout

# FP32 shows every error of the cut; the direction of one matrix is a smooth function of its gradient.
EXACT: dict[str, Any] = {"ns_method": "standard", "ns_compute_dtype": torch.float32}
# The same products, grouped into other batches: a few roundings of FP32 through five iterations.
FP32_TOLERANCE = 1e-5

# The tiny models of tests/layout have 4 heads; 8 leave more ways to cut them.
MLA_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm_moe_dsa": ("glm_moe_dsa", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "deepseek_v3": ("deepseek_v3", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "deepseek_v3 without q-LoRA": (
        "deepseek_v3",
        {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None},
    ),
}
HEADS, Q_HEAD, KV_HEAD, NOPE, VALUE = 8, 12, 20, 8, 12  # of MLA_MODELS


def with_gradients(model: nn.Module, *, batch: int = 4, tokens: int = 48, seed: int = 0) -> None:
    """Leave the gradient of the language-model loss on random tokens in `.grad`."""
    draw = torch.Generator().manual_seed(seed)
    size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    ids = torch.randint(1, size, (batch, tokens + 1), generator=draw)
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()


@functools.cache
def _model(model_type: str, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    model = fresh(model_type, **dict(changes))
    with_gradients(model)
    return model


def sample(model_type: str, **changes: Any) -> nn.Module:
    """A tiny model with the gradients of one batch; shared by tests, so not to be changed."""
    return _model(model_type, tuple(sorted(changes.items())))


def mla_sample(name: str) -> nn.Module:
    """One of `MLA_MODELS`."""
    model_type, changes = MLA_MODELS[name]
    return sample(model_type, **changes)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def updates(
    gradients: Mapping[str, Tensor | None], layout: Layout | None, **options: Any
) -> dict[str, Tensor]:
    """Return what one step at lr 1 subtracts from each parameter.

    The parameters start at zero, where neither decay nor the weights' own rounding takes part.
    """
    named = [
        (name, nn.Parameter(torch.zeros(layout[name].shape if layout else grad.shape)))  # type: ignore[union-attr]
        for name, grad in gradients.items()
    ]
    for name, parameter in named:
        parameter.grad = gradients[name]
    opt = muonloom.Muon(named, layout=layout, **{"lr": 1.0, "adamw_lr": 1.0, **EXACT, **options})
    opt.step()
    opt.drain()
    return {name: -parameter.detach() for name, parameter in named}


def alone(gradient: Tensor, **options: Any) -> Tensor:
    """Return what one step at lr 1 subtracts from a 2-D parameter that is nothing but this matrix."""
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient.contiguous()
    muonloom.Muon([parameter], **{"lr": 1.0, **EXACT, **options}).step()
    return -parameter.detach()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
