"""Ranks decide alike: to skip, to raise, what has a gradient; a difference between them is one error."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import muonloom
from muonloom import BlockSpec
from muonloom.dtensors import local_part
from ranks.models import (
    OPTIONS,
    SHAPES,
    Case,
    Named,
    Part,
    Result,
    alone,
    build,
    differences,
    give,
    gradient,
    indices,
    layout,
    optimizer,
    parts_of,
    remembered,
    report,
    same_bits,
    value,
)
from ranks.support import run

WORLD = 3
FEW = {name: SHAPES[name] for name in ("q", "mixed_up", "odd", "experts", "embed", "norm")}
CASES = {"plain": Case(shapes=FEW), "rows": Case(shapes=FEW, spread="rows")}
BY_CASE = pytest.mark.parametrize("key", CASES)


def told(call: Callable[[], Any]) -> str | None:
    """Return the error that a call raises, as text; None: it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def begin(case: Case, **options: Any) -> tuple[Named, muonloom.Muon]:
    named = build(case, WORLD)
    return named, optimizer(named, case, **options)


def parts(named: Named, opt: muonloom.Muon, case: Case, *, drain: bool = True) -> dict[str, Part]:
    return parts_of(named, opt, indices(case, WORLD), drain=drain)


def same_part(one: Part, other: Part) -> bool:
    return (
        same_bits(one.weight, other.weight)
        and one.state.keys() == other.state.keys()
        and all(same_bits(tensor, other.state[key]) for key, tensor in one.state.items())
    )


def same_parts(one: dict[str, Part], other: dict[str, Part]) -> bool:
    return all(same_part(one[name], other[name]) for name in one)


def take(named: Named, opt: muonloom.Muon, case: Case, *steps: int) -> None:
    for step in steps:
        give(named, case, step)
        opt.step()


# -- gradients ----------------------------------------------------------------------------------------


def absent_on_one(rank: int, key: str) -> Result:
    """In the second step the second rank has no gradient of two parameters."""
    case = CASES[key]
    named, opt = begin(case)
    reports = []
    for step in range(3):
        give(named, case, step)
        if (rank, step) == (1, 1):
            named["mixed_up"].grad = named["norm"].grad = None
        opt.step()
        reports.append(report(opt))
    return Result(parts=parts(named, opt, case), reports=reports)


def scaled(rank: int, spread: str, factors: tuple[float, ...]) -> Result:
    """Gradients so large that their squares overflow, or all zero."""
    case = Case(shapes=FEW, spread=spread)
    named, opt = begin(case)
    reports = []
    for step, factor in enumerate(factors):
        give(named, case, step)
        for parameter in named.values():
            parameter.grad.mul_(factor)
        opt.step()
        reports.append(report(opt))
    return Result(parts=parts(named, opt, case), reports=reports)


