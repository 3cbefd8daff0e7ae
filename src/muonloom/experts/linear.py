"""A linear layer of many experts over sorted rows, whose FP8 weights are dequantized a run at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from muonloom.errors import complaint
from muonloom.experts.groups import Groups, Run
from muonloom.experts.weights import ExpertWeight, Workspace

_GROUPED_BYTES = 16  # to which the kernel wants its rows aligned
_GROUPED_CAPABILITY = (8, 0)


def grouped_linear(
    x: Tensor, weight: ExpertWeight, groups: Groups, workspace: Workspace, *, transposed: bool
) -> Tensor:
    """Return each row of `x` times the weight of its expert, in the dtype of `x`.

    The gradient of the weight has the parameter's dtype, and zeros for experts without rows. Nothing that
    is dequantized outlives the call: the backward dequantizes again, so that it raises where the weight was
    written in between.

    Args:
        x: (rows, in), sorted by expert, contiguous; rows past ``groups.num_rows`` give zeros.
        weight: (experts, out, in); (experts, in, out) where `transposed`.
        groups: which rows are whose.
        workspace: for the dequantized weights, in the dtype of `x`.
        transposed: how the weight is stored.

    Raises:
        RuntimeError: the weight is released, here or in the backward.
    """
    result: Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight.parameter, weight, groups, workspace, transposed
    )
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor,
        weight: ExpertWeight,
        groups: Groups,
        workspace: Workspace,
        transposed: bool,
    ) -> Tensor:
        ctx.given = (weight, groups, workspace, transposed)
        ctx.version = weight.version
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return _times_weights(x, weight, groups, workspace, mirrored=not transposed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, groups, workspace, transposed = ctx.given
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            weight.check_present()
            _check_version(weight, ctx.version)
            of_x = _times_weights(gradient, weight, groups, workspace, mirrored=transposed)
        if x is not None:
            left, right = (x, gradient) if transposed else (gradient, x)
            of_weight = _weight_gradient(left, right, weight, groups, workspace)
        return of_x, of_weight, None, None, None, None


def _check_version(weight: ExpertWeight, version: int) -> None:
    if weight.version != version:
        raise RuntimeError(
            complaint(
                weight.name,
                got="FP8 weights that were written between forward and backward",
                wanted="the weights that the forward used",
                remedy="Run the backward before the optimizer's step and before weights are loaded.",
            )
        )


def _times_weights(
    x: Tensor, weight: ExpertWeight, groups: Groups, workspace: Workspace, *, mirrored: bool
) -> Tensor:
    """Return (rows, columns of the stored matrices), or times their transposes where `mirrored`."""
    _, rows, columns = weight.parameter.shape
    capacity = workspace.capacity(rows * columns, x.dtype)
    out = x.new_empty(x.shape[0], rows if mirrored else columns)
    with torch.autocast(x.device.type, enabled=False):
        for run in groups.runs(capacity):
            shape = (len(run.experts), rows, columns)
            stored = workspace.take(shape, dtype=x.dtype, device=x.device)
            weight.decode_(run.experts, stored)
            matrices = stored.mT if mirrored else stored
            if _has_grouped(x, rows, columns):
                offs = _offsets(run, x.device)
                out[run.rows] = functional.grouped_mm(x[run.rows], matrices, offs=offs)
            else:
                _loop(x[run.rows], matrices, run.ends, out[run.rows])
    out[groups.num_rows :] = 0
    return out


def _weight_gradient(
    left: Tensor, right: Tensor, weight: ExpertWeight, groups: Groups, workspace: Workspace
) -> Tensor:
    """Return leftᵀ·right over the rows of each expert (experts, columns of left, columns of right)."""
    parameter = weight.parameter
    num_experts, rows, columns = parameter.shape
    make = torch.empty if len(groups.experts) == num_experts else torch.zeros
    result = make(parameter.shape, dtype=parameter.dtype, device=left.device)
    with torch.autocast(left.device.type, enabled=False):
        for run in groups.runs(workspace.capacity(rows * columns, left.dtype)):
            a, b = left[run.rows].mT, right[run.rows]
            if _has_grouped(left, rows, columns):
                product = functional.grouped_mm(a, b, offs=_offsets(run, left.device))
                index = torch.tensor(run.experts, device=left.device)
                result.index_copy_(0, index, product.to(result.dtype))
                continue
            for expert, span in zip(run.experts, _row_spans(run.ends), strict=True):
                if result.dtype == left.dtype:
                    torch.mm(a[:, span], b[span], out=result[expert])
                else:
                    result[expert] = a[:, span] @ b[span]
    return result


def _has_grouped(x: Tensor, rows: int, columns: int) -> bool:
    """Whether one kernel multiplies all of a run; on a CPU torch's own is a loop as well."""
    aligned = _GROUPED_BYTES // x.dtype.itemsize
    return (
        x.device.type == "cuda"
        and x.dtype == torch.bfloat16
        and rows % aligned == 0
        and columns % aligned == 0
        and torch.cuda.get_device_capability(x.device) >= _GROUPED_CAPABILITY
    )


def _offsets(run: Run, device: torch.device) -> Tensor:
    return torch.tensor(run.ends, dtype=torch.int32, device=device)


def _loop(x: Tensor, matrices: Tensor, ends: Sequence[int], out: Tensor) -> None:
    for matrix, span in zip(matrices, _row_spans(ends), strict=True):
        torch.mm(x[span], matrix, out=out[span])


def _row_spans(ends: Sequence[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
