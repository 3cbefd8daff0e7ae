"""Optimizers whose parameters have no storage, and ways in which their writers' storage goes astray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from engines.support import (
    TRIED,
    Engine,
    Recorder,
    bits_of,
    build,
    recorders,
    register,
    release,
)
from staging.support import Named, give_gradients


@dataclass
class Case:
    """An optimizer whose parameters have no storage, written by an engine's writers or by its own."""

    named: Named
    opt: muonloom.Muon
    writers: dict[str, Recorder]
    engine: Engine | None
    saved: dict[str, Any] = field(default_factory=dict)

    def parameter(self, name: str = "down") -> Parameter:
        return dict(self.named)[name]

    def bytes_of_everything(self) -> dict[str, Tensor]:
        found = {name: bits_of(writer.data) for name, writer in self.writers.items()}
        for name, parameter in self.named:
            if parameter.untyped_storage().nbytes():
                found[f"{name} itself"] = bits_of(parameter)
            for key, value in self.opt.state[parameter].items():
                found[f"{name}/{key}"] = bits_of(value)
        return found


def give(named: Named, step: int) -> None:
    """Give gradients to parameters that cannot be looked at."""
    give_gradients(named, step)


def started(placement: str, *, by_engine: bool, steps: int = 2) -> Case:
    named, opt = build(TRIED[placement])
    writers = recorders(named)
    engine = None
    if by_engine:
        engine = Engine([(parameter, writers[name]) for name, parameter in named])
        opt.bind(engine)
    else:
        register(opt, named, writers)
    for _, parameter in named:
        release(parameter)
    for step in range(steps):
        give(named, step)
        opt.step()
    opt.drain()
    return Case(named, opt, writers, engine)


def storage_swapped(case: Case) -> None:
    case.writers["down"].holder = object()


def tensors_moved(case: Case) -> None:
    case.writers["down"].data = case.writers["down"].data.clone()


def data_moved_in_place(case: Case) -> None:
    case.writers["down"].data.data = case.writers["down"].data.clone()


def tensor_added(case: Case) -> None:
    extra, genuine = torch.zeros(3), case.writers["down"].data
    case.writers["down"].tensors = lambda: (genuine, extra)  # type: ignore[method-assign]


def engine_lets_go(case: Case) -> None:
    assert case.engine is not None
    case.engine.held = [pair for pair in case.engine.held if pair[0] is not case.parameter()]


def engine_holds_another(case: Case) -> None:
    assert case.engine is not None
    other = Recorder("down", case.writers["down"].data)
    case.engine.held = [
        (p, other if p is case.parameter() else writer) for p, writer in case.engine.held
    ]


def engine_swaps_two(case: Case) -> None:
    assert case.engine is not None
    gate_up = case.parameter("gate_up")
    swapped = {case.parameter(): case.writers["gate_up"], gate_up: case.writers["down"]}
    case.engine.held = [(p, swapped.get(p, writer)) for p, writer in case.engine.held]


REFUSED: dict[str, tuple[Callable[[Case], None], bool]] = {
    "storage swapped": (storage_swapped, False),
    "storage swapped, of an engine": (storage_swapped, True),
    "tensors moved": (tensors_moved, False),
    "tensors moved, of an engine": (tensors_moved, True),
    "data moved in place": (data_moved_in_place, False),
    "tensor added": (tensor_added, False),
    "engine lets go": (engine_lets_go, True),
    "engine holds another": (engine_holds_another, True),
    "engine swaps two": (engine_swaps_two, True),
}
