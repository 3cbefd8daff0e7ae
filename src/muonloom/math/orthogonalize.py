"""The public function: orthogonalize every trailing matrix of a tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.math.coefficients import DEFAULT_COEFFICIENTS, Coefficients
from muonloom.math.normalize import normalize_
from muonloom.math.recipe import iterate, make_recipe, workspace_numel


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    *,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = DEFAULT_COEFFICIENTS,
    eps: float = 1e-7,
    method: str = "auto",
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x with each trailing matrix replaced by its Newton–Schulz polynomial.

    With s = max|x| and V = x / s, each matrix starts as X = V / max(‖V‖, eps) in FP32 (FP64 for
    FP64 input or compute dtype), and then, with A = X Xᵀ of the short side, ``ns_steps`` times:
    X <- aX + (bA + cA²) X.

    Args:
        x: (..., m, n), any floating dtype and strides, at least two dimensions; never changed.
        ns_steps: iterations, 0 to 99.
        ns_coefficients: one triple (a, b, c), a sequence of them (the last repeats), or one of
            `ns_coefficient_names`.
        eps: the least norm divided by, > 0.
        method: ``"standard"``, ``"gram"``, or ``"auto"``.
        compute_dtype: BF16, FP32 or FP64; None: the fastest that keeps the documented accuracy.

    Returns:
        (..., m, n), contiguous, x's dtype and device. A zero matrix gives zero.

    Raises:
        ValueError: an option that is none of the above; the message leads with its name.
        TypeError: ``x`` is no real floating-point tensor.
    """
    _check_input(x, eps)
    m, n = x.shape[-2:]
    recipe = make_recipe(
        m,
        n,
        device_type=x.device.type,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        method=method,
        compute_dtype=compute_dtype,
    )
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return result
    count = x.numel() // (m * n)
    double = torch.float64 in (x.dtype, recipe.compute_dtype)
    u = torch.empty(x.shape, dtype=torch.float64 if double else torch.float32, device=x.device)
    u = u.copy_(x).view(count, m, n)
    start = (
        u if recipe.compute_dtype == u.dtype else torch.empty_like(u, dtype=recipe.compute_dtype)
    )
    normalize_(u, eps=eps, out=start, like_torch=recipe.like_torch)
    scratch = start.new_empty(workspace_numel(count, m, n, recipe))
    done = iterate(start, recipe, scratch).view(x.shape)
    if done.dtype == x.dtype and done.data_ptr() == start.data_ptr():
        return done
    return result.copy_(done)


def _check_input(x: Tensor, eps: float) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            complaint("x", got=got, wanted="a real floating-point tensor", remedy="Convert it.")
        )
    if x.ndim < 2:
        raise ValueError(
            complaint(
                "x", got=f"shape {tuple(x.shape)}", wanted="(..., m, n)", remedy="Reshape it."
            )
        )
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(
            complaint("eps", got=repr(eps), wanted="a finite number > 0", remedy="Use 1e-7.")
        )
