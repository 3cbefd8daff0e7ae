"""Killed at any moment, or on a full disk: the last good checkpoint is there, and the next save works.

Children are forked from a process that has done a step, and runs `kill` of this file.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.support import PLACEMENTS, Run, throttled
from fresh import Fresh
from muonloom import checkpoint
from muonloom.checkpoint import files
from staging import support
from staging.support import assert_same_bits

# -- children ---------------------------------------------------------------------------------------

MOMENTS_EACH_TIME = 24
MOMENTS = 50
MOMENT_S = 0.04
"""Between two moments of a save that is killed at them: the more there are, the slower it writes."""

STATE_BYTES = 150_000.0
CALLS = ("open", "pwrite", "fsync", "replace", "mkdir", "unlink", "rmdir")


def second_path(folder: Path, number: int) -> Path:
    """Return where child `number` is killed: where its good checkpoint is, or beside it."""
    return folder / ("one" if number % 2 else "two")


class _undone:
    """Undoes patches when it is left."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


class slow_names(_undone):
    """Have what makes files visible, or removes them, take its time before and after."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        for name in ("replace", "unlink", "fsync"):
            self.patch.setattr(os, name, self._slow(getattr(os, name), seconds / 2))

    @staticmethod
    def _slow(plain: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            result = plain(*args, **options)
            time.sleep(seconds)
            return result

        return call


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child, and end it there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def save_slowly(ready: Run, folder: Path, number: int, moments: int) -> float:
    """Save step 2 over, or beside, the checkpoint of step 1; return how long that took."""
    run = ready
    if number % 4 == 3:  # slabs do not survive a fork
        run = Run(list(PLACEMENTS.values())[number // 4 % len(PLACEMENTS)]).go(2)
    is_async = number % 8 > 4
    begin = time.monotonic()
    with slow_names(0.04), throttled(STATE_BYTES / (MOMENT_S * moments)):
        handle = run.save(
            second_path(folder, number), keep_last=1, async_=is_async, extra=[torch.arange(5)]
        )
        if is_async:
            run.go(1)
        handle.result()
    return time.monotonic() - begin


def kill_at_moments(root: Path, moments: int) -> dict[str, Any]:
    """Time one save, then kill others uniformly over such a time."""
    run = Run("device").go(1)
    run.save(root / "template" / "one")
    run.go(1)
    for number in range(-1, moments):
        shutil.copytree(root / "template", root / str(number))
    took = save_slowly(run, root / "-1", 1, moments)
    gc.freeze()
    events = sorted(
        event
        for number in range(moments)
        for event in (
            (0.08 * number, number, False),
            (0.08 * number + _killed_s(number, moments, took), number, True),
        )
    )
    children: dict[int, int] = {}
    begin = time.monotonic()
    for moment, number, is_kill in events:
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        if is_kill:
            os.kill(children[number], signal.SIGKILL)
        else:
            folder = root / str(number)
            children[number] = fork(partial(save_slowly, run, folder, number, moments))
    ends = [os.waitpid(child, 0)[1] for child in children.values()]
    return {"took": took, "killed": sum(map(os.WIFSIGNALED, ends))}


def _killed_s(number: int, moments: int, took: float) -> float:
    """Return when to kill a save, after its start. One has twice the time that it needs."""
    # Which of them is killed when has nothing to do with how it saves.
    moment = number * 23 % moments
    return took * (1.15 * (moment + 0.5) / moments if moment + 1 < moments else 2.0)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Have models with two parameters, so that a save makes few calls."""
    names = ("conv.weight", "layers.0.norm.weight")
    patch.setattr(support, "SHAPES", {name: support.SHAPES[name] for name in names})
    patch.setattr(support, "OVERRIDES", {names[0]: support.OVERRIDES[names[0]]})


def kill_at_calls(root: Path) -> dict[str, Any]:
    """Kill a save before each of its calls of the system; return how many children there were."""
    with _undone() as small:
        make_small(small.patch)
        run = Run("device").go(1)
    run.save(root / "template" / "one")
    run.go(1)
    gc.freeze()
    num_children = 0
    for where in ("one", "two"):
        number, was_killed = 0, True
        while was_killed:
            folder = root / f"{where} {number}"
            shutil.copytree(root / "template", folder)
            child = fork(partial(_die_at_call, run, folder / where, number))
            status = os.waitpid(child, 0)[1]
            was_killed = os.WIFSIGNALED(status)
            assert was_killed or status == 0
            number += 1
            num_children += 1
    return {"children": num_children}


def _die_at_call(run: Run, path: Path, number: int) -> None:
    with counted(
        lambda _, count, __: os.kill(os.getpid(), signal.SIGKILL) if count == number else None
    ):
        run.save(path, keep_last=1)


