"""Is this step fit to be taken? Decided from one read of the device, before anything is written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonloom.dtensors import is_dtensor, local_gradient, local_part
from muonloom.errors import complaint
from muonloom.ranks import this_rank

_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the guard saw.

    Attributes:
        grad_norm: global L2 norm of all gradients, as the step saw them.
        offender: name of the first parameter with a non-finite gradient, or None.
        earlier_failure: whether the last step left a matrix whose iteration was not finite.
        weights_moved: whether weights seem to have been written from outside.
        offender_rank: where the offender was found; None: here.
        has_state: whether another rank has taken a step before.
    """

    grad_norm: float
    offender: str | None
    earlier_failure: bool
    weights_moved: bool
    offender_rank: int | None = None
    has_state: bool = False


def gradient_of(name: str, parameter: Tensor) -> Tensor | None:
    """Return `main_grad` where present, else `grad`; of a DTensor this rank's part.

    Raises:
        ValueError: it is sparse, or not shaped as the parameter.
    """
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    if gradient is None:
        return None
    given = parameter
    if local_part(gradient).layout is not torch.strided or gradient.dtype not in _GRADIENT_DTYPES:
        raise ValueError(
            complaint(
                name,
                got=f"a gradient of {gradient.dtype} with {gradient.layout}",
                wanted="a dense FP32, BF16 or FP16 gradient",
                remedy="Turn sparse=True off in the embedding, and keep main_grad in FP32 or BF16.",
            )
        )
    if not is_dtensor(gradient):
        parameter = local_part(parameter)  # as main_grad may be, beside a DTensor
    if gradient.shape != parameter.shape:
        raise ValueError(
            complaint(
                name,
                got=f"a gradient of shape {tuple(gradient.shape)}",
                wanted=f"{tuple(parameter.shape)}, the parameter's",
                remedy="Set .grad or .main_grad in the parameter's own shape.",
            )
        )
    return local_gradient(gradient.detach(), given)


def inspect_gradients(
    gradients: Sequence[tuple[str, Tensor]], *, failure: Tensor | None, moved: Tensor | None
) -> Verdict:
    """Read norm, finiteness and the last step's failure flag in one host synchronization.

    A finite norm proves finite gradients. A norm that is not finite is looked into: finite gradients
    whose squares overflow FP32 are fine, and the norm is then taken in FP64.

    Args:
        gradients: names and gradients, any float dtype.
        failure: bool scalar of the last step, or None.
        moved: bool scalar for `Verdict.weights_moved`, or None.
    """
    filled = [(name, gradient) for name, gradient in gradients if gradient.numel()]
    norm, failed, stale = _read([gradient for _, gradient in filled], (failure, moved))
    offender = None
    if not math.isfinite(norm):
        offender = next((name for name, g in filled if not bool(torch.isfinite(g).all())), None)
    # FP32 squares of finite numbers over- and underflow; FP64's do not.
    if offender is None and (norm == 0 or not math.isfinite(norm)):
        norm = math.hypot(
            *(float(torch.linalg.vector_norm(g, dtype=torch.float64)) for _, g in filled)
        )
    return Verdict(
        grad_norm=norm, offender=offender, earlier_failure=bool(failed), weights_moved=bool(stale)
    )


def _read(gradients: Sequence[Tensor], flags: Sequence[Tensor | None]) -> list[float]:
    """Return the global norm, and each flag as a number (0 for None)."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    given = [flag for flag in flags if flag is not None]
    home = next((tensor.device for tensor in (*gradients, *given)), torch.device("cpu"))
    norms = [
        norm.to(home)
        for tensors in by_device.values()
        for norm in torch._foreach_norm(tensors, 2.0, torch.float32)
    ]
    zero = torch.zeros((), device=home)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else zero
    numbers = [zero if flag is None else flag.to(home, torch.float32) for flag in flags]
    return [float(number) for number in torch.stack((total, *numbers)).tolist()]


@dataclass(kw_only=True)
class SkipPolicy:
    """Whether a step with a non-finite gradient is left out, and how many were left out in a row."""

    allowed: bool
    most: int
    in_a_row: int = 0

    def must_skip(self, verdict: Verdict) -> bool:
        """Whether the step has to be skipped; counts it.

        Raises:
            FloatingPointError: it may not be: skipping is off, or `most` steps in a row were skipped.
        """
        if verdict.offender is None:
            self.in_a_row = 0
            return False
        if not self.allowed:
            raise FloatingPointError(_nonfinite(verdict))
        if self.in_a_row >= self.most:
            raise FloatingPointError(
                f"{_nonfinite(verdict)} The {self.in_a_row} steps before it were skipped too "
                "(max_consecutive_skips)."
            )
        self.in_a_row += 1
        return True

    def warn(self, verdict: Verdict) -> None:
        """Tell of a skipped step: of the first, second, fourth, eighth, … of a run."""
        if self.in_a_row & (self.in_a_row - 1) == 0:
            warnings.warn(
                f"{_nonfinite(verdict)} Step skipped on rank {_rank(verdict)}, {self.in_a_row} in a row.",
                RuntimeWarning,
                stacklevel=5,
            )


def _nonfinite(verdict: Verdict) -> str:
    return complaint(
        verdict.offender or "",
        got="a non-finite gradient",
        wanted="finite gradients",
        remedy="Nothing was written.",
    )


def _rank(verdict: Verdict) -> int:
    return this_rank() if verdict.offender_rank is None else verdict.offender_rank
