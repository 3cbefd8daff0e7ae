"""Saves and loads of several ranks that fail on one of them fail on all, and leave what was there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonloom
from muonloom import checkpoint
from muonloom.checkpoint import files, meeting
from muonloom.checkpoint.manifest import Manifest
from muonloom.checkpoint.meeting import Meeting
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.errors import LostRanksError
from ranks.checkpoint_runs import Run, assert_same, content
from ranks.support import run, spawn

# -- meeting by files ---------------------------------------------------------------------------------

NONCE = "0123456789abcdef"


def meetings(path: Path, n: int, limit_s: float = 30.0) -> list[Meeting]:
    return [Meeting(path, NONCE, rank=r, num_ranks=n, limit_s=limit_s) for r in range(n)]


def part(rank: int) -> Manifest:
    return Manifest(
        step=rank,
        created_s=0.0,
        versions={},
        tensors={},
        parameters={},
        options=(),
        ns_batch_bytes=0,
        extras=(f"extra-{rank}",),
        files={},
    )


def data_of(path: Path, rank: int) -> Path:
    return path / f"data-{NONCE}-{rank:05}.safetensors"


def play(one: Meeting) -> None:
    """Do what a rank does that has written its data."""
    try:
        if one._rank == 0:
            one.others_parts()
        else:
            one.hand_in(part(one._rank))
    except BaseException as failure:
        one.leave(failure)
        raise


@contextmanager
def together(n: int) -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(n) as pool:
        yield pool.submit


def test_all_hand_in_and_learn_that_the_checkpoint_is_there(tmp_path: Path):
    first, *others = meetings(tmp_path, 4)
    data_of(tmp_path, 0).touch()
    with together(3) as start:
        waiting = [start(one.hand_in, part(rank)) for rank, one in enumerate(others, start=1)]
        assert [found.step for found in first.others_parts()] == [1, 2, 3]
        assert not any(future.done() for future in waiting)
        first.close()
        for future in waiting:
            future.result(timeout=10)
    assert list(tmp_path.iterdir()) == [data_of(tmp_path, 0)]


@pytest.mark.parametrize("failing", [0, 2])
def test_one_that_fails_tells_all_and_nothing_is_left(failing: int, tmp_path: Path):
    path = tmp_path / "c"
    path.mkdir()
    all_of_them = meetings(path, 3)
    for rank in range(3):
        data_of(path, rank).write_bytes(b"data")

    with together(2) as start:
        waiting = [start(play, one) for one in all_of_them if one is not all_of_them[failing]]
        all_of_them[failing].leave(OSError(28, "x: got no space; wanted some. Make room."))
        for future in waiting:
            with pytest.raises(OSError, match=rf"^rank {failing}: .*x: got no space"):
                future.result(timeout=10)
    assert not path.exists()


def test_ranks_that_are_still_writing_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one, other = meetings(tmp_path, 2, limit_s=0.0)
    one.check()
    other.leave(ValueError("no"))
    with pytest.raises(ValueError, match="rank 1: no"):
        one.check()


def test_a_full_disk_has_room_for_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one, other = meetings(tmp_path, 2)
    data_of(tmp_path, 0).touch()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", full)
        other.leave(OSError(28, "full"))
    with pytest.raises(OSError, match=r"rank 1: .*did not even take the reason"):
        one.others_parts()


def test_who_writes_nothing_is_named(tmp_path: Path):
    all_of_them = meetings(tmp_path, 3, limit_s=0.2)
    for rank in range(3):
        data_of(tmp_path, rank).write_bytes(b"data")
    with together(2) as start:
        for future in [start(play, one) for one in all_of_them[:2]]:
            with pytest.raises(LostRanksError, match="nothing from rank 2 for") as caught:
                future.result(timeout=10)
            assert caught.value.ranks == (2,)


def test_who_goes_on_writing_is_waited_for(tmp_path: Path):
    """And so is the first one, which waits for that one meanwhile."""
    first, second, third = meetings(tmp_path, 3, limit_s=0.5)
    data_of(tmp_path, 0).touch()
    with together(3) as start:
        waiting, handed = start(first.others_parts), start(second.hand_in, part(1))
        until = time.monotonic() + 1.5
        with data_of(tmp_path, 2).open("wb", buffering=0) as file:
            while time.monotonic() < until:
                file.write(b"more")
                time.sleep(0.02)
        handing = start(third.hand_in, part(2))
        assert len(waiting.result(timeout=10)) == 2
        first.close()
        handed.result(timeout=10)
        handing.result(timeout=10)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_first_rank_that_was_killed(is_saved: bool, tmp_path: Path):
    """Whoever has handed in decides nothing: the checkpoint may be there, or come to be."""
    other = meetings(tmp_path, 2, limit_s=0.2)[1]
    data_of(tmp_path, 1).write_bytes(b"data")
    if is_saved:
        (tmp_path / "manifest.json").write_text(f'"{data_of(tmp_path, 1).name}"')
        other.hand_in(part(1))
    else:
        with pytest.raises(LostRanksError, match="nothing from rank 0") as caught:
            other.hand_in(part(1))
        other.leave(caught.value)
    assert data_of(tmp_path, 1).exists()
    assert not list(tmp_path.glob("failed-*.txt"))


# -- failures of saves --------------------------------------------------------------------------------


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def die_in_a_save(rank: int, folder: str, held: str) -> Any:
    path = Path(folder, "c")
    training = Run(held).go(1)
    training.save(path)
    training.go(1)
    plain, writes = os.pwrite, 0

    def until_all_are_on_their_way(*arguments: Any) -> int:
        nonlocal writes
        writes += 1
        if rank == 1 and writes == 4:
            while len(list(Path(folder).glob("started-*"))) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments)

    files.os.pwrite = until_all_are_on_their_way  # type: ignore[assignment]
    handle = training.save(path, async_=True, extra_host_bytes=1 << 20)
    Path(folder, f"started-{rank}").touch()
    started = time.monotonic()
    return *error_of(handle.result), time.monotonic() - started


def test_a_rank_that_is_killed_in_a_save(tmp_path: Path):
    limit_s = 3.0
    outcomes = spawn(3, die_in_a_save, str(tmp_path), "fsdp", timeout_s=limit_s, lost=[1])
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.error
        kind, text, seconds = outcome.value
        assert kind == "LostRanksError", text
        assert f"{tmp_path}/c: got nothing from rank 1 for 3 s" in text
        assert seconds < limit_s + 5
    wanted = Run().go(1)
    wanted.save(tmp_path / "wanted")
    assert_same(content(tmp_path / "c"), content(tmp_path / "wanted"))
    again = Run(seed=1)
    assert again.load(tmp_path / "c")["step"] == 1
    again.go(1).save(tmp_path / "c")
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "c").iterdir())
    assert kinds == ["data", "extra", "manifest.json"], "what was left is gone"


def fill_the_disk(rank: int, folder: str) -> Any:
    """Return what each rank was told, once at the start and once in the middle of a save."""
    path = Path(folder, "c")
    training = Run("ddp", placement="host").go(1)
    training.save(path)
    training.go(1)
    plain, told, left = os.pwrite, [], 0

    def full(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        is_data = "data-" in os.readlink(f"/proc/self/fd/{arguments[0]}")
        if rank == 1 and left < 0 and is_data:
            raise OSError(28, "No space left on device")
        return plain(*arguments)

    files.os.pwrite = full  # type: ignore[assignment]
    told.append(error_of(lambda: training.save(path, async_=True)))
    left = 4
    handle = training.save(path, async_=True)
    training.go(2)
    told.append(error_of(handle.result))
    left = 4
    handle = training.save(path, async_=True)
    told.append(error_of(lambda: training.save(path)))
    files.os.pwrite = plain
    after = training.weights()
    assert_same(after, Run("ddp").go(4).weights())
    return told


def test_a_disk_that_is_full_for_one_rank(tmp_path: Path):
    first, second, third = run(3, fill_the_disk, str(tmp_path))
    for told in (first, third):
        for kind, text in told:
            assert kind == "OSError", text
            assert text.startswith("rank 1: "), text
            assert "No space left" in text
    for kind, text in second:
        assert kind == "OSError"
        assert "No space left" in text
    wanted = Run().go(1)
    wanted.save(tmp_path / "wanted")
    assert_same(content(tmp_path / "c"), content(tmp_path / "wanted"))
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "c").iterdir())
    assert kinds == ["data"] * 3 + ["extra"] * 3 + ["manifest.json"]


def hear_of_it(rank: int, folder: str) -> tuple[str, str, int]:
    """Return what a rank was told, and how much it wrote after another one had failed."""
    path = Path(folder, "c")
    meeting._LONGEST_LOOK_S = 0.0
    training, plain, late = Run("fsdp").go(1), os.pwrite, 0

    def write(*arguments: Any) -> int:
        nonlocal late
        is_data = "data-" in os.readlink(f"/proc/self/fd/{arguments[0]}")
        if threading.current_thread() is not threading.main_thread() and is_data and rank < 2:
            if rank == 1:
                raise OSError(5, "Input/output error")
            late += bool(list(path.glob("failed-*.txt")))
            while not list(path.glob("failed-*.txt")):
                time.sleep(0.01)
        return plain(*arguments)

    files.os.pwrite = write  # type: ignore[assignment]
    return *error_of(lambda: training.save(path)), late


def test_who_is_still_writing_stops_when_another_one_has_failed(tmp_path: Path):
    first, second, third = run(3, hear_of_it, str(tmp_path))
    assert first[:2] == third[:2] == ("OSError", f"rank 1: {second[1]}")
    assert first[2] == 0
    assert not list(tmp_path.iterdir()), "all ranks have heard of it"


class Experts(nn.Module):
    """One weight of the same name on all ranks."""

    def __init__(self, seed: int, *, is_frozen: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(6, 5, generator=generator), requires_grad=not is_frozen)
        self.other = nn.Parameter(torch.ones(4, 4))


def want_different_things(rank: int, folder: str) -> list[Any]:
    training = Run("ddp").go(1)
    path, told = Path(folder, "c"), []

    def save(**options: Any) -> None:
        known = {"model": training.model, "optimizer": training.opt, "step": 1}
        checkpoint.save(options.pop("path", path), **{**known, **options})

    told.append(error_of(lambda: save(path=f"{folder}/{rank}")))
    told.append(error_of(lambda: save(step=7 + rank)))
    told.append(error_of(lambda: save(keep_last=1 if rank else None)))
    told.append(error_of(lambda: save(extra=print if rank else 0)))
    told.append(error_of(lambda: save(step=-1 if rank == 0 else 1)))
    alone = Experts(rank)
    opt = muonloom.Muon(alone.named_parameters(), lr=0.1, process_group=False)
    told.append(error_of(lambda: save(model=alone, optimizer=opt)))
    frozen = Experts(rank, is_frozen=True)
    opt = muonloom.Muon([("other", frozen.other)], lr=0.1)
    told.append(error_of(lambda: save(model=frozen, optimizer=opt)))
    same = Experts(0, is_frozen=True)
    opt = muonloom.Muon([("other", same.other)], lr=0.1)
    told.append(error_of(lambda: save(path=f"{folder}/good", model=same, optimizer=opt)))
    return told


def test_ranks_that_want_different_things_are_told_the_same_before_anything_is_written(
    tmp_path: Path,
):
    one, other = run(2, want_different_things, str(tmp_path))
    paths, steps, keep_last, extra, bad, experts, frozen, good = zip(one, other, strict=True)
    for pair in (paths, steps, keep_last, experts, frozen):
        assert pair[0] == pair[1]
        assert pair[0][0] == "ValueError", pair
    assert f"path: got {tmp_path}/0 on rank 0; {tmp_path}/1 on rank 1; wanted" in paths[0][1]
    assert "step: got 7 on rank 0; 8 on rank 1; wanted" in steps[0][1]
    assert "keep_last: got None on rank 0; 1 on rank 1" in keep_last[0][1]
    assert extra[1][1].startswith("extra: got a value that cannot be loaded")
    assert extra[0] == ("TypeError", f"rank 1: {extra[1][1]}")
    assert bad[0][1].startswith("step: got -1")
    assert bad[1] == ("ValueError", f"rank 0: {bad[0][1]}")
    assert experts[0][1].startswith("w: got float32 (6, 5), shared by rank 0 alone on rank 0")
    assert "DTensor over the mesh" in experts[0][1]
    assert frozen[0][1].startswith("w: got float32 (6, 5), other values")
    assert good == (("", "nothing was raised"),) * 2
    assert {path.name for path in tmp_path.iterdir()} == {"good", "latest"}


# -- failures of loads --------------------------------------------------------------------------------


def load_damage(rank: int, folder: str) -> Any:
    training = Run("fsdp", placement="host").go(1)
    before = training.weights(), training.states()
    told = [error_of(lambda: training.load(Path(folder, "c")))]
    assert_same(training.weights(), before[0])
    assert_same(training.states(), before[1])
    training.go(1)
    told.append(error_of(lambda: training.load(Path(folder, "c"), verify="manifest")))
    told.append(error_of(training.opt.step))
    bare = Run("fsdp", seed=1)
    told.append(error_of(lambda: checkpoint.load(Path(folder, "c"), model=bare.model)))
    told.append(error_of(lambda: bare.load(Path(folder, f"good{rank}"))))
    training.load(Path(folder, "good0"))
    training.go(1)
    return told


def damaged_key(path: Path) -> str:
    """Flip a bit that one of two ranks reads; return what it is of."""
    reader = CheckpointReader(path)
    key = "optimizer.embedding.exp_avg"
    chunk = reader.tensor(key).chunks[-1]
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.start)
        byte = file.read(1)
        file.seek(chunk.start)
        file.write(bytes([byte[0] ^ 1]))
    return key


def save_on(rank: int, path: str) -> None:
    Run("fsdp").go(2).save(path)


def test_damage_that_one_rank_reads_is_refused_by_all(tmp_path: Path):
    for number in range(2):
        Run().go(1 + number).save(tmp_path / f"good{number}")
    run(2, save_on, str(tmp_path / "c"))
    key = damaged_key(tmp_path / "c")
    reading, other = run(2, load_damage, str(tmp_path))[::-1]
    for index in (0, 1):
        kind, text = reading[index]
        assert kind == "CheckpointError"
        assert text.startswith(f"{key}: got bytes in")
        assert other[index] == ("CheckpointError", f"rank 1: {text}")
    for told in (reading, other):
        assert told[2][0] == "RuntimeError"
        assert "half written" in told[2][1]
        assert told[3] == ("", "nothing was raised"), "a model alone does not read the state"
        assert told[4][1].startswith("path: got step 1 on rank 0; step 2 on rank 1"), told[4]
        assert told[4][0] == "CheckpointError"
