"""The last screen of a run: what `summary.json` holds, for a reader at a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_WIDTH = 100
_BAR = 34  # characters of the longest bar of the ladder
_MARKS = {
    True: Text("✓", style="bold green"),
    False: Text("✗", style="bold red"),
    None: Text("–", style="dim"),
}


def show(console: Console, summary: dict[str, Any]) -> None:
    """Print one screen about a run."""
    parts: list[RenderableType] = [
        _heading(summary),
        _two_columns(_ladder(summary), _ledger(summary)),
        _layout_table(summary),
    ]
    if summary["completion"] is not None:
        parts.append(_completion(summary["completion"]))
    if summary["proofs"]:
        parts.append(_proofs(summary["proofs"]))
    parts.append(_files(summary))
    console.print(Group(*parts), width=min(_WIDTH, console.width))


def bytes_text(count: float) -> str:
    """Return a size in the unit that a reader would choose: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def ledger_line(memory: dict[str, int]) -> str:
    """Return the bytes by place in one line, for the start of a run."""
    places = ", ".join(f"{place} {bytes_text(count)}" for place, count in _occupied(memory))
    return f"memory before the first step: {places}"


def _occupied(memory: dict[str, int]) -> list[tuple[str, int]]:
    return [(place.replace("_", " "), count) for place, count in memory.items() if count]


def _heading(summary: dict[str, Any]) -> RenderableType:
    machine, model, data, training = (
        summary[key] for key in ("machine", "model", "data", "training")
    )
    ended = "interrupted after" if summary["interrupted"] else "trained for"
    text = Text()
    text.append(f"{machine['title']}", style="bold")
    text.append(
        f"  ·  {machine['processor']}, {machine['num_cores']} cores, {machine['num_threads']} "
        f"thread(s){_ranks(summary)}  ·  torch {machine['torch']}, transformers "
        f"{machine['transformers']}\n"
    )
    text.append(
        f"{model['class']}, {model['parameters']:,} parameters, {model['dtype']}; {ended} "
        f"{training['steps']} steps, {training['tokens']:,} tokens, {training['seconds']:.0f} s "
        f"({training['tokens_per_second']:,.0f} tokens/s)\n"
    )
    text.append(
        f"{data['train_documents']} documents ({bytes_text(data['train_bytes'])}) trained on, "
        f"{data['held_out_documents']} others ({bytes_text(data['held_out_bytes'])}) held out"
    )
    return Panel(text, title=f"muonloom train · {summary['name']}", title_align="left")


def _ranks(summary: dict[str, Any]) -> str:
    ranks, mode = summary["parallel"]["ranks"], summary["parallel"]["mode"]
    return f" × {ranks} ranks ({mode})" if ranks > 1 else ""


def _of_rank(summary: dict[str, Any]) -> str:
    """Return what a title adds where figures are of the first rank alone."""
    return " of rank 0" if summary["parallel"]["ranks"] > 1 else ""


def _two_columns(left: RenderableType, right: RenderableType) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=3)
    grid.add_column(ratio=2)
    grid.add_row(left, right)
    return grid


def _ladder(summary: dict[str, Any]) -> RenderableType:
    loss = summary["loss"]
    rungs = [("untrained", loss["held_out_before"], "dim")]
    rungs += [(name, value, "cyan") for name, value in loss["baselines"].items()]
    rungs.append(("this model", loss["held_out"], "bold green"))
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    longest = max(value for _, value, _ in rungs)
    for name, value, style in sorted(rungs, key=lambda rung: -rung[1]):
        bar = "█" * max(round(_BAR * value / longest), 1)
        table.add_row(Text(name, style=style), f"{value:.3f}", Text(bar, style=style))
    return Panel(table, title="held-out loss, nats a byte", title_align="left")


def _ledger(summary: dict[str, Any]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
    table.add_column()
    table.add_column(justify="right")
    for place, count in _occupied(summary["memory"]):
        table.add_row(place, bytes_text(count))
    report, training = summary["last_step"], summary["training"]
    if summary["memory"]["host_state"] and not report["skipped"]:
        table.add_row("to the device, a step", bytes_text(report["bytes_in"]))
        table.add_row("to the host, a step", bytes_text(report["bytes_out"]))
    table.add_row("a step", f"{training['step_seconds'] * 1e3:.0f} ms")
    if training["optimizer_share"] is not None:
        table.add_row("optimizer's share", f"{training['optimizer_share']:.1%}")
    return Panel(table, title=f"memory and time{_of_rank(summary)}", title_align="left")


def _layout_table(summary: dict[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), expand=True, header_style="dim")
    table.add_column("matrices", justify="right", no_wrap=True)
    table.add_column("out × in", justify="right", no_wrap=True)
    table.add_column("from")
    for shape, count, kinds in _by_shape(summary["layout"]):
        table.add_row(str(count), shape, ", ".join(kinds))
    for text, rows in _others(summary["layout"]):
        table.add_row("–", text, ", ".join(_short(row["kind"]) for row in rows))
    report = summary["last_step"]
    total = sum(count for _, count in report["matrices"])
    title = (
        f"layout · last step{_of_rank(summary)}: {total} matrices in {report['ns_calls']} "
        f"Newton–Schulz calls, {report['idle']} idle"
        if not report["skipped"]
        else "layout"
    )
    return Panel(table, title=title, title_align="left")


def _by_shape(rows: list[dict[str, Any]]) -> list[tuple[str, int, list[str]]]:
    """Return (shape, matrices, kinds) of what Muon updates, the most matrices first."""
    found: dict[str, tuple[int, list[str]]] = {}
    for row in rows:
        if row["algorithm"] != "muon" or not row["updated"]:
            continue
        shape = " | ".join(f"{m} × {n}" for m, n in row["shapes"])
        count, kinds = found.get(shape, (0, []))
        found[shape] = (count + row["matrices"], [*kinds, _short(row["kind"])])
    return sorted(
        ((shape, count, kinds) for shape, (count, kinds) in found.items()), key=lambda row: -row[1]
    )


def _others(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    adamw = [row for row in rows if row["algorithm"] == "adamw" and row["updated"]]
    idle = [row for row in rows if not row["updated"]]
    return [(text, part) for text, part in (("AdamW", adamw), ("no gradient", idle)) if part]


def _short(kind: str) -> str:
    return kind.removeprefix("model.").removeprefix("layers.*.").removesuffix(".weight")


def _completion(completion: dict[str, str]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, style in (("prompt", ""), ("before", "dim"), ("after", "green")):
        table.add_row(name, Text(_visible(completion[name]), style=style))
    return Panel(table, title="completion of held-out text", title_align="left")


def _visible(text: str, limit: int = 6) -> str:
    """Return at most `limit` lines of `text`, without blank ones and what disturbs a terminal."""
    kept = "".join(c if c.isprintable() or c == "\n" else "·" for c in text.expandtabs(4))
    lines = [line for line in kept.splitlines() if line.strip()]
    return "\n".join(lines[:limit] + (["…"] if len(lines) > limit else []))


def _proofs(proofs: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for proof in proofs:
        mark = _MARKS[proof["holds"]]
        claim = Text.assemble((proof["claim"], "bold"), f"  ({proof['seconds']:.1f} s)\n")
        table.add_row(mark, claim + Text(proof["detail"], style="dim"))
    return Panel(table, title="shown live on this model", title_align="left")


def _files(summary: dict[str, Any]) -> RenderableType:
    total = sum(summary["seconds"].values())
    phases = ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())
    files = summary["files"]
    return Text(
        f"{files['directory']}: {', '.join(files['names'])}\n{total:.0f} s in all: {phases}",
        style="dim",
    )
