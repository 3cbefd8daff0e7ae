"""What an engine is told and when; and that nobody pays where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from engines.support import (
    EXPERTS,
    PLACEMENTS,
    TRIED,
    Recorder,
    assert_equal,
    build,
    engine_for,
    held,
    masters,
    model,
    run,
    train,
)
from fresh import Fresh
from muonloom import BFloat16Writer, Float8BlockWriter, install_expert_engine
from staging.support import Named, everything, give_gradients


def bound(placement: Any) -> tuple[Named, muonloom.Muon, dict[str, Recorder]]:
    named, opt = build(placement)
    engine, writers = engine_for(named)
    opt.bind(engine)
    return named, opt, writers


# -- what an engine is told -------------------------------------------------------------------------


def test_engines_are_told_of_each_step_in_order():
    named = model()
    log: list[str] = []
    engines = [engine_for(named, (name,), name=f"{name} ", log=log)[0] for name in EXPERTS]
    with install_expert_engine(engines[0]), install_expert_engine(engines[1]):
        _, opt = build(named=named)
    turn = ["gate_up before", "down before", "gate_up after", "down after"]
    train(named, opt, 0, 1)
    assert log == turn * 2
    log.clear()
    down = dict(named)["down"]
    assert down.grad is not None
    down.grad[0, 0, 0] = float("inf")
    with pytest.warns(RuntimeWarning, match="down"):
        opt.step()
    assert log == ["gate_up before", "down before", "gate_up skipped", "down skipped"]


def test_engines_are_told_of_a_step_without_gradients():
    named, opt, _ = bound("device")
    for _, parameter in named:
        parameter.grad = None
    opt.step()
    (engine,) = opt._weights.engines
    assert engine.log == ["before", "after"]  # type: ignore[attr-defined]


def test_before_step_comes_before_gradients_are_looked_at():
    named = model()

    def before() -> None:
        give_gradients(named, 0)

    engine, writers = engine_for(named, before=before)
    _, opt = build(named=named, engine=engine)
    opt.step()
    plain, other, _ = run("device", writers=False, steps=1)
    assert_equal(masters(other, plain), masters(opt, named))
    assert writers["down"].writes


def test_weights_are_written_when_after_step_is_called():
    named = model()
    engine, writers = engine_for(named)
    seen: list[dict[str, Tensor]] = []
    engine.after_step = lambda optimizer, skipped: seen.append(held(writers))  # type: ignore[method-assign]
    _, opt = build(PLACEMENTS["tiny"], named=named, engine=engine)
    for step in range(2):
        give_gradients(named, step)
        opt.step()
        assert_equal(seen[-1], {name: masters(opt, named)[name] for name in EXPERTS})


@pytest.mark.parametrize("placement", TRIED)
def test_an_error_of_before_step_leaves_everything_as_it_was(placement: str):
    named = model()
    fails: list[bool] = [False]

    def before() -> None:
        if fails[0]:
            raise KeyError("not now")

    engine, writers = engine_for(named, before=before)
    _, opt = build(TRIED[placement], named=named, engine=engine)
    train(named, opt, 0)
    old, weights = everything(named, opt), held(writers)
    fails[0] = True
    give_gradients(named, 1)
    with pytest.raises(KeyError):
        opt.step()
    assert_equal(old, everything(named, opt))
    assert_equal(weights, held(writers))
    assert engine.log == ["before", "after", "before"]
    fails[0] = False
    train(named, opt, 1, 2)
    plain, other, _ = run(TRIED[placement], writers=False)
    assert_equal(masters(other, plain), masters(opt, named))


def test_an_engine_may_move_its_storage_before_a_step():
    """The storage is looked at after `before_step`, so that an engine can ask for rebind there."""
    named = model()
    engine, writers = engine_for(named)
    _, opt = build(named=named, engine=engine)
    train(named, opt, 0)

    def before() -> None:
        writers["down"].data = writers["down"].data.clone()
        opt.rebind(dict(named)["down"])

    engine.before = before
    train(named, opt, 1, 2)
    plain, other, _ = run("device", writers=False)
    assert_equal(masters(other, plain), masters(opt, named))


# -- nobody has an engine ---------------------------------------------------------------------------


def test_importing_muonloom_imports_no_experts(fresh: Fresh):
    code = (
        "import sys, muonloom\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('transformers', 'safetensors')"
        " or m.startswith('muonloom.experts')]\n"
        "assert not bad, bad\n"
        "assert 'experts' not in vars(muonloom)\n"
        "import torch\n"
        "p = torch.nn.Parameter(torch.ones(4, 4))\n"
        "p.grad = torch.ones(4, 4)\n"
        "muonloom.Muon([('w', p)]).step()\n"
        "bad = [m for m in sys.modules if m.startswith(('transformers', 'muonloom.experts'))]\n"
        "assert not bad, bad\n"
    )
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr


def test_the_protocols_know_these_writers():
    parameter = Parameter(torch.zeros(4, 4))
    for writer in (BFloat16Writer(), Float8BlockWriter(), Recorder("x", parameter)):
        assert isinstance(writer, muonloom.Writer)
    assert not isinstance(parameter, muonloom.Writer)
