"""A parameter without storage is accepted by its own writer alone, and before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from engines.cases import REFUSED, TRIED, Case, engine_holds_another, engine_lets_go, give, started
from engines.support import (
    SHAPES,
    Recorder,
    assert_equal,
    build,
    held,
    masters,
    recorders,
    register,
    release,
    run,
)
from muonloom import BFloat16Writer, Float8BlockWriter
from staging.support import give_gradients


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("placement", TRIED)
def test_released_parameters_train_to_the_same_bits(placement: str, by_engine: bool):
    plain, opt, _ = run("device", writers=False)
    case = started(placement, by_engine=by_engine, steps=3)
    assert_equal(masters(opt, plain), masters(case.opt, case.named))
    assert_equal(masters(opt, plain), held(case.writers))
    assert all(p.untyped_storage().nbytes() == 0 for _, p in case.named)


def test_a_released_parameter_gets_the_writer_that_holds_its_weight():
    """Released first, registered then: the master starts from what the writer holds."""
    plain, opt, _ = run("device", writers=False)
    named, other = build()
    writers = recorders(named)
    for _, parameter in named:
        release(parameter)
    register(other, named, writers)
    for step in range(3):
        give(named, step)
        other.step()
    assert_equal(masters(opt, plain), held(writers))


# -- refused ----------------------------------------------------------------------------------------


def assert_refused(case: Case, name: str = "down", error: type = RuntimeError) -> None:
    before = case.bytes_of_everything()
    give(case.named, 7)
    for _ in range(2):
        with pytest.raises(error, match=rf"^{re.escape(name)}: got .*; wanted .*\. \w"):
            case.opt.step()
        assert_equal(before, case.bytes_of_everything())


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("placement", TRIED)
def test_a_storage_that_is_not_where_it_was_is_refused(placement: str, kind: str):
    change, by_engine = REFUSED[kind]
    case = started(placement, by_engine=by_engine)
    change(case)
    assert_refused(case, "gate_up" if kind == "engine swaps two" else "down")


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("placement", TRIED)
def test_a_storage_that_was_released_without_the_optimizer_knowing(
    placement: str, with_gradient: bool
):
    named, opt, _ = run(TRIED[placement], steps=1, writers=False)
    opt.drain()
    down = dict(named)["down"]
    release(down)
    case = Case(named, opt, {}, None)
    before = case.bytes_of_everything()
    give_gradients(named, 7, absent=lambda name, step: name == "down" and not with_gradient)
    with pytest.raises(RuntimeError, match=r"^down: got released storage, and no writer"):
        opt.step()
    assert_equal(before, case.bytes_of_everything())


class Nothing(Recorder):
    """Stands in for nothing."""

    @property
    def storage(self) -> object:
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        return ()


@pytest.mark.parametrize("make", [Nothing, lambda name, p: BFloat16Writer()])
def test_a_writer_without_storage_stands_in_for_nothing(make: Callable[[str, Parameter], Any]):
    named, opt = build()
    down = dict(named)["down"]
    opt.register_writer(down, make("down", down))
    give_gradients(named, 0)
    opt.step()
    release(down)
    case = Case(named, opt, {}, None)
    assert_refused(case)
    named, opt = build()
    down = dict(named)["down"]
    writer = make("down", down)
    release(down)
    with pytest.raises(ValueError, match=r"^down: got released storage and a writer without"):
        opt.register_writer(down, writer)


def test_the_writer_of_another_parameter_is_refused():
    named, opt = build()
    one, two = dict(named)["gate_up"], dict(named)["norm.weight"]
    writer = Recorder("gate_up", one)
    opt.register_writer(one, writer)
    twin = Recorder("norm.weight", two)
    twin.holder = writer.holder
    for other in (writer, twin):
        with pytest.raises(ValueError, match=r"^norm\.weight: got the writer of gate_up"):
            opt.register_writer(two, other)
    assert opt._weights.writer(two) is None
    assert opt._weights.writer(one) is writer


@pytest.mark.parametrize("kind", [BFloat16Writer, Float8BlockWriter])
def test_a_writer_of_another_shape_is_refused(kind: type):
    named, opt = build()
    data = torch.zeros(2, 12, 16)
    if kind is BFloat16Writer:
        writer: Any = BFloat16Writer(data.bfloat16())
    else:
        writer = Float8BlockWriter(data=data.to(torch.float8_e4m3fn), scale_inv=torch.ones(2, 1, 1))
    with pytest.raises(ValueError, match=r"\(2, 12, 16\).*wanted .*\(3, 12, 16\)"):
        opt.register_writer(dict(named)["down"], writer)
    assert not opt.state


# -- accepted on request ----------------------------------------------------------------------------

MOVES = ("storage swapped", "tensors moved", "tensors moved, of an engine", "data moved in place")


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("placement", TRIED)
def test_what_moved_on_purpose_is_accepted_by_rebind(placement: str, kind: str):
    plain, opt, _ = run("device", writers=False)
    change, by_engine = REFUSED[kind]
    case = started(placement, by_engine=by_engine)
    change(case)
    case.opt.rebind(case.parameter())
    give(case.named, 2)
    case.opt.step()
    assert_equal(masters(opt, plain), masters(case.opt, case.named))
    assert_equal(masters(opt, plain), held(case.writers))


def test_a_writer_that_the_engine_made_anew_is_accepted_by_rebind():
    plain, opt, _ = run("device", writers=False)
    case = started("device", by_engine=True)
    engine_holds_another(case)
    case.opt.rebind(case.parameter())
    give(case.named, 2)
    case.opt.step()
    assert case.engine is not None
    fresh = dict(case.engine.held)[case.parameter()]
    assert torch.equal(masters(opt, plain)["down"], fresh.data)


@pytest.mark.parametrize("placement", TRIED)
def test_rebind_refuses_other_values_until_they_are_taken(placement: str):
    case = started(placement, by_engine=False)
    case.writers["down"].data = case.writers["down"].data + 1
    wanted = case.writers["down"].data.clone()
    with pytest.raises(muonloom.StaleMasterError, match=r"^down: "):
        case.opt.rebind(case.parameter())
    assert_refused(case, error=muonloom.StaleMasterError)
    case.opt.refresh_masters([case.parameter()])
    assert torch.equal(masters(case.opt, case.named)["down"], wanted)
    give(case.named, 8)
    case.opt.step()


def test_rebind_does_not_bring_back_what_an_engine_let_go():
    case = started("device", by_engine=True)
    engine_lets_go(case)
    with pytest.raises(RuntimeError, match="holds no more"):
        case.opt.rebind(case.parameter())
    assert_refused(case)


def test_rebind_of_a_stranger_is_refused():
    case = started("device", by_engine=False)
    with pytest.raises(ValueError, match=r"^param: got a tensor of shape \(2,\)"):
        case.opt.rebind(Parameter(torch.zeros(2)))
    case.opt.rebind(case.parameter())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placement", TRIED)
def test_parameters_without_writers_may_move_as_before(placement: str, dtype: torch.dtype):
    named, opt, _ = run(TRIED[placement], steps=1, writers=False)
    plain, other, _ = run(TRIED[placement], steps=1, writers=False)
    for _, parameter in named:
        parameter.data = parameter.data.clone()
    for trained, owner in ((named, opt), (plain, other)):
        give_gradients(trained, 1)
        owner.step()
    assert_equal(masters(opt, named), masters(other, plain))


# -- writes from outside ----------------------------------------------------------------------------


def copy_in_place(data: Tensor) -> None:
    data.copy_(data + 1)


def through_data(data: Tensor) -> None:
    data.data.mul_(2.0)


@pytest.mark.parametrize("write", [copy_in_place, through_data], ids=lambda write: write.__name__)
@pytest.mark.parametrize("placement", TRIED)
def test_a_write_from_outside_is_noticed(placement: str, write: Callable[[Tensor], None]):
    case = started(placement, by_engine=False)
    write(case.writers["down"].data)
    assert_refused(case, error=muonloom.StaleMasterError)
    case.opt.refresh_masters()
    give(case.named, 8)
    case.opt.step()
    assert_equal(masters(case.opt, case.named), held(case.writers))


@pytest.mark.parametrize("placement", TRIED)
def test_the_same_bits_written_again_are_no_change(placement: str):
    case = started(placement, by_engine=False)
    for writer in case.writers.values():
        writer.data.copy_(writer.data.clone())
    give(case.named, 8)
    case.opt.step()
    assert_equal(masters(case.opt, case.named), held(case.writers))


@pytest.mark.parametrize("placement", TRIED)
def test_a_master_that_is_dropped_is_made_from_what_the_writer_holds(placement: str):
    """Not from the parameter's own storage, which is as it was when the writer was registered."""
    named, opt, writers = run(TRIED[placement], steps=2, lr=0.1)
    before = held(writers)
    opt.drain()
    opt.state.clear()
    for group in opt.param_groups:
        group["lr"] = 0.0
    give_gradients(named, 8)
    opt.step()
    assert_equal(before, masters(opt, named))
    assert_equal(before, held(writers))
    assert set(before) == set(SHAPES)
