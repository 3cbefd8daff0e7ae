"""One step of Muon and of AdamW as functions of tensors.

Nothing here knows a stream, a rank, a model or where a tensor came from. Every function writes only
through its `out`-like arguments, so that the caller decides what lives where.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Where torch has a fused AdamW kernel; elsewhere its foreach implementation runs.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})


def scaled_gradient(gradient: Tensor, *, momentum: float, out: Tensor) -> Tensor:
    """Write ``(1 - momentum) * float32(gradient)`` to `out`.

    Args:
        gradient: any float dtype, any strides.
        momentum: the coefficient of the moving average, in [0, 1).
        out: FP32, shaped as `gradient`.
    """
    if gradient.dtype == out.dtype:
        return torch.mul(gradient, 1 - momentum, out=out)
    # A product with a Python number would be rounded to the gradient's own dtype first.
    return out.copy_(gradient).mul_(1 - momentum)


def advanced_momentum(buffer: Tensor, scaled: Tensor, *, momentum: float, out: Tensor) -> Tensor:
    """Write the next moving average ``momentum * buffer + scaled`` to `out`, in FP32.

    The convex form is used instead of ``lerp``: its difference ``g - M`` overflows for finite inputs.
    The value is rounded to `buffer`'s dtype, because that is what the next step will read.

    Args:
        buffer: the momentum, FP32 or BF16.
        scaled: what `scaled_gradient` gave; FP32, shaped as `buffer`.
        momentum: the coefficient of the moving average.
        out: FP32, shaped as `buffer`; may be `buffer` or `scaled` itself.
    """
    torch.add(scaled, buffer, alpha=momentum, out=out)
    return out if buffer.dtype == torch.float32 else out.copy_(out.to(buffer.dtype))


def update_direction(
    buffer: Tensor,
    gradient: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    out: Tensor,
    scratch: Tensor,
) -> Tensor:
    """Write the direction that is orthogonalized to `out`; `buffer` stays as it is.

    ``M' = momentum * M + (1 - momentum) * g``, then ``M'`` itself or, with `nesterov`,
    ``momentum * M' + (1 - momentum) * g`` (Keller Jordan's Muon; ``torch.optim.Muon``).

    Args:
        buffer: the momentum ``M``, FP32 or BF16.
        gradient: ``g``, shaped as `buffer`.
        momentum: the coefficient of the moving average.
        nesterov: whether to look ahead.
        out: FP32, shaped as `buffer`.
        scratch: FP32, shaped as `buffer`.
    """
    if not nesterov:
        scaled = scaled_gradient(gradient, momentum=momentum, out=scratch)
        return advanced_momentum(buffer, scaled, momentum=momentum, out=out)
    scaled = scaled_gradient(gradient, momentum=momentum, out=out)
    ahead = advanced_momentum(buffer, scaled, momentum=momentum, out=scratch)
    return out.add_(ahead, alpha=momentum)


def advance_momentum_(
    buffer: Tensor,
    gradient: Tensor,
    *,
    momentum: float,
    keep: Tensor | None,
    scratch: Tensor,
) -> None:
    """Move the average on in place, except where `keep` is False.

    Args:
        buffer: the momentum, FP32 or BF16.
        gradient: shaped as `buffer`.
        momentum: the coefficient of the moving average.
        keep: bool, broadcastable to `buffer`: True takes the new value. None: all do.
        scratch: FP32, shaped as `buffer`.
    """
    scaled = scaled_gradient(gradient, momentum=momentum, out=scratch)
    if keep is None and buffer.dtype == torch.float32:
        advanced_momentum(buffer, scaled, momentum=momentum, out=buffer)
        return
    fresh = advanced_momentum(buffer, scaled, momentum=momentum, out=scratch)
    select_(buffer, fresh, keep)


def apply_update_(
    master: Tensor,
    direction: Tensor,
    *,
    lr: float,
    weight_decay: float,
    scale: float,
    keep: Tensor | None,
    scratch: Tensor,
) -> None:
    """``W = W (1 - lr·weight_decay) - lr·scale·X`` in place, except where `keep` is False.

    Args:
        master: ``W``, FP32.
        direction: ``X``, the orthogonalized direction in the compute dtype, shaped as `master`.
        lr: the group's learning rate; decay uses it without `scale`.
        weight_decay: decoupled.
        scale: the factor of `muon_scale` for the logical matrix.
        keep: bool, broadcastable to `master`: True takes the new value. None: all do.
        scratch: FP32, shaped as `master`.
    """
    if keep is None:
        master.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * scale)
        return
    torch.mul(master, 1 - lr * weight_decay, out=scratch).add_(direction, alpha=-lr * scale)
    select_(master, scratch, keep)


def select_(target: Tensor, fresh: Tensor, keep: Tensor | None) -> None:
    """Copy `fresh` into `target` where `keep` is True (everywhere for None), on the device."""
    if keep is None:
        target.copy_(fresh)
    elif fresh.dtype == target.dtype:
        torch.where(keep, fresh, target, out=target)
    else:
        target.copy_(torch.where(keep, fresh.to(target.dtype), target))


def adamw_(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place, by torch's own kernels (fused where the device has them).

    Args:
        masters: FP32 weights, any shapes.
        gradients: FP32, shaped as the masters.
        exp_avgs: FP32 first moments.
        exp_avg_sqs: FP32 second moments.
        steps: FP32 scalars, one a tensor, incremented here.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled.
    """
    fused = masters[0].device.type in _FUSED_DEVICES
    adamw(
        list(masters),
        list(gradients),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
