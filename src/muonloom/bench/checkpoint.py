"""What checkpoints cost: ``python -m muonloom.bench.checkpoint [--out docs/checkpoints.md]``.

Loading is measured beside `safetensors.torch.load_file` and a copy of each tensor to where it belongs, of
the very file that the checkpoint has, in the same rounds; both read from the page cache. How long a save
holds the loop is measured on a disk of a set speed (writes sleep), beside a save that is waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn

import muonloom
from muonloom import checkpoint
from muonloom.bench.machine import num_threads
from muonloom.bench.text import write_between

LOADING = ("<!-- loading:begin -->", "<!-- loading:end -->")
SAVING = ("<!-- saving:begin -->", "<!-- saving:end -->")
ROUNDS = 7

SETTINGS: dict[str, tuple[torch.dtype, Any]] = {
    "FP32 weights, momentum on the device": (torch.float32, "device"),
    "FP32 weights, momentum on the host": (torch.float32, "host"),
    "BF16 weights, masters and momentum on the host": (torch.bfloat16, "host"),
    "BF16 weights, split masters": (
        torch.bfloat16,
        muonloom.HostPlacement(master_layout="split"),
    ),
}


class Matrices(nn.Module):
    """`count` square matrices and as many vectors."""

    def __init__(self, size: int, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index in range(count):
            matrix = torch.randn(size, size, generator=generator).to(dtype)
            self.register_parameter(f"matrix{index}", nn.Parameter(matrix))
            self.register_parameter(f"vector{index}", nn.Parameter(torch.ones(size, dtype=dtype)))


def trained(
    size: int, count: int, dtype: torch.dtype, placement: Any
) -> tuple[Matrices, muonloom.Muon]:
    """Return a model and its optimizer after a step; the gradients are kept."""
    model = Matrices(size, count, dtype)
    optimizer = muonloom.Muon(
        model.named_parameters(), placement=placement, ns_steps=1, lr=1e-3, adamw_lr=1e-3
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    optimizer.step()
    optimizer.drain()
    return model, optimizer


# -- loading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Medians of one setting, in seconds."""

    setting: str
    nbytes: int
    safetensors_s: float
    full_s: float
    manifest_s: float


def measure_loading(
    setting: str, *, size: int = 2048, count: int = 24, rounds: int = ROUNDS
) -> Loaded:
    """Load a checkpoint, and its data file by safetensors, interleaved."""
    dtype, placement = SETTINGS[setting]
    model, optimizer = trained(size, count, dtype, placement)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        report = checkpoint.save(path, model=model, optimizer=optimizer, step=1).result()
        (data,) = path.glob("data-*")
        places = {key: tensor.clone() for key, tensor in load_file(data).items()}

        def by_safetensors() -> None:
            for key, tensor in load_file(data).items():
                places[key].copy_(tensor)

        def ours(verify: str) -> Callable[[], object]:
            return lambda: checkpoint.load(path, model=model, optimizer=optimizer, verify=verify)

        medians = _medians(
            {"safetensors": by_safetensors, "full": ours("full"), "manifest": ours("manifest")},
            rounds,
        )
    return Loaded(
        setting=setting,
        nbytes=report.nbytes,
        safetensors_s=medians["safetensors"],
        full_s=medians["full"],
        manifest_s=medians["manifest"],
    )


