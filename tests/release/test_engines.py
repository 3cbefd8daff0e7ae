"""What an expert engine is asked to do by release and resume; overlap of steps with the forward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import muonloom
from release.support import NAMES, EngineDouble, build, has_storage
from staging.support import assert_same_bits

ENGINES = ("engine, fp8 alone", "engine, fp8 beside", "engine, bf16 alone")


@pytest.mark.parametrize("arrangement", ENGINES)
@pytest.mark.parametrize("placement", ["device", "host"])
def test_calls_of_a_cycle(placement: str, arrangement: str) -> None:
    run = build("bf16", placement, arrangement).step(0)
    assert run.engine is not None
    owned = [param for param, _ in run.engine.pairs]
    run.engine.calls.clear()
    run.opt.release()
    run.opt.release()
    run.opt.resume()
    run.opt.resume()
    names = [call[0] for call in run.engine.calls]
    assert names == ["release", "resume"]
    for _, *params in run.engine.calls:
        assert {id(p) for p in params} == {id(p) for p in owned}
        assert len(params) == len(owned)


@pytest.mark.parametrize("arrangement", ENGINES)
def test_calls_for_parts(arrangement: str) -> None:
    run = build("bf16", "device", arrangement).step(0)
    assert run.engine is not None
    before = run.contents()
    run.engine.calls.clear()
    run.opt.release([run["up"], run["idle"]])
    assert has_storage(run.writers["stack"].tensors()[0])
    run.opt.release()
    run.opt.resume([run["idle"]])
    run.opt.resume([run["stack"]])
    run.opt.resume()
    calls = [(name, {id(p) for p in params}) for name, *params in run.engine.calls]
    rest = {id(run[name]) for name in run.writers} - {id(run["up"])}
    assert calls == [
        ("release", {id(run["up"])}),
        ("release", rest),
        ("resume", {id(run["stack"])}),
        ("resume", (rest | {id(run["up"])}) - {id(run["stack"])}),
    ]
    assert_same_bits(before, run.contents())


def test_an_engine_is_not_asked_where_weights_stay() -> None:
    run = build("bf16", "device", "engine, fp8 alone").step(0)
    assert run.engine is not None
    run.engine.calls.clear()
    run.opt.release(weights=False)
    run.opt.resume()
    assert run.engine.calls == []


def test_steps_are_announced_again_after_resume() -> None:
    run = build("bf16", "device", "engine, fp8 alone").step(0)
    assert run.engine is not None
    run.opt.release()
    run.opt.resume()
    run.engine.calls.clear()
    run.step(1)
    assert run.engine.calls == [("before_step",), ("after_step", False)]


class MovingEngine(EngineDouble):
    """Has other tensors, and other storage objects, after each resume."""

    def resume(self, params: object) -> None:
        chosen = list(params)  # type: ignore[call-overload]
        self.calls.append(("resume", *chosen))
        fresh = [(p, muonloom.BFloat16Writer(torch.full(p.shape, 9.0).bfloat16())) for p in chosen]
        self.pairs = [(p, dict(fresh).get(p, writer)) for p, writer in self.pairs]


def test_an_engine_may_come_back_with_other_storage() -> None:
    runs = []
    for release in (True, False):
        param = Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16())
        opt = muonloom.Muon([("a.weight", param)], lr=0.02)
        engine = MovingEngine([(param, muonloom.BFloat16Writer(param.detach().clone()))])
        opt.bind(engine)
        for seed in range(3):
            draw = torch.Generator().manual_seed(seed)
            param.grad = torch.randn(8, 8, generator=draw).bfloat16()
            opt.step()
            if release:
                opt.release()
                opt.resume()
        runs.append(engine.pairs[0][1].data)
    assert torch.equal(*runs)


def test_split_masters_in_an_engines_hands() -> None:
    run = build("bf16", "split", "engine, bf16 alone").step(0)
    assert run.engine is not None
    before = run.contents()
    run.opt.release()
    assert run.opt.memory()["device_weights"] == 0
    assert run.engine.calls[-1][0] == "release"
    run.opt.resume()
    assert_same_bits(before, run.contents())
    wanted = build("bf16", "split", "engine, bf16 alone").step(0, 1)
    assert_same_bits(wanted.contents(), run.step(1).contents())


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_while_steps_overlap_with_the_forward(placement: str) -> None:
    run = build("bf16 and fp32", placement)
    handle = run.opt.overlap_forward(run.model)
    for seed in range(3):
        run.give_gradients(seed)
        run.opt.step()
        run.opt.release(model=run.model)
        with pytest.raises(RuntimeError, match=r"resume\(\)"):
            run.model(torch.ones(2, 24))
        run.opt.resume()
        run.model(torch.ones(2, 24))
    handle.remove()
    wanted = build("bf16 and fp32", placement).step(0, 1, 2)
    assert_same_bits(wanted.contents(), run.contents())


@pytest.mark.parametrize("when", ["released", "resumed"])
def test_overlap_ends_and_gradients_are_zeroed_meanwhile(when: str) -> None:
    run = build("bf16 and fp32", "host")
    handle = run.opt.overlap_forward(run.model)
    run.give_gradients(0)
    run.opt.step()
    run.opt.release()
    if when == "resumed":
        run.opt.resume()
    for name in NAMES:
        run[name].grad = torch.ones_like(run[name])
    run.opt.zero_grad(set_to_none=False)
    assert not run["up"].grad.any()  # type: ignore[union-attr]
    handle.remove()
    run.opt.resume()
    wanted = build("bf16 and fp32", "host").step(0, 1)
    assert_same_bits(wanted.contents(), run.step(1).contents())
