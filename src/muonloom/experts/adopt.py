"""Experts that Transformers has loaded as FP8 already: their bytes become the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from muonloom.errors import complaint
from muonloom.experts.weights import ExpertWeight
from muonloom.float8_writer import Float8BlockWriter
from muonloom.hollow import whole_
from muonloom.math.float8 import scale_shape


def check_float8(name: str, module: Any, projection: str) -> None:
    """Refuse FP8 weights whose scales are not one a block.

    Raises:
        ValueError: naming the parameter.
    """
    parameter, block = module._parameters[projection], module.block_size
    scales = module._parameters.get(f"{projection}_scale_inv")
    if block is None or scales is None or scales.shape != scale_shape(parameter.shape, block):
        raise ValueError(
            complaint(
                name,
                got=f"FP8 weights with scales {None if scales is None else tuple(scales.shape)}",
                wanted=f"one scale a block of {block}",
                remedy="Load the checkpoint dequantized, and attach that.",
            )
        )


def adopt_float8(name: str, module: Any, projection: str, device: torch.device) -> ExpertWeight:
    """Take data and scales of a weight over, without rounding; the parameter becomes BF16 and hollow.

    Args:
        name: of the parameter, in the model.
        module: `FP8Experts` of Transformers, which `check_float8` admits.
        projection: of the stacked weight.
        device: where the tensors go.
    """
    parameter = module._parameters[projection]
    scales = module._parameters[f"{projection}_scale_inv"]
    data, scale_inv = parameter.detach().to(device), scales.detach().to(device)
    power_of_two = scale_inv.dtype == torch.float8_e8m0fnu
    writer = Float8BlockWriter(
        tuple(module.block_size),
        scale_format="ue8m0" if power_of_two else "float32",
        data=data,
        scale_inv=scale_inv,
    )
    del module._parameters[f"{projection}_scale_inv"]
    # Gradients and state_dict need a dtype in which one can count.
    parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
    weight = AdoptedWeight(name, parameter, writer, module, projection)
    weight.give_up_parameter(device)
    parameter.requires_grad_(True)
    return weight


class AdoptedWeight(ExpertWeight):
    """A weight that goes back as the FP8 parameters that it was."""

    def __init__(
        self,
        name: str,
        parameter: Parameter,
        writer: Float8BlockWriter,
        module: Any,
        projection: str,
    ) -> None:
        super().__init__(name, parameter, writer)
        self._module = module
        self._projection = projection

    def restore(self) -> None:
        """Make data and scales parameters of the module again."""
        storage = self.writer.storage
        parameter = whole_(self.parameter).requires_grad_(False)
        parameter.grad = None
        parameter.data = storage.data
        scales = _frozen(storage.scale_inv)
        self._module.register_parameter(f"{self._projection}_scale_inv", scales)


def _frozen(tensor: Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)
