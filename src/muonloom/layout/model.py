"""What a model tells about its parameters: names, logical shapes, owners, config."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonloom.errors import complaint
from muonloom.layout.build import Family, Parameter
from muonloom.layout.describe import Dims
from muonloom.layout.families import compile_table, find_family
from muonloom.layout.guess import ExpertFlags, Hints, guess
from muonloom.layout.rules import WRAPPERS, canonical_name

HOOK = "muonloom_family"
"""Class attribute by which a model class offers its own table, in the form of register_family."""

_LOGICAL_SHAPE_ATTRIBUTES = ("logical_shape", "ds_shape")
_MATRIX_OWNERS = (nn.Linear, nn.Embedding, nn.Bilinear, _ConvNd)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, FSDP, `torch.compile` and checkpoint wrappers."""
    while True:
        children = dict(model.named_children())
        inner = [child for name, child in children.items() if name in WRAPPERS]
        if len(children) != 1 or not inner or getattr(model, "config", None) is not None:
            return model
        model = inner[0]


def text_config(config: Any) -> Any:
    """Return the language model's config of a config that nests several."""
    get = getattr(config, "get_text_config", None)
    inner = get() if callable(get) else getattr(config, "text_config", None)
    return config if inner is None else inner


def model_type_of(config: Any) -> Any:
    """Return the config's model type, or None."""
    return getattr(config, "model_type", None)


def family_of(model: nn.Module | None, config: Any) -> Family | None:
    """Find the table: the class's own, else by the text config's type, else by the config's."""
    text = text_config(config)
    dims = Dims(model if config is None else text)
    own = getattr(model, HOOK, None)
    if own is not None:
        name = type(model).__name__
        return Family(model_type=name, lines=compile_table(own, where=f"{name}.{HOOK}"), dims=dims)
    found = find_family(model_type_of(text), model_type_of(config))
    if found is None:
        return None
    return Family(model_type=found[0], lines=found[1], dims=dims)


def model_parameters(model: nn.Module) -> list[Parameter]:
    """List the parameters once each, with logical shapes and what their modules tell.

    Raises `ValueError` for a parameter whose data stands for a sharded or released matrix and whose
    logical shape is not known.
    """
    owners = dict(model.named_modules())
    head = _output_head(unwrapped(model))
    tied = _tied_names(model)
    result = []
    for name, parameter in model.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        shape = _logical_shape(name, parameter, owner)
        hints = _hints(parameter, owner, is_head=parameter is head)
        names = tied.get(id(parameter), ())
        if not hints.adamw and any(guess(n, shape).algorithm == "adamw" for n in names):
            hints = Hints(adamw=f"tied with {', '.join(n for n in names if n != name)}")
        result.append(Parameter(name=canonical_name(name), shape=shape, hints=hints))
    return result


def _output_head(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return getattr(get(), "weight", None) if callable(get) else None


def _tied_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), canonical_name(name))
    return {key: value for key, value in names.items() if len(value) > 1}


def _hints(parameter: nn.Parameter, owner: nn.Module, *, is_head: bool) -> Hints:
    if not parameter.is_floating_point():
        return Hints(integer=True)
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return Hints(adamw="embedding, by module")
    if is_head:
        return Hints(adamw="output head, by module")
    if isinstance(owner, _ConvTransposeNd):
        return Hints(adamw="transposed convolution: (in, out, *kernel) is no (out, in) matrix")
    return Hints(
        convolution=isinstance(owner, _ConvNd),
        transposed=type(owner).__name__ == "Conv1D",
        experts=_expert_flags(owner),
    )


def _expert_flags(owner: nn.Module) -> ExpertFlags | None:
    flags = [getattr(owner, flag, None) for flag in ExpertFlags.__dataclass_fields__]
    if not all(isinstance(flag, bool) for flag in flags):
        return None
    is_transposed, is_concatenated, has_gate = (bool(flag) for flag in flags)
    return ExpertFlags(
        is_transposed=is_transposed, is_concatenated=is_concatenated, has_gate=has_gate
    )


def _logical_shape(name: str, parameter: nn.Parameter, owner: nn.Module) -> tuple[int, ...]:
    for attribute in _LOGICAL_SHAPE_ATTRIBUTES:
        known = getattr(parameter, attribute, None)
        if known is not None:
            return tuple(int(size) for size in known)
    shape = tuple(parameter.shape)
    is_bias = name.endswith("bias")
    flattened = len(shape) == 1 and isinstance(owner, _MATRIX_OWNERS) and not is_bias
    vanished = shape == (0,) and not is_bias and "norm" not in type(owner).__name__.lower()
    if flattened or vanished:
        raise ValueError(
            complaint(
                canonical_name(name),
                got=f"data of shape {shape}, which stands for a sharded or released matrix",
                wanted="its logical shape",
                remedy="Make the layout before sharding, set parameter.logical_shape, or use "
                "Layout.from_shapes().",
            )
        )
    return shape
