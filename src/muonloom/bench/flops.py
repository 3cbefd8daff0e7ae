"""Floating-point operations of the two iterations: formulas, and direct counting of the real calls."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode

from muonloom.math import Recipe


def standard_flops(m: int, n: int, steps: int = 5) -> int:
    """Return the FLOPs of ``steps`` standard iterations of one m x n matrix, in either order.

    A step is XXᵀ (2 k² l), A² (2 k³) and BX (2 k² l), with k the short side and l the long one.
    """
    short, long = min(m, n), max(m, n)
    return steps * (4 * short**2 * long + 2 * short**3)


def gram_flops(m: int, n: int, steps: int, segments: int) -> int:
    """Return the FLOPs of the Gram iteration of one matrix: 4 s k² l + (8 t - 6 s) k³.

    Args:
        m: rows.
        n: columns.
        steps: iterations t.
        segments: runs s between restarts; one more than there are restarts.
    """
    short, long = min(m, n), max(m, n)
    return 4 * segments * short**2 * long + (8 * steps - 6 * segments) * short**3


def recipe_flops(recipe: Recipe, m: int, n: int) -> int:
    """Return the formula's FLOPs of one matrix; products computed by halves count in full."""
    steps = len(recipe.coefficients)
    if recipe.method == "gram":
        return gram_flops(m, n, steps, len(recipe.restarts) + 1)
    return standard_flops(m, n, steps)


def counted_flops(call: Callable[[], object]) -> int:
    """Run ``call`` once, and return the FLOPs of the matrix products that it made."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
