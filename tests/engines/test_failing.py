"""Writers that fail: once they are asked again, twice the parameter is torn, and all else is whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.support import (
    PLACEMENTS,
    Broken,
    Engine,
    Recorder,
    assert_equal,
    build,
    held,
    masters,
    recorders,
    register,
    run,
)
from muonloom.device import Backend, SynchronousBackend, ThreadedBackend
from staging.support import give_gradients, on_backend

TRIED = {key: PLACEMENTS[key] for key in ("device", "tiny", "one slot")}
KINDS: dict[str, Callable[[], Backend]] = {
    "synchronous": SynchronousBackend,
    "threaded": ThreadedBackend,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", TRIED)
def test_a_writer_that_fails_once_is_asked_again(placement: str, kind: str):
    plain, opt, _ = run(TRIED[placement], writers=False)
    with on_backend(KINDS[kind]):
        named, other, writers = run(TRIED[placement], recorder={"fails": (0, 3)})
        assert_equal(masters(opt, plain), masters(other, named))
        assert_equal(masters(opt, plain), held(writers))
    for writer in writers.values():
        assert writer.writes[0] == writer.writes[1]
        assert writer.writes[2:] != writer.writes[:2]


# -- twice ------------------------------------------------------------------------------------------


class Snapshots:
    """A model that was trained for one step, to come back to, and what the second step makes of it."""

    def __init__(self, placement: Any) -> None:
        self.named, self.opt = build(placement)
        self.writers = recorders(self.named)
        register(self.opt, self.named, self.writers)
        self.step(0)
        self.opt.drain()
        self.state = copy.deepcopy(self.opt.state_dict())
        self.old = self.everything()
        for writer in self.writers.values():
            writer.writes.clear()
        self.step(1)
        self.new = self.everything()
        self.calls = {name: len(writer.writes) for name, writer in self.writers.items()}

    def step(self, number: int) -> None:
        give_gradients(self.named, number)
        self.opt.step()
        self.opt.drain()

    def go_back(self) -> None:
        self.opt.load_state_dict(copy.deepcopy(self.state))
        for writer in self.writers.values():
            writer.writes.clear()
            writer.fails.clear()

    def everything(self) -> dict[str, Tensor]:
        """Return weights and state, without asking the optimizer whether it is well."""
        found = {}
        for name, parameter in self.named:
            found[name] = self.writers[name].data.clone()
            for key, value in self.opt.state[parameter].items():
                found[f"{name}/{key}"] = value.clone()
        return found


def is_whole(
    name: str, old: dict[str, Tensor], new: dict[str, Tensor], got: dict[str, Tensor]
) -> bool:
    """Whether weight, master and momentum of each element are all old, or all new."""
    keys = [key for key in got if key == name or key.startswith(f"{name}/")]
    keys = [key for key in keys if got[key].shape == got[name].shape]
    is_old = torch.stack([(got[key] == old[key]).reshape(-1) for key in keys]).all(0)
    is_new = torch.stack([(got[key] == new[key]).reshape(-1) for key in keys]).all(0)
    return bool((is_old | is_new).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", TRIED)
def test_a_writer_that_fails_twice_tears_its_parameter_and_no_other(placement: str, kind: str):
    """Each write of a step in turn."""
    with on_backend(KINDS[kind]):
        case = Snapshots(TRIED[placement])
        case.go_back()
        assert_equal(case.old, case.everything())
        for name, writer in case.writers.items():
            for call in range(case.calls[name]):
                case.go_back()
                writer.fails = {call, call + 1}
                with pytest.raises(Broken) as failure:
                    case.step(1)
                assert name in str(getattr(failure.value, "__notes__", ""))
                _assert_others_whole(case, name)
                _assert_refused(case)
        case.go_back()
        assert_equal(case.old, case.everything())
        case.step(1)
        assert_equal(case.new, case.everything())


def _assert_others_whole(case: Snapshots, name: str) -> None:
    torn = case.opt._assembly.torn
    assert name in torn
    scalars = {"embed.weight", "norm.weight", "gain"}
    # AdamW works on a whole pack at once, in place where state is on the device.
    assert set(torn) <= ({name} if case.opt._assembly.host else {name} | scalars)
    got = case.everything()
    broken = [
        n for n, _ in case.named if n not in torn and not is_whole(n, case.old, case.new, got)
    ]
    assert not broken


def _assert_refused(case: Snapshots) -> None:
    opt = case.opt
    message = r"^[a-z_.]+( \(and \d more\))?: got a weight .*half written.*checkpoint"
    before = case.everything()
    for refused in (
        opt.step,
        opt.state_dict,
        lambda: opt.apply_to_masters([case.named[0][1]], lambda master: None),
    ):
        with pytest.raises(RuntimeError, match=message):
            refused()
    assert_equal(before, case.everything())


def test_a_failing_step_is_not_told_to_engines_as_ended():
    named, opt = build()
    writers = recorders(named)
    engine = Engine([(p, writers[name]) for name, p in named])
    opt.bind(engine)
    give_gradients(named, 0)
    opt.step()
    writers["down"].fails = {1, 2}
    with pytest.raises(Broken):
        opt.step()
    assert engine.log == ["before", "after", "before"]
    assert opt._assembly.torn == ["down"]


@pytest.mark.parametrize("placement", TRIED)
def test_an_interrupt_is_not_retried(placement: str):
    named, opt, writers = run(TRIED[placement], steps=1)
    genuine = writers["down"].write
    calls = []

    def write(param: Tensor, master: Tensor, rows: slice) -> None:
        calls.append(rows)
        if len(calls) == 1:
            raise KeyboardInterrupt
        genuine(param, master, rows)

    writers["down"].write = write  # type: ignore[method-assign]
    give_gradients(named, 1)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert len(calls) == 1
    assert opt._assembly.torn == ["down"]


# -- errors at registration -------------------------------------------------------------------------


def wrong_shape(recorder: Recorder) -> None:
    recorder.source = torch.zeros(2, 2)


def broadcast(recorder: Recorder) -> None:
    recorder.source = torch.zeros(1, *recorder.data.shape[1:])


def failing_read(recorder: Recorder) -> None:
    def read(param: Tensor) -> Tensor:
        raise Broken(recorder.name)

    recorder.take_source = read  # type: ignore[assignment]


def failing_prepare(recorder: Recorder) -> None:
    def prepare(param: Tensor) -> None:
        raise Broken(recorder.name)

    recorder.prepare = prepare  # type: ignore[method-assign]


def failing_write(recorder: Recorder) -> None:
    recorder.fails = {0, 1}
    recorder.agrees = lambda param, master: False  # type: ignore[method-assign]


BREAKS = [
    (wrong_shape, 0),
    (broadcast, 0),
    (failing_read, 0),
    (failing_prepare, 0),
    (failing_prepare, 1),
    (failing_write, 0),
    (failing_write, 1),
]


@pytest.mark.parametrize(("breaks", "steps"), BREAKS)
@pytest.mark.parametrize("placement", ["device", "tiny"])
def test_a_registration_that_fails_changes_nothing(
    placement: str, breaks: Callable[[Recorder], None], steps: int
):
    plain, opt, _ = run(PLACEMENTS[placement], steps=steps, writers=False)
    named, other, _ = run(PLACEMENTS[placement], steps=steps, writers=False)
    recorder = Recorder("down", dict(named)["down"])
    breaks(recorder)
    with pytest.raises((ValueError, Broken)):
        other.register_writer(dict(named)["down"], recorder)
    for trained, owner in ((plain, opt), (named, other)):
        give_gradients(trained, 5)
        owner.step()
    assert_equal(masters(opt, plain), masters(other, named))
    assert_equal(dict(plain), dict(named))


def test_an_engine_of_which_one_writer_is_refused_is_not_bound():
    named, opt, _ = run("device", steps=1, writers=False)
    writers = recorders(named)
    wrong_shape(writers["gain"])
    writers["gain"].fails = {0, 1}
    writers["gain"].agrees = lambda param, master: False  # type: ignore[method-assign]
    engine = Engine([(p, writers[name]) for name, p in named])
    with pytest.raises((ValueError, Broken)):
        opt.bind(engine)
    plain, other, _ = run("device", steps=1, writers=False)
    for trained, owner in ((plain, other), (named, opt)):
        give_gradients(trained, 5)
        owner.step()
    assert_equal(dict(plain), dict(named))
    assert engine.log == []


# -- errors outside of steps ------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["device", "tiny"])
def test_a_writer_that_fails_in_a_load_leaves_whole_state_or_a_torn_name(placement: str):
    named, opt, writers = run(PLACEMENTS[placement], steps=2)
    saved = copy.deepcopy(opt.state_dict())
    before = {name: {k: v.clone() for k, v in opt.state[p].items()} for name, p in named}
    writers["kv.weight"].fails = set(range(1000))
    with pytest.raises(Broken):
        opt.load_state_dict(saved)
    for name, parameter in named:
        assert_equal(before[name], dict(opt.state[parameter]))
    give_gradients(named, 2)
    with pytest.raises(RuntimeError, match=r"^kv\.weight: "):
        opt.step()
    writers["kv.weight"].fails.clear()
    opt.load_state_dict(saved)
    opt.step()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("placement", ["device", "tiny"])
def test_a_writer_that_fails_under_apply_to_masters(placement: str, times: int):
    named, opt, writers = run(PLACEMENTS[placement], steps=2)
    down = dict(named)["down"]
    opt.drain()
    count = len(writers["down"].writes)
    writers["down"].fails = {count + i for i in range(times)}
    before = masters(opt, named)["down"]
    if times == 1:
        opt.apply_to_masters([down], lambda master: master * 0.5)
        assert torch.equal(writers["down"].data, before * 0.5)
        return
    with pytest.raises(Broken):
        opt.apply_to_masters([down], lambda master: master * 0.5)
    give_gradients(named, 2)
    with pytest.raises(RuntimeError, match=r"^down: got a weight .*half written"):
        opt.step()


@pytest.mark.parametrize("rows", [0, -3])
def test_blocks_of_no_rows_are_refused(rows: int):
    named, opt = build()
    with pytest.raises(ValueError, match=r"^down: got .*rows_per_block"):
        opt.register_writer(
            dict(named)["down"], Recorder("down", dict(named)["down"], block_rows=rows)
        )
    assert not opt.state


def test_what_is_no_writer_is_refused():
    named, opt = build()
    with pytest.raises((TypeError, ValueError), match=r"^down: got .*object"):
        opt.register_writer(dict(named)["down"], object())  # type: ignore[arg-type]
