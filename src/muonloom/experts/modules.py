"""Expert modules of Transformers: which they are, and what an attached one does differently."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from muonloom.errors import complaint
from muonloom.experts.groups import Groups
from muonloom.experts.linear import grouped_linear
from muonloom.experts.weights import ExpertWeight, Workspace

IMPLEMENTATION = "muonloom_float8"
"""The name under which the forward stands in Transformers' registry of expert implementations."""

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def find_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each module with stacked expert weights.

    Raises:
        ValueError: there is none, one is attached already, or one does not use Transformers' registry.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if any(_is_stack(module, projection) for projection in _PROJECTIONS)
    ]
    if not found:
        raise ValueError(
            complaint(
                "model",
                got=f"{type(model).__name__} without stacked expert weights",
                wanted="modules with 3-D gate_up_proj (or up_proj) and down_proj, as Transformers has them",
                remedy="Only mixture-of-experts models of Transformers can be attached.",
            )
        )
    for name, module in found:
        _check_module(name, module)
    return found


def projections(module: nn.Module) -> list[str]:
    """Return the names of the stacked weights of an expert module, in order of use."""
    return ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]


def _is_stack(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.ndim == 3


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, Float8Module):
        raise unfit(name, "experts that are attached already", "plain ones", "Detach first.")
    missing = [flag for flag in _FLAGS if not hasattr(module, flag)]
    if missing:
        raise unfit(
            name,
            f"{type(module).__name__} without {', '.join(missing)}",
            "experts under Transformers' use_experts_implementation, whose flags tell the layout",
            "This family (as Llama4) multiplies its experts in its own code, and cannot be attached.",
        )
    for projection in projections(module):
        parameter = module._parameters.get(projection)
        if parameter is None or parameter.ndim != 3:
            got = "none" if parameter is None else f"shape {tuple(parameter.shape)}"
            raise unfit(
                f"{name}.{projection}", got, "(experts, rows, columns)", "Attach another model."
            )
        if parameter.is_meta:
            got, remedy = "a parameter on the meta device", "Load the weights first."
            raise unfit(f"{name}.{projection}", got, "values to quantize", remedy)
        if not parameter.is_floating_point():
            got, remedy = str(parameter.dtype), "Load the checkpoint dequantized."
            raise unfit(f"{name}.{projection}", got, "float or FP8 weights", remedy)


def unfit(name: str, got: str, wanted: str, remedy: str) -> ValueError:
    """Return the error about a module, or a weight, that the engine cannot hold or save."""
    return ValueError(complaint(name, got=got, wanted=wanted, remedy=remedy))