def not_finite(rank: int, key: str) -> dict[str, Any]:
    """The last rank has NaNs; then the second one an infinity, and no more steps may be skipped.

    Gradients of plain tensors were averaged: what one rank has, all have.
    """
    case = CASES[key]
    named, opt = begin(case, max_consecutive_skips=1)
    take(named, opt, case, 0)
    before = parts(named, opt, case)
    give(named, case, 1)
    if rank == WORLD - 1 or key == "plain":
        local_part(named["odd"].grad).fill_(float("nan"))
        local_part(named["embed"].grad).fill_(float("nan"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        opt.step()
    skipped = report(opt)
    give(named, case, 1)
    if rank == 1 or key == "plain":
        local_part(named["norm"].grad).fill_(float("inf"))
    error = told(opt.step)
    untouched = same_parts(before, parts(named, opt, case))
    take(named, opt, case, 1)
    return {
        "heard": [str(warning.message) for warning in heard],
        "skipped": skipped,
        "error": error,
        "untouched": untouched,
        "result": Result(parts=parts(named, opt, case), reports=[]),
    }


def may_not_skip(rank: int, key: str) -> tuple[str | None, bool]:
    case = CASES[key]
    named, opt = begin(case, skip_nonfinite=False)
    before = parts(named, opt, case)
    give(named, case, 0)
    if rank == 1:
        local_part(named["q"].grad).fill_(float("nan"))
    return told(opt.step), same_parts(before, parts(named, opt, case))


SCALES = {"huge": (1e30, 1.0, 1e36), "zero": (0.0, 1.0, 0.0)}


def gradients(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in CASES:
        found[f"absent, {key}"] = absent_on_one(rank, key)
        found[f"not finite, {key}"] = not_finite(rank, key)
        found[f"may not skip, {key}"] = may_not_skip(rank, key)
    for name, factors in SCALES.items():
        for spread in ("plain", "rows", "replicated"):
            found[f"{name}, {spread}"] = scaled(rank, spread, factors)
    return found


@remembered
def outcomes(job: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return run(WORLD, job, limit_s=120)


def outcome(job: Callable[[int], dict[str, Any]], name: str) -> list[Any]:
    return [found[name] for found in outcomes(job)]


def reference(change: Callable[[str, int, Tensor], Tensor], steps: int = 3) -> Result:
    """Train on this process with gradients that `change` returns."""
    case = CASES["plain"]
    named = build(case, 1)
    opt = optimizer(named, case)
    reports = []
    for step in range(steps):
        for name, parameter in named.items():
            parameter.grad = change(name, step, gradient(name, FEW[name], step))
        opt.step()
        reports.append(report(opt))
    return Result(parts=parts_of(named, opt, indices(case, 1)), reports=reports)


@BY_CASE
def test_a_gradient_that_one_rank_lacks_is_zero_there(key: str):
    results = outcome(gradients, f"absent, {key}")

    def change(name: str, step: int, whole: Tensor) -> Tensor:
        if step == 1 and name in ("mixed_up", "norm"):
            whole.view(-1)[results[1].parts[name].state_of] = 0
        return whole

    whole = reference(change)
    assert not differences(results, whole)
    # A bit a parameter travels only in the step in which ranks differ.
    assert [[r["control_bytes"] for r in result.reports] for result in results] == [
        [64, 65, 64]
    ] * 3


@BY_CASE
def test_one_rank_with_a_nan_makes_all_skip_and_name_it(key: str):
    found = outcome(gradients, f"not finite, {key}")
    has_it = [
        rank for rank, here in enumerate(found) if here["result"].parts["odd"].state_of.numel()
    ]
    for here in found:
        (text,) = here["heard"]
        assert text.startswith("odd: got a non-finite gradient")
        assert f"on rank {2 if key == 'rows' else has_it[0]}" in text
        assert here["skipped"]["skipped"]
        assert here["untouched"]
        assert here["error"].startswith("FloatingPointError: norm: got a non-finite gradient")
    assert not differences([here["result"] for here in found], alone(Case(shapes=FEW, steps=2)))


@BY_CASE
def test_a_nan_that_may_not_be_skipped_raises_on_all(key: str):
    errors = {error for error, _ in outcome(gradients, f"may not skip, {key}")}
    assert len(errors) == 1
    assert str(*errors).startswith("FloatingPointError: q: got a non-finite gradient")
    assert all(untouched for _, untouched in outcome(gradients, f"may not skip, {key}"))


@pytest.mark.parametrize("spread", ["plain", "rows", "replicated"])
@pytest.mark.parametrize("name", SCALES)
def test_finite_gradients_of_any_size_are_taken(name: str, spread: str):
    results = outcome(gradients, f"{name}, {spread}")
    whole = reference(lambda _, step, gradient: gradient * SCALES[name][step])
    assert not differences(results, whole)
    for result in results:
        norms = [r["grad_norm"] for r in result.reports]
        assert norms == pytest.approx([r["grad_norm"] for r in whole.reports], rel=1e-6)


# -- results that are not finite ----------------------------------------------------------------------


def spoilt(rank: int, name: str) -> dict[str, Any]:
    """The first rank's momentum is infinite, in one element; nobody drains before the next step."""
    case = CASES["rows"]
    named, opt = begin(case)
    take(named, opt, case, 0)
    if rank == 0:
        opt.state[named[name]]["momentum_buffer"].view(-1)[0] = float("inf")
    before = parts(named, opt, case)
    take(named, opt, case, 1)
    after = parts(named, opt, case, drain=False)
    give(named, case, 2)
    found = {
        "kept": same_part(before[name], after[name]),
        "result": Result(parts=after, reports=[]),
        "named": opt.last_step.nonfinite_updates,
        "error": told(opt.step),
        "untouched": same_parts(after, parts(named, opt, case)),
    }
    opt.state[named[name]]["momentum_buffer"].nan_to_num_(posinf=0.0)
    return {**found, "again": told(opt.step), "hears": told(opt.drain)}


def heard_first(rank: int) -> tuple[str | None, str | None]:
    """Those who hold a part of the matrix hear of it by `drain`, and go on."""
    case = CASES["rows"]
    named, opt = begin(case)
    take(named, opt, case, 0)
    if rank == 0:
        opt.state[named["odd"]]["momentum_buffer"].view(-1)[0] = float("inf")
    take(named, opt, case, 1)
    drained = told(opt.drain)
    if rank == 0:
        opt.state[named["odd"]]["momentum_buffer"].nan_to_num_(posinf=0.0)
    give(named, case, 2)
    return drained, told(opt.step)


def spoil(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: spoilt(rank, name) for name in ("odd", "q")}
    return {**found, "heard first": heard_first(rank)}


@pytest.mark.parametrize("name", ["odd", "q"])
def test_a_failed_iteration_leaves_its_matrix_and_raises_on_all(name: str):
    """Each rank has a row of one matrix; of the other each has one of three matrices."""
    found = outcome(spoil, name)
    holders = range(WORLD) if name == "odd" else [0]
    plain = alone(Case(shapes=FEW, steps=2))
    for rank, here in enumerate(found):
        assert here["named"] == ([name] if rank in holders else [])
        assert here["kept"] == (rank in holders)
        expected = (
            "FloatingPointError: " if rank in holders else "RuntimeError: rank 0: got an error"
        )
        assert here["error"].startswith(expected)
        assert here["untouched"]
        assert here["again"] is None
        assert here["hears"] is None
        part, known = here["result"].parts.pop(name), plain.parts[name]
        assert rank in holders or same_bits(part.weight, known.weight[part.weight_of])
    del plain.parts[name]
    assert not differences([here["result"] for here in found], plain)


def test_who_heard_of_a_failure_goes_on():
    for drained, stepped in outcome(spoil, "heard first"):
        assert drained.startswith("FloatingPointError: odd")
        assert stepped is None


# -- ranks that cannot step ---------------------------------------------------------------------------


def stale(rank: int, spread: str) -> dict[str, Any]:
    """The second rank's weights were written from outside."""
    case = Case(shapes=FEW, spread=spread, dtype=torch.bfloat16)
    named, opt = begin(case)
    take(named, opt, case, 0)
    if rank == 1:
        with torch.no_grad():
            for parameter in named.values():
                local_part(parameter).mul_(2)
    before = parts(named, opt, case)
    give(named, case, 1)
    found = {"error": told(opt.step), "untouched": same_parts(before, parts(named, opt, case))}
    if rank == 1:
        opt.refresh_masters()
    return {**found, "again": told(opt.step)}


def misshapen(rank: int) -> dict[str, Any]:
    case = CASES["rows"]
    named, opt = begin(case)
    before = parts(named, opt, case)
    give(named, case, 0)
    if rank == 1:
        wrong = torch.zeros(5, dtype=torch.float32)
        named["q"].main_grad = wrong
    found = {"error": told(opt.step), "untouched": same_parts(before, parts(named, opt, case))}
    if rank == 1:
        del named["q"].main_grad
    return {**found, "again": told(opt.step)}


def bad_option(rank: int) -> dict[str, Any]:
    case = CASES["rows"]
    named, opt = begin(case)
    take(named, opt, case, 0)
    before = parts(named, opt, case)
    if rank == 1:
        opt.param_groups[0]["lr"] = -1.0
    found = {"error": told(opt.step), "untouched": same_parts(before, parts(named, opt, case))}
    opt.param_groups[0]["lr"] = 0.1
    return {**found, "again": told(opt.step)}


def unable(rank: int) -> dict[str, Any]:
    return {
        "stale plain": stale(rank, "plain"),
        "stale rows": stale(rank, "rows"),
        "misshapen": misshapen(rank),
        "bad option": bad_option(rank),
    }


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("stale plain", "StaleMasterError: "),
        ("stale rows", "StaleMasterError: "),
        ("misshapen", "ValueError: q: got a gradient of shape (5,)"),
        ("bad option", "ValueError: param_groups[0].lr: got -1.0"),
    ],
)
def test_one_rank_that_cannot_step_raises_on_all(name: str, error: str):
    for rank, here in enumerate(outcome(unable, name)):
        expected = (
            error if rank == 1 else "RuntimeError: rank 1: got an error there before the step"
        )
        assert here["error"].startswith(expected)
        assert here["untouched"]
        assert here["again"] is None


# -- ranks that differ --------------------------------------------------------------------------------


def differing(rank: int, name: str, spread: str) -> tuple[str | None, float]:
    """Build another optimizer on the last rank, and step."""
    odd = rank == WORLD - 1
    shapes = dict(FEW)
    if odd and name == "number of parameters":
        del shapes["odd"]
    dtype = torch.bfloat16 if odd and name == "dtype" else torch.float32
    case = Case(shapes=shapes, spread=spread, dtype=dtype)
    chosen = layout(shapes)
    if odd and name == "layout":
        specs = {"q": BlockSpec.heads(6, heads_per_block=3), "embed": "adamw", "odd": "muon"}
        chosen = muonloom.Layout.from_shapes(shapes, overrides=specs)
    options: dict[str, Any] = dict(OPTIONS)
    if odd:
        options |= OTHER_OPTIONS.get(name, {})
    began = time.monotonic()

    def step() -> None:
        named = build(case, WORLD)
        if odd and name == "weights":
            named["norm"].data[3] += 1
        opt = muonloom.Muon(named.items(), layout=chosen, **options)
        give(named, case, 0)
        opt.step()

    return told(step), time.monotonic() - began


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 1e-2},
    "adamw_lr": {"adamw_lr": 3e-2},
    "momentum": {"momentum": 0.5},
    "ns_steps": {"ns_steps": 4},
    "idle_matrices": {"idle_matrices": "skip"},
    "momentum_dtype": {"momentum_dtype": torch.bfloat16},
    "ns_batch_bytes": {"ns_batch_bytes": 4000},
    "skip_nonfinite": {"skip_nonfinite": False},
    "max_consecutive_skips": {"max_consecutive_skips": 1},
}
# Name of the difference -> how its spread, and what the error leads with.
DIFFERENCES = {
    "number of parameters": ("plain", "odd: got "),
    "dtype": ("rows", "q: got "),
    "layout": ("rows", "q: got "),
    "weights": ("plain", "norm: got "),
    "lr": ("rows", "q: got "),
    "adamw_lr": ("plain", "embed: got "),
    "momentum": ("plain", "q: got "),
    "ns_steps": ("plain", "q: got "),
    "idle_matrices": ("rows", "q: got "),
    "momentum_dtype": ("plain", "q: got "),
    "ns_batch_bytes": ("columns", ""),
    "skip_nonfinite": ("rows", ""),
    "max_consecutive_skips": ("rows", ""),
}


