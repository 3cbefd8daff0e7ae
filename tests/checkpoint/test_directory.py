"""Checkpoints beside each other: which is the newest, which are removed, and what of others stays."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.support import Run
from muonloom import checkpoint
from muonloom.checkpoint import saving
from staging.support import assert_same_bits


@pytest.fixture(scope="module")
def run() -> Run:
    return Run("device").go(1)


def save(run: Run, path: Path, step: int, **options: Any) -> None:
    """Save as step `step`: the state is the same."""
    checkpoint.save(path, model=run.model, optimizer=run.opt, step=step, **options)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if (path / "manifest.json").is_file())


def step_of(run: Run, path: Path | None) -> int:
    assert path is not None
    return int(checkpoint.load(path, model=run.model, optimizer=run.opt)["step"])


# -- latest -------------------------------------------------------------------------------------------


def test_latest_is_what_was_saved_last(run: Run, tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for name, step in (("b", 1), ("a", 5), ("c", 3)):
        save(run, tmp_path / name, step)
        assert checkpoint.latest(tmp_path) == tmp_path / name
    assert (tmp_path / "latest").read_text() == "c\n"


@pytest.mark.parametrize(
    "pointer",
    [
        "../outside",
        "..",
        ".",
        "",
        "/etc",
        "a/b",
        "nothing",
        "a\0b",
        "x" * 5000,
        "a\nc",
        "latest",
        "\xff",
        b"\xff\xfe\x00",
        None,
    ],
    ids=repr,
)
def test_a_pointer_that_names_no_checkpoint_beside_it_is_not_followed(
    pointer: str | bytes | None, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    for name, step in (("a", 1), ("c", 2), ("a/b", 3)):
        save(run, folder / name, step)
    save(run, tmp_path / "outside", 9)
    for file in (tmp_path / "outside").iterdir():  # the parent is one, too
        shutil.copy(file, tmp_path)
    (folder / "latest").unlink()
    if pointer is not None:
        content = pointer if isinstance(pointer, bytes) else pointer.encode()
        (folder / "latest").write_bytes(content)
    assert checkpoint.latest(folder) == folder / "c"
    assert step_of(run, checkpoint.latest(folder)) == 2


def test_damaged_siblings_are_not_the_newest_and_stay(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path / "good", 1)
    for name, content in {
        "text": b"text",
        "deep": b"[" * 100_000,
        "cut": (tmp_path / "good" / "manifest.json").read_bytes()[:-100],
        "newer": b'{"format": "muonloom-checkpoint", "version": 2}',
    }.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        (tmp_path / name / "manifest.json").write_bytes(content)
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "good"
    before = {path: sorted(path.iterdir()) for path in tmp_path.iterdir() if path.is_dir()}
    save(run, tmp_path / "new", 2, keep_last=1)
    assert steps_in(tmp_path) == sorted(["cut", "deep", "new", "newer", "text"])
    for path, files in before.items():
        assert path.name == "good" or sorted(path.iterdir()) == files


def test_a_checkpoint_that_is_named_latest(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path / "latest", 1)
    assert checkpoint.latest(tmp_path) == tmp_path / "latest"
    save(run, tmp_path / "a", 2)
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    save(run, tmp_path / "latest", 3)
    assert step_of(run, checkpoint.latest(tmp_path)) == 3
    assert steps_in(tmp_path) == ["a", "latest"]


# -- keep_last ----------------------------------------------------------------------------------------


def test_keep_last_goes_by_the_time_of_saving(run: Run, tmp_path: Path) -> None:
    for name, step in (("z", 9), ("a", 5), ("m", 1)):
        save(run, tmp_path / name, step)
    save(run, tmp_path / "k", 3, keep_last=3)
    assert steps_in(tmp_path) == ["a", "k", "m"]
    assert not (tmp_path / "z").exists()
    save(run, tmp_path / "a", 6, keep_last=2)  # saved again: it is the newest
    assert steps_in(tmp_path) == ["a", "k"]
    save(run, tmp_path / "b", 6)
    assert steps_in(tmp_path) == ["a", "b", "k"]
    save(run, tmp_path / "c", 7, keep_last=1)
    assert steps_in(tmp_path) == ["c"]
    save(run, tmp_path / "c", 8, keep_last=100)
    assert steps_in(tmp_path) == ["c"]


def test_keep_last_never_removes_the_new_one_though_the_clock_went_back(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        save(run, tmp_path / name, 1)
    now = time.time()
    monkeypatch.setattr(saving.time, "time", lambda: now - 3600)
    for keep_last in (2, 1):
        save(run, tmp_path / "new", 2, keep_last=keep_last)
        assert step_of(run, tmp_path / "new") == 2
        assert checkpoint.latest(tmp_path) == tmp_path / "new"
        assert len(steps_in(tmp_path)) == keep_last


def test_keep_last_leaves_what_is_not_ours(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "data-0123456789abcdef-00000.safetensors").write_text("mine")
    (tmp_path / "notes" / "model.safetensors").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "file").write_text("mine")
    save(run, tmp_path / "a", 1)
    (tmp_path / "a" / "readme.txt").write_text("mine")
    save(run, tmp_path / "b", 2, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a", "b", "file", "latest", "notes", "other"]
    )
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["readme.txt"]
    assert len(list((tmp_path / "notes").iterdir())) == 2


@pytest.mark.parametrize("target", ["one", "link"])
def test_keep_last_does_not_follow_links(target: str, run: Run, tmp_path: Path) -> None:
    save(run, tmp_path / "one", 1)
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "best").symlink_to("one")
    save(run, tmp_path / target, 2, keep_last=1)
    assert step_of(run, tmp_path / "one") == 2
    save(run, tmp_path / "two", 3, keep_last=2)
    assert step_of(run, tmp_path / "one") == 2
    assert step_of(run, tmp_path / "two") == 3


def test_inference_mode_of_the_caller(run: Run, tmp_path: Path) -> None:
    with torch.inference_mode():
        save(run, tmp_path / "saved", 1)
        found = checkpoint.load(tmp_path / "saved", model=run.model, optimizer=run.opt)
    assert found["step"] == 1
    run.go(1)


def test_what_killed_removals_and_saves_left_is_removed(run: Run, tmp_path: Path) -> None:
    for name in ("half", "again"):
        save(run, tmp_path / name, 1)
        (tmp_path / name / "manifest.json").rename(tmp_path / name / "removed.json")
    save(run, tmp_path / "again", 2)
    old, young = (tmp_path / f"latest.{16 * digit}.partial" for digit in "01")
    old.write_text("ha")
    os.utime(old, (0, 0))
    young.write_text("ha")  # another save's, that is writing it now
    for name in (
        "data-0123456789abcdef-00000.safetensors",
        "manifest.json.0123456789abcdef.partial",
    ):
        (tmp_path / "again" / name).write_text("left")
    save(run, tmp_path / "again", 3, keep_last=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "latest", young.name]
    found = sorted(path.name.split("-")[0] for path in (tmp_path / "again").iterdir())
    assert found == ["data", "extra", "manifest.json"]


@pytest.mark.parametrize("kind", ["created_s", "name"])
def test_what_goes_wrong_after_the_rename_leaves_the_checkpoint_whole(
    kind: str, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, tmp_path / "old", 1)
    path = tmp_path / "new"
    if kind == "name":
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    else:  # as a careless program might write it
        file = tmp_path / "old" / "manifest.json"
        whole = json.loads(file.read_text())
        whole["body"]["created_s"] = "yesterday"
        text = json.dumps(whole["body"], sort_keys=True, separators=(",", ":"))
        file.write_text(json.dumps({**whole, "crc32": zlib.crc32(text.encode())}))
    save(run, path, 2, keep_last=1)
    assert step_of(run, path) == 2
    assert checkpoint.latest(tmp_path) == path


def test_a_pointer_that_cannot_be_written_is_told_and_the_checkpoint_is_there(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, tmp_path / "old", 1)

    def failing(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saving, "_point_to", failing)
    with caplog.at_level(logging.WARNING, logger="muonloom"):
        save(run, tmp_path / "new", 2, keep_last=1)
    assert any("Input/output error" in record.getMessage() for record in caplog.records)
    assert steps_in(tmp_path) == ["new", "old"]
    assert step_of(run, tmp_path / "new") == 2


# -- paths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["with spaces", "Größe-模型-🔥", "a.b.c", "-x", "[*]?", "deep/er/still"]
)
def test_paths_of_every_kind(name: str, run: Run, tmp_path: Path) -> None:
    for step in (1, 2):
        save(run, tmp_path / name, step, keep_last=1)
    assert checkpoint.latest((tmp_path / name).parent) == tmp_path / name
    assert step_of(run, tmp_path / name) == 2
    assert len(list((tmp_path / name).iterdir())) == 3


def test_paths_may_be_text_and_relative_and_the_directory_may_change_meanwhile(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handle = checkpoint.save("a", model=run.model, optimizer=run.opt, step=1, async_=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert handle.result().path.resolve() == (tmp_path / "a").resolve()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.chdir(tmp_path / "a")
    checkpoint.save(".", model=run.model, optimizer=run.opt, step=2)
    assert step_of(run, Path()) == 2
    assert not (tmp_path / "a" / "latest").exists()
    assert (tmp_path / "latest").read_text() == "a\n"
    monkeypatch.chdir(tmp_path)
    assert step_of(run, checkpoint.latest("")) == 2
    checkpoint.save("b/../c/", model=run.model, optimizer=run.opt, step=3)
    assert step_of(run, checkpoint.latest(".")) == 3


def test_files_of_the_user_in_the_directory_stay(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    mine = {
        "readme.md": "mine",
        "model.safetensors": "mine",
        "data-set.csv": "mine",
        "extra-1.pt": "mine",
        "video.mp4.partial": "mine",
        "manifest.json.bak": "mine",
    }
    for name, content in mine.items():
        (path / name).write_text(content)
    (path / "sub").mkdir()
    for step in (1, 2):
        save(run, path, step)
    assert step_of(run, path) == 2
    assert {name: (path / name).read_text() for name in mine} == mine
    assert (path / "sub").is_dir()
    assert len(list(path.iterdir())) == len(mine) + 1 + 3
    save(run, tmp_path / "d", 3, keep_last=1)
    assert {file.name for file in path.iterdir()} == {*mine, "sub"}


def test_a_path_that_is_a_file_or_may_not_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            save(run, path, 1)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- what save is given -------------------------------------------------------------------------------


class Custom:
    """Of a type that is not loaded safely."""


@pytest.mark.parametrize(
    "extra",
    [Custom(), {"a": [Custom()]}, lambda: 1, nn.Linear(2, 2), Path("x"), open],
    ids=["object", "nested", "function", "module", "path", "builtin"],
)
def test_extra_of_a_forbidden_type_is_refused_before_anything_is_written(
    extra: Any, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"^extra: .*state_dict"):
        save(run, tmp_path / "c", 1, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_extra_comes_back_as_it_was(run: Run, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    extra = {
        "numbers": [1, 2.5, True, None, 10**30],
        "text": "Größe",
        "tensor": torch.arange(6).view(2, 3),
        "rng": generator.get_state(),
        3: ("a", {"b": b"bytes"}),
    }
    save(run, tmp_path / "c", 1, extra=extra)
    found = checkpoint.load(tmp_path / "c", model=run.model)["extra"]
    assert_same_bits(
        {key: found.pop(key) for key in ("tensor", "rng")},
        {key: extra.pop(key) for key in ("tensor", "rng")},
    )
    assert found == extra
    save(run, tmp_path / "c", 1)
    assert checkpoint.load(tmp_path / "c", model=run.model)["extra"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("step", value) for value in (-1, 1.5, "1", None, True)],
        *[("keep_last", value) for value in (0, -1, 1.5, "1", True)],
        *[("extra_host_bytes", value) for value in (-1, 1.5, "1", False)],
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    name: str, value: Any, run: Run, tmp_path: Path
) -> None:
    options = {"step": 1, name: value}
    with pytest.raises(ValueError, match=f"^{name}: got "):
        checkpoint.save(tmp_path / "c", model=run.model, optimizer=run.opt, **options)
    assert list(tmp_path.iterdir()) == []


def test_room_for_copies_that_the_host_does_not_have_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        save(run, tmp_path / "c", 1, async_=True, extra_host_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []
