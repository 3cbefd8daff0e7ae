"""Scaling to Frobenius norm 1, safe for anything that FP32 can hold."""

from __future__ import annotations

import torch
from torch import Tensor

NORMALIZE_CHUNK_BYTES = 1 << 18
"""On a CPU, matrices pass in groups of about this size, so that later passes hit the cache."""


def normalize_(u: Tensor, *, eps: float = 1e-7, out: Tensor) -> None:
    """Write ``V / max(||V||, eps)`` with ``V = U / max|U|`` of each matrix alone into ``out``.

    Dividing by the largest magnitude first keeps squares from under- or overflowing, so that
    gradients of any size, denormals included, give the same direction. A zero matrix gives zero.
    Nothing waits for the device.

    Args:
        u: (count, rows, columns), contiguous, FP32 (or FP64); clobbered.
        eps: the least norm divided by. ``V`` has an entry of magnitude 1, so it acts on zero only.
        out: (count, rows, columns), contiguous, the compute dtype; may be ``u`` itself.
    """
    count = u.shape[0]
    if u.numel() == 0:
        return
    flat, result = u.view(count, -1), out.view(count, -1)
    size = count
    if u.device.type == "cpu":
        row_bytes = flat.shape[1] * flat.element_size()
        size = max(1, min(count, NORMALIZE_CHUNK_BYTES // row_bytes))
    for low in range(0, count, size):
        _normalize_rows_(flat[low : low + size], result[low : low + size], eps)


def _normalize_rows_(rows: Tensor, out: Tensor, eps: float) -> None:
    # two vectorized reductions: the infinity norm runs element by element on a CPU
    largest = torch.amax(rows, 1, keepdim=True)
    largest = torch.maximum(largest, torch.amin(rows, 1, keepdim=True).neg_(), out=largest)
    rows.div_(largest.masked_fill_(largest == 0, 1.0))
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(eps)
    rows.div_(norm)
    if out.data_ptr() != rows.data_ptr():
        out.copy_(rows)