def later(rank: int) -> dict[str, Any]:
    """A schedule that one rank forgets in the second step."""
    case = CASES["plain"]
    named, opt = begin(case)
    take(named, opt, case, 0)
    before = parts(named, opt, case)
    if rank:
        opt.param_groups[0]["lr"] = 0.5
    give(named, case, 1)
    found = {"error": told(opt.step), "untouched": same_parts(before, parts(named, opt, case))}
    opt.param_groups[0]["lr"] = OPTIONS["lr"]
    opt.step()
    return {**found, "result": Result(parts=parts(named, opt, case), reports=[])}


TOO_SMALL: dict[str, dict[str, Any]] = {
    "ns_batch_bytes": {"ns_batch_bytes": 200},
    "slot_bytes": {"placement": muonloom.HostPlacement(slot_bytes=256)},
}


def too_small(rank: int, name: str, spread: str) -> str | None:
    """Build an optimizer with less memory than some matrix, of some ranks, needs."""
    named = build(Case(shapes=FEW, spread=spread), WORLD)
    case = Case(shapes=FEW, options=TOO_SMALL[name])
    return told(lambda: optimizer(named, case))


def differ(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: differing(rank, name, spread) for name, (spread, _) in DIFFERENCES.items()
    }
    for name in TOO_SMALL:
        for spread in CASES:
            found[f"{name}, {spread}"] = too_small(rank, name, spread)
    return {**found, "later": later(rank)}


