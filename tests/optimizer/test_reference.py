"""The reference itself, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import reference
from optimizer.support import SEEDS, randn


def test_one_by_one_matrix_follows_the_scalar_polynomial():
    w, m = reference.muon_matrix(
        torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.tensor([[-3.0]]), lr=0.1, ns_steps=1
    )
    assert float(m) == pytest.approx(-3.0 * 0.05)
    x = -(3.4445 - 4.7750 + 2.0315)  # the polynomial at -1
    assert float(w) == pytest.approx(2.0 * (1 - 0.1 * 0.1) - 0.1 * x)


def test_nesterov_mixes_gradient_and_momentum():
    old, grad = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    plain = reference.muon_matrix(
        torch.zeros(1, 2),
        old,
        grad,
        lr=1.0,
        weight_decay=0.0,
        momentum=0.75,
        nesterov=False,
        ns_steps=0,
    )
    ahead = reference.muon_matrix(
        torch.zeros(1, 2), old, grad, lr=1.0, weight_decay=0.0, momentum=0.75, ns_steps=0
    )
    norm = math.hypot(0.75, 0.25)
    assert plain[0].tolist()[0] == pytest.approx([-0.75 / norm, -0.25 / norm])
    u = (0.75 * 0.75, 0.25 + 0.75 * 0.25)
    assert ahead[0].tolist()[0] == pytest.approx([-u[0] / math.hypot(*u), -u[1] / math.hypot(*u)])


@pytest.mark.parametrize("seed", SEEDS)
def test_convergent_coefficients_give_the_polar_factor(seed: int):
    x = randn(5, 9, seed=seed).double()
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    got = reference.direction(x, steps=40, triples=((15 / 8, -10 / 8, 3 / 8),))
    assert torch.allclose(got, u @ vt, atol=1e-10)


def test_rank_one_keeps_one_singular_value_near_seven_tenths():
    x = torch.outer(torch.arange(1.0, 6.0), torch.arange(1.0, 9.0))
    values = torch.linalg.svdvals(reference.direction(x))
    assert float(values[0]) == pytest.approx(0.7, abs=0.05)
    assert float(values[1]) < 1e-10


@pytest.mark.parametrize(
    ("rule", "m", "n", "wanted"),
    [
        ("original", 64, 9, math.sqrt(64 / 9)),
        (None, 9, 64, 1.0),
        ("match_rms_adamw", 128, 32, 2.2627417),
        ("spectral", 9, 64, math.sqrt(9 / 64)),
        ("none", 64, 9, 1.0),
    ],
)
def test_scale_rules(rule: str | None, m: int, n: int, wanted: float):
    assert reference.scale(m, n, rule) == pytest.approx(wanted)


def test_adamw_first_step_is_lr_times_sign():
    w, first, second, step = reference.adamw(
        torch.tensor([1.0]), torch.zeros(1), torch.zeros(1), 0, torch.tensor([-4.0]),
        lr=0.1, weight_decay=0.5,
    )  # fmt: skip
    assert float(w) == pytest.approx(1 - 0.05 + 0.1)
    assert (float(first), float(second), step) == (pytest.approx(-0.4), pytest.approx(0.8), 1)


def test_index_tables_cover_each_element_once():
    cases = {
        "whole": (reference.whole(3, 4), 12),
        "transposed": (reference.transposed(3, 4), 12),
        "rows": (reference.row_blocks((1, 2), 4), 12),
        "columns": (reference.column_blocks(3, (1, 3)), 12),
        "interleaved": (reference.interleaved_rows(4, 3), 12),
        "stacked": (reference.stacked(2, 4, 3, reference.interleaved_rows), 24),
    }
    for name, (tables, numel) in cases.items():
        flat = sorted(int(i) for table in tables for i in table.reshape(-1))
        assert flat == list(range(numel)), name
    assert reference.transposed(3, 4)[0].shape == (4, 3)
    assert reference.transposed(3, 4)[0][1, 2] == 2 * 4 + 1
