"""Manifests and extras that another hand wrote: one error that names the file, and nothing runs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.damage import Damaged
from muonloom import checkpoint
from muonloom.checkpoint.checksum import checksum

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
