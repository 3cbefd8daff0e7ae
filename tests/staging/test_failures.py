"""A step that fails in the middle: every part of it is old or new as a whole, or it is named as torn."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom
import muonloom.places
from choosing import slow
from muonloom import HostPlacement
from muonloom.device import Backend, SynchronousBackend, ThreadedBackend
from staging.support import (
    OPTIONS,
    FailingBackend,
    Injected,
    Named,
    assert_same_bits,
    everything,
    give_gradients,
    layout,
    mixed,
    model,
    on_backend,
)

KINDS: dict[str, Callable[[], Backend]] = {
    "synchronous": SynchronousBackend,
    "threaded": ThreadedBackend,
}
BATCHES = {"ns_batch_bytes": 4096}


def build(placement: Any, dtype: Any = mixed, **options: Any) -> tuple[Named, muonloom.Muon]:
    named = model(dtype)
    opt = muonloom.Muon(
        named, layout=layout(), placement=placement, **OPTIONS, **BATCHES, **options
    )
    return named, opt


def step(named: Named, opt: muonloom.Muon, index: int) -> None:
    give_gradients(named, index)
    opt.step()


def reference(dtype: Any = mixed) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return everything after one, two and three steps."""
    named, opt = build("device", dtype)
    after = []
    for index in range(3):
        step(named, opt, index)
        after.append(everything(named, opt))
    return after[0], after[1], after[2]


def changed(
    old: dict[str, Tensor], new: dict[str, Tensor], got: dict[str, Tensor], key: str
) -> Tensor:
    """Return 1 where an element is new, 0 where it is old, -1 where both are the same."""
    bits = {4: torch.int32, 2: torch.int16}[got[key].element_size()]
    was, will, now = (t[key].view(bits) for t in (old, new, got))
    assert bool(((now == was) | (now == will)).all()), f"{key} is neither old nor new somewhere"
    return torch.where(was == will, -1, (now == will).int())


def assert_whole(old: dict[str, Tensor], new: dict[str, Tensor], got: dict[str, Tensor]) -> int:
    """Check that weights, masters and momentum of every element are of one step; count new elements."""
    total = 0
    for name in [key for key in got if "/" not in key]:
        states = [
            key for key in got if key.startswith(f"{name}/") and got[key].shape == got[name].shape
        ]
        whole = changed(old, new, got, name)
        for key in states:
            other = changed(old, new, got, key)
            both = (whole >= 0) & (other >= 0)
            assert torch.equal(whole[both], other[both]), f"{name} and {key} are of different steps"
        total += int((whole == 1).sum())
    return total


def snapshot(named: Named, opt: muonloom.Muon) -> Callable[[], None]:
    """Return what puts everything back."""
    opt.drain()
    weights = {name: parameter.detach().clone() for name, parameter in named}
    state = copy.deepcopy(opt.state_dict())

    def restore() -> None:
        for name, parameter in named:
            parameter.detach().copy_(weights[name])
        opt.load_state_dict(state)

    return restore


def step_and_drain(opt: muonloom.Muon) -> None:
    opt.step()
    opt.drain()


@pytest.mark.parametrize(
    ("kind", "when", "layout_of_masters"),
    [
        ("synchronous", "before", "full"),
        slow("synchronous", "after", "split"),
        ("synchronous", "copy", "split"),
        slow("threaded", "before", "split"),
        ("threaded", "after", "full"),
        slow("threaded", "copy", "full"),
    ],
)
def test_every_piece_of_work_may_fail(kind: str, when: str, layout_of_masters: str):
    placement = HostPlacement(slot_bytes=20_000, num_slots=2, master_layout=layout_of_masters)
    first, second, third = reference()
    with on_backend(lambda: FailingBackend(KINDS[kind](), when)) as made:
        named, opt = build(placement)
        step(named, opt, 0)
        restore = snapshot(named, opt)
        made[0].arm(None)
        give_gradients(named, 1)
        step_and_drain(opt)
        total = made[0].count
        assert total > 40
        new_elements = set()
        for index in range(total):
            restore()
            give_gradients(named, 1)
            made[0].arm(index)
            with pytest.raises(Injected):
                step_and_drain(opt)
            made[0].arm(None)
            new_elements.add(assert_whole(first, second, everything(named, opt)))
        restore()
        for later in (1, 2):
            step(named, opt, later)
        assert_same_bits(everything(named, opt), third)
    assert len(new_elements) > 5  # from nothing to all