class counted(_undone):
    """Have `look` told of each call of the system: its name, its number, and its first argument."""

    def __init__(self, look: Callable[[str, int, Any], None]) -> None:
        super().__init__()
        self._look = look
        self._count = 0
        for name in CALLS:
            self.patch.setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name: str, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._count += 1
        self._look(name, self._count - 1, args[0])
        return plain(*args, **options)


def kill(root: str, moments: int) -> None:
    """Do all of it, and print what is to be known of it."""
    at_moments = kill_at_moments(Path(root) / "moments", moments)
    print(json.dumps({**at_moments, **kill_at_calls(Path(root) / "calls")}))


# -- what is left of them -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kill_many(fresh, tmp_path_factory.mktemp("killed"), MOMENTS_EACH_TIME)


def kill_many(fresh: Fresh, root: Path, moments: int) -> tuple[dict[str, Any], Path]:
    """Have a program kill saves; return what it says, and where it has left what."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from checkpoint.test_durable import kill
kill(sys.argv[2], int(sys.argv[3]))
"""
    ended = fresh.run(code, Path(__file__).parents[1], root, moments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), root


def trained(steps: tuple[int, ...] = (1, 2)) -> dict[int, dict[str, torch.Tensor]]:
    """What there is after steps, by their number."""
    run = Run("device")
    return {step: run.go(1).everything() for step in steps}


def assert_clean(folder: Path, *kept: str) -> None:
    """Pointer and checkpoints are there, and at most the empty directory of a removed one."""
    found = {path.name for path in folder.iterdir() if path.is_file() or any(path.iterdir())}
    assert found == {"latest", *kept}
    for name in kept:
        found = sorted(file.name.split("-")[0] for file in (folder / name).iterdir())
        assert found == ["data", "extra", "manifest.json"]


def loaded_step(run: Run, folder: Path, expected: Any) -> int:
    """Load the newest checkpoint: it is one of those that were saved, whole."""
    path = checkpoint.latest(folder)
    assert path is not None
    found = run.load(path)
    assert_same_bits(run.everything(), expected[found["step"]])
    return int(found["step"])


