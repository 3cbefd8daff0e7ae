from __future__ import annotations

import pytest
import torch

from muonloom.bench.flops import counted_flops, gram_flops, recipe_flops, standard_flops
from muonloom.bench.peers import standard_iteration, torch_muon
from muonloom.math import make_recipe, orthogonalize

SHAPES = [(16, 64), (64, 16), (48, 48), (1, 9)]


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_the_standard_formula_is_what_torch_and_the_published_iteration_multiply(m, n):
    x = torch.randn(m, n)
    torch_calls = counted_flops(lambda: torch_muon().orthogonalize(x, 5))
    published = counted_flops(lambda: standard_iteration(x, 5, torch.float32))
    assert standard_flops(m, n, 5) == torch_calls == published


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recipes_multiply_what_their_formula_says(m, n, steps, dtype):
    x = torch.randn(3, m, n)
    for method in ("standard", "gram"):
        recipe = make_recipe(
            m, n, device_type="cpu", ns_steps=steps, method=method, compute_dtype=dtype
        )
        counted = counted_flops(
            lambda method=method: orthogonalize(
                x, ns_steps=steps, method=method, compute_dtype=dtype
            )
        )
        assert counted == 3 * recipe_flops(recipe, m, n)


def test_the_known_totals_of_five_steps():
    m, n = 64, 512
    assert standard_flops(m, n) == 5 * (4 * m * m * n + 2 * m**3)
    assert gram_flops(m, n, 5, 1) == 4 * m * m * n + 34 * m**3
    assert gram_flops(m, n, 5, 2) == 8 * m * m * n + 28 * m**3
    assert gram_flops(m, n, 5, 3) == 12 * m * m * n + 22 * m**3
    assert gram_flops(n, m, 5, 3) == gram_flops(m, n, 5, 3)