class Float8Module(nn.Module):
    """Mixed into the class of an attached expert module; it keeps what is ordinary about a module.

    `state_dict` gives dequantized tensors in the parameters' dtype, `load_state_dict` quantizes what it
    gets, and `to` moves the FP8 tensors without casting them.
    """

    def _float8_weights(self) -> dict[str, ExpertWeight]:
        weights: dict[str, ExpertWeight] = self.__dict__["_float8"]
        return weights

    @contextmanager
    def _replaced(self, entries: Mapping[str, Tensor | None]) -> Iterator[None]:
        """Show other tensors under these names, in the same order; None hides a parameter."""
        before: dict[str, Any] = dict(self._parameters)
        for name, tensor in entries.items():
            if tensor is None:
                del self._parameters[name]
            else:
                self._parameters[name] = tensor  # type: ignore[assignment]
        try:
            yield
        finally:
            after = dict(self._parameters)
            self._parameters.clear()
            for name, parameter in before.items():
                self._parameters[name] = parameter if name in entries else after[name]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        weight = next(iter(self._float8_weights().values()))
        raise RuntimeError(
            complaint(
                weight.name,
                got="a deep copy or pickling of attached experts",
                wanted="model.state_dict(), which is ordinary",
                remedy="Copy the model before it is attached, or after engine.detach().",
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        weights = self._float8_weights()
        with self._replaced(dict.fromkeys(weights)):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in weights.values():
            parameter = weight.parameter
            # What the function does to dtype and device shows on any tensor of the same kind.
            probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            gradient, parameter.grad = parameter.grad, None
            weight.move_(dtype=probe.dtype, device=probe.device)
            if gradient is not None:
                parameter.grad = fn(gradient)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        shown = self.__dict__["_float8_shown"]
        with self._replaced(
            {name: shown(weight) for name, weight in self._float8_weights().items()}
        ):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weights = self._float8_weights()
        keys = {prefix + name: weight for name, weight in weights.items()}
        rest = {key: value for key, value in state_dict.items() if key not in keys}
        with self._replaced(dict.fromkeys(weights)):
            super()._load_from_state_dict(
                rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        for key, weight in keys.items():
            values = state_dict.get(key)
            if values is None:
                if strict:
                    missing_keys.append(key)
            elif values.shape != weight.parameter.shape:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {values.shape} from checkpoint, "
                    f"the shape in current model is {weight.parameter.shape}."
                )
            else:
                weight.load_(values)


@contextmanager
def shown_as(
    modules: Iterable[Float8Module], show: Callable[[ExpertWeight], Tensor]
) -> Iterator[None]:
    """Let `state_dict` of these modules give ``show(weight)`` in place of the dequantized weights."""
    for module in modules:
        module.__dict__["_float8_shown"] = show
    try:
        yield
    finally:
        for module in modules:
            module.__dict__["_float8_shown"] = ExpertWeight.dequantized


@functools.cache
def _attached_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Float8{cls.__name__}", (Float8Module, cls), {"__module__": cls.__module__})


def attach_module(module: Any, weights: dict[str, ExpertWeight], workspace: Workspace) -> None:
    """Make `module` compute from `weights`; the registry's function is chosen by its own configuration."""
    module.__dict__["_float8"] = weights
    module.__dict__["_float8_workspace"] = workspace
    module.__dict__["_float8_shown"] = ExpertWeight.dequantized
    module.__dict__["_float8_config"] = module.config
    # Other modules share the configuration, and are not attached.
    module.config = copy.copy(module.config)
    module.config._experts_implementation_internal = IMPLEMENTATION
    cls: Any = type(module)
    module.__class__ = _attached_class(cls)


def detach_module(module: Any) -> None:
    """Undo `attach_module`: the class and the implementation of before."""
    module.__class__ = type(module).__mro__[2]
    module.config = module.__dict__["_float8_config"]
    for name in ("_float8", "_float8_workspace", "_float8_shown", "_float8_config"):
        del module.__dict__[name]


def register_forward() -> None:
    """Put the forward into Transformers' registries: of plain experts, and of those loaded as FP8."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        registry[IMPLEMENTATION] = float8_experts_forward


def float8_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an attached module, after Transformers' `grouped_mm_experts_forward`.

    It computes in the dtype of the activations, or of autocast. `torch.compile` breaks its graph here.

    Args:
        self: an attached module.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k): numbers of experts; `num_experts` and above where another rank has them.
        top_k_weights: (tokens, k), from the router.

    Returns:
        (tokens, hidden), in the dtype of `hidden_states`.

    Raises:
        RuntimeError: a weight is released.
    """
    num_tokens, hidden = hidden_states.shape
    num_top_k = top_k_index.size(-1)
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    groups = Groups.of(expert_ids, self.num_experts)
    elsewhere = None
    if self._is_expert_parallel:
        elsewhere = (expert_ids >= self.num_experts).unsqueeze(-1)
        expert_ids = expert_ids.clamp(max=self.num_experts - 1)

    x = hidden_states[order // num_top_k].to(_compute_dtype(hidden_states))
    first, second = projections(self)
    x = _project(self, first, x, groups, expert_ids, elsewhere)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _project(self, second, x.contiguous(), groups, expert_ids, elsewhere)
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)

    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    # A sum over k in place of additions by index, whose order is random on GPUs.
    return x[back].view(num_tokens, num_top_k, hidden).sum(dim=1).to(hidden_states.dtype)


def _project(
    module: Any,
    name: str,
    x: Tensor,
    groups: Groups,
    expert_ids: Tensor,
    elsewhere: Tensor | None,
) -> Tensor:
    """Return `x` (rows, in) times the experts' weight `name`, plus its bias; zeros for others' rows."""
    weight: ExpertWeight = module._float8[name]
    out = grouped_linear(
        x, weight, groups, module._float8_workspace, transposed=module.is_transposed
    )
    if module.has_bias:
        bias: Parameter = getattr(module, f"{name}_bias")
        out = out + bias[expert_ids].to(out.dtype)
    return out if elsewhere is None else out.masked_fill(elsewhere, 0.0)


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
