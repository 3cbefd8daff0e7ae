"""The Gram iteration: the same polynomial, carried out on the small Gram matrix.

With G = X Xᵀ a step multiplies X from the left by the symmetric P(G) = aI + bG + cG², and the next
Gram matrix is P G P, as everything here commutes with G. So Q = P_k ... P_1 is gathered on the
short side, and X is touched twice: once for G, once for Q X. Rounding in G grows with every step
(by a² for the smallest singular values); a *restart* applies Q, and forms G anew.

Method: https://github.com/Dao-AILab/gram-newton-schulz.

In BF16 the matrices are *centred*: G = gI + D, P = pI + Z, Q = qI + T, where g, p, q are numbers
and only D, Z, T are stored. With ||X|| = 1 the mean eigenvalue of G is 1/k for a short side of k,
so that for gradients without strong structure D is small, and its rounding with it. Any g gives the
same polynomial. g = 1/k at the start, p²g after each step, and at most 1/2 at a restart are close
to the mean, or at least to the middle of the spectrum, for structured and unstructured inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from muonloom.math.coefficients import Triple
from muonloom.math.products import Arena, apply_, gram_, multiply_symmetric_

SQUARE_BUFFERS = 4
"""Scratch matrices of the short side that `gram_iteration` uses, beside one of x's shape."""


def segments(
    coefficients: tuple[Triple, ...], restarts: tuple[int, ...]
) -> list[tuple[Triple, ...]]:
    """Cut the steps at the restarts: ``restarts`` counts the steps done before each."""
    bounds = (0, *restarts, len(coefficients))
    return [coefficients[low:high] for low, high in pairwise(bounds)]


LARGEST_RESTART_CENTRE = 0.5
"""At a restart eigenvalues of G lie in 0 .. 1.5, wherever the mean of an even spectrum would be."""


def flops(short: int, long: int, steps: int, num_segments: int) -> int:
    """Return the FLOPs of `gram_iteration` on one matrix."""
    return 4 * num_segments * short**2 * long + (8 * steps - 6 * num_segments) * short**3


def gram_iteration(
    x: Tensor, coefficients: tuple[Triple, ...], restarts: tuple[int, ...], arena: Arena
) -> Tensor:
    """Run one step a triple, and return the result, which is ``x`` or a piece of ``arena``.

    FLOPs a matrix, m <= n, for s segments and k steps: 4 s m² n + (8 k - 6 s) m³.

    Args:
        x: (count, rows, columns), contiguous, Frobenius norms at most 1; clobbered.
        coefficients: (a, b, c) of each step.
        restarts: after which steps G is formed anew, ascending, each in 1 .. steps - 1.
        arena: scratch for four short-side squares and one matrix of x's shape, x's dtype.
    """
    count, rows, columns = x.shape
    short = min(rows, columns)
    state = _Squares(*(arena.take(count, short, short) for _ in range(SQUARE_BUFFERS)))
    source, target = x, arena.take(count, rows, columns)
    parts = segments(coefficients, restarts)
    centred = x.dtype == torch.bfloat16
    centres = segment_centres(parts, short) if centred else [0.0] * len(parts)
    for segment, centre in zip(parts, centres, strict=True):
        if centre:
            state.gram.zero_().diagonal(dim1=-2, dim2=-1).fill_(-centre)
            gram_(state.gram, source, add=state.gram)
            shift = _accumulate_centred(state, segment, centre)
            apply_(target, source, state.total, beta=shift)
        else:
            gram_(state.gram, source)
            _accumulate(state, segment)
            apply_(target, source, state.total)
        source, target = target, source
    return source


@dataclass
class _Squares:
    """The four (count, k, k) buffers of a segment."""

    gram: Tensor  # G, or D
    poly: Tensor  # P, or Z
    total: Tensor  # Q, or T
    spare: Tensor


def segment_centres(parts: list[tuple[Triple, ...]], short: int) -> list[float]:
    """Return the g that each segment starts with: a BF16 number, or 0 for no centring.

    The sums divide by p, the value of a step's P at g: where that is near 0, G stays as it is.
    """
    centres: list[float] = []
    g = 1.0 / short
    for segment in parts:
        g = _round_to_bfloat16(min(g, LARGEST_RESTART_CENTRE) if centres else g)
        centres.append(g)
        for a, b, c in segment:
            p = a + b * g + c * g * g
            if abs(p) < 0.01:
                centres[-1] = 0.0
            g *= p * p
    return centres


def _round_to_bfloat16(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


def _accumulate(state: _Squares, segment: tuple[Triple, ...]) -> None:
    """Leave Q of the segment in ``state.total``; ``state.gram`` holds G, and is clobbered."""
    for index, (a, b, c) in enumerate(segment):
        gram, poly = state.gram, state.poly if index else state.total
        multiply_symmetric_(poly, gram, gram, add=gram, beta=b, alpha=c)
        poly.diagonal(dim1=-2, dim2=-1).add_(a)
        if index < len(segment) - 1:
            multiply_symmetric_(state.spare, poly, gram)
            multiply_symmetric_(gram, poly, state.spare)
        if index:
            multiply_symmetric_(state.spare, poly, state.total)
            state.total, state.spare = state.spare, state.total


def _accumulate_centred(state: _Squares, segment: tuple[Triple, ...], g: float) -> float:
    """Leave T of the segment's Q = qI + T in ``state.total``; return q.

    ``state.gram`` holds D of G = gI + D, and is clobbered.
    """
    q = 1.0
    for index, (a, b, c) in enumerate(segment):
        p = a + b * g + c * g * g
        gram, poly = state.gram, state.poly if index else state.total
        multiply_symmetric_(poly, gram, gram, add=gram, beta=b + 2 * c * g, alpha=c)
        if index < len(segment) - 1:
            _advance_centred(state, poly, p, g)
        if index:
            # (pI + Z)(qI + T) = pq I + (pT + qZ + ZT)
            add = torch.add(state.total, poly, alpha=q / p, out=state.spare)
            multiply_symmetric_(state.spare, poly, state.total, add=add, beta=p)
            state.total, state.spare = state.spare, state.total
        q *= p
        g *= p * p
    return q


def _advance_centred(state: _Squares, poly: Tensor, p: float, g: float) -> None:
    """Replace D of G = gI + D by that of PGP = p²g I + D', where P = pI + Z with Z in ``poly``."""
    gram, spare = state.gram, state.spare
    # (pI + Z)(gI + D) = pg I + R, R = pD + gZ + ZD
    torch.add(gram, poly, alpha=g / p, out=spare)
    multiply_symmetric_(spare, poly, gram, add=spare, beta=p)
    # (pI + Z)(pg I + R) = p²g I + pR + pg Z + ZR
    torch.add(spare, poly, alpha=g, out=gram)
    multiply_symmetric_(gram, poly, spare, add=gram, beta=p)