@BY_CASE
@pytest.mark.parametrize("name", TOO_SMALL)
def test_too_little_memory_for_one_rank_is_an_error_of_all(name: str, key: str):
    errors = outcome(differ, f"{name}, {key}")
    assert all(str(error).startswith("ValueError: ") for error in errors), errors


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_mean_different_things_get_one_error(name: str):
    found = outcome(differ, name)
    (error,) = {error for error, _ in found}
    assert error is not None
    assert error.startswith(f"ValueError: {DIFFERENCES[name][1]}")
    assert "on ranks 0 and 1" in error
    assert "on rank 2" in error
    assert max(seconds for _, seconds in found) < 30  # and not the timeout's 60


def test_a_rate_that_one_rank_changed_later_is_the_same_error():
    found = outcome(differ, "later")
    (error,) = {here["error"] for here in found}
    assert error.startswith("ValueError: q: got ")
    assert "lr=0.5" in error
    assert all(here["untouched"] for here in found)
    assert not differences([here["result"] for here in found], alone(Case(shapes=FEW, steps=2)))


# -- groups that hold different things ----------------------------------------------------------------


def expert_groups(rank: int) -> dict[str, Any]:
    """Pairs of ranks have an expert each; later all of them get a matrix."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shapes = {"experts": (1, 12, 8), "odd": (3, 7)}
    expert = nn.Parameter(value("experts", (1, 12, 8), rank % 2))
    shared = nn.Parameter(value("odd", (3, 7), 0))
    groups = [{"params": [("experts", expert)], "process_group": pairs[rank % 2]}]
    opt = muonloom.Muon(groups, layout=layout(shapes), **OPTIONS)
    found: dict[str, Any] = {}
    for number in range(2):
        expert.grad = torch.ones_like(expert)
        shared.grad = torch.ones_like(shared)
        if rank == 1:
            expert.grad.fill_(float("nan"))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            opt.step()
        found[f"skipped {number}"] = opt.last_step.skipped
        found[f"heard {number}"] = [str(warning.message) for warning in heard]
        if number == 0:
            opt.add_param_group({"params": [("odd", shared)]})
    found["whole"] = bool(torch.equal(shared, value("odd", (3, 7), 0)))
    return found


def uneven_tokens(rank: int) -> dict[str, Any]:
    """One pair's expert gets a gradient in the first step, nobody in the second, all in the third."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shapes = {"experts": (1, 12, 8), "odd": (3, 7)}
    expert = nn.Parameter(value("experts", (1, 12, 8), rank % 2))
    shared = nn.Parameter(value("odd", (3, 7), 0))
    groups = [
        {"params": [("experts", expert)], "process_group": pairs[rank % 2]},
        {"params": [("odd", shared)]},
    ]
    opt = muonloom.Muon(groups, layout=layout(shapes), **OPTIONS)
    weights = []
    for step in range(3):
        has = step == 2 or (step == 0 and rank % 2 == 0)
        expert.grad = torch.ones_like(expert) if has else None
        shared.grad = torch.ones_like(shared) if step == 2 else None
        opt.step()
        weights.append((expert.detach().clone(), shared.detach().clone()))
    return {"weights": weights}


def test_a_step_without_any_gradient_changes_nothing_anywhere():
    for rank, here in enumerate(run(4, uneven_tokens, timeout_s=20)):
        (first, _), (second, shared), (third, last) = here["weights"]
        untouched = value("experts", (1, 12, 8), rank % 2)
        assert torch.equal(first, untouched) == (rank % 2 == 1)
        assert torch.equal(first, second)
        assert torch.equal(shared, value("odd", (3, 7), 0))
        assert not torch.equal(second, third)
        assert not torch.equal(shared, last)


def test_who_has_nothing_in_common_decides_alone_until_it_has():
    found = run(4, expert_groups)
    assert [here["skipped 0"] for here in found] == [False, True, False, True]
    assert all(here["skipped 1"] and here["whole"] for here in found)
    for here in found:
        (text,) = here["heard 1"]
        assert "experts: got a non-finite gradient" in text
        assert "on rank 1" in text
