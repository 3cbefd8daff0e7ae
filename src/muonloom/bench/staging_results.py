"""Host placement as plain JSON values, its figures, and its tables."""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict

import torch

from muonloom.bench.results import Plain, figure
from muonloom.bench.staging import (
    SetupTiming,
    StagingWork,
    floor_s,
    measure_placements,
)
from muonloom.bench.staging_memory import LAYERS, measure_memory, on_device
from muonloom.bench.staging_overlap import measure_overlap, overlap_table
from muonloom.bench.staging_setups import (
    DEVICE,
    HOST,
    OVERLAPPED,
    QUICK_SIZE,
    SIZES,
    SLOTS,
    SPLIT,
    SPLIT_BOUND,
    SWAP,
    THREADS,
    TRANSFER_BOUND,
    slots_name,
)
from muonloom.bench.text import Block, number
from muonloom.bench.timing import Timing

UNLIMITED_GOAL = 1.04
OVERLAPPED_GOAL = 1.09
TRANSFER_GOAL = 1.08
SPLIT_GOAL = 0.58
SWAP_GOAL = 1.8
RESIDUE_GOAL = 0.10

STAGING_COLUMNS = (
    "state",
    "link, T",
    "step ms",
    "÷ T",
    "floor",
    "alone ÷ T",
    "floor",
    "in turn",
    "waits",
    "MB a step",
)
MEMORY_COLUMNS = ("model", "state, host", "slots", "workspace", "slots + workspace ÷ state")


def measure_staging(*, quick: bool, rounds: int, device: torch.device) -> Plain:
    """Measure all of host placement, and return it as plain values."""
    print("measuring host placement ...", file=sys.stderr, flush=True)
    size = QUICK_SIZE if quick else SIZES[device.type]
    work = measure_placements(size, rounds=rounds, device=device)
    overlap = measure_overlap(size, resident_s=work.resident_s, rounds=rounds, device=device)
    print("measuring the memory of host placement ...", file=sys.stderr, flush=True)
    memory = measure_memory(quick=quick, device=device)
    return plain_placements(work) | {"overlap": overlap, "memory": memory}


def plain_placements(work: StagingWork) -> Plain:
    """Return all setups; ratios are to T, device placement's step in the same run."""
    return {
        "matrices": asdict(work.size),
        "resident_s": work.resident_s,
        "rows": [_plain_row(row, work) for row in work.rows],
    }


def _plain_row(row: SetupTiming, work: StagingWork) -> Plain:
    size, resident_s = work.size, work.resident_s
    transfer_s = row.bytes_a_step / row.bytes_per_s if row.bytes_per_s is not None else 0.0
    in_turn = row.setup.name == SWAP
    floors = {
        steps: floor_s(
            resident_s=resident_s,
            transfer_s=transfer_s,
            units=size.units,
            steps=steps,
            in_turn=in_turn,
        )
        for steps in (size.steps, 1)
    }
    waits = statistics.median(phases.get("wait", 0.0) for phases in row.phases_s)
    return {
        "name": row.setup.name,
        "link": row.setup.link,
        "bytes_per_s": row.bytes_per_s,
        "bytes_a_step": row.bytes_a_step,
        "transfer_s": transfer_s,
        "back_to_back": _plain_timing(row.back_to_back, resident_s, floors[size.steps]),
        "alone": _plain_timing(row.alone, resident_s, floors[1]),
        "in_turn": (resident_s + 2 * transfer_s) / resident_s,
        "waits": waits / resident_s,
        "phases_s": row.phases_s,
    }


def _plain_timing(timing: Timing, resident_s: float, least_s: float) -> Plain:
    return {
        "rounds": len(timing.samples_s),
        "samples_s": timing.samples_s,
        "median_s": timing.median_s,
        "quartiles_s": list(timing.quartiles_s()),
        "ratio": timing.median_s / resident_s,
        "floor": least_s / resident_s,
    }


def row_of(staging: Plain, name: str, link: float | None = None) -> Plain | None:
    """Return a setup's row; None where it was not measured, as links without a limit on a CPU."""
    return next((r for r in staging["rows"] if (r["name"], r["link"]) == (name, link)), None)


def staging_figures(staging: Plain) -> list[Plain]:
    """Return the figures that have goals."""
    limited = any(row["link"] is not None for row in staging["rows"])
    found = _link_figures(staging) if limited else _real_link_figures(staging)
    return found + _memory_figures(staging["memory"])


