from __future__ import annotations

import pytest
import torch

from muonloom.bench.gate import (
    SPECTRA,
    Gate,
    GateResult,
    largest_singular_value,
    relative_error,
    samples,
    standard_bfloat16,
    summary,
)
from muonloom.bench.peers import JORDAN, torch_muon
from muonloom.math import orthogonalize

COEFFICIENTS = (JORDAN,) * 5
CPU = torch.device("cpu")


def iterate_float64(x):
    """The polynomial by its definition, one matrix at a time."""
    results = []
    for matrix in x.double():
        y = matrix / matrix.norm()
        for a, b, c in COEFFICIENTS:
            gram = y @ y.mT
            y = a * y + (b * gram + c * gram @ gram) @ y
        results.append(y)
    return torch.stack(results)


@pytest.mark.parametrize(("m", "n"), [(12, 40), (40, 12), (24, 24)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_reference_is_the_polynomial_in_float64(m, n, seed):
    made = samples(2, m, n, COEFFICIENTS, device=CPU, seed=seed)
    assert [sample.spectrum for sample in made] == list(SPECTRA)
    for sample in made:
        # x was rounded to FP32, and the polynomial stretches small singular values by up to a^5 = 485.
        assert relative_error(iterate_float64(sample.x), sample.exact) < 1e-5


def test_the_spectra_are_what_their_names_say():
    made = {s.spectrum: s for s in samples(1, 32, 64, COEFFICIENTS, device=CPU, seed=0)}
    values = {name: torch.linalg.svdvals(s.x[0].double()) for name, s in made.items()}
    assert values["condition 1e3"][0] / values["condition 1e3"][-1] == pytest.approx(1e3, rel=1e-2)
    assert values["condition 1e6"][0] / values["condition 1e6"][-1] == pytest.approx(1e6, rel=0.5)
    assert values["one dominant"][0] / values["one dominant"][1] > 900
    assert int((values["rank-deficient"] > 1e-5).sum()) == 16
    gaussian = torch.linalg.svdvals(torch.randn(32, 64, dtype=torch.float64))
    assert values["gaussian"][0] == pytest.approx(float(gaussian[0]), rel=0.25)


@pytest.mark.parametrize(("m", "n"), [(16, 64), (64, 16)])
def test_the_yardstick_is_as_accurate_as_torchs_bfloat16_iteration(m, n):
    # torch also rounds before it normalizes, which adds up to half of an error; never a smaller one.
    peer = torch_muon()
    for sample in samples(2, m, n, COEFFICIENTS, device=CPU, seed=0):
        theirs = torch.stack([peer.orthogonalize(matrix, 5) for matrix in sample.x])
        yardstick = relative_error(standard_bfloat16(sample.x, COEFFICIENTS), sample.exact)
        assert 0.8 * yardstick < relative_error(theirs, sample.exact) < 2.5 * yardstick


def test_what_muonloom_chooses_passes():
    report = summary(Gate(2, 24, 96, device=CPU).judge(orthogonalize, COEFFICIENTS))
    assert report["passed"], report


@pytest.mark.parametrize(
    "broken",
    [
        lambda x: 1.3 * orthogonalize(x),
        lambda x: orthogonalize(x, ns_steps=4),
        lambda x: orthogonalize(x) * float("nan"),
        torch.zeros_like,
    ],
    ids=["too large", "a step short", "nan", "zero"],
)
def test_a_wrong_result_does_not_pass(broken):
    report = summary(Gate(1, 16, 64, device=CPU).judge(broken, COEFFICIENTS))
    assert not report["passed"]


def test_one_bad_spectrum_fails_the_gate():
    def result(error, largest, exact=1.1):
        return GateResult(
            spectrum="gaussian",
            error=error,
            bfloat16_error=0.01,
            largest_singular_value=largest,
            exact_largest_singular_value=exact,
        )

    good, large, wrong = result(0.01, 1.1), result(0.01, 1.21), result(0.013, 1.0)
    assert result(0.01, 1.205, exact=1.2023).passed
    assert not result(0.01, 1.21, exact=1.2023).passed
    assert summary([good])["passed"]
    assert not summary([good, large])["passed"]
    assert not summary([good, wrong])["passed"]
    assert summary([good, large, wrong])["error_ratio"] == pytest.approx(1.3)


def test_the_largest_singular_value_is_that_of_the_svd():
    for shape in ((3, 8, 20), (3, 20, 8)):
        y = torch.randn(shape)
        expected = float(torch.linalg.svdvals(y.double()).max())
        assert largest_singular_value(y) == pytest.approx(expected, rel=1e-5)
    assert largest_singular_value(torch.full((1, 2, 2), float("nan"))) == float("inf")
