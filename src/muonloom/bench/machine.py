"""What was measured on, and with which versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from muonloom.math import has_fast_bfloat16

PACKAGES = ("muonloom", "torch", "heavyball", "emerging-optimizers", "triton")


def versions() -> dict[str, str]:
    """Return the installed versions; ``"not installed"`` where there is none."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__
    return found


def describe(device: torch.device) -> dict[str, object]:
    """Return the hardware, and how many threads this process may use."""
    facts: dict[str, object] = {
        "device": device.type,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "fast_bfloat16": has_fast_bfloat16(device.type),
        "system": platform.platform(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Let torch use ``threads`` inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
