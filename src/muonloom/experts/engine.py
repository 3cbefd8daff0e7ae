"""The engine that keeps the expert weights of a Transformers model in FP8 alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from muonloom.errors import complaint
from muonloom.experts.adopt import adopt_float8, check_float8
from muonloom.experts.checkpoint import save_float8
from muonloom.experts.modules import (
    Float8Module,
    attach_module,
    detach_module,
    find_experts,
    projections,
    register_forward,
)
from muonloom.experts.reduction import GradientReduction
from muonloom.experts.weights import ExpertWeight, Workspace
from muonloom.float8_writer import SCALE_DTYPES, Float8BlockWriter, ScaleFormat
from muonloom.math.float8 import scale_shape

WORKSPACE_BYTES = 64 << 20


class Float8Experts:
    """Holds a model's expert weights as FP8 data and scales; made by `attach`.

    It is an expert engine: give it to `muonloom.Muon(engine=)`, `Muon.bind` or `install_expert_engine`.
    Each stacked weight stays a parameter with shape, gradient and hooks, whose storage is gone; the
    optimizer writes the FP8 tensors from its FP32 masters.

    One stream of the device at a time may run forward and backward: they share the workspace.
    """

    def __init__(self, model: nn.Module, workspace: Workspace) -> None:
        self._model = model
        self._workspace = workspace
        self._modules: list[Float8Module] = []
        self._weights: dict[Parameter, ExpertWeight] = {}
        self._reduction: GradientReduction | None = None

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        device: torch.device | str | None = None,
        *,
        block: tuple[int, int] = (128, 128),
        scale_format: ScaleFormat = "float32",
        workspace_bytes: int = WORKSPACE_BYTES,
        process_group: ProcessGroup | None = None,
        gradient_divisor: float | None = None,
    ) -> Float8Experts:
        """Quantize the experts of `model`, a layer at a time, and give up their parameters' storage.

        What they were stays on the host, in its own dtype, until an optimizer has taken its masters from it
        (or `drop_sources`). Experts that Transformers loaded as FP8 keep their bytes, blocks and scales.

        Args:
            model: of Transformers, with values; on any device, also before `model.to`.
            device: where the FP8 tensors go; None: where the weights are.
            block: rows and columns that share a scale.
            scale_format: ``"float32"``, or ``"ue8m0"`` for powers of two.
            workspace_bytes: into which runs of experts are dequantized; one expert always fits.
            process_group: the ranks that hold the same experts (the expert-data group): their gradients are
                added up before each step, since DDP and FSDP have to leave the experts alone. None:
                nobody's are.
            gradient_divisor: what these sums are divided by; None: the number of those ranks.

        Raises:
            ValueError: no expert module, one that is attached already, or a layout that is not supported;
                nothing has changed then.
        """
        Float8BlockWriter(block, scale_format=scale_format)  # refuses options
        found = find_experts(model)
        _check_weights(found)
        register_forward()
        stacks = [module._parameters[name] for _, module in found for name in projections(module)]
        largest = max(stack[0].numel() for stack in stacks if stack is not None)
        engine = cls(model, Workspace(workspace_bytes, largest))
        if process_group is not None:
            engine._reduction = GradientReduction(process_group, gradient_divisor)
        weights: dict[str, ExpertWeight] = {}
        try:
            for name, module in found:
                for projection in projections(module):
                    weights[projection] = _take_up(
                        _joined(name, projection),
                        module,
                        projection,
                        device,
                        block=block,
                        scale_format=scale_format,
                    )
                engine._add(module, weights)
                weights = {}
        except BaseException:
            for weight in weights.values():
                weight.restore()
            engine.detach()
            raise
        return engine

    def _add(self, module: nn.Module, weights: dict[str, ExpertWeight]) -> None:
        attach_module(module, weights, self._workspace)
        assert isinstance(module, Float8Module)
        self._modules.append(module)
        self._weights.update({weight.parameter: weight for weight in weights.values()})

    def detach(self) -> None:
        """Bring the parameters back, with the modules' former class: what they were, or dequantized.

        An optimizer that is bound to this engine cannot go on. Without effect the second time.

        Raises:
            RuntimeError: a weight is released; nothing has changed then.
        """
        for weight in self._weights.values():
            weight.check_present()
        for module in self._modules:
            for weight in module._float8_weights().values():
                weight.restore()
            detach_module(module)
        self._modules.clear()
        self._weights.clear()
        self._workspace.drop()

    def named_writers(self) -> Iterator[tuple[Parameter, Float8BlockWriter]]:
        """Yield each expert parameter with its writer: the same objects every time."""
        for parameter, weight in self._weights.items():
            yield parameter, weight.writer

    def before_step(self, optimizer: Any) -> None:
        """Reduce gradients over the ranks that hold the same experts."""
        if self._reduction is not None:
            self._reduction(list(self._weights))

    def after_step(self, optimizer: Any, skipped: bool) -> None:
        """Do nothing: the writers have written what forward reads."""

    def release(self, params: Iterable[Parameter] | None = None) -> None:
        """Give back the FP8 tensors of `params` (None: of all) and the workspace; again is without effect.

        Forward, `state_dict` and saving raise then, and name the parameter.

        Raises:
            ValueError: a parameter that this engine does not hold.
        """
        for weight in self._chosen(params):
            weight.release()
        self._workspace.drop()

    def resume(self, params: Iterable[Parameter] | None = None) -> None:
        """Allocate them again, with undefined content: the optimizer writes all of it then.

        Raises:
            ValueError: a parameter that this engine does not hold.
        """
        for weight in self._chosen(params):
            weight.resume()

    def dequantize(self, param: Parameter, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight of `param` on its device, in `dtype` (None: the parameter's).

        Raises:
            ValueError: it is not this engine's.
            RuntimeError: it is released.
        """
        (weight,) = self._chosen([param])
        return weight.dequantized(dtype)

    def drop_sources(self) -> None:
        """Let go of what the weights were made from; masters made later start from the FP8 weights."""
        for weight in self._weights.values():
            weight.writer.set_source(None)

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        """Write a checkpoint with FP8 experts: `weight` and `weight_scale_inv` of each, as DeepSeek has it.

        All else is saved as it is. `model.save_pretrained` writes an ordinary one without FP8.

        Args:
            directory: made where it is missing.
            options: of Transformers' `save_pretrained`, such as ``max_shard_size``.

        Raises:
            ValueError: a family without such a layout (transposed experts), or a matrix of more than one
                block and not of whole blocks, which Transformers would read wrong.
            RuntimeError: a weight is released.
        """
        save_float8(self._model, self._modules, directory, **options)

    def memory(self) -> dict[str, int]:
        """Return bytes by place: `device_weights`, `device_workspace`, `host_sources`."""
        weights = self._weights.values()
        held = [tensor for weight in weights for tensor in weight.writer.tensors()]
        sources = [weight.writer.source for weight in weights]
        return {
            "device_weights": sum(tensor.untyped_storage().nbytes() for tensor in held),
            "device_workspace": self._workspace.nbytes,
            "host_sources": sum(source.nbytes for source in sources if source is not None),
        }

    def _chosen(self, params: Iterable[Parameter] | None) -> list[ExpertWeight]:
        if params is None:
            return list(self._weights.values())
        chosen = []
        for parameter in params:
            if parameter not in self._weights:
                raise ValueError(
                    complaint(
                        "params",
                        got=f"a parameter {tuple(parameter.shape)} that this engine does not hold",
                        wanted="those of named_writers()",
                        remedy="Leave it out.",
                    )
                )
            chosen.append(self._weights[parameter])
        return chosen