def _link_figures(staging: Plain) -> list[Plain]:
    found = [
        _quotient(f"{name} ÷ {DEVICE}, no limit on the link", staging, name, None, UNLIMITED_GOAL)
        for name in (HOST, THREADS)
    ]
    most = slots_name(SLOTS[0])
    name = f"{most} ÷ {DEVICE}, link {OVERLAPPED} T"
    found.append(_quotient(name, staging, most, OVERLAPPED, OVERLAPPED_GOAL))
    full = _row(staging, most, TRANSFER_BOUND)["back_to_back"]
    value = full["ratio"] / full["floor"]
    name = f"{most} ÷ floor, link {TRANSFER_BOUND} T"
    found.append(figure(name, value, TRANSFER_GOAL, most=True, bound=1.0))
    full, split = (_row(staging, n, SPLIT_BOUND)["back_to_back"] for n in (most, SPLIT))
    name = f"{SPLIT} ÷ {most}, link {SPLIT_BOUND} T"
    value, bound = split["ratio"] / full["ratio"], split["floor"] / full["floor"]
    found.append(figure(name, value, SPLIT_GOAL, most=True, bound=bound))
    for link in (OVERLAPPED, TRANSFER_BOUND):
        found.append(_swap_figure(staging, most, link))
    return found


def _real_link_figures(staging: Plain) -> list[Plain]:
    return [_swap_figure(staging, HOST, None)]


def _quotient(name: str, staging: Plain, setup: str, link: float | None, goal: float) -> Plain:
    row = _row(staging, setup, link)["back_to_back"]
    return figure(name, row["ratio"], goal, most=True, bound=row["floor"])


def _swap_figure(staging: Plain, host: str, link: float | None) -> Plain:
    swap, own = (_row(staging, name, link)["back_to_back"] for name in (SWAP, host))
    where = "real link" if link is None else f"link {link} T"
    bound = None if link is None else swap["floor"] / own["floor"]
    return figure(
        f"{SWAP} ÷ {host}, {where}",
        swap["ratio"] / own["ratio"],
        SWAP_GOAL,
        most=False,
        bound=bound,
    )


def _row(staging: Plain, name: str, link: float | None) -> Plain:
    row = row_of(staging, name, link)
    assert row is not None
    return row


def _memory_figures(memory: Plain) -> list[Plain]:
    first, last = (depth["bytes"] for depth in memory["depths"])
    early, late = (entry["bytes"] for entry in memory["growth"])
    slots = memory["num_slots"] * memory["slot_bytes"]
    steps = [entry["steps"] for entry in memory["growth"]]
    differences = {
        "bytes of all slots, beyond num_slots × slot_bytes": last["device_slots"] - slots,
        f"device bytes of {LAYERS[1]} layers, beyond those of {LAYERS[0]}": on_device(last)
        - on_device(first),
        f"device bytes at step {steps[1]}, beyond those at step {steps[0]}": _held(late)
        - _held(early),
    }
    found = [figure(name, value, 0, most=True) for name, value in differences.items()]
    name = f"slots + workspace ÷ all state, {LAYERS[1]} layers"
    value = on_device(last) / last["host_state"]
    return [*found, figure(name, value, RESIDUE_GOAL, most=True)]


def _held(found: Plain) -> int:
    return int(found.get("reserved", on_device(found)))


def staging_tables(staging: Plain) -> list[Block]:
    """Return the tables of steps, of steps with forward passes, and of bytes."""
    size = staging["matrices"]
    count = size["units"] * size["per_unit"]
    title = (
        f"Host placement, {count} BF16 matrices of {size['side']}×{size['side']} in {size['units']} units, "
        f"{size['steps']} steps in a row; T = {number(1e3 * staging['resident_s'])} ms"
    )
    return [
        (title, STAGING_COLUMNS, [_text_row(row) for row in staging["rows"]]),
        overlap_table(staging["overlap"]),
        ("Host placement, bytes", MEMORY_COLUMNS, memory_rows(staging["memory"])),
    ]


def _text_row(row: Plain) -> list[str]:
    together, alone = row["back_to_back"], row["alone"]
    limited = row["link"] is not None
    return [
        row["name"],
        number(row["link"]),
        number(1e3 * together["median_s"]),
        number(together["ratio"]),
        number(together["floor"] if limited else None),
        number(alone["ratio"]),
        number(alone["floor"] if limited else None),
        number(row["in_turn"] if limited else None),
        number(row["waits"]),
        number(row["bytes_a_step"] / 1e6),
    ]


def memory_rows(memory: Plain) -> list[list[str]]:
    """Return one row a depth, as `MEMORY_COLUMNS`."""
    rows = []
    for depth in memory["depths"]:
        found = depth["bytes"]
        rows.append(
            [
                f"{depth['layers']} layers, {depth['parameters']:,} parameters",
                f"{found['host_state']:,}",
                f"{found['device_slots']:,}",
                f"{found['device_workspace']:,}",
                number(on_device(found) / found["host_state"]),
            ]
        )
    return rows
