"""Tensors that give their storage up for a while: what becomes of each, and which cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muonloom.dtensors import is_dtensor, local_part
from muonloom.errors import complaint
from muonloom.hollow import hollow_, is_hollow, whole_
from muonloom.layout import canonical_name
from muonloom.ranks import num_ranks
from muonloom.writers import ExpertEngine

REMEDY = "Call resume() of its optimizer first."


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """What becomes of the tensors behind one parameter, or of one tensor of a model.

    Attributes:
        emptied: whose storages are given up here.
        kept: that host memory has to hold meanwhile; what is in none of them is written from the master.
        engine: that gives up what holds the weight.
    """

    name: str
    emptied: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()
    engine: ExpertEngine | None = None


def by_engine(
    leaving: Mapping[Tensor, Leaving],
) -> Iterator[tuple[ExpertEngine, list[nn.Parameter]]]:
    """Yield each engine with its parameters among these."""
    engines = {id(found.engine): found.engine for found in leaving.values()}
    for engine in engines.values():
        if engine is not None:
            own = [param for param, found in leaving.items() if found.engine is engine]
            yield engine, own  # type: ignore[misc]


def tensors_of(model: nn.Module | None) -> dict[Tensor, str]:
    """Return a model's parameters and buffers, with canonical names."""
    if model is None:
        return {}
    found = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: canonical_name(name) for name, tensor in found}


def called_first(model: nn.Module) -> list[nn.Module]:
    """Return what may be called, and reads the model before any hook of a module inside it runs."""
    return list(dict.fromkeys([model, *_wrappers(model)]))


def exposed_buffers(model: nn.Module | None) -> dict[Tensor, str]:
    """Return buffers that DDP around the model would send round before a hook of the model can refuse.

    Whether there is a DDP around it cannot be seen.
    """
    if model is None or num_ranks() == 1 or _wrappers(model):
        return {}
    return {tensor: canonical_name(name) for name, tensor in model.named_buffers()}


def _wrappers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def sharers(leaving: Mapping[Tensor, Leaving], known: Iterable[Tensor]) -> tuple[str, ...]:
    """Return the names of tensors whose storage holds something else than what is to go.

    Args:
        leaving: what is to go.
        known: all tensors that may share storage with it.
    """
    going = {tensor: found.name for found in leaving.values() for tensor in found.emptied}
    bytes_of: dict[int, int] = {}
    for tensor in going:
        place = tensor.untyped_storage().data_ptr()
        bytes_of[place] = bytes_of.get(place, 0) + tensor.nbytes
    others = (local_part(tensor) for tensor in known if tensor not in going)
    staying = {tensor.untyped_storage().data_ptr() for tensor in others} - {0}
    names: dict[str, None] = {}
    for tensor, name in going.items():
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        # One element in several places cannot be filled again element by element.
        expanded = tensor.nbytes > storage.nbytes()
        if place in staying or expanded or bytes_of[place] < storage.nbytes():
            names[name] = None
    return tuple(names)


def refuse_dtensors(names: Mapping[Tensor, str]) -> None:
    """Raise a ValueError that names the first DTensor: its weight cannot be taken away."""
    for tensor, name in names.items():
        if is_dtensor(tensor):
            raise ValueError(
                complaint(
                    name,
                    got="a DTensor, which its wrapper reads without asking",
                    wanted="weights that can be taken away",
                    remedy="Use release(weights=False), and move the model by its own means.",
                )
            )


def drop_gradient(param: Tensor, name: str) -> bool:
    """Let go of a parameter's gradients; return whether all could go.

    A `main_grad` is somebody's buffer, made once: it stays the same object, without storage.
    """
    # What a DTensor's gradient is part of lives no longer than all gradients in it.
    if param.grad is not None and (is_dtensor(param.grad) or not _is_part(param.grad)):
        param.grad = None
    main_grad = getattr(param, "main_grad", None)
    if main_grad is not None and not is_dtensor(main_grad) and not _is_part(main_grad):
        hollow_(main_grad, f"{name}.main_grad", REMEDY)
        main_grad = None
    return param.grad is None and main_grad is None


def restore_gradient(param: Tensor) -> None:
    """Give a `main_grad` its storage back, as zeros."""
    main_grad: Tensor | None = getattr(param, "main_grad", None)
    if main_grad is not None and is_hollow(main_grad):
        whole_(main_grad).zero_()


def _is_part(gradient: Tensor) -> bool:
    """Whether a gradient is part of somebody's larger tensor, as of a reducer's bucket."""
    if is_hollow(gradient):
        return False
    return gradient._base is not None or gradient.untyped_storage().nbytes() > gradient.nbytes
