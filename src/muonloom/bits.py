"""Comparing tensors bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_NUMEL = 1 << 22  # elements that `rounds_to` rounds at a time


def bits(tensor: Tensor) -> Tensor:
    """Return the words of a tensor, which compare equal exactly where the bits are."""
    return tensor.view(_WORDS[tensor.element_size()])


def rounds_to(master: Tensor, weight: Tensor) -> bool:
    """Return whether `weight` is `master` (FP32, of its shape, on any device) rounded, bit for bit.

    It works on pieces, on the device of `weight`, and waits for that.
    """
    length = weight.shape[0] if weight.ndim else 1
    step = max(1, _PIECE_NUMEL * length // max(1, weight.numel()))
    same = torch.ones((), dtype=torch.bool, device=weight.device)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        held = rows_of(weight, rows)
        rounded = torch.empty_like(held).copy_(rows_of(master, rows))
        same &= (bits(rounded) == bits(held)).all()
    return bool(same)


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return rows of dimension 0; a 0-D tensor has one."""
    return tensor.unsqueeze(0) if tensor.ndim == 0 else tensor[rows]