def test_a_write_that_fails_once_is_repeated(monkeypatch: pytest.MonkeyPatch):
    first, second, _ = reference(torch.bfloat16)
    del first
    named, opt = build("host", torch.bfloat16)
    step(named, opt, 0)
    genuine = Tensor.copy_
    failures = []

    def copy_(self: Tensor, source: Tensor, *args: Any) -> Tensor:
        if self.dtype == torch.bfloat16 and source.dtype == torch.float32 and not failures:
            failures.append(self)
            genuine(
                self.view(-1)[: self.numel() // 2] if self.is_contiguous() else self[:1],
                source.reshape(-1)[: self.numel() // 2] if self.is_contiguous() else source[:1],
            )
            raise Injected
        return genuine(self, source, *args)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    step(named, opt, 1)
    monkeypatch.undo()
    assert failures
    assert_same_bits(everything(named, opt), second)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_write_that_keeps_failing_tears_and_is_named(
    monkeypatch: pytest.MonkeyPatch, placement: str
):
    named, opt = build(placement, torch.bfloat16)
    step(named, opt, 0)
    restore = snapshot(named, opt)
    genuine = muonloom.places.write
    count = 0

    def write(weight: Tensor, master: Tensor) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise Injected
        genuine(weight, master)

    monkeypatch.setattr(muonloom.places, "write", write)
    give_gradients(named, 1)
    with pytest.raises(Injected):
        opt.step()
    monkeypatch.undo()
    names = "|".join(name.replace(".", r"\.") for name, _ in named)
    for refused in (
        opt.step,
        opt.state_dict,
        lambda: opt.apply_to_masters([named[0][1]], lambda m: None),
    ):
        with pytest.raises(RuntimeError, match=rf"^({names}).*half written.*checkpoint"):
            refused()
    restore()
    step(named, opt, 1)
    twin, other = build("device", torch.bfloat16)
    for index in range(2):
        step(twin, other, index)
    assert_same_bits(everything(named, opt), everything(twin, other))


@pytest.mark.parametrize("kind", list(KINDS))
def test_after_a_failure_the_next_step_goes_on(kind: str):
    """A caller may catch the error and train on: what was not begun has just missed one step."""
    with on_backend(lambda: FailingBackend(KINDS[kind](), "before")) as made:
        named, opt = build(HostPlacement(slot_bytes=20_000, num_slots=3))
        step(named, opt, 0)
        opt.drain()
        made[0].arm(30)
        give_gradients(named, 1)
        with pytest.raises(Injected):
            step_and_drain(opt)
        made[0].arm(None)
        before = everything(named, opt)
        step(named, opt, 2)
        after = everything(named, opt)
    assert all(not torch.equal(before[n], after[n]) for n, _ in named)
    for name, parameter in named:
        if parameter.dtype == torch.bfloat16:
            assert torch.equal(after[f"{name}/master_weight"].bfloat16(), after[name])


def test_a_refused_load_keeps_what_a_failed_step_had_finished():
    first, second, _ = reference()
    with on_backend(lambda: FailingBackend(ThreadedBackend(), "before")) as made:
        named, opt = build(HostPlacement(slot_bytes=20_000, num_slots=3))
        step(named, opt, 0)
        opt.drain()
        give_gradients(named, 1)
        made[0].arm(None)
        step_and_drain(opt)
        total = made[0].count
        for index in range(10, total, 7):
            named, opt = build(HostPlacement(slot_bytes=20_000, num_slots=3))
            step(named, opt, 0)
            opt.drain()
            give_gradients(named, 1)
            made[-1].arm(index)
            with contextlib.suppress(Injected):
                opt.step()
            made[-1].arm(None)
            with pytest.raises(ValueError, match="param_groups"):
                opt.load_state_dict({"state": {}, "param_groups": []})
            assert_whole(first, second, everything(named, opt))
