"""Batched matrix products into given storage, with scale and addend folded into the GEMM."""

from __future__ import annotations

import torch
from torch import Tensor

SYMMETRIC_LEAST_ROWS = 256
"""On a CPU, symmetric products are computed by halves from here on; below, panels do not pay."""

SYMMETRIC_LARGE_ROWS = 1024
"""From here on the panels have 256 rows, else 128."""


def multiply_(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    add: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """Write ``beta * add + alpha * left @ right`` into ``out`` and return it.

    Args:
        out: (count, p, q), overlapping neither factor; may be ``add`` itself.
        left: (count, p, k), any strides.
        right: (count, k, q), any strides.
        add: (count, p, q), or None for nothing to add.
        beta: factor of ``add``.
        alpha: factor of the product.
    """
    if add is None:
        assert alpha == 1.0, "a scaled product always has an addend here"
        return torch.bmm(left, right, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


def multiply_symmetric_(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    add: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """Do as `multiply_` where the product is known to be symmetric, for about half the FLOPs.

    The lower half is computed by panels of rows, and mirrored: on a CPU, for large matrices, one
    at a time, as strided batches would be multiplied one by one anyhow. ``add`` must be symmetric.
    """
    size = out.shape[-1]
    if size < SYMMETRIC_LEAST_ROWS or out.device.type != "cpu":
        return multiply_(out, left, right, add=add, beta=beta, alpha=alpha)
    panel_rows = 128 if size < SYMMETRIC_LARGE_ROWS else 256
    for index in range(out.shape[0]):
        one = slice(index, index + 1)
        for low in range(0, size, panel_rows):
            high = min(size, low + panel_rows)
            panel = out[one, low:high, :high]
            addend = None if add is None else add[one, low:high, :high]
            factors = left[one, low:high], right[one, :, :high]
            multiply_(panel, *factors, add=addend, beta=beta, alpha=alpha)
            out[one, :low, low:high].copy_(panel[..., :low].mT)
    return out


def gram_(out: Tensor, x: Tensor, *, add: Tensor | None = None) -> Tensor:
    """Write the Gram matrix of the short side into ``out``: ``x xᵀ``, or ``xᵀ x`` for tall ``x``.

    Args:
        out: (count, k, k) with k the smaller of rows and columns.
        x: (count, rows, columns).
        add: (count, k, k), symmetric, added to it; may be ``out``.
    """
    left, right = (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)
    return multiply_symmetric_(out, left, right, add=add)


def apply_(out: Tensor, x: Tensor, square: Tensor, *, beta: float = 0.0) -> Tensor:
    """Write ``beta * x + square x`` into ``out``; from the right, ``x square``, for tall ``x``.

    Args:
        out: (count, rows, columns), not ``x``.
        x: (count, rows, columns).
        square: (count, k, k), symmetric, with k the smaller of rows and columns.
        beta: factor of ``x``; 0 leaves it out.
    """
    left, right = (x, square) if x.shape[-2] > x.shape[-1] else (square, x)
    add = x if beta else None
    return multiply_(out, left, right, add=add, beta=beta)


class Arena:
    """Hands out aligned pieces of one flat scratch tensor."""

    ALIGN_BYTES = 256

    def __init__(self, scratch: Tensor) -> None:
        self._scratch = scratch
        self._used = 0

    @classmethod
    def padded_numel(cls, numel: int, itemsize: int) -> int:
        """Return ``numel`` rounded up to whole alignment units."""
        unit = cls.ALIGN_BYTES // itemsize
        return -(-numel // unit) * unit

    def take(self, count: int, rows: int, columns: int) -> Tensor:
        """Return the next (count, rows, columns) piece, uninitialized."""
        numel = count * rows * columns
        piece = self._scratch.narrow(0, self._used, numel)
        self._used += self.padded_numel(numel, self._scratch.element_size())
        return piece.view(count, rows, columns)
