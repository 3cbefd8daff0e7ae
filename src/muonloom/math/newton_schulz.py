"""The standard iteration, batched: X <- aX + (bA + cA^2)X with A the Gram matrix of the short side.

Tall matrices are multiplied from the right (A = XᵀX), so that nothing is ever transposed in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonloom.math.coefficients import Triple
from muonloom.math.products import Arena, apply_, gram_, multiply_symmetric_

SQUARE_BUFFERS = 2
"""Scratch matrices of the short side that `newton_schulz` uses, beside one of x's shape."""


def flops(short: int, long: int, steps: int) -> int:
    """Return the FLOPs of `newton_schulz` on one matrix."""
    return steps * (4 * short**2 * long + 2 * short**3)


def newton_schulz(x: Tensor, coefficients: tuple[Triple, ...], arena: Arena) -> Tensor:
    """Run one step a triple, and return the result, which is ``x`` or a piece of ``arena``.

    FLOPs a matrix and step, m <= n: 4 m² n + 2 m³.

    Args:
        x: (count, rows, columns), contiguous, Frobenius norms at most 1; clobbered.
        coefficients: (a, b, c) of each step.
        arena: scratch for two short-side squares and one matrix of x's shape, x's dtype.
    """
    count, rows, columns = x.shape
    short = min(rows, columns)
    gram, polynomial = arena.take(count, short, short), arena.take(count, short, short)
    source, target = x, arena.take(count, rows, columns)
    # aI inside the polynomial saves a pass over x, but in BF16 it costs accuracy
    fold = x.dtype != torch.bfloat16
    for a, b, c in coefficients:
        gram_(gram, source)
        multiply_symmetric_(polynomial, gram, gram, add=gram, beta=b, alpha=c)
        if fold:
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        apply_(target, source, polynomial, beta=0.0 if fold else a)
        source, target = target, source
    return source
