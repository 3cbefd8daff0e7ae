"""Hooks by which a forward pass waits for each weight only when it needs it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from muonloom.assembly import Assembly
from muonloom.assignment import Assignment
from muonloom.errors import complaint
from muonloom.handles import RemovableContext


class OverlapHandle(RemovableContext):
    """Ends the overlap; as a context manager, on leaving."""

    def __init__(self, hooks: Iterable[RemovableHandle], end: Callable[[], None]) -> None:
        self._hooks = list(hooks)
        self._end = end

    def remove(self) -> None:
        """Take the hooks away, and have steps return with all weights written again."""
        while self._hooks:
            self._hooks.pop().remove()
        self._end()


def overlap_forward(
    model: nn.Module, assignments: Mapping[Tensor, Assignment], assembly: Assembly
) -> OverlapHandle:
    """Hook `model` and set the overlap going; see `Muon.overlap_forward`."""
    inside = set(model.parameters())
    for parameter, assignment in assignments.items():
        if parameter not in inside:
            raise ValueError(
                complaint(
                    assignment.name,
                    got="a parameter that is not in the model given",
                    wanted="the model whose forward pass reads all of the optimizer's parameters",
                    remedy="Pass the whole model, as it is called in training.",
                )
            )

    wait_for_all = _Wait(assembly, list(inside))
    awaited = [(model, list(inside))] if _is_fetched_ahead(model) else _awaited(model)
    # First of all hooks: those of FSDP read weights.
    hooks = [
        module.register_forward_pre_hook(_Wait(assembly, parameters), prepend=True)
        for module, parameters in awaited
        if parameters
    ]
    hooks += [
        model.register_state_dict_pre_hook(wait_for_all),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(wait_for_all),  # type: ignore[no-untyped-call]
    ]
    assembly.awaited = frozenset(inside)
    alive = weakref.ref(assembly)

    def end() -> None:
        wait_for_all()
        if (found := alive()) is not None:
            found.awaited = None

    return OverlapHandle(hooks, end)


class _Wait:
    """A hook that waits for weights. It keeps no optimizer alive, and a copy of the model has none."""

    def __init__(self, assembly: Assembly | None, parameters: Sequence[Tensor]) -> None:
        self._assembly = None if assembly is None else weakref.ref(assembly)
        self._parameters = parameters

    def __call__(self, *_: Any) -> None:
        assembly = None if self._assembly is None else self._assembly()
        if assembly is not None:
            assembly.wait_for(self._parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Wait, (None, ())


def _is_fetched_ahead(model: nn.Module) -> bool:
    """Whether weights of a module are read in the forward of another one: FSDP2 gathers them beforehand."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())


def _awaited(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield modules with the parameters that their forward may read, before it begins.

    A module may read weights of those inside it without calling them, as attention does. So only what
    holds a module list, and goes through it, is taken apart.
    """
    yield model, list(model.parameters(recurse=False))
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from ((block, list(block.parameters())) for block in child)
        elif any(isinstance(module, nn.ModuleList) for module in child.modules()):
            yield from _awaited(child)
        else:
            yield child, list(child.parameters())
