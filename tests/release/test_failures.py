"""A release or resume that fails on its way: nothing is lost, and a second call finishes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import muonloom
from muonloom.hollow import is_hollow
from release.support import FailingCopies, Injected, Run, build, has_storage
from staging.support import assert_same_bits

KINDS = [
    ("fp32", "device", None),
    ("bf16", "device", None),
    ("bf16 and fp32", "host", None),
    ("bf16 and fp32", "split", None),
    ("bf16", "device", "fp8 alone"),
    ("bf16", "host", "bf16 beside"),
    ("all three", "device", "engine, fp8 beside"),
]


def copies_of(call: str, kind: tuple[str, str, str | None]) -> int:
    run = build(*kind).step(0)
    if call == "resume":
        run.opt.release(model=run.model)
    with FailingCopies() as counter:
        run.opt.release(model=run.model) if call == "release" else run.opt.resume()
    return counter.count


def some(count: int) -> Iterator[int]:
    """The first ones, the last ones, and a few between."""
    yield from sorted({*range(min(2, count)), *range(3, count - 2, 17), *range(count - 2, count)})


def readable(run: Run) -> dict[str, Tensor]:
    """Weights and buffers that a forward pass would read without an error."""
    tensors = [*run.model.named_parameters(), *run.model.named_buffers()]
    found = {name: t for name, t in tensors if not is_hollow(t)}
    return {name: t.detach().clone() for name, t in found.items() if has_storage(t)}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_copy_fails_while_releasing(kind: tuple[str, str, str | None]) -> None:
    wanted = build(*kind).step(0, 1).contents()
    for index in some(copies_of("release", kind)):
        run = build(*kind).step(0)
        before = run.contents()
        with pytest.raises(Injected), FailingCopies(index):
            run.opt.release(model=run.model)
        found = readable(run)
        assert_same_bits({name: before[name] for name in found}, found)
        run.opt.resume()
        assert_same_bits(before, run.contents())
        assert_same_bits(wanted, run.step(1).contents())


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_a_second_release_goes_on_where_a_copy_failed(kind: tuple[str, str, str | None]) -> None:
    for index in some(copies_of("release", kind)):
        run = build(*kind).step(0)
        before = run.contents()
        with pytest.raises(Injected), FailingCopies(index):
            run.opt.release(model=run.model)
        run.opt.release(model=run.model)
        memory = run.opt.memory()
        assert memory["device_weights"] == memory["device_state"] == 0
        run.opt.resume()
        assert_same_bits(before, run.contents())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_copy_fails_while_resuming(kind: tuple[str, str, str | None]) -> None:
    wanted = build(*kind).step(0, 1).contents()
    for index in some(copies_of("resume", kind)):
        run = build(*kind).step(0)
        before = run.contents()
        run.opt.release(model=run.model)
        # A writer's is repeated once, and then nothing has failed.
        with contextlib.suppress(Injected), FailingCopies(index):
            run.opt.resume()
        found = readable(run)
        assert_same_bits({name: before[name] for name in found}, found)
        run.opt.resume()
        assert_same_bits(before, run.contents())
        assert_same_bits(wanted, run.step(1).contents())


class FullDevice:
    """Has the storages' `index`-th growth fail, as where another process holds the memory."""

    def __init__(self, patch: pytest.MonkeyPatch, index: int) -> None:
        self.count, self._index = 0, index
        resize = torch.UntypedStorage.resize_

        def grow(storage: torch.UntypedStorage, nbytes: int) -> object:
            if nbytes:
                self.count += 1
                if self.count - 1 == self._index:
                    raise Injected("out of memory")
            return resize(storage, nbytes)

        patch.setattr(torch.UntypedStorage, "resize_", grow)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[4]], ids=str)
def test_the_device_is_full_while_resuming(kind: tuple[str, str, str | None]) -> None:
    for index in (0, 1, 4, 7):
        run = build(*kind).step(0)
        before = run.contents()
        run.opt.release(model=run.model)
        with pytest.MonkeyPatch.context() as patch:
            FullDevice(patch, index)
            with pytest.raises(Injected):
                run.opt.resume()
        alone = {name for name in run.writers if kind[2] == "fp8 alone"}
        lost = [n for n, p in run.params.items() if not is_hollow(p) and not has_storage(p)]
        assert set(lost) <= alone, "reading these ends the process"
        found = readable(run)
        assert_same_bits({name: before[name] for name in found}, found)
        run.opt.resume()
        assert_same_bits(before, run.contents())
        run.step(1)


