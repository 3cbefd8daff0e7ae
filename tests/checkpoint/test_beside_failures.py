"""Saves that fail leave training alone, and steps that fail leave saves alone; what is let go."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import muonloom.engine
from checkpoint.disks import saved, stalled, to_save
from checkpoint.support import PLACEMENTS, Run
from choosing import pairwise
from fresh import Fresh
from muonloom import checkpoint
from muonloom.checkpoint.finding import latest
from muonloom.device.hazards import CheckedBackend
from staging.support import BACKENDS, assert_same_bits, mixed, on_backend

ALL_BYTES = 10_000_000
OPTIONS: dict[str, Any] = {"ns_steps": 1}


def assert_saved(path: Path, wanted: dict[str, Any]) -> None:
    found = saved(path)
    del found["counter"]
    assert_same_bits(to_save(wanted), found)


# -- the disk fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "number", "extra"), pairwise(PLACEMENTS, [0, 20], [0, 20_000, ALL_BYTES])
)
def test_training_goes_on_untouched_when_a_write_fails(
    placement: str, number: int, extra: int, tmp_path: Path
):
    run, other = (Run(PLACEMENTS[placement], **OPTIONS).go(1) for _ in range(2))
    run.save(tmp_path / "good")
    good = run.everything()
    with stalled(lazy=True) as disk:
        disk.fails_at = number
        handle = run.save(tmp_path / "bad", async_=True, extra_host_bytes=extra)
        run.go(2)
        disk.open()
        run.go(1)
        with pytest.raises(OSError, match=r"bad/data-[0-9a-f]+-00000\.safetensors"):
            handle.result()
    assert handle.done()
    assert not (tmp_path / "bad").exists()
    assert latest(tmp_path) == tmp_path / "good"
    assert_saved(tmp_path / "good", good)
    assert_same_bits(other.go(3).everything(), run.everything())
    run.save(tmp_path / "bad")
    assert_saved(tmp_path / "bad", run.everything())


def failed(run: Run, path: Path) -> checkpoint.SaveHandle:
    with stalled() as disk:
        disk.fails_at = 3
        disk.open()
        handle = run.save(path, async_=True)
        while not handle.done():
            pass
    return handle


def test_the_next_save_raises_what_nobody_has_seen_and_only_once(tmp_path: Path):
    run = Run("host", **OPTIONS).go(1)
    handle = failed(run, tmp_path / "bad")
    run.go(1)
    with pytest.raises(OSError, match="Input/output error"):
        run.save(tmp_path / "good")
    assert not (tmp_path / "good").exists()
    run.save(tmp_path / "good").result()
    with pytest.raises(OSError, match="Input/output error"):
        handle.result()


def test_what_was_seen_is_not_raised_again(tmp_path: Path):
    run = Run("host", **OPTIONS).go(1)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            failed(run, tmp_path / "bad").result()
    run.save(tmp_path / "good", async_=True).result()


def test_a_failed_save_in_place_of_a_good_one_leaves_that(tmp_path: Path):
    run = Run(PLACEMENTS["split"], **OPTIONS).go(1)
    run.save(tmp_path / "save")
    before = run.everything()
    run.go(1)
    with pytest.raises(OSError, match="Input/output error"):
        failed(run, tmp_path / "save").result()
    assert_saved(tmp_path / "save", before)
    assert not list((tmp_path / "save").glob("*.partial"))
    assert len(list((tmp_path / "save").glob("data-*"))) == 1


def test_a_failed_write_of_the_last_small_files(tmp_path: Path):
    """When all data is on the disk, what makes it visible is missing."""
    run = Run("host", **OPTIONS).go(1)
    with stalled() as disk:
        disk.open()
        run.save(tmp_path / "counted").result()
        all_writes, disk.writes = disk.writes, 0
    for missing in (1, 2, 3):
        path = tmp_path / f"bad{missing}"
        with stalled() as disk:
            disk.fails_at = all_writes - missing
            disk.open()
            handle = run.save(path, async_=True)
            if (
                missing > 1
            ):  # the last write is that of the pointer: the checkpoint is there already
                with pytest.raises(OSError, match="Input/output error"):
                    handle.result()
            else:
                handle.result()
        assert path.exists() == (missing == 1)


# -- a step fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "number", "extra"), pairwise(PLACEMENTS, [3, 9, 15, 24], [0, ALL_BYTES])
)
def test_what_a_failed_step_brings_home_is_not_in_the_save(
    placement: str, number: int, extra: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """State that the step has finished goes to the slabs at once, and not by a store of the schedule."""
    run = Run(PLACEMENTS[placement], dtype=mixed, **OPTIONS).go(1)
    before = run.everything()
    genuine, done = muonloom.engine._do, []

    def do(*arguments: Any) -> None:
        genuine(*arguments)
        done.append(1)
        if len(done) == min(number, 16 if placement == "device" else number):
            raise KeyboardInterrupt

    with stalled(lazy=True):
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=extra)
        with monkeypatch.context() as patch:
            patch.setattr(muonloom.engine, "_do", do)
            with pytest.raises(KeyboardInterrupt):
                run.go(1)
    handle.result()
    assert_saved(tmp_path / "save", before)


def test_a_copy_that_fails_fails_the_save_too(tmp_path: Path):
    """The step cannot know what was copied; the save must not count on it."""
    run = Run("host", dtype=torch.float32, **OPTIONS).go(1)
    with stalled(lazy=True):
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
        snapshot = run.opt._assembly._snapshot
        assert snapshot is not None
        victim = snapshot.segments[-2].tensor
        object.__setattr__(victim, "read", refuse)
        with pytest.raises(MemoryError, match="no room"):
            run.go(1)
    with pytest.raises(RuntimeError, match="copy of a part of the state failed"):
        handle.result()
    assert not (tmp_path / "save").exists()
    del snapshot, victim
    assert_all_goes(run, handle)


def refuse(*_: Any) -> None:
    raise MemoryError("no room")


def test_a_step_after_all_is_read_needs_no_more_order(tmp_path: Path):
    with on_backend(BACKENDS["checked"]) as backends:
        run = Run(PLACEMENTS["host"], **OPTIONS).go(1)
        handle = run.save(tmp_path / "save", async_=True)
        while not handle.done():
            pass
        run.go(1)
        (backend,) = backends
        assert isinstance(backend, CheckedBackend)
        backend.check()


# -- what is let go -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "is_kept", "fails"), pairwise(PLACEMENTS, [False, True], [False, True])
)
def test_nothing_of_a_finished_save_keeps_the_optimizer(
    placement: str, is_kept: bool, fails: bool, tmp_path: Path
):
    run = Run(PLACEMENTS[placement], **OPTIONS).go(1)
    with stalled(lazy=True) as disk:
        if fails:
            disk.fails_at = 10
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=20_000)
        run.go(1)
    if fails:
        with pytest.raises(OSError, match="Input/output error"):
            handle.result()
    else:
        handle.result()
    assert_all_goes(run, handle if is_kept else None)


def test_an_optimizer_can_be_dropped_while_it_is_saved(tmp_path: Path):
    run = Run("host", **OPTIONS).go(1)
    before = run.everything()
    with stalled():
        handle = run.save(tmp_path / "save", async_=True)
        del run
        gc.collect()
    handle.result()
    assert_saved(tmp_path / "save", before)


def test_threads_end_with_their_saves(tmp_path: Path):
    before = threading.active_count()
    for number in range(3):
        run = Run("host", **OPTIONS).go(1)
        run.save(tmp_path / str(number), async_=True).result()
        with pytest.raises(OSError, match="Input/output error"):
            failed(run, tmp_path / "bad").result()
    assert threading.active_count() == before


def assert_all_goes(run: Run, handle: object) -> None:
    state = [weakref.ref(tensor) for own in run.opt.state.values() for tensor in own.values()]
    weights = [weakref.ref(parameter) for _, parameter in run.named]
    optimizer = weakref.ref(run.opt)
    run.__dict__.clear()
    gc.collect()
    assert optimizer() is None
    assert not [found for found in (*state, *weights) if found() is not None]
    del handle


# -- the end of the program ---------------------------------------------------------------------------

PROGRAM = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from checkpoint.support import Run, throttled
path = Path(sys.argv[2])
"""
TESTS = Path(__file__).parents[1]