def _medians(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, run in work.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def loading_table(found: Sequence[Loaded]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        '| setting | MiB | safetensors | `verify="full"` | `"manifest"` |',
        "|---|---|---|---|---|",
    ]
    for one in found:
        ratios = (one.full_s / one.safetensors_s, one.manifest_s / one.safetensors_s)
        lines.append(
            f"| {one.setting} | {one.nbytes >> 20} | {1e3 * one.safetensors_s:.0f} ms | "
            f"{ratios[0]:.2f}× | {ratios[1]:.2f}× |"
        )
    return lines


# -- saving -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Held:
    """One save beside training; seconds are medians.

    Attributes:
        save_of_steps: seconds of a save in steps, as the disk was set.
        extra_of_state: room for copies in bytes of state.
        step_s: of a step, with what comes before it.
        save_s: of a save that is waited for, on the same disk.
        held_s: that the loop took longer.
        reported_s: that the optimizer waited, as the handle says.
        least_s: what no order of work could avoid.
        copied: bytes copied, of the state.
    """

    save_of_steps: float
    extra_of_state: float
    step_s: float
    save_s: float
    held_s: float
    reported_s: float
    least_s: float
    copied: float


@contextlib.contextmanager
def disk(bytes_per_s: float) -> Iterator[None]:
    """Have files of checkpoints written at this rate."""
    plain = os.pwrite

    def slow(descriptor: int, data: bytes, start: int) -> int:
        begin = time.perf_counter()
        count = plain(descriptor, data, start)
        time.sleep(max(0.0, count / bytes_per_s - (time.perf_counter() - begin)))
        return count

    with mock.patch.object(os, "pwrite", slow):
        yield


def measure_saving(
    save_of_steps: float,
    extra_of_state: float | None,
    *,
    size: int = 512,
    count: int = 24,
    rounds: int = 6,
) -> Held:
    """Train with and without a save, alternately.

    Half of a step's time is spent before the optimizer, as by a forward and backward pass. The first
    round is not counted.

    Args:
        save_of_steps: how many steps long a save is to be.
        extra_of_state: room for copies in bytes of state; None: the default.
        size: of the matrices.
        count: of matrices.
        rounds: of which medians are taken.
    """
    model, optimizer = trained(size, count, torch.float32, "host")
    state_bytes = sum(p.numel() for p in model.parameters()) * 8
    extra = None if extra_of_state is None else int(extra_of_state * state_bytes)
    pause = _medians({"step": lambda: _step(optimizer, 0.0)}, 5)["step"]
    step_s = _medians({"step": lambda: _step(optimizer, pause)}, 5)["step"]
    many = int(save_of_steps) + 2
    found: list[tuple[float, float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        disk(state_bytes / (save_of_steps * step_s)),
    ):
        for name in range(rounds + 1):
            # A median: one slow step of many must not count as held.
            plain = statistics.median(_step(optimizer, pause) for _ in range(many))
            begin = time.perf_counter()
            handle = checkpoint.save(
                Path(folder) / f"beside{name}",
                model=model,
                optimizer=optimizer,
                step=1,
                async_=True,
                extra_host_bytes=extra,
                keep_last=1,
            )
            for _ in range(many):
                _step(optimizer, pause)
            held = time.perf_counter() - begin - many * plain
            report = handle.result()
            begin = time.perf_counter()
            checkpoint.save(Path(folder) / "waited", model=model, optimizer=optimizer, step=1)
            waited = time.perf_counter() - begin
            found.append((held, report.held_seconds, report.copied_bytes / report.nbytes, waited))
    held_s, reported_s, copied, save_s = map(statistics.median, zip(*found[1:], strict=True))
    room = 2 * optimizer._assembly.engine.schedule.slot_bytes if extra is None else extra
    return Held(
        save_of_steps=save_of_steps,
        extra_of_state=room / state_bytes,
        step_s=step_s,
        save_s=save_s,
        held_s=held_s,
        reported_s=reported_s,
        least_s=max(0.0, save_s - step_s - min(room / state_bytes, 1.0) * save_s),
        copied=copied,
    )


def _step(optimizer: muonloom.Muon, pause_s: float) -> float:
    """Take a step after a pause; return the seconds of both."""
    begin = time.perf_counter()
    time.sleep(pause_s)
    optimizer.step()
    optimizer.drain()
    return time.perf_counter() - begin


def saving_table(found: Sequence[Held]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| save / step | room / state | least | loop held | as reported | copied | held / waited save |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        step = one.step_s
        lines.append(
            f"| {one.save_s / step:.2f} | {one.extra_of_state:.2f} | {one.least_s / step:.2f} steps | "
            f"{one.held_s / step:.2f} steps | {one.reported_s / step:.2f} steps | {one.copied:.2f} | "
            f"{one.held_s / one.save_s:.3f} |"
        )
    return lines


CASES: tuple[tuple[float, float | None], ...] = (
    (0.5, None),
    (2.0, None),
    (4.0, None),
    (4.0, 0.5),
    (4.0, 1.0),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the tables into a Markdown file between their markers."""
    parser = argparse.ArgumentParser(
        prog="python -m muonloom.bench.checkpoint", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    with num_threads(1):
        loading = loading_table([measure_loading(setting) for setting in SETTINGS])
        saving = saving_table([measure_saving(*case) for case in CASES])
    print("\n".join([*loading, "", *saving]))
    if options.out is not None:
        for lines, (begin, end) in ((loading, LOADING), (saving, SAVING)):
            write_between(options.out, lines, begin=begin, end=end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
