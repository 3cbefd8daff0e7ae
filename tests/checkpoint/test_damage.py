"""Damaged checkpoints, and those of others: one error that names the file or the parameter."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.support import PLACEMENTS, Run
from muonloom import CheckpointError, checkpoint
from muonloom.checkpoint.checksum import checksum
from muonloom.checkpoint.manifest import Manifest
from staging.support import assert_same_bits

EXTRA = {"rng": torch.arange(40), "epoch": 3, "names": ["a", "b"]}

# -- what is damaged, and how -------------------------------------------------------------------------


class Damaged:
    """A checkpoint that is damaged and mended again, and a run that nothing may change."""

    def __init__(self, folder: Path, placement: Any) -> None:
        self.path = folder / "good"
        self.saved = Run("device").go(2)
        self.saved.save(self.path, extra=EXTRA)
        self.expected = self.saved.everything()
        other = Run("device", seed=9).go(1)
        other.save(folder / "other", extra={"epoch": 1})
        self.other = folder / "other"
        self.run = Run(placement, seed=4).go(3)
        self.twin = Run(placement, seed=4).go(3)
        self._whole = {file: file.read_bytes() for file in self.path.iterdir()}
        self.before = self.run.everything()
        self.groups = options_of(self.run)

    def file(self, kind: str) -> Path:
        return next(file for file in self._whole if file.name.startswith(kind))

    def mend(self) -> None:
        for file, content in self._whole.items():
            if not file.is_file() or file.read_bytes() != content:
                if file.is_dir():
                    shutil.rmtree(file)
                file.write_bytes(content)

    def refused(self, *, verify: str = "full", names: str | None = None) -> str:
        """Load what is damaged: an error that names something, and a run that is as it was."""
        with pytest.raises(CheckpointError) as caught:
            self.run.load(self.path, verify=verify)
        message = str(caught.value)
        assert str(self.path) in message or "model." in message or "optimizer." in message
        assert "; wanted " in message
        if names is not None:
            assert names in message
        if verify == "full":
            self.assert_untouched()
        return message

    def assert_untouched(self) -> None:
        assert_same_bits(self.run.everything(), self.before)
        assert options_of(self.run) == self.groups

    def goes_on(self) -> None:
        """The next step is that of a run that nobody disturbed."""
        assert_same_bits(self.run.go(1).everything(), self.twin.go(1).everything())

    def forge(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the manifest's body as another program might, with a checksum that is right."""
        file = self.path / "manifest.json"
        whole = json.loads(file.read_text())
        change(whole["body"])
        text = json.dumps(whole["body"], sort_keys=True, separators=(",", ":"))
        whole["crc32"] = zlib.crc32(text.encode())
        file.write_text(json.dumps(whole))


def options_of(run: Run) -> list[dict[str, Any]]:
    return [
        {key: copy.copy(value) for key, value in group.items() if key != "params"}
        for group in run.opt.param_groups
    ]


