"""Scaling to Frobenius norm 1, safe for anything that FP32 can hold."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize_(u: Tensor, *, eps: float = 1e-7, out: Tensor, like_torch: bool = False) -> None:
    """Write ``V / max(||V||, eps)`` with ``V = U / max|U|`` of each matrix alone into ``out``.

    Dividing by the largest magnitude first keeps squares from under- or overflowing, so that
    gradients of any size, denormals included, give the same direction. A zero matrix gives zero.
    Nothing waits for the device.

    Args:
        u: (count, rows, columns), contiguous, FP32 (or FP64); clobbered.
        eps: the least norm divided by. ``V`` has an entry of magnitude 1, so it acts on zero only.
        out: (count, rows, columns), contiguous, the compute dtype; may be ``u`` itself.
        like_torch: with a BF16 ``out``, round three times where ``torch.optim.Muon`` does, in place
            of once; `Recipe.like_torch` tells.
    """
    if u.numel() == 0:
        return
    rows, result = u.view(u.shape[0], -1), out.view(u.shape[0], -1)
    # two vectorized reductions: the infinity norm runs element by element on a CPU
    largest = torch.amax(rows, 1, keepdim=True)
    largest = torch.maximum(largest, torch.amin(rows, 1, keepdim=True).neg_(), out=largest)
    if like_torch and out.dtype == torch.bfloat16:
        _normalize_as_torch_(rows, largest, result, eps)
        return
    rows.div_(largest.masked_fill_(largest == 0, 1.0))
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(eps)
    if result.dtype == rows.dtype:
        torch.div(rows, norm, out=result)
    else:
        result.copy_(rows.div_(norm))


def _normalize_as_torch_(rows: Tensor, largest: Tensor, out: Tensor, eps: float) -> None:
    """Round where ``torch.optim.Muon`` rounds, so that the standard iteration agrees with it.

    Two BF16 iterations from starts that differ in their last bit end 1.5 % apart. torch rounds the
    matrix, its norm, and their quotient to BF16. The power of two below the largest magnitude is
    divided out first: exactly, so it only keeps the squares in range and changes no later rounding.
    """
    power = largest / torch.frexp(largest).mantissa.mul_(2.0)
    rows.div_(power.masked_fill_(largest == 0, 1.0))
    rows.copy_(out.copy_(rows))
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(eps)
    out.copy_(rows.div_(norm.to(torch.bfloat16)))
