"""From shared atoms to exchanges: which of them travel to their owners, and back, together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from muonloom.batching import Batching, MatrixEntry, batch_bytes, recipe_of
from muonloom.cuts import flat_views
from muonloom.ownership import SharedAtom
from muonloom.plan import Batch, Exchange, OwnedBatch, Run, Shipment


@dataclass(frozen=True, kw_only=True)
class _Traveller:
    """A shared atom that waits for its exchange; `part` is this rank's, if it has one."""

    entry: MatrixEntry
    atom: SharedAtom
    dtype: torch.dtype
    part: Run | None


def exchanges(
    matrices: Sequence[MatrixEntry], ns_batch_bytes: int | str, slot_bytes: int | None
) -> Iterator[Exchange]:
    """Fill exchanges until each rank has about one batch to do; all ranks find the same ones."""
    found: list[Exchange] = []
    queues: dict[tuple[tuple[int, ...], torch.device], list[_Traveller]] = {}
    for entry in sorted(matrices, key=lambda entry: entry.turn):
        for traveller in _travellers(entry):
            assert entry.share is not None
            key = (entry.share.holding.ranks, entry.device)
            queues.setdefault(key, []).append(traveller)
    for (ranks, device), queue in queues.items():
        limit = len(ranks) * batch_bytes(device, ns_batch_bytes)
        filled, waiting = 0, list[_Traveller]()
        for traveller in queue:
            more = traveller.atom.numel * traveller.dtype.itemsize
            if waiting and filled + more > limit:
                found.append(_exchange(waiting, ns_batch_bytes, slot_bytes))
                filled, waiting = 0, []
            waiting.append(traveller)
            filled += more
        found.append(_exchange(waiting, ns_batch_bytes, slot_bytes))
    # Ranks that meet in several groups meet in the same order.
    yield from sorted(found, key=lambda exchange: (exchange.turn, exchange.ranks))


def _travellers(entry: MatrixEntry) -> Iterator[_Traveller]:
    if entry.share is None:
        return
    views = flat_views(entry.spec, torch.empty(entry.shape, device="meta"))
    parts = {atom: view for view, atom in entry.share.fragments}
    for index, atom in enumerate(entry.share.atoms):
        rows, columns = atom.spec.matrices(atom.shape)[0]
        part = None
        if index in parts:
            view = views[parts[index]]
            part = Run(
                parameter=entry.index,
                view=parts[index],
                batched=False,
                first=0,
                count=1,
                offset=0,
                shape=view.shape,
                kind=entry.kind,
                numel=view.rows * view.columns,
            )
        dtype = recipe_of(entry, rows, columns).compute_dtype
        yield _Traveller(entry=entry, atom=atom, dtype=dtype, part=part)


def _exchange(
    travellers: Sequence[_Traveller], ns_batch_bytes: int | str, slot_bytes: int | None
) -> Exchange:
    first = travellers[0].entry
    assert first.share is not None
    position = first.share.holding.position
    runs: list[Run] = []
    shipments: list[Shipment] = []
    batching = Batching(ns_batch_bytes, slot_bytes)
    for traveller in travellers:
        entry, atom = traveller.entry, traveller.atom
        if traveller.part is None:
            continue
        if atom.owner == position:
            spec, number = atom.spec, len(shipments)
            batching.add(replace(entry, index=number, shape=atom.shape, spec=spec, share=None))
        shipments.append(Shipment(parameter=entry.index, atom=atom, dtype=traveller.dtype))
        runs.append(replace(traveller.part, offset=len(runs)))
    return Exchange(
        ranks=first.share.holding.ranks,
        position=position,
        turn=min(traveller.entry.turn for traveller in travellers),
        device=first.device,
        parameters=frozenset(traveller.entry.index for traveller in travellers),
        runs=tuple(runs),
        shipments=tuple(shipments),
        owned=tuple(_owned(batch, shipments) for batch in batching.batches()),
    )


def _owned(batch: Batch, shipments: Sequence[Shipment]) -> OwnedBatch:
    """Name parameters again, where runs were numbered by shipment."""
    runs = [replace(run, parameter=shipments[run.parameter].parameter) for run in batch.runs]
    return OwnedBatch(
        batch=replace(batch, runs=tuple(runs)),
        shipments=tuple(run.parameter for run in batch.runs),
    )
