"""Benchmarks against other implementations, with a validity gate and the GEMM ceiling in one run."""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path

from muonloom.bench.machine import describe, num_threads, versions
from muonloom.bench.orthogonalization import measure_batch
from muonloom.bench.peers import load_peers
from muonloom.bench.results import SCHEMA, Plain, figures, plain_batch, plain_step
from muonloom.bench.shapes import BATCHES, MOE, QUICK_BATCHES, QUICK_MOE
from muonloom.bench.split_results import measure_split, split_figures
from muonloom.bench.staging_results import measure_staging, staging_figures
from muonloom.bench.step import measure_step
from muonloom.bench.timing import Pace
from muonloom.errors import complaint

__all__ = ["PARTS", "run_bench"]

PARTS = ("orthogonalization", "step", "split", "staging")
ROUNDS, QUICK_ROUNDS = 7, 3
DEFAULT_DIRECTORY = Path("runs/bench")


def run_bench(*, out: Path | None, quick: bool, threads: int = 1, only: str | None = None) -> None:
    """Measure all parts, or one, print the tables, and write JSON.

    Args:
        out: where the JSON goes; None: ``runs/bench/<UTC date and time>.json``.
        quick: tiny shapes and few rounds: shows that all parts run; its times mean nothing.
        threads: that torch may use, in this process only.
        only: one of `PARTS`, to leave out the others.

    Raises:
        ValueError: ``only`` names no part.
    """
    # not at the top: `python -m muonloom.bench.report` would find itself imported already
    from muonloom.bench.report import print_report

    if only is not None and only not in PARTS:
        raise ValueError(
            complaint(
                "only",
                got=repr(only),
                wanted=f"one of {', '.join(PARTS)}",
                remedy="Leave it out to measure everything.",
            )
        )
    now = datetime.datetime.now(datetime.UTC)
    path = DEFAULT_DIRECTORY / f"{now:%Y%m%d-%H%M%S}.json" if out is None else out
    with num_threads(threads):
        report = _measure(quick=quick, threads=threads, only=only)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)
    print(f"wrote {path} after {report['elapsed_s']:.0f} s")


def _measure(*, quick: bool, threads: int, only: str | None) -> Plain:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    parts = PARTS if only is None else (only,)
    peers = load_peers() if {"orthogonalization", "step"} & set(parts) else []
    pace = Pace()
    works: list[Plain] = []
    for index, shape in enumerate(QUICK_BATCHES if quick else BATCHES):
        if "orthogonalization" not in parts:
            break
        print(f"measuring {shape.name} ...", file=sys.stderr, flush=True)
        work = measure_batch(
            shape, peers, rounds=rounds, device=device, pace=pace, variants=index == 0
        )
        works.append(plain_batch(work))
    if "step" in parts:
        print("measuring the whole step ...", file=sys.stderr, flush=True)
        size = QUICK_MOE if quick else MOE
        step = measure_step(size, peers, rounds=rounds, device=device, pace=pace)
        works.append(plain_step(step, ceilings=_best_ceilings(works)))
    split = None
    if "split" in parts:
        split = measure_split(quick=quick, rounds=rounds, device=device)
    staging = None
    if "staging" in parts:
        staging = measure_staging(quick=quick, rounds=rounds, device=device)
    found = figures(works)
    found += split_figures(split) if split is not None else []
    found += staging_figures(staging) if staging is not None else []
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(quick=quick, threads=threads, only=only),
        "quick": quick,
        "rounds": rounds,
        "elapsed_s": time.perf_counter() - begin,
        "machine": describe(device),
        "versions": versions(),
        "works": works,
        "split": split,
        "staging": staging,
        "figures": found,
    }


def _best_ceilings(works: list[Plain]) -> Plain:
    return {
        dtype: max((work["ceilings"][dtype] or 0.0 for work in works), default=0.0)
        for dtype in ("bfloat16", "float32")
    }


def _command(*, quick: bool, threads: int, only: str | None) -> str:
    options = ["--quick"] if quick else []
    options += [f"--threads {threads}"] if threads != 1 else []
    options += [f"--only {only}"] if only is not None else []
    return " ".join(["muonloom bench", *options])
