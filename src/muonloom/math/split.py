"""Split masters: an FP32 master as its BF16 weight and 16 bits more, exactly, in integer arithmetic.

The weight is the master rounded to the nearest BF16, ties to even. What it lacks is at most half a step
of BF16, a number from -2**15 to 2**15 in steps of the master's bits. Only +2**15 does not fit INT16: a tie
that rounds down. `settle_ties_` moves such a master to its neighbour nearer zero, which rounds alike; after
that weight and INT16 give the master back, bit for bit. No function here rounds, or looks at the weight's
own rounding: make it with ``weight.copy_(master)``.

All work on tensors of any strides, on any device, without synchronization.

- Zeros of both signs, denormals and infinities come back exactly.
- A finite master from 2**128 - 2**119 on rounds to an infinite weight. It still comes back exactly, but the
  weight is unusable: `has_overflow` tells the caller, who has to refuse it.
- A NaN comes back as a NaN, perhaps another one.
- The weight must be rounded with denormals kept: a conversion that flushes them to zero loses them here.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 16
_TIE_MASK = 0x1FFFF  # the half that BF16 drops, and the last bit that it keeps
_TIE_DOWN = 0x08000  # exactly half a step above an even BF16 number
_MAGNITUDE = 0x7FFF
_INFINITY = 0x7F80


def settle_ties_(master: Tensor, scratch: Tensor | None = None) -> None:
    """Subtract 1 from the bits of every master that is a tie and rounds down; its BF16 rounding stays.

    Done once, it changes nothing more when done again.

    Args:
        master: FP32, any shape; changed in place.
        scratch: FP32 or INT32, shaped as `master`; overwritten. None allocates it.
    """
    bits = master.view(torch.int32)
    ties = torch.empty_like(bits) if scratch is None else scratch.view(torch.int32)
    torch.bitwise_and(bits, _TIE_MASK, out=ties)
    # In place the comparison writes 0 and 1 as INT32: ten times the speed of one that writes bool.
    bits.sub_(ties.eq_(_TIE_DOWN))


def low_halves(master: Tensor, out: Tensor) -> None:
    """Write what the BF16 weights lack: ``int16(bits(master) - (bits(weight) << 16))``.

    That difference ends in the same 16 bits as the master, whatever the weight, so they are all it takes.

    Args:
        master: FP32 after `settle_ties_`, any shape.
        out: INT16, shaped as `master`.
    """
    out.copy_(master.view(torch.int32))


def join_(weight: Tensor, low: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """Write the masters: ``bits = (bits(weight) << 16) + low``.

    Args:
        weight: BF16, any shape: the settled masters rounded to nearest even.
        low: INT16 from `low_halves`, shaped as `weight`.
        out: FP32, shaped as `weight`; overlaps neither.
        scratch: FP32 or INT32, shaped as `weight`; overwritten. None allocates it.
    """
    bits = out.view(torch.int32)
    high = torch.empty_like(bits) if scratch is None else scratch.view(torch.int32)
    # Operands of one dtype: with mixed ones torch converts a whole copy behind our back.
    high.copy_(weight.view(torch.int16))
    bits.copy_(low)
    bits.add_(high, alpha=1 << _HALF)


def has_overflow(weight: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return a bool scalar on the weight's device: whether an infinity is among the weights.

    A NaN is none. Infinite masters count as well as finite ones that rounded to infinity.

    Args:
        weight: BF16, any shape.
        scratch: BF16 or INT16, shaped as `weight`; overwritten. None allocates it.
    """
    bits = weight.view(torch.int16)
    if bits.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=weight.device)
    found = torch.empty_like(bits) if scratch is None else scratch.view(torch.int16)
    torch.bitwise_and(bits, _MAGNITUDE, out=found)
    return found.eq_(_INFINITY).amax() > 0