def test_killed_at_many_moments_the_old_or_the_new_checkpoint_is_whole(
    killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_STALE_S", -1.0)  # what was left is not another save's
    assert_whole(*killed, MOMENTS_EACH_TIME)


@pytest.mark.slow
def test_killed_at_fifty_moments_the_old_or_the_new_checkpoint_is_whole(
    fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_STALE_S", -1.0)
    assert_whole(*kill_many(fresh, tmp_path, MOMENTS), MOMENTS)


def assert_whole(known: dict[str, Any], root: Path, moments: int) -> None:
    assert known["took"] >= MOMENT_S * moments
    assert known["killed"] >= moments * 0.8
    expected = trained()
    runs = [Run(placement) for placement in PLACEMENTS.values()]
    steps = []
    for number in range(moments):
        folder, run = root / "moments" / str(number), runs[number % len(runs)]
        steps.append(loaded_step(run, folder, expected))
        second = second_path(folder, number)
        run.save(second, keep_last=1)
        assert_clean(folder, second.name)
    assert steps.count(1) > 0.4 * moments
    assert steps.count(2) > 0  # killed after the rename, or finished


def test_killed_before_each_call_of_the_system(
    killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, root = killed
    folders = [path for path in (root / "calls").iterdir() if path.name != "template"]
    assert len(folders) == known["children"] > 30
    make_small(monkeypatch)
    monkeypatch.setattr(files, "_STALE_S", -1.0)
    expected, run = trained(), Run("device", seed=3)
    steps = []
    for folder in folders:
        steps.append(loaded_step(run, folder, expected))
        second = folder.name.split()[0]
        run.save(folder / second, keep_last=1)
        assert_clean(folder, second)
    assert steps.count(1) > 10
    assert steps.count(2) > 10


# -- a full disk --------------------------------------------------------------------------------------

FULL = "No space left on device"


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


class full_at(counted):
    """A disk that is full at the call of this number; from then on if it stays full."""

    def __init__(self, number: int, *, stays: bool = False) -> None:
        self.failed: list[str] = []
        self._number, self._stays = number, stays
        super().__init__(self._fail)

    def _fail(self, name: str, count: int, first: Any) -> None:
        is_due = count == self._number or (self._stays and count > self._number)
        if is_due and name not in ("unlink", "rmdir"):
            self.failed.append(name)
            raise OSError(28, FULL, *([] if isinstance(first, int) else [os.fspath(first)]))


@pytest.mark.parametrize(
    ("target", "stays"), [("one", False), ("two", True), ("new/parents/two", False)]
)
def test_a_disk_that_is_full_at_any_call_changes_nothing(
    target: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    run, other = Run("device").go(1), Run("device", seed=1)
    run.save(tmp_path / "good" / "one")
    run.go(1)
    wanted, raised, number, failed = run.everything(), [], 0, ["at first"]
    while failed:
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        before = listing(folder)
        with full_at(number, stays=stays) as disk:
            try:
                run.save(folder / target, keep_last=3)
            except OSError as error:
                raised.append((disk.failed[0], str(error), error.errno))
            else:
                raised.append(None)
        failed = disk.failed
        if raised[-1] is None:
            assert other.load(folder / target)["step"] == 2
        else:
            left = {
                name
                for name in listing(folder).keys() - before.keys()
                if "data" in name or "." in name
            }
            assert not left
            assert {name: listing(folder)[name] for name in before} == before
            assert raised[-1][2] == 28
            assert str(folder) in raised[-1][1]
        assert_same_bits(run.everything(), wanted)
        number += 1
    assert {"open", "pwrite", "fsync", "replace"} <= {found[0] for found in raised if found}
    assert len([found for found in raised if found]) > 10
    assert_same_bits(run.go(2).everything(), Run("device").go(4).everything())


def test_a_full_disk_of_an_asynchronous_save_is_told_by_result_and_training_goes_on(
    tmp_path: Path,
) -> None:
    run = Run(PLACEMENTS["split"]).go(1)
    run.save(tmp_path / "one")
    before = listing(tmp_path)
    with full_at(12):
        handle = run.save(tmp_path / "one", async_=True)
        run.go(2)
        with pytest.raises(OSError, match=r"data-.*No space left"):
            handle.result()
    assert listing(tmp_path) == before
    assert_same_bits(run.go(1).everything(), Run("device").go(4).everything())
    run.save(tmp_path / "one")
    assert Run("device").load(tmp_path / "one")["step"] == 4


def test_a_failure_that_nobody_saw_is_raised_by_the_next_save(tmp_path: Path) -> None:
    run = Run("device").go(1)
    with full_at(12):
        handle = run.save(tmp_path / "one", async_=True)
        while not handle.done():
            time.sleep(0.001)
    with pytest.raises(OSError, match="No space left"):
        run.save(tmp_path / "one")
    run.save(tmp_path / "one")
    assert Run("device").load(tmp_path / "one")["step"] == 1


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """Have the system refuse longer files; the report of the tests may be one, so not for long."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("nbytes", [0, 1000, 50_000])
def test_a_real_limit_of_the_system(nbytes: int, tmp_path: Path) -> None:
    run = Run(PLACEMENTS["host"]).go(1)
    run.save(tmp_path / "one")
    before = listing(tmp_path)
    run.go(1)
    with small_files(nbytes), pytest.raises(OSError, match=r"one/data-.*File too large"):
        run.save(tmp_path / "one")
    assert listing(tmp_path) == before
    assert_same_bits(run.go(1).everything(), Run("device").go(3).everything())


def test_too_little_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("device").go(1)
    run.save(tmp_path / "one")
    before = listing(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with (
        throttled(1e9) as written,
        pytest.raises(OSError, match=r"10,000 bytes of free disk") as error,
    ):
        run.save(tmp_path / "one")
    assert error.value.errno == 28
    assert written == []
    assert listing(tmp_path) == before


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda d, data, start: plain(d, data[:1001], start))
    run = Run("device").go(2)
    run.save(tmp_path / "one")
    other = Run("device", seed=1)
    other.load(tmp_path / "one")
    assert_same_bits(run.everything(), other.everything())


def test_data_is_on_the_disk_before_the_manifest_is_named_and_the_old_goes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds when the power fails: only what was synced before a rename is there after it."""
    run = Run("device").go(1)
    run.save(tmp_path / "one")
    old = {path.name for path in (tmp_path / "one").iterdir()} - {"manifest.json"}
    calls: list[tuple[str, str]] = []

    def noted(name: str) -> None:
        plain = getattr(os, name)

        def call(first: Any, *rest: Any, **options: Any) -> Any:
            what = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            calls.append((name, Path(rest[0]).name if name == "replace" else Path(what).name))
            return plain(first, *rest, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fsync", "replace", "unlink"):
        noted(name)
    run.save(tmp_path / "one")
    monkeypatch.undo()
    visible = calls.index(("replace", "manifest.json"))
    synced = {name for call, name in calls[:visible] if call == "fsync"}
    new = {path.name for path in (tmp_path / "one").iterdir()} - {"manifest.json"}
    data = next(name for name in new if name.startswith("data-"))
    assert data in synced
    assert "one" in synced, "the names of the data files are on the disk"
    writes = [
        index for index, (call, name) in enumerate(calls) if name == data and call == "pwrite"
    ]
    assert max(writes) < calls.index(("fsync", data)) < visible
    gone = [index for index, (call, name) in enumerate(calls) if call == "unlink" and name in old]
    assert len(gone) == len(old)
    after = calls.index(("fsync", "one"), visible)
    assert visible < after < min(gone), "the rename is on the disk before the old data goes"