@pytest.mark.parametrize("arrangement", ["engine, fp8 alone", "engine, bf16 alone"])
@pytest.mark.parametrize("call", ["release", "resume"])
def test_an_engine_fails(call: str, arrangement: str) -> None:
    run = build("bf16", "device", arrangement).step(0)
    assert run.engine is not None
    before = run.contents()
    run.engine.fails = {call}
    if call == "resume":
        run.opt.release()
    with pytest.raises(RuntimeError, match=f"engine's {call} failed"):
        getattr(run.opt, call)()
    run.give_gradients(1)
    with pytest.raises(RuntimeError, match="resume"):
        run.opt.step()
    run.engine.fails = set()
    run.opt.resume()
    assert_same_bits(before, run.contents())
    wanted = build("bf16", "device", arrangement).step(0, 1)
    assert_same_bits(wanted.contents(), run.step(1).contents())


def test_while_an_engine_fails_to_resume_no_weight_reads_as_garbage() -> None:
    run = build("bf16", "device", "engine, fp8 beside").step(0)
    assert run.engine is not None
    before = run.contents()
    run.opt.release(model=run.model)
    run.engine.fails = {"resume"}
    with pytest.raises(RuntimeError, match="engine's resume failed"):
        run.opt.resume()
    for param in run.params.values():
        if has_storage(param):
            param.untyped_storage().fill_(1)  # what memory holds is not what it held before
    found = readable(run)
    assert_same_bits({name: before[name] for name in found}, found)


def test_a_second_release_asks_the_engine_again() -> None:
    run = build("bf16", "device", "engine, fp8 alone").step(0)
    assert run.engine is not None
    before = run.contents()
    run.engine.fails = {"release"}
    with pytest.raises(RuntimeError, match="engine's release failed"):
        run.opt.release()
    run.engine.fails = set()
    run.opt.release()
    assert run.opt.memory()["device_weights"] == 0
    run.opt.resume()
    assert_same_bits(before, run.contents())


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_step_that_failed_is_refused_and_nothing_goes(placement: str) -> None:
    run = build("bf16", placement).step(0)
    run.opt._assembly.torn.append("up")
    with pytest.raises(RuntimeError, match=r"^up: .*half written"):
        run.opt.release()
    assert all(map(has_storage, run.params.values()))
    assert run.opt.memory()["device_weights"] > 0


def test_a_failed_iteration_is_told_once_and_then_released() -> None:
    run = build("bf16", "device").step(0)
    run.give_gradients(1)
    run.opt.step()
    record = run.opt._record
    assert record is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(record), "failures", lambda _: ["up"])
        with pytest.raises(FloatingPointError, match=r"^up: "):
            run.opt.release()
    assert all(map(has_storage, run.params.values()))
    run.opt.release()
    run.opt.resume()
    run.step(2)


OUTSIDE = {
    "copy_": lambda p: p.copy_(torch.full_like(p, 3.0)),
    "data": lambda p: p.data.fill_(3.0),
    "data =": lambda p: setattr(p, "data", torch.full_like(p, 3.0)),
}


@pytest.mark.parametrize("how", OUTSIDE)
@pytest.mark.parametrize("placement", ["device", "host", "split"])
@pytest.mark.parametrize("name", ["up", "norm"])
def test_a_weight_written_outside_would_not_come_back(name: str, placement: str, how: str) -> None:
    run = build("bf16", placement).step(0)
    with torch.no_grad():
        OUTSIDE[how](run[name])
    with pytest.raises(muonloom.StaleMasterError, match=rf"^{name}: "):
        run.opt.release()
    assert all(map(has_storage, run.params.values()))
    run.opt.refresh_masters()
    run.opt.release()
    run.opt.resume()
    assert torch.equal(run[name], torch.full_like(run[name], 3.0))
    run.step(1)


@pytest.mark.parametrize("first", ["another", "without weights"])
@pytest.mark.parametrize("how", OUTSIDE)
def test_nor_would_one_written_between_two_releases(how: str, first: str) -> None:
    run = build("bf16", "device").step(0)
    run.opt.release([run["stack"]]) if first == "another" else run.opt.release(weights=False)
    with torch.no_grad():
        OUTSIDE[how](run["up"])
    with pytest.raises(muonloom.StaleMasterError, match=r"^up: "):
        run.opt.release()
    assert has_storage(run["up"])
