"""Engines: given, bound, installed; who gets which parameters, and what is told when."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import muonloom
from engines.support import (
    EXPERTS,
    OPTIONS,
    OVERRIDES,
    SPLIT,
    TRIED,
    Engine,
    Recorder,
    assert_equal,
    bits_of,
    bound_names,
    build,
    engine_for,
    held,
    layout,
    masters,
    model,
    run,
    train,
)
from muonloom import BFloat16Writer, Float8BlockWriter, Layout, install_expert_engine
from staging.support import Named, everything

# -- ways to bind -----------------------------------------------------------------------------------


def given(placement: Any) -> tuple[Named, muonloom.Muon, dict[str, Recorder]]:
    named = model()
    engine, writers = engine_for(named)
    _, opt = build(placement, named=named, engine=engine)
    return named, opt, writers


def bound(placement: Any) -> tuple[Named, muonloom.Muon, dict[str, Recorder]]:
    named, opt = build(placement)
    engine, writers = engine_for(named)
    opt.bind(engine)
    return named, opt, writers


def installed(placement: Any) -> tuple[Named, muonloom.Muon, dict[str, Recorder]]:
    named = model()
    engine, writers = engine_for(named)
    with install_expert_engine(engine):
        _, opt = build(placement, named=named)
    return named, opt, writers


@pytest.mark.parametrize("way", [given, bound, installed], ids=lambda way: way.__name__)
@pytest.mark.parametrize("placement", TRIED)
def test_each_way_to_bind_gives_the_same_bits(placement: str, way: Any):
    plain, other, _ = run(TRIED[placement], writers=False)
    named, opt, writers = way(TRIED[placement])
    assert bound_names(named, opt) == set(EXPERTS)
    train(named, opt, 0, 1, 2)
    assert_equal(masters(other, plain), masters(opt, named))
    assert_equal({name: masters(opt, named)[name] for name in EXPERTS}, held(writers))
    rest = {name: p for name, p in named if name not in EXPERTS}
    assert_equal(rest, {name: dict(plain)[name] for name in rest})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placement", TRIED)
def test_an_engine_bound_in_the_middle_of_training(placement: str, dtype: torch.dtype):
    plain, other, _ = run(TRIED[placement], named=model(dtype), writers=False, steps=4)
    named, opt, _ = run(TRIED[placement], named=model(dtype), writers=False, steps=2)
    engine, writers = engine_for(named)
    opt.bind(engine)
    assert_equal({name: masters(opt, named)[name] for name in EXPERTS}, held(writers))
    train(named, opt, 2, 3)
    assert_equal(masters(other, plain), masters(opt, named))
    assert engine.log == ["before", "after"] * 2


def test_binding_again_changes_nothing():
    named, opt, writers = bound("device")
    (engine,) = opt._weights.engines
    opt.bind(engine)
    opt.register_writer(dict(named)["down"], writers["down"])
    assert opt._weights.engines == (engine,)
    assert [writers[name].prepared for name in EXPERTS] == [1, 1]
    assert opt._weights.engine(dict(named)["down"]) is engine
    train(named, opt, 0)
    assert engine.log == ["before", "after"]  # type: ignore[attr-defined]


# -- installed engines ------------------------------------------------------------------------------


def test_an_installed_engine_is_for_optimizers_that_are_built_meanwhile():
    named = model()
    engine, _ = engine_for(named)
    _, before = build(named=named)
    handle = install_expert_engine(engine)
    _, meanwhile = build(named=named)
    handle.remove()
    handle.remove()
    _, after = build(named=named)
    assert [bound_names(named, opt) for opt in (before, meanwhile, after)] == [
        set(),
        set(EXPERTS),
        set(),
    ]


def test_installations_nest():
    named = model()
    outer, _ = engine_for(named, ("down",))
    inner, _ = engine_for(named, ("gate_up",))
    with install_expert_engine(outer):
        with install_expert_engine(inner):
            _, both = build(named=named)
        _, one = build(named=named)
    assert bound_names(named, both) == {"down", "gate_up"}
    assert both._weights.engines == (outer, inner)
    assert bound_names(named, one) == {"down"}


def test_one_engine_installed_twice_stays_until_both_have_ended():
    named = model()
    engine, _ = engine_for(named)
    with install_expert_engine(engine) as outer:
        assert outer is not None
        with install_expert_engine(engine):
            pass
        _, opt = build(named=named)
    _, after = build(named=named)
    assert bound_names(named, opt) == set(EXPERTS)
    assert bound_names(named, after) == set()


def test_an_installation_ends_where_its_block_raises():
    named = model()
    with pytest.raises(KeyError), install_expert_engine(engine_for(named)[0]):
        raise KeyError
    assert bound_names(named, build(named=named)[1]) == set()


def test_an_installed_engine_that_holds_none_changes_nothing():
    plain, other, _ = run("device", writers=False)
    foreign = Parameter(torch.zeros(4, 4))
    engine = Engine([(foreign, Recorder("foreign", foreign))])
    with install_expert_engine(engine):
        named, opt = build()
        train(named, opt, 0, 1, 2)
    assert_equal(everything(plain, other), everything(named, opt))
    assert engine.log == []


def test_only_the_parameters_of_the_optimizer_are_bound():
    named = model()
    engine, writers = engine_for(named)
    own = [pair for pair in named if pair[0] != "down"]
    with install_expert_engine(engine):
        opt = muonloom.Muon(own, layout=layout(), **OPTIONS)
    assert bound_names(named, opt) == {"gate_up"}
    train(own, opt, 0)
    assert writers["gate_up"].writes
    assert not writers["down"].writes
    assert writers["down"].prepared == 0


@pytest.mark.parametrize("way", ["bound", "installed"])
def test_a_group_that_is_added_later_is_bound(way: str):
    named = model()
    engine, writers = engine_for(named)
    own = [pair for pair in named if pair[0] != "down"]
    added = {"params": [(name, p) for name, p in named if name == "down"]}
    opt = muonloom.Muon(own, layout=layout(), **OPTIONS)
    if way == "bound":
        opt.bind(engine)
        opt.add_param_group(added)
    else:
        with install_expert_engine(engine):
            opt.add_param_group(added)
    assert "down" in bound_names(named, opt)
    train(named, opt, 0)
    assert writers["down"].writes
    assert torch.equal(writers["down"].data, masters(opt, named)["down"])


# -- refused ----------------------------------------------------------------------------------------


def test_two_engines_that_claim_one_parameter():
    named = model()
    one, _ = engine_for(named)
    two, _ = engine_for(named, ("down", "q.weight"))
    before = {name: bits_of(p) for name, p in named}
    with (
        install_expert_engine(one),
        install_expert_engine(two),
        pytest.raises(ValueError, match=r"^down: got two engines"),
    ):
        build(named=named)
    with install_expert_engine(one), pytest.raises(ValueError, match=r"^down: got two engines"):
        build(named=named, engine=two)
    _, opt = build(named=named, engine=one)
    with pytest.raises(ValueError, match=r"^down: got a second writer"):
        opt.bind(two)
    assert bound_names(named, opt) == set(EXPERTS)
    assert opt._weights.engines == (one,)
    train(named, opt, 0)
    assert two.log == []
    assert {name for name, p in named if torch.equal(before[name], bits_of(p))} == set(EXPERTS)


def test_an_engine_and_a_writer_of_ones_own():
    named, opt = build()
    engine, _ = engine_for(named)
    own = Recorder("down", dict(named)["down"])
    opt.register_writer(dict(named)["down"], own)
    with pytest.raises(ValueError, match=r"^down: got a second writer"):
        opt.bind(engine)
    assert bound_names(named, opt) == {"down"}
    named, opt, _ = bound("device")
    with pytest.raises(ValueError, match=r"^down: got a second writer"):
        opt.register_writer(dict(named)["down"], Recorder("down", dict(named)["down"]))
    train(named, opt, 0)


def test_an_engine_that_holds_none_is_refused():
    named, opt = build()
    foreign = Parameter(torch.zeros(4, 4))
    engine = Engine([(foreign, Recorder("foreign", foreign))])
    for refused in (lambda: opt.bind(engine), lambda: build(named=model(), engine=engine)):
        with pytest.raises(ValueError, match=r"^engine: got a Engine that holds none"):
            refused()
    assert opt._weights.engines == ()
    train(named, opt, 0)
    assert engine.log == []


def test_engines_may_both_hold_what_is_not_the_optimizers():
    foreign = Parameter(torch.zeros(4, 4))
    engines = [Engine([(foreign, Recorder("foreign", foreign))]) for _ in range(2)]
    with install_expert_engine(engines[0]), install_expert_engine(engines[1]):
        named, opt = build()
    assert bound_names(named, opt) == set()


def test_an_engine_that_yields_a_parameter_twice_is_refused():
    named, opt = build()
    down = dict(named)["down"]
    engine = Engine([(down, Recorder("down", down)), (down, Recorder("down", down))])
    with pytest.raises(ValueError, match=r"^down: got "):
        opt.bind(engine)
    assert bound_names(named, opt) == set()


@dataclass
class Plain:
    """An engine that is compared by its fields, and so cannot be hashed."""

    held: list[tuple[Parameter, Any]]
    log: list[str] = field(default_factory=list)

    named_writers = Engine.named_writers
    release = Engine.release
    resume = Engine.resume

    def before_step(self, optimizer: Any) -> None:
        self.log.append("before")

    def after_step(self, optimizer: Any, skipped: bool) -> None:
        self.log.append("after")


def test_engines_are_told_apart_by_identity():
    named = model()
    engines = [Plain([(p, Recorder(n, p))]) for n, p in named if n in EXPERTS]
    with install_expert_engine(engines[0]), install_expert_engine(engines[1]):
        _, opt = build(named=named)
    train(named, opt, 0)
    assert [engine.log for engine in engines] == [["before", "after"]] * 2


@pytest.mark.parametrize("way", ["engine", "bind", "install", "register", "add"])
def test_split_masters_refuse_a_writer_that_is_not_bf16(way: str):
    named = model()
    down = dict(named)["down"]
    engine = Engine([(down, Float8BlockWriter())])
    before = bits_of(down)
    message = r'^down: got a Float8BlockWriter and master_layout="split"; wanted .*"full"'
    if way == "engine":
        with pytest.raises(ValueError, match=message):
            build(SPLIT, named=named, engine=engine)
        return
    if way == "install":
        with install_expert_engine(engine), pytest.raises(ValueError, match=message):
            build(SPLIT, named=named)
        return
    own = [pair for pair in named if way != "add" or pair[0] != "down"]
    opt = muonloom.Muon(own, layout=layout(), placement=SPLIT, **OPTIONS)
    with install_expert_engine(engine) if way == "add" else nullcontext():
        ask = {
            "bind": lambda: opt.bind(engine),
            "register": lambda: opt.register_writer(down, Float8BlockWriter()),
            "add": lambda: opt.add_param_group({"params": [("down", down)]}),
        }[way]
        with pytest.raises(ValueError, match=message):
            ask()
    assert torch.equal(before, bits_of(down))
    assert sum(len(group["params"]) for group in opt.param_groups) == len(own)
    train(own, opt, 0)
    opt_of_bf16 = build(SPLIT, named=named, engine=Engine([(down, BFloat16Writer())]))[1]
    train(named, opt_of_bf16, 1)


def test_a_group_whose_writer_is_refused_is_not_added():
    shapes = {"a.weight": (8, 4), "qkv.weight": (128, 4)}
    overrides = {"qkv.weight": OVERRIDES["qkv.weight"].rows(64, 32, 32)}
    whole = Layout.from_shapes(shapes, overrides=overrides)
    named = [(name, Parameter(torch.randn(shape))) for name, shape in shapes.items()]
    opt = muonloom.Muon(named[:1], layout=whole)
    writer = Recorder("qkv.weight", named[1][1], block_rows=128)
    with (
        install_expert_engine(Engine([(named[1][1], writer)])),
        pytest.raises(ValueError, match=r"^qkv\.weight: got a writer for blocks of 128 rows"),
    ):
        opt.add_param_group({"params": named[1:]})
    assert len(opt.param_groups) == 1
    assert bound_names(named, opt) == set()
    opt.add_param_group({"params": named[1:]})
    train(named, opt, 0)
