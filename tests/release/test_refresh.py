"""Weights loaded from outside: trained from after `refresh_masters`, and never silently reverted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom
from release.support import OPTIONS, Model, Run, build, has_storage
from staging.support import assert_same_bits

DECAY = 1 - OPTIONS["lr"] * OPTIONS["weight_decay"]
# The master's own rounding to FP32, at most 4 in size, in decay and in the update.
FP32_ROUNDING = 2e-6


def _merge(run: Run, name: str) -> None:
    down, up = torch.ones(24, 2).bfloat16(), torch.full((2, 16), 0.25).bfloat16()
    run[name].data += (down @ up).reshape(run[name].shape)


def _load_state_dict(run: Run, name: str) -> None:
    values = {**run.model.state_dict(), name: Model("bf16", seed=9).get_parameter(name).detach()}
    run.model.load_state_dict(values)


def _from_pretrained(run: Run, name: str) -> None:
    with torch.no_grad():
        run[name].copy_(Model("bf16", seed=9).get_parameter(name))


PATHS: dict[str, Callable[[Run, str], object]] = {
    "load_state_dict": _load_state_dict,
    "copy_": _from_pretrained,
    "data.copy_": lambda run, name: run[name].data.copy_(torch.full_like(run[name], 2.0)),
    "data =": lambda run, name: setattr(run[name], "data", torch.full_like(run[name], 2.0)),
    "adapter merge": _merge,
}


def assert_moved_alike(run: Run, twin: Run, name: str, shift: Tensor) -> None:
    """Both took the same update; `run` took it from a master that was `shift` away.

    Muon's update depends on momentum and gradient alone, so the distance between the masters only decays.
    """
    run_master = run.opt.get_full_parameter_master(run[name])
    twin_master = twin.opt.get_full_parameter_master(twin[name])
    assert run_master is not None
    assert twin_master is not None
    distance = run_master - twin_master - shift * DECAY
    assert float(distance.abs().max()) <= FP32_ROUNDING * float(run_master.abs().max() + 1)
    momentum = [r.opt.state[r[name]]["momentum_buffer"] for r in (run, twin)]
    assert_same_bits({"momentum": momentum[0]}, {"momentum": momentum[1]})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_refreshed_masters_train_from_the_new_weights(placement: str, path: str) -> None:
    run, twin = build("bf16", placement).step(0, 1), build("bf16", placement).step(0, 1)
    before = run.opt.get_full_parameter_master(run["up"])
    assert before is not None
    before = before.clone()
    PATHS[path](run, "up")
    new = run["up"].detach().clone()
    shift = new.float() - before
    assert float(shift.abs().max()) > 0.2
    run.opt.refresh_masters()
    master = run.opt.get_full_parameter_master(run["up"])
    assert_same_bits({"up": new.float()}, {"up": master})  # type: ignore[dict-item]
    assert_moved_alike(run.step(2), twin.step(2), "up", shift)
    run.step(3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_without_it_the_step_raises_and_writes_nothing(placement: str, path: str) -> None:
    run = build("bf16", placement).step(0, 1)
    state = run.state()
    PATHS[path](run, "up")
    weights = {name: param.detach().clone() for name, param in run.params.items()}
    run.give_gradients(2)
    for _ in range(2):
        with pytest.raises(muonloom.StaleMasterError, match=r"^up: .*refresh_masters"):
            run.opt.step()
    assert_same_bits(weights, {name: param.detach() for name, param in run.params.items()})
    # Half a master cannot tell that a weight was overwritten with the bits that it had.
    rewritten = placement == "split" and path == "load_state_dict"
    run.opt.refresh_masters(None if rewritten else [run["up"]])
    fresh = run.state()
    changed = "/master" if rewritten else "up/master"
    others = [key for key in state if changed not in key]
    assert_same_bits({k: state[k] for k in others}, {k: fresh[k] for k in others})
    run.opt.step()


def test_a_sparse_edit_through_data_is_missed() -> None:
    """The documented limit: one element that is not sampled, and no version that tells."""
    run = build("bf16", "device").step(0)
    sampled = slice(None, None, run["table"].numel() // 64)
    at = 1
    assert at not in range(run["table"].numel())[sampled]
    run["table"].data.view(-1)[at] = 100.0
    run.step(1)  # no error: it is reverted
    assert run["table"].view(-1)[at].item() < 50.0
    run["table"].data.view(-1)[at] = 100.0
    run.opt.refresh_masters([run["table"]])
    run.step(2)
    assert run["table"].view(-1)[at].item() > 50.0


EDITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda tensor, new: tensor.copy_(new),
    "data": lambda tensor, new: tensor.data.copy_(new),
}


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("arrangement", ["fp8 alone", "fp8 beside", "engine, fp8 alone"])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_float8_weights(placement: str, arrangement: str, how: str) -> None:
    run = build("bf16", placement, arrangement).step(0, 1)
    twin = build("bf16", placement, arrangement).step(0, 1)
    other = build("bf16", placement, arrangement, seed=9)
    old = run.opt.get_full_parameter_master(run["up"])
    assert old is not None
    old, state = old.clone(), run.state()
    for target, values in zip(
        run.writers["up"].tensors(), other.writers["up"].tensors(), strict=True
    ):
        EDITS[how](target, values)
    bytes_now = [tensor.clone() for tensor in run.writers["up"].tensors()]
    run.give_gradients(2)
    with pytest.raises(muonloom.StaleMasterError, match=r"^up: "):
        run.opt.step()
    with pytest.raises(muonloom.StaleMasterError, match=r"^up: "):
        run.opt.release()
    assert_same_bits(state, run.state())
    for tensor, wanted in zip(run.writers["up"].tensors(), bytes_now, strict=True):
        assert_same_bits({"bytes": wanted}, {"bytes": tensor})
    run.opt.refresh_masters([run["up"]])
    new = other.writers["up"].read(other["up"])
    assert_same_bits({"": new}, {"": run.opt.get_full_parameter_master(run["up"])})  # type: ignore[dict-item]
    run.opt.release()
    run.opt.resume()
    assert_moved_alike(run.step(2), twin.step(2), "up", new - old)
    assert has_storage(run["up"]) == (arrangement == "fp8 beside")


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_between_refresh_and_step_the_weights_may_be_released(placement: str) -> None:
    run, other = build("bf16", placement).step(0), build("bf16", placement).step(0)
    for each in (run, other):
        with torch.no_grad():
            each["up"].copy_(torch.full((24, 16), 2.0))
        each.opt.refresh_masters()
    run.opt.release()
    run.opt.resume()
    assert_same_bits(other.step(1).contents(), run.step(1).contents())


HEADS, HEAD = 4, 6  # of "up", (24, 16): 4 heads of 6 rows
CLIPPED = {1: 0.5, 3: 0.25}


def qk_clip(clipped: dict[int, float]) -> Callable[[Tensor], None]:
    """Scale the rows of heads whose largest attention logit was too large (Kimi K2, 2025)."""

    def clip(master: Tensor) -> None:
        heads = master.view(HEADS, HEAD, -1)
        for head, factor in clipped.items():
            heads[head] *= factor

    return clip


@pytest.mark.parametrize(
    ("placement", "arrangement"),
    [
        *((placement, None) for placement in ("device", "host", "split")),
        *((placement, "fp8 alone") for placement in ("device", "host")),
        *((placement, "engine, fp8 beside") for placement in ("device", "host")),
        *((placement, "bf16 alone") for placement in ("device", "host", "split")),
    ],
)
def test_qk_clip_survives_the_next_step(placement: str, arrangement: str | None) -> None:
    run = build("bf16", placement, arrangement).step(0, 1)
    twin = build("bf16", placement, arrangement).step(0, 1)
    old = run.opt.get_full_parameter_master(run["up"])
    assert old is not None
    old = old.clone()
    run.opt.apply_to_masters([run["up"]], qk_clip(CLIPPED))
    clipped = run.opt.get_full_parameter_master(run["up"])
    assert clipped is not None
    clipped = clipped.clone()
    factors = torch.tensor([CLIPPED.get(head, 1.0) for head in range(HEADS)])
    assert torch.equal(clipped, old * factors.repeat_interleave(HEAD)[:, None])
    assert_weight_is_of_master(run)
    run.opt.release()
    run.opt.resume()
    assert_moved_alike(run.step(2), twin.step(2), "up", clipped - old)
    assert_weight_is_of_master(run)


def assert_weight_is_of_master(run: Run) -> None:
    master = run.opt.get_full_parameter_master(run["up"])
    assert master is not None
    writer: Any = run.writers.get("up")
    if writer is not None:
        assert writer.agrees(run["up"], master)
    else:
        assert torch.equal(run["up"], master.bfloat16())


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_a_bad_edit_of_masters_changes_nothing(placement: str) -> None:
    run = build("bf16 and fp32", placement).step(0)
    before = run.contents()
    bad: Sequence[Callable[[Tensor], Tensor]] = (
        lambda master: master * float("inf"),
        lambda master: master.flatten()[:3],
        lambda master: master.long(),
    )
    for function in bad:
        with pytest.raises(ValueError, match=r"^up: "):
            run.opt.apply_to_masters([run["up"], run["norm"]], function)
        assert_same_bits(before, run.contents())
