"""Which tensors of a file come from which of a model, as transformers converts them on saving.

transformers gives its conversions names and tensors of a whole model. Here they run once on tensors without
memory that remember what they were computed from; after that, on as few real tensors at a time as can be.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Convert = Callable[[Mapping[str, Tensor]], list[tuple[str, Tensor]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """Tensors of a model that become tensors of a file together.

    Attributes:
        sources: names in the model.
        outputs: names in the file and shapes, in the order in which `convert` gives them: of all, or of
            each expert.
        by_expert: whether each index of dimension 0 is converted by itself.
        computes: whether there is anything to compute; else only the name changes.
    """

    sources: tuple[str, ...]
    outputs: tuple[Mapping[str, torch.Size], ...]
    by_expert: bool = False
    computes: bool = False

    @classmethod
    def same(cls, name: str, shape: torch.Size) -> Conversion:
        """Return the one of a tensor that stays as it is."""
        return cls(sources=(name,), outputs=({name: shape},))


def is_of_transformers(model: nn.Module) -> bool:
    """Whether `model` is a `transformers.PreTrainedModel`; imports nothing."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def plan_of_transformers(
    model: nn.Module, shapes: Mapping[str, torch.Size]
) -> tuple[list[Conversion], Convert]:
    """Return what `save_pretrained` would do with parameters and buffers, and the function that does it.

    Args:
        model: a `transformers.PreTrainedModel`; its tensors are not read.
        shapes: of all its tensors by name, tied ones under each of their names.
    """
    convert = _converter(model)
    shapes = {name: shapes[name] for name in _saved_names(model, shapes)}
    parts: dict[str, _Part] = {}
    for output, traced in convert({name: _Traced.of(name, shapes[name]) for name in shapes}):
        assert isinstance(traced, _Traced), f"{output} was not made from tensors of the model"
        part = _Part()
        for known in {id(parts[s]): parts[s] for s in traced.sources if s in parts}.values():
            part.take(known)
        part.take(_Part(dict.fromkeys(traced.sources), {output: traced}))
        parts.update(dict.fromkeys(part.sources, part))
    distinct = {id(part): part for part in parts.values()}.values()
    return [_conversion(part, shapes, convert) for part in distinct], convert


def _converter(model: nn.Module) -> Convert:
    from transformers.core_model_loading import revert_weight_conversion

    stand_in = _WithConversions(model)
    return lambda tensors: list(revert_weight_conversion(stand_in, dict(tensors)).items())


class _WithConversions:
    """A model whose conversions were looked up once: transformers walks all modules for them."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        self._model = model
        self._weight_conversions = getattr(model, "_weight_conversions", None)
        if self._weight_conversions is None:
            # Which prefix the file had is known only of a model that was loaded.
            found = get_model_conversion_mapping(model, add_legacy=False)
            self._weight_conversions = [one for one in found if not isinstance(one, PrefixChange)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _saved_names(model: Any, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Return the names that transformers saves, of tied weights the one that it keeps."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    # It compares tensors on the meta device by the identity of the model's own.
    hollow = {
        name: torch.empty(shape, device="meta")
        for name, shape in shapes.items()
        if name not in ignored
    }
    return list(remove_tied_weights_from_state_dict(hollow, model))


class _Traced(Tensor):
    """A tensor without memory that remembers what it was computed from."""

    sources: frozenset[str] = frozenset()
    was_computed = False

    @classmethod
    def of(cls, name: str, shape: torch.Size) -> _Traced:
        """Return the tensor `name` of the model."""
        traced: _Traced = torch.empty(shape, device="meta").as_subclass(cls)
        traced.sources = frozenset([name])
        return traced

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Mark each new tensor of the result with the sources of all arguments."""
        result = super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, dict(kwargs or {})
        )
        given = _traced_in([args, list((kwargs or {}).values())])
        for tensor in _traced_in([result]):
            if not any(tensor is one for one in given):
                tensor.sources = frozenset().union(*(one.sources for one in given))
                tensor.was_computed = True
        return result


def _traced_in(values: Iterable[Any]) -> list[_Traced]:
    found = []
    for value in values:
        if isinstance(value, _Traced):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _traced_in(value)
    return found


@dataclasses.dataclass
class _Part:
    """Tensors that cannot be converted without one another; as dictionaries, which keep their order."""

    sources: dict[str, None] = dataclasses.field(default_factory=dict)
    outputs: dict[str, _Traced] = dataclasses.field(default_factory=dict)

    def take(self, other: _Part) -> None:
        """Add all of `other`."""
        self.sources |= other.sources
        self.outputs |= other.outputs

    def shapes(self, names: Iterable[str] | None = None) -> dict[str, torch.Size]:
        """Return the shapes of these outputs (None: of all)."""
        chosen = self.outputs if names is None else names
        return {name: torch.Size(self.outputs[name].shape) for name in chosen}


def _conversion(part: _Part, shapes: Mapping[str, torch.Size], convert: Convert) -> Conversion:
    sources = tuple(name for name in shapes if name in part.sources)
    if not any(traced.was_computed for traced in part.outputs.values()):
        return Conversion(sources=sources, outputs=(part.shapes(),))
    by_expert = _by_expert(part, shapes[sources[0]], convert) if len(sources) == 1 else None
    return Conversion(
        sources=sources,
        outputs=by_expert or (part.shapes(),),
        by_expert=by_expert is not None,
        computes=True,
    )


def _by_expert(
    part: _Part, shape: torch.Size, convert: Convert
) -> tuple[Mapping[str, torch.Size], ...] | None:
    """Return the outputs of each expert of a stack (E, ...), or None where they are not made one by one."""
    count = shape[0] if len(shape) > 2 else 0
    experts = [part.shapes(names) for names in _names_by_number(list(part.outputs), count)]
    if not experts:
        return None
    (source,) = part.sources
    first = convert({source: _Traced.of(source, torch.Size([1, *shape[1:]]))})
    shapes = [tensor.shape for _, tensor in first]
    alike = all(list(shapes_of.values()) == shapes for shapes_of in experts)
    return tuple(experts) if alike and [name for name, _ in first] == list(experts[0]) else None


def _names_by_number(names: list[str], count: int) -> tuple[tuple[str, ...], ...]:
    """Group `names` by the one number in them that takes every value below `count`; empty if none does."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    wanted = {str(number) for number in range(count)}
    numbers = [column for column in columns if set(column) == wanted]
    if len(numbers) != 1:
        return ()
    groups: dict[str, list[str]] = {str(number): [] for number in range(count)}
    for number, name in zip(numbers[0], names, strict=True):
        groups[number].append(name)
    return tuple(tuple(group) for group in groups.values())


def float8_description(block: Iterable[int], plain: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` of files in FP8 blocks.

    Args:
        block: rows and columns of a block.
        plain: names of modules that are not in FP8.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": sorted(plain),
    }
