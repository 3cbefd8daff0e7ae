"""``python -m muonloom.bench``: the benchmarks without the `muonloom` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from muonloom.bench import PARTS, run_bench


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m muonloom.bench", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--only", choices=PARTS, help="run this part alone")
    options = parser.parse_args(arguments)
    run_bench(out=options.out, quick=options.quick, threads=options.threads, only=options.only)


if __name__ == "__main__":
    main()
