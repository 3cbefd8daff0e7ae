"""Gradients of experts that several ranks hold, averaged over these: no wrapper does it for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


class GradientReduction:
    """Adds up gradients over a group, and divides them.

    Args:
        group: the ranks that hold the same experts.
        divisor: what sums are divided by; None: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, divisor: float | None) -> None:
        self._group = group
        self._divisor = float(divisor or dist.get_world_size(group))

    def __call__(self, parameters: Sequence[Parameter]) -> None:
        """Reduce the gradients of these, in their own dtypes; where none has one, none gets one.

        All ranks of the group call it. On a rank without a gradient, zero takes its place.
        """
        if not parameters:
            return
        found = [_gradient(parameter) for parameter in parameters]
        present = torch.tensor(
            [gradient is not None for gradient in found],
            dtype=torch.uint8,
            device=parameters[0].device,
        )
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._group)
        works = []
        for parameter, gradient, anywhere in zip(parameters, found, present.tolist(), strict=True):
            if anywhere:
                if gradient is None:
                    gradient = torch.zeros(
                        parameter.shape, dtype=parameter.dtype, device=parameter.device
                    )
                    parameter.grad = gradient
                works.append(
                    (dist.all_reduce(gradient, group=self._group, async_op=True), gradient)
                )
        for work, gradient in works:
            work.wait()
            gradient.div_(self._divisor)


def _gradient(parameter: Parameter) -> Tensor | None:
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient
