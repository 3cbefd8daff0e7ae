"""Damaged checkpoints, and those of others: one error that names the file or the parameter."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.damage import EXTRA, Damaged, flip, tensors_of
from checkpoint.support import Run
from muonloom import CheckpointError, checkpoint
from muonloom.checkpoint.manifest import Manifest
from staging.support import assert_same_bits

# -- what is damaged, and how -------------------------------------------------------------------------


def swap(file: Path) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    pairs = zip(
        content[middle:], content[middle + 1 :], strict=False
    )  # spaces in JSON mean nothing
    at = middle + next(i for i, two in enumerate(pairs) if len({*two} - {*b" ,"}) == 2)
    content[at], content[at + 1] = content[at + 1], content[at]
    file.write_bytes(content)


def zero_page(file: Path) -> None:
    content = bytearray(file.read_bytes())
    begin = len(content) // 2
    assert any(content[begin : begin + 512])
    content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "two bytes short": lambda file: os.truncate(file, file.stat().st_size - 2),
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "one byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a sector of zeros": zero_page,
    "bytes swapped": swap,
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}

KINDS = ("manifest", "data", "extra")

# -- verify="full" ------------------------------------------------------------------------------------


def test_damage_of_any_file_is_refused_and_nothing_changes(damaged: Damaged) -> None:
    for kind in KINDS:
        for damage in DAMAGES.values():
            damage(damaged.file(kind))
            damaged.refused(names=damaged.file(kind).name)
            damaged.mend()
    damaged.goes_on()


def test_a_file_of_another_checkpoint_is_refused(damaged: Damaged) -> None:
    for kind in ("data", "extra"):
        other = next(file for file in damaged.other.iterdir() if file.name.startswith(kind))
        shutil.copy(other, damaged.file(kind))
        damaged.refused(names=damaged.file(kind).name)
        damaged.mend()
    shutil.copy(damaged.other / "manifest.json", damaged.file("manifest"))
    damaged.refused(names="data-")  # it wants files of other names
    damaged.goes_on()


def test_the_data_of_a_later_save_is_refused_though_it_has_the_same_size(
    shared: Damaged,
) -> None:
    shared.saved.go(1)
    later = shared.path.with_name("later")
    shared.saved.save(later, extra=EXTRA)
    source = next(later.glob("data-*"))
    assert source.stat().st_size == shared.file("data").stat().st_size
    shutil.copy(source, shared.file("data"))
    shared.refused(names=shared.file("data").name)
    shared.goes_on()


def test_a_flipped_bit_of_any_tensor_is_refused_by_its_name(shared: Damaged) -> None:
    choose = random.Random(0)
    places = tensors_of(shared.path)
    assert {key.rpartition(".")[2] for key in places} >= {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "weight",
        "counter",
    }
    file = shared.file("data")
    for key, (start, nbytes) in places.items():
        for bit in (0, 8 * nbytes - 1, choose.randrange(8 * nbytes)):
            flip(file, 8 * start + bit)
            shared.refused(names=key)
            flip(file, 8 * start + bit)
    shared.goes_on()


def test_a_flipped_bit_of_extra_is_refused(shared: Damaged) -> None:
    file = shared.file("extra")
    for bit in random.Random(1).sample(range(8 * file.stat().st_size), 40):
        flip(file, bit)
        shared.refused(names=file.name)
        flip(file, bit)
    shared.goes_on()


def test_a_flipped_bit_of_the_manifest_is_refused_or_says_the_same(shared: Damaged) -> None:
    file = shared.file("manifest")
    want = Manifest.from_json(file.read_text(), file)
    refused = 0
    for bit in random.Random(2).sample(range(8 * file.stat().st_size), 300):
        flip(file, bit)
        try:
            content = file.read_text()
            assert Manifest.from_json(content, file) == want  # 1e-5 is 1E-5, too
        except (CheckpointError, UnicodeDecodeError):
            refused += 1
            if refused % 10 == 0:
                shared.refused(names=file.name)
        flip(file, bit)
    assert refused > 250
    shared.goes_on()


def test_a_flipped_bit_of_the_data_files_header_does_no_harm(on_device: Damaged) -> None:
    """Where tensors lie is in the manifest; the header is for tools that read the file by itself."""
    file = on_device.file("data")
    first = min(start for start, _ in tensors_of(on_device.path).values())
    for bit in random.Random(3).sample(range(8 * first), 5):
        flip(file, bit)
        try:
            on_device.run.load(on_device.path)
        except CheckpointError as error:
            if file.name not in str(error):
                raise
        else:
            assert_same_bits(on_device.run.everything(), on_device.expected)
        flip(file, bit)


# -- verify="manifest" --------------------------------------------------------------------------------


def test_manifest_finds_the_same_damage_and_refuses_steps_until_a_good_load(
    damaged: Damaged,
) -> None:
    for kind, name in (("data", "a sector of zeros"), ("data", "zeros")):
        DAMAGES[name](damaged.file(kind))
        damaged.refused(verify="manifest", names=damaged.file(kind).name)
        for attempt in (lambda: damaged.run.go(1), lambda: damaged.run.save(damaged.path)):
            with pytest.raises(RuntimeError, match="load"):
                attempt()
        with pytest.raises(RuntimeError, match="load"):
            damaged.run.opt.state_dict()
        damaged.mend()
        damaged.run.load(damaged.path, verify="manifest")
        assert_same_bits(damaged.run.everything(), damaged.expected)
        twin = Run("device").go(3)
        assert_same_bits(damaged.run.go(1).everything(), twin.everything())


def test_manifest_finds_flipped_bits_of_every_tensor(on_device: Damaged) -> None:
    file = on_device.file("data")
    for key, (start, nbytes) in tensors_of(on_device.path).items():
        flip(file, 8 * start + 4 * nbytes)
        on_device.refused(verify="manifest", names=key)
        flip(file, 8 * start + 4 * nbytes)
        with pytest.raises(RuntimeError, match="load"):
            on_device.run.go(1)
    on_device.run.load(on_device.path, verify="manifest")
    assert_same_bits(on_device.run.go(1).everything(), Run("device").go(3).everything())


def test_manifest_changes_nothing_where_the_damage_shows_before_the_load(
    on_device: Damaged,
) -> None:
    for kind, name in (
        ("data", "two bytes short"),
        ("data", "missing"),
        ("extra", "bytes swapped"),
        ("manifest", "half"),
    ):
        DAMAGES[name](on_device.file(kind))
        on_device.refused(verify="manifest", names=on_device.file(kind).name)
        on_device.assert_untouched()
        on_device.mend()
    on_device.goes_on()


def test_a_model_alone_gets_the_same_error(on_device: Damaged) -> None:
    file = on_device.file("data")
    start, _ = tensors_of(on_device.path)["model.head.weight"]
    flip(file, 8 * start)
    with pytest.raises(CheckpointError, match=r"model\.head\.weight: .*data-"):
        checkpoint.load(on_device.path, model=on_device.run.model)
    on_device.assert_untouched()
    with pytest.raises(CheckpointError, match=r"model\.head\.weight: .*data-"):
        checkpoint.load(on_device.path, model=Run("device").model, verify="manifest")


# -- not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layers.0.down.weight", "momentum_buffer"),
        ("embed.weight", "exp_avg"),
        ("head.weight", "exp_avg_sq"),
        ("layers.1.q.weight", "master_weight"),
    ],
)
def test_state_that_is_not_finite_is_refused_by_its_name(
    name: str,
    key: str,
    value: float,
    shared: Damaged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = Run("device").go(2)
    parameter = dict(bad.named)[name]
    bad.opt.state[parameter][key].view(-1)[-1] = value
    bad.save(tmp_path / "bad")
    monkeypatch.setattr(shared, "path", tmp_path / "bad")
    wanted = f"model.{name}" if key == "master_weight" else f"optimizer.{name}.{key}"
    for verify in ("full", "manifest"):
        shared.refused(names=wanted, verify=verify)
        shared.assert_untouched()
    shared.goes_on()


def test_state_of_bfloat16_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    bad = Run("device", momentum_dtype=torch.bfloat16).go(1)
    parameter = dict(bad.named)["conv.weight"]
    bad.opt.state[parameter]["momentum_buffer"].view(-1)[3] = float("nan")
    bad.save(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=r"optimizer\.conv\.weight\.momentum_buffer"):
        Run("device", momentum_dtype=torch.bfloat16).load(tmp_path / "bad")
