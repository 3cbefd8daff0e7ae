"""A model as a module, throttled disks, and runs that are saved and gone on with."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import muonloom
from muonloom import checkpoint
from muonloom.checkpoint import files
from staging import support

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": muonloom.HostPlacement(slot_bytes=4096, num_slots=2),
    "one slot": muonloom.HostPlacement(slot_bytes=4096, num_slots=1),
    "split": muonloom.HostPlacement(slot_bytes=4096, num_slots=3, master_layout="split"),
}


class Bare(nn.Module):
    """Holds parameters under names with dots, and a buffer."""

    def __init__(self, named: support.Named) -> None:
        super().__init__()
        for name, parameter in named:
            parts = name.split(".")
            module: nn.Module = self
            for part in parts[:-1]:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(parts[-1], parameter)
        self.register_buffer("counter", support.torch.zeros(3, dtype=support.torch.int64))


class Run:
    """A model, its optimizer, and steps on gradients that depend on the step's number alone."""

    def __init__(
        self, placement: Any, *, dtype: Any = support.torch.bfloat16, seed: int = 0, **options: Any
    ):
        self.named = support.model(dtype, seed)
        self.model = Bare(self.named)
        self.opt = muonloom.Muon(
            self.named,
            layout=support.layout(),
            placement=placement,
            **{**support.OPTIONS, **options},
        )
        self.step = 0

    def go(self, steps: int, *, absent: Any = None) -> Run:
        for _ in range(steps):
            support.give_gradients(self.named, self.step, absent=absent)
            self.opt.step()
            self.step += 1
        return self

    def save(self, path: Path, **options: Any) -> checkpoint.SaveHandle:
        return checkpoint.save(
            path, model=self.model, optimizer=self.opt, step=self.step, **options
        )

    def load(self, path: Path, **options: Any) -> dict[str, Any]:
        found = checkpoint.load(path, model=self.model, optimizer=self.opt, **options)
        self.step = found["step"]
        return found

    def everything(self) -> dict[str, Tensor]:
        return support.everything(self.named, self.opt)


@contextlib.contextmanager
def throttled(bytes_per_s: float) -> Iterator[list[int]]:
    """Have data files take writes at this rate; yields the sizes of writes."""
    written: list[int] = []
    plain = os.pwrite

    def slow(descriptor: int, data: memoryview, start: int) -> int:
        time.sleep(len(data) / bytes_per_s)
        written.append(len(data))
        return plain(descriptor, data, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "pwrite", slow)
        yield written
