"""What `Muon.resume` costs beside a plain copy of the same bytes: ``python -m muonloom.bench.release``.

Masters lie in host memory; their weights are given back and brought back, round after round. Beside that,
in the same rounds, BF16 tensors of the same sizes are allocated and filled from FP32 ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from muonloom.bench.machine import num_threads
from muonloom.bench.text import write_between

SHAPE, COUNT, ROUNDS = (16, 1024, 1024), 4, 9
BEGIN, END = "<!-- resume:begin -->", "<!-- resume:end -->"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of one kind of weights, in seconds."""

    weights: str
    release_s: float
    resume_s: float
    copy_s: float


def measure(float8: bool, *, shape: Sequence[int] = SHAPE, rounds: int = ROUNDS) -> Measured:
    """Release and resume an optimizer with host placement, and copy beside it, interleaved."""
    parameters = [
        (f"layers.{i}.experts.down_proj", Parameter(torch.randn(shape).to(torch.bfloat16)))
        for i in range(COUNT)
    ]
    layout = muonloom.Layout.from_shapes({name: tuple(p.shape) for name, p in parameters})
    optimizer = muonloom.Muon(parameters, layout=layout, placement="host")
    for _, parameter in parameters:
        if float8:
            optimizer.register_writer(parameter, muonloom.Float8BlockWriter())
            parameter.untyped_storage().resize_(0)
        else:  # a writer has masters made at once, without a step
            optimizer.register_writer(parameter, muonloom.BFloat16Writer())
    optimizer.drain()
    masters = [optimizer.get_full_parameter_master(p) for _, p in parameters]
    targets: list[Tensor] = []

    def copy() -> None:
        targets[:] = [torch.empty(shape, dtype=torch.bfloat16) for _ in masters]
        for target, master in zip(targets, masters, strict=True):
            assert master is not None
            target.copy_(master)

    seconds: dict[str, list[float]] = {"release": [], "resume": [], "copy": []}
    steps: list[tuple[str, Callable[[], object]]] = [
        ("release", optimizer.release),
        ("resume", optimizer.resume),
        ("copy", copy),
    ]
    for _ in range(rounds + 1):
        for name, run in steps:
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
        targets.clear()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return Measured(
        weights="FP8" if float8 else "BF16",
        release_s=medians["release"],
        resume_s=medians["resume"],
        copy_s=medians["copy"],
    )


def markdown(found: Sequence[Measured], *, master_bytes: int) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"| weights of {master_bytes >> 20} MiB of masters | release | resume "
        "| FP32 → new BF16 tensors | resume / copy |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        times = f"{1e3 * one.release_s:.1f} ms | {1e3 * one.resume_s:.0f} ms | {1e3 * one.copy_s:.0f} ms"
        lines.append(f"| {one.weights} | {times} | {one.resume_s / one.copy_s:.2f} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the table into a Markdown file between its markers."""
    parser = argparse.ArgumentParser(prog="python -m muonloom.bench.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    with num_threads(1):
        found = [measure(float8) for float8 in (False, True)]
    master_bytes = 4 * COUNT * torch.Size(SHAPE).numel()
    lines = markdown(found, master_bytes=master_bytes)
    print("\n".join(lines))
    if options.out is not None:
        write_between(options.out, lines, begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
