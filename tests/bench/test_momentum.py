"""FP32 against BF16 momentum: what is measured, and where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muonloom.bench import momentum
from muonloom.bench.momentum import BEGIN, END, Regression, distances, main, trajectory


@pytest.mark.parametrize("problem", ["given gradients", "regression"])
@pytest.mark.parametrize("seed", [0, 1])
def test_distances_are_those_of_rounding(problem, seed):
    first, tenth = distances(problem, seed, (1, 10))
    # One rounding to 8 bits: at most 2**-9 of each element, and some of it.
    assert 2**-12 < first.momentum < 2**-9
    # Ten of them, as good as independent: less than ten times the first, and more than it.
    assert first.momentum < tenth.momentum < 10 * first.momentum
    assert 0 < tenth.weights < 0.02
    assert (first.step, tenth.step) == (1, 10)


def test_the_same_dtype_goes_the_same_way():
    problem = Regression(0)
    one, other = (
        list(trajectory(problem.gradient, seed=0, momentum_dtype=torch.float32, steps=(1, 3)))
        for _ in range(2)
    )
    assert len(one) == 3
    for (w, m), (v, n) in zip(one, other, strict=True):
        assert torch.equal(w, v)
        assert torch.equal(m, n)


def test_the_gradient_is_that_of_the_loss_on_its_batch():
    problem = Regression(3)
    weight = torch.zeros(momentum.ROWS, momentum.COLUMNS, requires_grad=True)
    _, errors = problem._errors(5, weight)
    (errors.square().sum() / (2 * momentum.SAMPLES)).backward()
    # Sums of 128 FP32 products in another order.
    torch.testing.assert_close(
        weight.grad, problem.gradient(5, weight.detach()), rtol=1e-4, atol=1e-5
    )


def test_the_regression_is_learnt():
    first, last = distances("regression", 0, (1, 60))
    assert first.losses is not None
    assert last.losses is not None
    assert max(last.losses) < 0.9 * min(first.losses)


def test_the_table_stands_between_the_markers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        momentum, "distances", lambda problem, seed: distances(problem, seed, (1, 2))
    )
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(["--out", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| regression |") == 2
    assert text.count("| given gradients |") == 2
    assert "| regression | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "no markers"])
def test_a_page_that_cannot_take_the_table_is_refused_before_measuring(
    tmp_path, monkeypatch, capsys, text
):
    monkeypatch.setattr(momentum, "distances", None)
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    assert main(["--out", str(page)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_guide_holds_a_table_of_all_steps():
    guide = (Path(__file__).parents[2] / "docs" / "host-placement.md").read_text(encoding="utf-8")
    table = guide.partition(BEGIN)[2].partition(END)[0]
    for problem in ("given gradients", "regression"):
        for step in momentum.STEPS:
            assert f"| {problem} | {step} |" in table
