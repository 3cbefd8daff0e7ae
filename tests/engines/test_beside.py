"""Writers beside what else a step does: memory, freed gradients, a forward pass that overlaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from engines.support import (
    PLACEMENTS,
    SHAPES,
    SPLIT,
    TRIED,
    Engine,
    Recorder,
    assert_equal,
    build,
    held,
    masters,
    model,
    recorders,
    register,
    release,
    run,
    train,
)
from muonloom import BFloat16Writer, Float8BlockWriter
from muonloom.device import SynchronousBackend, ThreadedBackend, seeded_delays
from staging.support import Named, give_gradients, on_backend

# -- memory, gradients, overlap ---------------------------------------------------------------------


@pytest.mark.parametrize("placement", TRIED)
def test_the_tensors_of_writers_are_counted_once(placement: str):
    named, opt = build(TRIED[placement])
    own = sum(p.numel() * 2 for _, p in named)
    assert opt.memory()["device_weights"] == own
    down, conv = dict(named)["down"], dict(named)["conv.weight"]
    writer = Recorder("down", down)
    opt.register_writer(down, writer)
    opt.register_writer(conv, BFloat16Writer())
    fp8 = Float8BlockWriter((4, 8))
    opt.register_writer(dict(named)["qkv.weight"], fp8)
    extra = writer.data.nbytes + sum(t.nbytes for t in fp8.tensors())
    assert opt.memory()["device_weights"] == own + extra
    tensors = writer.tensors() * 2
    writer.tensors = lambda: tensors  # type: ignore[method-assign]
    assert opt.memory()["device_weights"] == own + extra
    release(down)
    assert opt.memory()["device_weights"] == own + extra - down.numel() * 2


@pytest.mark.parametrize("placement", TRIED)
def test_the_master_of_an_fp32_parameter_is_counted(placement: str):
    named, opt, _ = run(TRIED[placement], named=model(torch.float32), steps=1, writers=False)
    before = opt.memory()
    opt.register_writer(dict(named)["down"], Recorder("down", dict(named)["down"]))
    key = "device_state" if placement == "device" else "host_state"
    assert opt.memory()[key] >= before[key] + dict(named)["down"].numel() * 4


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("placement", TRIED)
def test_gradients_are_freed_with_writers(placement: str, released: bool):
    plain, other, _ = run(TRIED[placement], writers=False)
    named, opt = build(TRIED[placement], free_gradients=True)
    writers = recorders(named)
    register(opt, named, writers)
    seen: list[int] = []

    def watched(genuine: Callable[..., None]) -> Callable[..., None]:
        def write(param: Tensor, master: Tensor, rows: slice) -> None:
            seen.append(sum(p.grad is not None for _, p in named))
            genuine(param, master, rows)

        return write

    for writer in writers.values():
        writer.write = watched(writer.write)  # type: ignore[method-assign]
    for _, parameter in named:
        if released:
            release(parameter)
    for step in range(3):
        give_gradients(named, step)
        opt.step()
        assert all(p.grad is None for _, p in named)
    assert_equal(masters(other, plain), held(writers))
    assert min(seen) < len(SHAPES)


class Model(nn.Module):
    """Holds the parameters of a list in layers, whose forward passes read what writers hold."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(p) for _, p in named)

    def forward(self) -> list[Tensor]:
        return [layer() for layer in self.layers]


class Layer(nn.Module):
    """One parameter, and the writer's tensor that stands for it."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__()
        self.own = parameter
        self.holds: list[Tensor] = []

    def forward(self) -> Tensor:
        return self.holds[0].clone()


@pytest.mark.parametrize("threaded", [False, True])
def test_writers_are_waited_for_where_a_step_overlaps_the_forward_pass(threaded: bool):
    plain, other, _ = run("device", writers=False, steps=1)
    ends = []
    for step in range(3):
        if step:
            train(plain, other, step)
        ends.append(masters(other, plain))

    def make() -> Any:
        if threaded:
            return ThreadedBackend(delays=seeded_delays(2, 1e-3))
        return SynchronousBackend()

    with on_backend(make):
        named, opt = build(PLACEMENTS["tiny"])
        writers = recorders(named, pause_s=5e-4)
        register(opt, named, writers)
        net = Model(named)
        for layer, writer in zip(net.layers, writers.values(), strict=True):
            layer.holds.append(writer.data)  # type: ignore[union-attr, operator]
        with opt.overlap_forward(net):
            for step in range(3):
                give_gradients(named, step)
                opt.step()
                assert_equal(ends[step], dict(zip(SHAPES, net(), strict=True)))
        opt.drain()
        assert_equal(ends[-1], held(writers))


def test_engines_are_told_of_a_step_when_the_one_before_has_written_all():
    """An engine may read what its writers hold then, and move it: late units overlap no step."""
    plain, other, _ = run("device", writers=False, steps=1)
    end = masters(other, plain)
    with on_backend(lambda: ThreadedBackend(delays=seeded_delays(2, 2e-3))):
        named = model()
        writers = recorders(named, pause_s=1e-3)
        seen: list[dict[str, Tensor]] = []
        engine = Engine(
            [(p, writers[n]) for n, p in named], before=lambda: seen.append(held(writers))
        )
        _, opt = build(PLACEMENTS["tiny"], named=named, engine=engine)
        with opt.overlap_forward(Model(named)):
            for step in range(2):
                give_gradients(named, step)
                opt.step()
        opt.drain()
    first = {name: p.detach().float() for name, p in model()}
    for expected, found in zip((first, end), seen, strict=True):
        assert_equal(expected, found)


def test_split_masters_of_a_bfloat16_writer_are_saved_whole():
    named, opt = build(SPLIT)
    plain, other = build(SPLIT)
    register(opt, named, {n: BFloat16Writer(p.detach().clone()) for n, p in named})
    for _, parameter in named:
        release(parameter)
    train(named, opt, 0, 1)
    train(plain, other, 0, 1)
    assert_equal(masters(other, plain), masters(opt, named))
    ours, theirs = opt.state_dict()["state"], other.state_dict()["state"]
    for index, state in theirs.items():
        assert_equal(state, ours[index])
