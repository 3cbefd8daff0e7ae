"""The machine that a run's figures come from, named plainly."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from muonloom.errors import ConfigError, complaint


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware and versions; `title` says in words what the figures are of."""

    title: str
    processor: str
    num_cores: int  # that this process may run on
    num_threads: int  # that torch uses
    python: str
    torch: str
    transformers: str
    muonloom: str


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device that ``run.device`` names; ``"auto"`` takes CUDA where there is one.

    Args:
        name: as the configuration has it.
        local_rank: of a process among those of the run on this machine, which take a GPU each; None: this
            process is alone.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if local_rank is not None and name != "cpu":
        name = _of_a_rank(name, local_rank)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            complaint(
                "run.device",
                got=f"{name!r} ({str(error).splitlines()[0]})",
                wanted='"auto", "cpu" or a device that is present',
                remedy='Use "auto".',
            )
        ) from None
    return device


def _of_a_rank(name: str, local_rank: int) -> str:
    """Return the device of a rank; torch's current one from now on."""
    count = torch.get_device_module(name).device_count() if name == "cuda" else 0
    if local_rank >= count:
        raise ConfigError(
            complaint(
                "run.device",
                got=f"{name!r} for rank {local_rank} of this machine, which has {count} of it",
                wanted='"auto", "cuda" with a GPU for each rank, or "cpu"',
                remedy="Start as many ranks as there are GPUs.",
            )
        )
    torch.cuda.set_device(local_rank)
    return f"{name}:{local_rank}"


def describe_machine(device: torch.device) -> Machine:
    """Return what `device` and its host are."""
    import transformers

    import muonloom

    processor = _processor()
    if device.type == "cuda":
        title = torch.cuda.get_device_name(device)
    else:
        title = f"{device.type.upper()}; no GPU figure"
    return Machine(
        title=title,
        processor=processor,
        num_cores=_num_cores(),
        num_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        muonloom=muonloom.__version__,
    )


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.is_file():
        for line in described.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
