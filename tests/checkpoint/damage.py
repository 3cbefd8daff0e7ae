"""A checkpoint that tests damage and mend, and what tells that a refused load changed nothing."""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.support import Run
from muonloom import CheckpointError
from staging.support import assert_same_bits

EXTRA = {"rng": torch.arange(40), "epoch": 3, "names": ["a", "b"]}


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


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
