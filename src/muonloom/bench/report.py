"""Tables of a benchmark: on the terminal, and in the docs (``python -m muonloom.bench.report JSON``)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muonloom.bench.peers import REFERENCE
from muonloom.bench.results import OURS, Plain, contender
from muonloom.bench.split_results import split_tables
from muonloom.bench.staging_results import staging_figures, staging_tables
from muonloom.bench.text import Block, number

BEGIN = "<!-- benchmark: begin, written by `python -m muonloom.bench.report` -->"
END = "<!-- benchmark: end -->"
STAGING_BEGIN = "<!-- staging: begin, written by `python -m muonloom.bench.report` -->"
STAGING_END = "<!-- staging: end -->"
REDIRECTED_WIDTH = 110
DOCS = Path("docs/benchmarks.md")

RESULT_COLUMNS = ("against", "ms", "quartiles", "ratio", "goal", "bound", "gate")
CEILING_COLUMNS = ("work", "ours", "GFLOP/s", "BF16 GEMM", "FP32 GEMM", "÷ ceiling")
FIGURE_COLUMNS = ("figure", "value", "goal", "bound", "reached")


def gate_text(gate: Plain | None, *, verdict: bool = True) -> str:
    """Return the verdict, the error in units of standard BF16's, and the largest singular value."""
    if gate is None:
        return ""
    passed = ("pass " if gate["passed"] else "FAIL ") if verdict else ""
    ratio = gate["error_ratio"]
    error = "<0.01" if ratio < 0.01 else f"{ratio:.2f}"
    return f"{passed}{error}× σ{gate['largest_singular_value']:.2f}"


def result_rows(work: Plain) -> list[list[str]]:
    """Return one row a contender, as `RESULT_COLUMNS`; ours first, ceilings left out."""
    rows = []
    for entry in work["contenders"]:
        if entry["role"] == "ceiling":
            continue
        is_reference = entry["name"] == REFERENCE
        timed = "median_s" in entry
        quartiles = [number(1e3 * q) for q in entry["quartiles_s"]] if timed else []
        rows.append(
            [
                entry["name"] + _cut_mark(entry),
                number(1e3 * entry["median_s"]) if timed else entry["status"],
                "–".join(quartiles),
                number(entry["ratio"]) if timed else "",
                number(work["goal"]) if is_reference else "",
                number(work["bound"]) if is_reference else "",
                gate_text(entry.get("gate"), verdict=entry["role"] == "ours"),
            ]
        )
    return rows


def _cut_mark(entry: Plain) -> str:
    if entry.get("measured", "all") == "all":
        return ""
    return f" [{entry['measured']}, {entry['rounds']} rounds]"


def work_title(work: Plain) -> str:
    """Return what the work is, and how ours does it."""
    if work["kind"] == "orthogonalization":
        recipe = work["recipe"]
        restarts = f", restarts {recipe['restarts']}" if recipe["restarts"] else ""
        how = f"ours: {recipe['method']}, {recipe['dtype']}{restarts}"
        return f"{work['name']} ({work['source']}); {how}"
    matrices = sum(count for _, _, count in work["matrices"])
    return f"whole step, {work['parameters'] / 1e6:.1f} M parameters, {matrices} matrices"


def figure_rows(figures: Sequence[Plain]) -> list[list[str]]:
    """Return one row a figure with a goal, as `FIGURE_COLUMNS`."""
    return [
        [
            figure["name"],
            number(figure["value"]),
            ("≤ " if figure["most"] else "≥ ") + number(figure["goal"]),
            number(figure["bound"]),
            "yes" if figure["reached"] else "no",
        ]
        for figure in figures
    ]


def ceiling_rows(works: Sequence[Plain]) -> list[list[str]]:
    """Return GFLOP/s of ours and of the GEMMs, a row a shape."""
    rows = []
    for work in works:
        if work["kind"] != "orthogonalization":
            continue
        ours = contender(work, OURS)
        best = work["ceilings"][ours["dtype"]]
        rates = [work["ceilings"][dtype] for dtype in ("bfloat16", "float32")]
        rows.append(
            [
                work["name"],
                f"{work['recipe']['method']}, {ours['dtype']}",
                number(ours["flops_per_s"] / 1e9),
                *(number(None if rate is None else rate / 1e9) for rate in rates),
                number(ours["flops_per_s"] / best) if best else "–",
            ]
        )
    return rows


def heading(report: Plain) -> str:
    """Return what was measured on, in one line."""
    machine, versions = report["machine"], report["versions"]
    place = machine.get("gpu") or f"{machine['cpu']} ({machine['capability']})"
    slow = "" if machine["fast_bfloat16"] else ", no BF16 instructions"
    peers = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "heavyball", "emerging-optimizers")
    )
    return (
        f"{report['date']}, `{report['command']}`: {place}, {machine['cores']} cores, "
        f"{machine['threads']} thread(s){slow}; {peers}; medians of {report['rounds']} rounds."
    )


def print_report(report: Plain) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=REDIRECTED_WIDTH)
    console.print(heading(report), highlight=False, markup=False, soft_wrap=True)
    for title, columns, rows in blocks(report):
        console.print(f"\n{title}", highlight=False, markup=False, soft_wrap=True)
        table = Table()
        for index, column in enumerate(columns):
            table.add_column(column, no_wrap=index > 1, min_width=18 if index == 0 else None)
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)


def blocks(report: Plain) -> list[Block]:
    """Return all tables: one a work, the ceilings, Muon Split, staging, the figures with goals."""
    works, split, staging = report["works"], report["split"], report["staging"]
    made: list[Block] = [(work_title(work), RESULT_COLUMNS, result_rows(work)) for work in works]
    speeds = ceiling_rows(works)
    if speeds:
        made.append(("Speed of the products, GFLOP/s", CEILING_COLUMNS, speeds))
    if split is not None:
        made += split_tables(split)
    if staging is not None:
        made += staging_tables(staging)
    made.append(("Figures with goals", FIGURE_COLUMNS, figure_rows(report["figures"])))
    return made


def markdown(report: Plain) -> str:
    """Return the tables as Markdown."""
    parts = [heading(report)]
    for title, columns, rows in blocks(report):
        lines = [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows)]
        parts += [f"**{title}**", "\n".join(lines)]
    return "\n\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_between_markers(text: str, content: str, *, begin: str = BEGIN, end: str = END) -> str:
    """Return ``text`` with what stands between the markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"docs: got no text between {begin!r} and {end!r}; wanted both markers.")
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"


def write_tables(text: str, report: Plain) -> str:
    """Return the page ``text`` with the tables of all parts that ``report`` has.

    Host placement has its own place, so that it can be measured alone.

    Raises:
        ValueError: a marker is missing.
    """
    staging = report["staging"]
    own = staging_figures(staging) if staging is not None else []
    others = [figure for figure in report["figures"] if figure not in own]
    if report["works"] or report["split"] is not None:
        content = markdown({**report, "staging": None, "figures": others})
        text = write_between_markers(text, content)
    if staging is not None:
        content = markdown({**report, "works": [], "split": None, "figures": own})
        text = write_between_markers(text, content, begin=STAGING_BEGIN, end=STAGING_END)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables of a JSON report into the docs."""
    parser = argparse.ArgumentParser(
        prog="python -m muonloom.bench.report", description=main.__doc__
    )
    parser.add_argument("json", type=Path, help="written by `muonloom bench`")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the page to write into")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = json.loads(options.json.read_text())
    options.docs.write_text(write_tables(options.docs.read_text(), report))


if __name__ == "__main__":
    main()
