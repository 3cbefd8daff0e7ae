"""The tensors of a model by name; none is read, so that weights may be released."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from muonloom.errors import complaint
from muonloom.layout import canonical_name


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers; tied ones by each of their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def names_by_tensor(model: nn.Module) -> dict[Tensor, tuple[str, ...]]:
    """Return each tensor once, with all of its names in the bare model.

    What DDP, FSDP, ``torch.compile`` and activation checkpointing put into names is left out.

    Raises:
        ValueError: two tensors have one name then.
    """
    names: dict[Tensor, tuple[str, ...]] = {}
    known: dict[str, Tensor] = {}
    for raw, tensor in named_tensors(model).items():
        name = canonical_name(raw)
        if known.setdefault(name, tensor) is not tensor:
            raise ValueError(
                complaint(
                    raw,
                    got="a tensor that has the name of another without the parts of wrappers",
                    wanted=f"one tensor that is {name}",
                    remedy="Rename one of the modules.",
                )
            )
        if name not in names.get(tensor, ()):
            names[tensor] = (*names.get(tensor, ()), name)
    return names


def owners(model: nn.Module) -> Iterator[tuple[Tensor, nn.Module, str]]:
    """Yield each parameter with a module that has it, and the name that it has there."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield parameter, module, name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and ``torch.compile``."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