@pytest.fixture(params=["device", "split"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Damaged]:
    found = Damaged(tmp_path, PLACEMENTS[request.param])
    yield found
    found.mend()
    found.run.load(found.path)
    assert_same_bits(found.run.everything(), found.expected)


@pytest.fixture
def on_device(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path, "device")


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(tmp_path_factory.mktemp("kept"), "device")


@pytest.fixture
def shared(_kept: Damaged) -> Iterator[Damaged]:
    """One for all tests whose loads are all refused: they step it once, its twin too."""
    _kept.before, _kept.groups = _kept.run.everything(), options_of(_kept.run)
    yield _kept
    _kept.mend()


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


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


def tensors_of(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the bytes of each tensor are."""
    body = json.loads((path / "manifest.json").read_text())["body"]
    sizes = {"F32": 4, "BF16": 2, "I64": 8}
    return {
        key: (
            tensor["chunks"][0]["start"],
            torch.Size(tensor["shape"]).numel() * sizes[tensor["dtype"]],
        )
        for key, tensor in body["tensors"].items()
    }


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


# -- manifests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"no JSON", b"{}", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000],
    ids=["text", "empty", "list", "null", "string", "no UTF-8", "deep", "a long number"],
)
def test_a_manifest_that_is_none(content: bytes, shared: Damaged) -> None:
    shared.file("manifest").write_bytes(content)
    shared.refused(names="manifest.json")
    assert checkpoint.latest(shared.path.parent / "nowhere") is None
    shared.goes_on()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", 2, "version 2"),
        ("version", "1", "version 1"),
        ("version", None, "version None"),
        ("format", "another", "format another"),
        ("crc32", 0, "checksum"),
        ("crc32", "0", "checksum"),
    ],
)
def test_another_version_or_format_is_named(
    key: str, value: Any, says: str, shared: Damaged
) -> None:
    file = shared.file("manifest")
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, key: value}))
    assert says in shared.refused(names="manifest.json")
    file.write_text(json.dumps({name: entry for name, entry in whole.items() if name != key}))
    shared.refused(names="manifest.json")
    shared.goes_on()


def test_a_later_version_is_not_read_any_further(shared: Damaged) -> None:
    file = shared.file("manifest")
    file.write_text(json.dumps({"format": "muonloom-checkpoint", "version": 9, "all": "else"}))
    assert "version 9" in shared.refused()
    assert "release" in shared.refused()


KEYS = ("step", "created_s", "versions", "tensors", "parameters", "options", "ns_batch_bytes")
KEYS += ("extras", "files", "aliases", "model")


def test_manifests_without_a_key_or_with_another_kind_of_value(shared: Damaged) -> None:
    for key in KEYS:
        if key not in ("aliases", "model"):
            shared.forge(lambda body, key=key: body.pop(key))
            shared.refused(names="manifest.json")
            shared.mend()
        for value in (3.5, "text", [3], {"a": 3}, None):
            if (key, value) in (("created_s", 3.5), ("aliases", {"a": 3})):
                continue
            if key in ("ns_batch_bytes", "versions", "model"):
                continue  # nothing is done with them but to show them
            shared.forge(lambda body, key=key, value=value: body.update({key: value}))
            shared.refused()
            shared.mend()
    shared.forge(lambda body: body.update(unknown=1))
    shared.refused(names="manifest.json")
    shared.goes_on()


def first_tensor(body: dict[str, Any], key: str = "model.embed.weight") -> dict[str, Any]:
    return body["tensors"][key]


def first_chunk(body: dict[str, Any]) -> dict[str, Any]:
    return first_tensor(body)["chunks"][0]


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no chunks": lambda body: first_tensor(body).update(chunks=[]),
    "a dtype of nobody": lambda body: first_tensor(body).update(dtype="F7"),
    "a chunk behind the end": lambda body: first_chunk(body).update(start=10**9),
    "a chunk before the beginning": lambda body: first_chunk(body).update(start=-8),
    "a chunk at a broken place": lambda body: first_chunk(body).update(start=0.5),
    "a chunk of no file": lambda body: first_chunk(body).update(file="data-none"),
    "a chunk without a start": lambda body: first_chunk(body).pop("start"),
    "no blocks": lambda body: first_chunk(body).update(blocks=[]),
    "too few rows": lambda body: first_chunk(body)["blocks"][0].update(rows=1),
    "negative rows": lambda body: first_chunk(body)["blocks"][0].update(rows=-1),
    "a checksum of another kind": lambda body: first_chunk(body)["blocks"][0].update(checksum=1),
    "another checksum": lambda body: first_chunk(body)["blocks"][0].update(checksum="0" * 32),
    "offsets of another rank": lambda body: first_chunk(body).update(offsets=[0]),
    "a box beside the tensor": lambda body: first_chunk(body).update(offsets=[5, 0]),
    "a smaller box": lambda body: first_chunk(body).update(sizes=[299, 16]),
    "options of nobody": lambda body: body["parameters"]["embed.weight"].update(options=9),
    "options of -1": lambda body: body["parameters"]["embed.weight"].update(options=-1),
    "no extras": lambda body: body.update(extras=[]),
    "an extra of no file": lambda body: body.update(extras=["nothing"]),
    "a file outside": lambda body: body["files"].update({"../other/manifest.json": {"nbytes": 1}}),
    "a size that is no number": lambda body: next(iter(body["files"].values())).update(nbytes="9"),
    "a negative step": lambda body: body.update(step=-1),
    "a step of AdamW that is none": lambda body: body["parameters"]["embed.weight"].update(
        step="many"
    ),
    "a parameter without algorithm": lambda body: body["parameters"]["embed.weight"].pop(
        "algorithm"
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_manifests_that_contradict_themselves(name: str, shared: Damaged) -> None:
    shared.forge(FORGED[name])
    shared.refused()
    shared.goes_on()


# -- extra --------------------------------------------------------------------------------------------


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_extra_is_refused_and_does_not_run(how: str, shared: Damaged) -> None:
    target = shared.path.with_name("executed")
    file = shared.file("extra")
    if how == "torch":
        torch.save({"a": Malicious(target)}, file)
    else:
        file.write_bytes(pickle.dumps(Malicious(target)))
    content = bytearray(file.read_bytes())
    known = {
        "nbytes": len(content),
        "checksum": checksum(torch.frombuffer(content, dtype=torch.uint8)),
    }
    shared.forge(lambda body: body["files"].update({file.name: known}))
    shared.refused(names=file.name)
    assert not target.exists()
    shared.goes_on()


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
