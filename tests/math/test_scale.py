from __future__ import annotations

import math

import pytest

from muonloom.math import ADJUST_LR_FNS, muon_scale


@pytest.mark.parametrize(
    ("shape", "rule", "factor"),
    [
        ((64, 9), None, math.sqrt(64 / 9)),  # depthwise (64, 1, 3, 3)
        ((64, 7), "original", math.sqrt(64 / 7)),  # 1x7 and 7x1 kernels alike
        ((9, 64), "original", 1.0),
        ((128, 32), "match_rms_adamw", 0.2 * math.sqrt(128)),
        ((32, 128), "match_rms_adamw", 0.2 * math.sqrt(128)),
        ((128, 32), "original", 2.0),  # a 32 -> 128 layer, however it is stored
        ((32, 128), "spectral", 0.5),
        ((128, 32), "spectral", 2.0),
        ((3, 5), "none", 1.0),
    ],
)
def test_values(shape: tuple[int, int], rule: str | None, factor: float) -> None:
    assert muon_scale(*shape, rule) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (4096, 1), (1, 4096)])
def test_agrees_with_torch(shape: tuple[int, int], rule: str | None) -> None:
    import torch
    from torch.optim._muon import _adjust_lr

    assert muon_scale(*shape, rule) == _adjust_lr(1.0, rule, torch.Size(shape))


@pytest.mark.parametrize("rule", [None, *ADJUST_LR_FNS])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_matrix_has_factor_one(shape: tuple[int, int], rule: str | None) -> None:
    assert muon_scale(*shape, rule) == 1.0


def test_errors_lead_with_the_name() -> None:
    with pytest.raises(ValueError, match=r"^adjust_lr_fn: got 'moonshot'.*match_rms_adamw"):
        muon_scale(2, 2, "moonshot")
    with pytest.raises(ValueError, match=r"^m, n: got -1, 2"):
        muon_scale(-1, 2)
