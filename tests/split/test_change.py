"""The squared change of the parameters in one step is 0.04·lr²·m·n, whole or cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import muonloom
from layout.tiny import fresh
from muonloom import Layout
from split.support import EXACT, with_gradients

LR = 0.02
BLOCKS = (None, 1, 4, 16)
DEFAULT = (3.4445, -4.7750, 2.0315)
# The table's eighth triple repeats and brings every singular value to 1 exactly; the tables of five steps
# repeat one that ends a few percent off. The smallest singular value here is 3e-5 of its matrix' norm:
# eight steps raise it 6e3-fold, and each further step 1.875-fold, so that 13 suffice and 16 leave room.
TABLE, TABLE_STEPS = "polar_express_1.01", 16
# In one step from weights of RMS 0.02, FP32 rounds a change of 0.2·LR to 1e-6 of it, and the direction
# of the default triple, which amplifies small singular values 5e2-fold, to 1e-4 of its square.
FP32_TOLERANCE = 1e-3


def model_with_gradients(seed: int) -> nn.Module:
    """4 layers of 16 heads; 768 tokens, when the tallest matrix (kv_b) has 320 rows."""
    model = fresh(
        "glm_moe_dsa", num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16
    )
    with_gradients(model, batch=8, tokens=96, seed=seed)
    assert max(max(p.shape) for n, p in model.named_parameters() if "layers" in n) <= 320 < 8 * 96
    return model


def changes(
    model: nn.Module, layout: Layout, coefficients: object, ns_steps: int
) -> dict[str, float]:
    """Return each matrix parameter's squared change in one step ÷ 0.04·lr²·m·n."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {"ns_coefficients": coefficients, "ns_steps": ns_steps, **EXACT}
    muonloom.Muon(
        model.named_parameters(),
        layout=layout,
        lr=LR,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
        **options,
    ).step()
    ratios = {}
    for name, parameter in model.named_parameters():
        change = float((parameter.detach().double() - before[name].double()).square().sum())
        if parameter.grad is None:
            assert change == 0
        elif layout[name].algorithm == "muon":
            ratios[name] = change / (0.04 * LR**2 * parameter.numel())
        parameter.data.copy_(before[name])
    return ratios


def blocks_of(layout: Layout, name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices of a parameter, in FP64."""
    spec = layout[name].spec
    assert spec is not None
    views = spec.views(tensor)
    return [m for v in views for m in v.tensor.reshape(v.count, v.rows, v.columns).double()]


def polynomial(values: Tensor, triple: Sequence[float], steps: int) -> Tensor:
    """What an odd quintic makes of singular values of a matrix of norm 1."""
    a, b, c = triple
    for _ in range(steps):
        values = values * (a + b * values**2 + c * values**4)
    return values


@pytest.mark.parametrize("seed", [0, 1])
def test_one_step_changes_the_parameters_as_much_whole_or_cut(seed: int) -> None:
    model = model_with_gradients(seed)
    for k in BLOCKS:
        layout = Layout.from_model(model, heads_per_block=k)
        ratios = changes(model, layout, TABLE, TABLE_STEPS)
        assert sum(name.endswith(("q_b_proj.weight", "kv_b_proj.weight")) for name in ratios) == 8
        assert len(layout["model.layers.3.self_attn.kv_b_proj.weight"].matrices) == 16 // (k or 16)
        for name, ratio in ratios.items():
            assert ratio == pytest.approx(1, abs=0.01), (k, name)


@pytest.mark.parametrize("k", BLOCKS)
def test_the_default_triple_stays_within_the_band_of_its_polynomial(k: int | None) -> None:
    """Its five steps leave singular values between 0 and 1.2: the change follows from the spectrum."""
    model = model_with_gradients(0)
    layout = Layout.from_model(model, heads_per_block=k)
    largest = float(polynomial(torch.linspace(0, 1, 100_001).double(), DEFAULT, 5).max())
    assert 1.20 < largest < 1.21
    for name, ratio in changes(model, layout, DEFAULT, 5).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        wanted, numel = 0.0, 0
        for matrix in blocks_of(layout, name, gradient):
            values = polynomial(torch.linalg.svdvals(matrix / matrix.norm()), DEFAULT, 5)
            # 0.2²·max(m, n)·Σσ², where 0.04·m·n stands for all σ = 1
            wanted += float(max(matrix.shape) * values.square().sum())
            numel += matrix.numel()
        assert ratio == pytest.approx(wanted / numel, rel=FP32_TOLERANCE), name
        assert ratio <= largest**2
