"""Any parameters, in any order, as often as one likes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from release.support import NAMED, NAMES, Run, build, everything_but_state, has_storage
from staging.support import assert_same_bits

SUBSETS = st.sets(st.sampled_from(NAMES)).map(sorted)
ACTIONS = st.one_of(
    st.tuples(st.just("release"), SUBSETS),
    st.tuples(st.just("release"), SUBSETS),
    st.tuples(st.just("without weights"), SUBSETS),
    st.tuples(st.just("with model"), SUBSETS),
    st.tuples(st.just("resume"), SUBSETS),
    st.tuples(st.just("resume"), st.just(list(NAMES))),
    st.tuples(st.just("step"), st.just([])),
)
KINDS = st.sampled_from(
    [
        ("bf16", "device", None),
        ("all three", "device", None),
        ("all three", "host", None),
        ("bf16 and fp32", "split", None),
        ("bf16", "host", "fp8 alone"),
        ("bf16", "device", "bf16 beside"),
        ("all three", "device", "engine, fp8 beside"),
    ]
)


@functools.cache
def after_steps(kind: tuple[Any, ...], count: int) -> dict[str, Tensor]:
    return build(*kind).step(*range(count)).contents()


def gone(run: Run) -> set[str]:
    held = {name: writer.tensors() for name, writer in run.writers.items()}
    return {n for n, p in run.params.items() if not any(map(has_storage, held.get(n, (p,))))}


@settings(max_examples=20, deadline=None)
@given(kind=KINDS, actions=st.lists(ACTIONS, min_size=2, max_size=8))
def test_any_order_of_any_subsets(kind: tuple[Any, ...], actions: list[Any]) -> None:
    run = build(*kind).step(0)
    steps, asleep, empty = 1, set[str](), set[str]()
    for action, names in actions:
        params = [run[name] for name in names]
        if action == "resume":
            run.opt.resume(params)
            asleep -= set(names)
            empty -= set(names)
        elif action == "step":
            if asleep:
                run.give_gradients(steps)
                with pytest.raises(RuntimeError, match=NAMED) as caught:
                    run.opt.step()
                assert any(name in str(caught.value) for name in asleep)
                continue
            run.step(steps)
            steps += 1
        else:
            weights = action != "without weights"
            model = run.model if action == "with model" else None
            run.opt.release(params, weights=weights, model=model)
            asleep |= set(names)
            empty |= set(names) if weights else set()
        assert gone(run) == empty
    run.opt.resume()
    assert all(has_storage(tensor) for tensor in run.model.buffers())
    assert_same_bits(after_steps(kind, steps), run.contents())


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_twice_is_once(placement: str) -> None:
    run = build("bf16 and fp32", placement).step(0)
    before = run.contents()
    first = run.opt.release(model=run.model)
    memory = run.opt.memory()
    second = run.opt.release(model=run.model)
    assert run.opt.memory() == memory
    assert (second.device_bytes, second.kept_weights, second.kept_gradients) == (0, (), ())
    assert first.device_bytes > 0
    run.opt.resume()
    run.opt.resume()
    run.opt.resume([run["up"]])
    assert_same_bits(before, run.contents())


def test_resume_without_a_release_does_nothing() -> None:
    run = build("all three", "device").step(0)
    where = [tensor.data_ptr() for tensor in everything_but_state(run)]
    before = run.contents()
    run.opt.resume()
    run.opt.resume([run["up"]])
    assert [tensor.data_ptr() for tensor in everything_but_state(run)] == where
    assert_same_bits(before, run.contents())


def test_weights_may_follow_later() -> None:
    run = build("all three", "device").step(0)
    before = run.contents()
    run.opt.release(weights=False)
    assert has_storage(run["up"])
    run.opt.release()
    assert not has_storage(run["up"])
    assert run.opt.memory()["device_weights"] == 0
    run.opt.resume()
    assert_same_bits(before, run.contents())


def test_what_is_the_models_comes_back_with_the_last_parameter() -> None:
    run = build("bf16", "device").step(0)
    running = run.model.running.clone()
    run.opt.release(model=run.model)
    *most, last = run.params.values()
    run.opt.resume(most)
    assert not has_storage(run.model.running)
    assert not has_storage(run.model.frozen)
    run.opt.resume([last])
    assert torch.equal(run.model.running, running)


def test_only_a_models_own_tensors() -> None:
    run = build("bf16", "device").step(0)
    before = run.contents()
    run.opt.release([], model=run.model)
    assert not has_storage(run.model.frozen)
    assert has_storage(run["up"])
    run.step(1)  # the optimizer misses nothing
    run.opt.resume([])
    wanted = build("bf16", "device").step(0, 1).contents()
    assert_same_bits(wanted, run.contents())
    assert_same_bits(
        {key: before[key] for key in ("running", "mask", "frozen")},
        {key: run.contents()[key] for key in ("running", "mask", "frozen")},
    )


@pytest.mark.parametrize("call", ["release", "resume"])
def test_a_stranger_is_refused_and_nothing_happens(call: str) -> None:
    run = build("bf16", "device").step(0)
    stranger = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="not the optimizer's"):
        getattr(run.opt, call)([run["up"], stranger])
    assert all(has_storage(param) for param in run.params.values())
    run.step(1)
