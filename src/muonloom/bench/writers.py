"""What FP8 writers cost on top of the BF16 write-back: ``python -m muonloom.bench.writers``.

Every contender turns the same FP32 masters into device weights that exist already. They take turns, so that
drift of the machine hits all alike; a round starts with another one each time.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from muonloom.bench.machine import num_threads
from muonloom.bench.text import write_between
from muonloom.bench.timing import Contender, Timing, interleave
from muonloom.bfloat16_writer import BFloat16Writer
from muonloom.float8_writer import Float8BlockWriter, ScaleFormat

ROUNDS = 21
BEGIN, END = "<!-- writers:begin -->", "<!-- writers:end -->"


@dataclass(frozen=True, kw_only=True)
class WriterShape:
    """A parameter, and where its shape comes from."""

    shape: tuple[int, ...]
    source: str


SHAPES = (
    WriterShape(shape=(16, 1536, 2048), source="gate and up of 16 of Qwen3-30B-A3B's 128 experts"),
    WriterShape(shape=(16, 2048, 768), source="down of 16 of them"),
    WriterShape(shape=(2048, 2048), source="one matrix"),
    WriterShape(shape=(4096, 4096), source="one matrix"),
)
QUICK_SHAPES = (WriterShape(shape=(256, 384), source="one matrix"),)
_FLOAT8: Sequence[tuple[str, tuple[int, int], ScaleFormat]] = (
    ("FP8 128×128, FP32 scales", (128, 128), "float32"),
    ("FP8 128×128, UE8M0", (128, 128), "ue8m0"),
    ("FP8 1×128, FP32 scales", (1, 128), "float32"),
)


def contenders(shape: WriterShape) -> list[tuple[Contender, int]]:
    """Return the writers of one parameter with the bytes that they fill; BF16 comes first."""
    master = torch.randn(shape.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    param = Parameter(master.to(torch.bfloat16))
    rows = slice(0, shape.shape[0])
    data = torch.empty(shape.shape, dtype=torch.bfloat16)
    writers: list[tuple[str, BFloat16Writer | Float8BlockWriter]] = [
        ("BF16 write-back", BFloat16Writer(data))
    ]
    for name, block, scale_format in _FLOAT8:
        writer = Float8BlockWriter(block, scale_format=scale_format)
        writer.prepare(param)
        writers.append((name, writer))
    return [
        (
            _contender(name, _writing(writer, param, master, rows)),
            sum(tensor.nbytes for tensor in writer.tensors()),
        )
        for name, writer in writers
    ]


def _writing(
    writer: BFloat16Writer | Float8BlockWriter, param: Tensor, master: Tensor, rows: slice
) -> Callable[[], object]:
    return lambda: writer.write(param, master, rows)


def _contender(name: str, run: Callable[[], object]) -> Contender:
    # No FLOPs: bytes are moved. All are "ours", so that nothing is cut or left out.
    return Contender(name=name, role="ours", dtype="", flops=0.0, run=run)


def markdown(shapes: Sequence[WriterShape], *, rounds: int) -> list[str]:
    """Measure, and return the lines of the table: a row a shape and writer."""
    lines = [
        "| parameter | writer | ms | ns an element | of BF16 write-back | bytes, of BF16 |",
        "|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        with torch.no_grad():
            found = contenders(shape)
            runs = [contender for contender, _ in found]
            timings = interleave(runs, rounds=rounds, device=torch.device("cpu"))
        filled = [nbytes / found[0][1] for _, nbytes in found]
        name = "×".join(map(str, shape.shape)) + f" ({shape.source})"
        lines += [
            _row(name, timing, timings[0], math.prod(shape.shape), share)
            for timing, share in zip(timings, filled, strict=True)
        ]
    return lines


def _row(name: str, timing: Timing, bfloat16: Timing, numel: int, share: float) -> str:
    seconds = timing.median_s
    ratio = seconds / bfloat16.median_s
    times = f"{seconds * 1e3:.2f} | {seconds / numel * 1e9:.3f} | {ratio:.2f}"
    return f"| {name} | {timing.name} | {times} | {share:.4f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m muonloom.bench.writers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--out", type=Path, default=None, help="a page with the markers")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with num_threads(options.threads):
        shapes, rounds = (QUICK_SHAPES, 3) if options.quick else (SHAPES, ROUNDS)
        table = markdown(shapes, rounds=rounds)
    print("\n".join(table))
    if options.out is not None:
        write_between(options.out, table, begin=BEGIN, end=END)


if __name__ == "__main__":
    main()
