"""From parameters to a plan: batches of matrices, exchanges with other ranks, packs of AdamW spans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from muonloom.batching import Batching, MatrixEntry
from muonloom.plan import Pack, Plan, Span
from muonloom.travelling import exchanges

__all__ = ["MatrixEntry", "ScalarEntry", "build_plan"]

# The elements of one AdamW call, whose state passes through one slot. Spans start at multiples of 64
# elements: vectorized kernels round their last few elements otherwise.
_PACK_NUMEL = {"cpu": 1 << 16}
_DEFAULT_PACK_NUMEL = 1 << 22
_SPAN_ALIGNMENT = 64
_ADAMW_BYTES = 12  # of state an element, at most


@dataclass(frozen=True, kw_only=True)
class ScalarEntry:
    """One AdamW parameter: `pool` is what may share one kernel call (its group)."""

    index: int
    turn: int
    name: str
    kind: str
    shape: tuple[int, ...]
    device: torch.device
    pool: tuple[object, ...]
    block_rows: int = 0


def build_plan(
    matrices: Sequence[MatrixEntry],
    scalars: Sequence[ScalarEntry],
    *,
    ns_batch_bytes: int | str = "auto",
    slot_bytes: int | None = None,
) -> Plan:
    """Return the plan of one step.

    Args:
        matrices: the Muon parameters, in the layout's order.
        scalars: the AdamW parameters, in order.
        ns_batch_bytes: the most bytes, in the compute dtype, that one batch may hold. "auto" takes a
            constant of the device type, or the largest single matrix where that is more.
        slot_bytes: the most bytes of state that a run of several matrices or a pack may have, where the
            device's own choice would be more. How finely these are cut changes no result.

    Raises:
        ValueError: a matrix is larger than the `ns_batch_bytes` that was asked for.
    """
    batching = Batching(ns_batch_bytes, slot_bytes)
    for matrix in matrices:
        batching.add(matrix)
    batches = tuple(batching.batches())
    packs = tuple(_packs(scalars, slot_bytes))
    entries: list[MatrixEntry | ScalarEntry] = [*matrices, *scalars]
    size = max((entry.index for entry in entries), default=-1) + 1
    names, kinds, turns = [""] * size, [""] * size, [0] * size
    for entry in entries:
        names[entry.index], kinds[entry.index] = entry.name, entry.kind
        turns[entry.index] = entry.turn
    return Plan(
        names=tuple(names),
        kinds=tuple(kinds),
        turns=tuple(turns),
        batches=batches,
        packs=packs,
        exchanges=tuple(exchanges(matrices, ns_batch_bytes, slot_bytes)),
    )


def _packs(scalars: Sequence[ScalarEntry], slot_bytes: int | None) -> Iterator[Pack]:
    """Pack spans of one pool up to the size of a call; a large parameter is cut at aligned places."""
    pools: dict[tuple[object, ...], list[ScalarEntry]] = {}
    for entry in scalars:
        pools.setdefault((*entry.pool, entry.device), []).append(entry)
    for entries in pools.values():
        entries.sort(key=lambda entry: entry.turn)  # works are done so: a last span must come last
        device = entries[0].device
        most = _PACK_NUMEL.get(device.type, _DEFAULT_PACK_NUMEL)
        if slot_bytes is not None:
            most = min(most, slot_bytes // _ADAMW_BYTES)
        most = max(most // _SPAN_ALIGNMENT, 1) * _SPAN_ALIGNMENT
        spans: list[Span] = []
        filled = 0
        for span in (span for entry in entries for span in _spans(entry, most)):
            if spans and filled + span.numel > most:
                yield Pack(spans=tuple(spans), device=device)
                spans, filled = [], 0
            spans.append(span)
            filled += span.numel
        if spans:
            yield Pack(spans=tuple(spans), device=device)


def _spans(entry: ScalarEntry, most: int) -> Iterator[Span]:
    numel = math.prod(entry.shape)
    if numel and entry.block_rows:
        # What its writer writes together stays together, and spans still start at multiples of 64.
        least = math.lcm(_SPAN_ALIGNMENT, entry.block_rows * math.prod(entry.shape[1:]))
        most = max(most // least, 1) * least
    for start in range(0, numel, most):
        stop = min(start + most, numel)
        yield Span(parameter=entry.index, start=start, stop=stop, last=stop == numel)