def _check_weights(found: list[tuple[str, nn.Module]]) -> None:
    """Refuse, before anything is changed, parameters that two modules share and odd FP8 ones."""
    seen: dict[int, str] = {}
    for name, module in found:
        for projection in projections(module):
            full, parameter = _joined(name, projection), module._parameters[projection]
            other = seen.setdefault(id(parameter), full)
            if other != full:
                raise ValueError(
                    complaint(
                        full,
                        got=f"the same parameter as {other}",
                        wanted="a parameter of its own",
                        remedy="Untie the two first.",
                    )
                )
            if parameter is not None and parameter.dtype == torch.float8_e4m3fn:
                check_float8(full, module, projection)


def _joined(name: str, projection: str) -> str:
    return f"{name}.{projection}" if name else projection


def _take_up(
    name: str,
    module: nn.Module,
    projection: str,
    device: torch.device | str | None,
    *,
    block: tuple[int, int],
    scale_format: ScaleFormat,
) -> ExpertWeight:
    """Make one stacked weight of `module` FP8, and give up its parameter's storage."""
    parameter = module._parameters[projection]
    assert parameter is not None
    target = parameter.device if device is None else torch.empty(0, device=device).device
    if parameter.dtype == torch.float8_e4m3fn:
        return adopt_float8(name, module, projection, target)
    source = parameter.detach()
    if not bool(torch.isfinite(source).all()):
        raise ValueError(
            complaint(
                name,
                got="a weight with a NaN or an infinity",
                wanted="finite numbers: one would spoil its block",
                remedy="Mend the weights first.",
            )
        )
    writer = Float8BlockWriter(
        block,
        scale_format=scale_format,
        data=torch.empty(parameter.shape, dtype=torch.float8_e4m3fn, device=target),
        scale_inv=torch.empty(
            scale_shape(parameter.shape, block), dtype=SCALE_DTYPES[scale_format][0], device=target
        ),
    )
    weight = ExpertWeight(name, parameter, writer)
    writer.set_source(source.cpu())
    weight.quantize_(source)
    del source
    weight.give_up_parameter(target)
    return weight
