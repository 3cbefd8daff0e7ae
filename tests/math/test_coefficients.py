from __future__ import annotations

import pytest
import torch

from muonloom.math import (
    COEFFICIENT_TABLES,
    expand_coefficients,
    ns_coefficient_names,
    orthogonalize,
)
from muonloom.math.coefficients import _POLAR_EXPRESS

QUINTIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = [name for name in ns_coefficient_names() if name.startswith("polar_express")]


def polynomial(s: torch.Tensor, triples: object) -> torch.Tensor:
    for a, b, c in triples:  # type: ignore[attr-defined]
        s = a * s + b * s**3 + c * s**5
    return s


def test_every_table_names_its_source_generator_and_safety_factor() -> None:
    assert {"quintic", *POLAR_EXPRESS} == set(COEFFICIENT_TABLES) == set(ns_coefficient_names())
    for name, table in COEFFICIENT_TABLES.items():
        assert table.source.startswith("https://")
        assert table.generator
        assert table.safety_factor >= 1.0
        if name in POLAR_EXPRESS:
            assert name.endswith(f"_{table.safety_factor}")


def test_the_default_is_keller_jordans_triple() -> None:
    assert expand_coefficients("quintic", 5) == (QUINTIC,) * 5
    assert expand_coefficients(QUINTIC, 2) == (QUINTIC,) * 2


def test_the_last_triple_repeats_and_surplus_ones_are_left() -> None:
    one, two = (1.0, 0.0, 0.0), (2.0, -1.5, 0.5)
    assert expand_coefficients([one, two], 4) == (one, two, two, two)
    assert expand_coefficients([list(one), two], 1) == (one,)
    assert expand_coefficients(one, 0) == ()
    assert expand_coefficients("polar_express_1.01", 12)[-1] == (1.875, -1.25, 0.375)


def test_polar_express_quintics_are_the_minimax_ones_from_1e_3() -> None:
    """Each step maps its interval [l, u] onto one that is centred at 1: what the generator solves.

    A digit changed anywhere in the table breaks the centring by far more than this tolerance.
    """
    s = torch.logspace(-3, 0, 200_001, dtype=torch.float64)
    reached = []
    for triple in _POLAR_EXPRESS[:7]:
        s = polynomial(s, [triple])
        assert float(s.min() + s.max()) == pytest.approx(2.0, abs=1e-10)
        reached.append(float(s.min()))
    assert reached == sorted(reached)
    assert reached[4] == pytest.approx(0.876441, abs=1e-6)
    assert reached[6] == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("name", POLAR_EXPRESS)
def test_polar_express_tables_bring_their_interval_near_one(name: str) -> None:
    s = torch.logspace(-2, 0, 4001, dtype=torch.float64)
    result = polynomial(s, expand_coefficients(name, 5))
    assert result.min() > 0.84
    assert result.max() < 1.15


def test_the_three_polar_express_tables_differ_by_their_safety_factor() -> None:
    raw = torch.tensor(_POLAR_EXPRESS[:5], dtype=torch.float64)
    for name in ("polar_express_1.01", "polar_express_1.05"):
        table = COEFFICIENT_TABLES[name]
        factor = table.safety_factor
        powers = torch.tensor([factor, factor**3, factor**5], dtype=torch.float64)
        divided = torch.tensor(table.triples[:5], dtype=torch.float64)
        torch.testing.assert_close(divided * powers, raw, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ns_coefficient_names())
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("rank", [1, 2, 12])
def test_singular_values_from_1_to_1_1_stay_bounded_in_bfloat16(
    name: str, seed: int, method: str, rank: int
) -> None:
    """Minimax tables blow up above 1 (1.1 becomes 5, then 1e4): only normalization, rounded to
    BF16, keeps even a rank-1 matrix within their safety factor."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64)).Q
        for n in (12, 40)
    )
    s = torch.linspace(1.1, 1.0, rank, dtype=torch.float64)
    for steps in (1, 5, 10):
        y = orthogonalize(
            ((left * s) @ right.mT).bfloat16(),
            ns_coefficients=name,
            ns_steps=steps,
            method=method,
            compute_dtype=torch.bfloat16,
        )
        exact = polynomial(s / s.norm(), expand_coefficients(name, steps))
        largest = float(torch.linalg.matrix_norm(y.double(), 2))
        # noise of the rounded input may rise to the preset's own plateau, 1.2 at most
        assert largest <= max(1.2, float(exact.max())) * 1.05


@pytest.mark.parametrize(
    "given",
    ["polar_express", (), (1.0, 2.0), (1.0, 2.0, 3.0, 4.0), [(1.0, 2.0)], None, 3, ("a", "b", "c"),
     (1.0, float("nan"), 0.0), [(1.0, 2.0, float("inf"))], ["abc"], [QUINTIC, 1.0]],
)  # fmt: skip
def test_bad_coefficients_are_named(given: object) -> None:
    with pytest.raises(ValueError, match=r"^ns_coefficients: got .*; wanted .*polar_express_1\.01"):
        orthogonalize(torch.ones(2, 2), ns_coefficients=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [-1, 100, 2.0, True, "5", None])
def test_bad_steps_are_named(given: object) -> None:
    with pytest.raises(ValueError, match=r"^ns_steps: got .*; wanted an integer from 0 to 99"):
        orthogonalize(torch.ones(2, 2), ns_steps=given)  # type: ignore[arg-type]