ENDS_EARLY = """
run = Run("host", ns_steps=1).go(1)
with throttled(1_000_000) as written:
    run.save(path / "save", async_=True)
    run.go(1)
    assert not (path / "save/manifest.json").exists()
    sys.exit(0)  # the throttle is gone by then, the save is not
"""

FAILS = """
import os
from muonloom.checkpoint import files
plain = os.pwrite
def fail(descriptor, data, start):
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    if "bad" in name and threading.current_thread() is not threading.main_thread():
        raise OSError(28, "No space left on device")
    return plain(descriptor, data, start)
files.os.pwrite = fail
runs = [Run("host", ns_steps=1).go(1) for _ in range(4)]
for number, run in enumerate(runs):
    run.save(path / ("bad" if number == 1 else f"good{number}"), async_=True)
"""


def test_the_end_of_the_program_waits_for_a_save(fresh: Fresh, tmp_path: Path):
    done = fresh.run(PROGRAM + ENDS_EARLY, TESTS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert_saved(tmp_path / "save", Run("host", ns_steps=1).go(1).everything())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="knows files by /proc")
def test_the_end_of_the_program_shows_a_failure_and_waits_for_all_others(
    fresh: Fresh, tmp_path: Path
):
    done = fresh.run(PROGRAM + FAILS, TESTS, tmp_path)
    assert "No space left on device" in done.stderr
    assert "bad/data-" in done.stderr
    assert not (tmp_path / "bad").exists()
    wanted = Run("host", ns_steps=1).go(1).everything()
    for number in (0, 2, 3):
        assert_saved(tmp_path / f"good{number}", wanted)
