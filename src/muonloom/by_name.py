"""The optimizer's state as tensors with names: what checkpoints save, and where they load to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from muonloom.failures import refuse_released, refuse_torn
from muonloom.math import low_halves, settle_ties_
from muonloom.saving import StateSaving
from muonloom.segments import WEIGHT, Place, SnapshotTensor
from muonloom.sharding import Box, whole_box
from muonloom.snapshot import Snapshot
from muonloom.state import MASTER_KEYS, State, lasting, state_dtypes


class StateByName(StateSaving):
    """The part of `Muon` that checkpoints are made of."""

    _settings: dict[str, Any]

    def _parts_by_name(self, names: Mapping[Tensor, str]) -> list[SnapshotTensor]:
        """Return this rank's part of the state of all parameters, named `names`.

        To be called drained, and where tensors last (`lasting`).

        Raises:
            StaleMasterError: a weight was written from outside.
            RuntimeError: a failed step left a weight half written.
        """
        refuse_torn(self._assembly.torn)
        self._refuse_pieces(names, "a checkpoint")
        self._check_weights({p: n for p, n in self._names().items() if p not in self._gone})
        return [
            tensor
            for index, param in enumerate(self._groups_by_parameter())
            for tensor in self._tensors_of(index, param, names[param])
        ]

    def _snapshot(
        self,
        names: Mapping[Tensor, str],
        others: list[SnapshotTensor],
        extra_bytes: int | None,
    ) -> Snapshot:
        """Return all parts that this rank has as a snapshot that steps respect from now on."""
        return self._assembly.snapshot([*self._parts_by_name(names), *others], extra_bytes)

    def _tensors_of(self, index: int, param: Tensor, name: str) -> Iterator[SnapshotTensor]:
        state, known = self.state.get(param, {}), self._assignments[param]
        spec, place = known.part_spec, self._place(param)
        held: dict[str, tuple[torch.dtype, Callable[[slice, Tensor], None], frozenset[str]]] = {}
        if "master_low" in state:
            sources = frozenset({WEIGHT, "master_low"})
            held[f"model.{name}"] = (torch.float32, self._joined(param, dict(state)), sources)
        elif "master_weight" in state:
            master = state["master_weight"]
            read = reading(master)
            held[f"model.{name}"] = (torch.float32, read, frozenset({"master_weight"}))
        else:
            stored = self._weights.stored(param).detach()
            held[f"model.{name}"] = (stored.dtype, reading(stored), frozenset({WEIGHT}))
        for key, tensor in state.items():
            if key != "step" and key not in MASTER_KEYS:
                entry = (tensor.dtype, reading(tensor), frozenset({key}))
                held[f"optimizer.{name}.{key}"] = entry
        # Spans of what is not contiguous pass through a copy of all of it.
        kept = [self._weights.stored(param), *(t for k, t in state.items() if k != "step")]
        is_whole = spec is None and not all(tensor.is_contiguous() for tensor in kept)
        for key, (dtype, read, sources) in held.items():
            yield SnapshotTensor(
                key=key,
                dtype=dtype,
                shape=known.part_shape,
                read=read,
                parameter=index,
                sources=sources,
                spec=spec,
                is_whole=is_whole,
                place=place,
            )

    def _place(self, param: Tensor) -> Place:
        known = self._assignments[param]
        if known.share is None:
            start = (0,) * len(known.shape)
            return Place(whole=known.shape, offsets=start, ranks=self._membership.ids(param))
        holding = known.share.holding
        held = zip(holding.ranks, holding.states, strict=True)
        return Place(
            whole=holding.shape,
            offsets=holding.own.offsets,
            ranks=holding.ranks,
            holders=tuple(rank for rank, box in held if box == holding.own),
        )

    def _joined(self, param: Tensor, state: State) -> Callable[[slice, Tensor], None]:
        def read(rows: slice, out: Tensor) -> None:
            part = None if param.ndim == 0 else rows
            out.copy_(self._masters.whole(param, state, part))

        return read

    # -- loading ------------------------------------------------------------------------------------

    def _own_box(self, param: Tensor) -> Box:
        """Return which part of a parameter this rank keeps masters and state of."""
        known = self._assignments[param]
        return whole_box(known.shape) if known.share is None else known.share.holding.own

    def _check_loadable(self) -> None:
        refuse_released(self._released.values(), "loading a checkpoint")
        self._refuse_pieces(self._assignments, "a checkpoint")
        self._weights.check({p: n for p, n in self._names().items() if self._weights.writer(p)})

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Have state and weights taken inside; where that fails, all count as torn until a good load.

        Of weights that several ranks have, each takes the part that it updates; they are shared at the end.
        """
        self._assembly.quiesce()
        self._drained = True
        self._assembly.torn[:] = list(self._names().values())
        with lasting():
            yield
            self._current_engine()
            replicated = [param for param in self._assignments if self._is_replicated(param)]
            if replicated:
                self._share_weights(replicated)
        self._assembly.torn.clear()

    def _is_near(self, param: Tensor) -> bool:
        """Whether master and weight are both in host memory, and nobody else writes the weight."""
        return param.device.type == "cpu" and self._weights.writer(param) is None

    def _has_low_half(self, param: Tensor) -> bool:
        """Whether the master of a parameter is kept as what its weight lacks."""
        return self._weights.has_master(param) and self._masters.is_split(param)

    def _make_master(self, param: Tensor) -> Tensor:
        """Return the place of the master, or of what the weight lacks of it; of any content."""
        if not self._weights.has_master(param):
            return self._weights.part(param).detach()
        return self._masters.place(param, self.state[param])

    def _take_box(
        self, param: Tensor, box: tuple[slice, ...], master: Tensor, *, is_settled: bool
    ) -> None:
        """Take a part of a master, and write that of the weight from it; see `_is_near`. Any thread may."""
        weight = self._weights.part(param).detach()[box]
        if self._weights.has_master(param):
            if param.dtype == torch.bfloat16 and not is_settled:
                master = master.clone()
                settle_ties_(master)
            if self._has_low_half(param):
                low_halves(master, self.state[param]["master_low"][box])
            else:
                self.state[param]["master_weight"][box].copy_(master)
        weight.copy_(master)

    def _finish_master(self, param: Tensor, *, is_settled: bool) -> None:
        """Take a whole master that was written in place."""
        if self._weights.has_master(param):
            self._masters.renew(param, self.state[param], is_settled=is_settled)

    def _take_master(self, param: Tensor, master: Tensor) -> None:
        """Take a master that is kept as what its weight lacks."""
        self._masters.replace(param, self.state[param], master)

    def _take_weight(self, param: Tensor, weight: Tensor) -> None:
        """Take a weight that had no master, as no step had been."""
        state = self.state[param]
        if self._weights.writer(param) is not None:
            self._masters.replace(param, state, weight.to(torch.float32))
            return
        self._masters.restore(param, state, None)
        self._weights.part(param).detach().copy_(weight)
        self._masters.doubt(param)

    def _state_target(
        self, param: Tensor, key: str, group: Mapping[str, Any], old: State
    ) -> Tensor:
        """Return where a tensor of the state of a parameter, of this group, is loaded to."""
        dtype = state_dtypes(group, has_master=False)[key]
        target = old.get(key)
        if target is None or target.dtype != dtype:
            target = self._assembly.new(param, key, dtype, zero=False)
        self.state[param][key] = target
        return target

    def _forget_state(self, param: Tensor) -> State:
        """Have a parameter without state but for its master; return what it had."""
        old: State = self.state[param]
        self.state[param] = {key: value for key, value in old.items() if key in MASTER_KEYS}
        return old

    def _prune(self) -> None:
        """Have no entries of parameters that have no state: torch makes none for them."""
        for param in [param for param, state in self.state.items() if not state]:
            del self.state[param]

    def _ns_batch_bytes(self) -> Any:
        return self._settings["ns_batch_bytes"]


def reading(tensor: Tensor) -> Callable[[slice, Tensor], None]:
    """Return what copies rows of `tensor`."""

    def read(rows: slice, out: Tensor) -> None:
        out.copy_(tensor if tensor.ndim == 0 else tensor[rows])

    return read
