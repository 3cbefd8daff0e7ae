"""FP32 masters for the outside: read whole, rebuilt from loaded weights, changed in place."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonloom.collectives import agree
from muonloom.dtensors import local_part
from muonloom.engines import EngineBinding
from muonloom.errors import complaint
from muonloom.failures import refuse_released, refuse_torn, refuse_unusable
from muonloom.gathering import gathered
from muonloom.masters import edited_master
from muonloom.membership import Membership
from muonloom.sharding import Holding
from muonloom.state import MASTER_KEYS, State, lasting


class MasterAccess(EngineBinding):
    """The part of `Muon` that hands masters out and takes them back."""

    _drained: bool
    _membership: Membership

    def _groups_by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        return {tensor: group for group in self.param_groups for tensor in group["params"]}

    def drain(self) -> None:
        """Wait until the last step is finished everywhere; see `Muon.drain`."""
        raise AssertionError("the optimizer overrides this")

    def get_full_parameter_master(
        self, param: Tensor, *, rows: slice | None = None
    ) -> Tensor | None:
        """Return the complete FP32 master of `param`, on the host; None where this rank has a part of it.

        Where the whole master lies there, that is the slab itself: the next step changes it, and nobody
        else may. Otherwise it is a copy.

        Args:
            param: of this optimizer, released or not.
            rows: of dimension 0, for a part of a large one; None: all.

        Raises:
            ValueError: `param` is not the optimizer's.
            StaleMasterError: a weight that is half of its master was written from outside.
            RuntimeError: `drain` was not called since the last `step`, or that left it half written.
        """
        self._require_drained(param)
        holding = self._spread(param)
        if holding is not None and not holding.own.is_all_of(holding.shape):
            return None
        master = self._own_master(param, rows)
        if self._assembly.host is not None and self.state.get(param, {}).keys() & set(MASTER_KEYS):
            return master
        return master.to("cpu", torch.float32, copy=True)

    def gathered_master(self, param: Tensor, *, rows: slice | None = None) -> Tensor:
        """Return the complete FP32 master of `param`, on the host of all ranks that hold parts of it.

        A collective where other ranks hold parts: all of them call it, with the same `rows`. Else as
        `get_full_parameter_master`, which tells what is raised, too.

        Args:
            param: of this optimizer, released or not.
            rows: of dimension 0, for a part of a large one; None: all.
        """
        holding = self._spread(param)
        self._refuse_pieces([param], "the complete master")
        if holding is None:
            master = self.get_full_parameter_master(param, rows=rows)
            assert master is not None
            return master
        self._require_drained(param)
        return gathered(
            lambda own: self._own_master(param, own),
            holding.states,
            shape=holding.shape,
            rows=rows,
            dtype=torch.float32,
            ranks=self._membership.ranks(holding.ranks),
            device=local_part(param).device,
        )

    def _refuse_pieces(self, params: Iterable[Tensor], what: str) -> None:
        """Refuse what needs a whole parameter that is cut over ranks by `sharding`."""
        for param in params:
            if self._membership.is_cut(param):
                raise ValueError(
                    complaint(
                        self._assignments[param].name,
                        got=f"{what} of a parameter that sharding= cuts over ranks",
                        wanted="a whole tensor, or a DTensor",
                        remedy="Use own_state() and load_own_state() for the rows that this rank updates.",
                    )
                )

    def _require_drained(self, param: Tensor) -> None:
        assignment = self._assignment(param)
        if not self._drained:
            raise RuntimeError(
                complaint(
                    assignment.name,
                    got="a master that a step may still write",
                    wanted="a drained optimizer",
                    remedy="Call drain() first.",
                )
            )
        refuse_torn([name for name in self._assembly.torn if name == assignment.name])

    def _spread(self, param: Tensor) -> Holding | None:
        """Return how ranks hold parts of the master of `param`; None where each that has any has all."""
        share = self._assignment(param).share
        if share is None or all(box.is_all_of(share.holding.shape) for box in share.holding.states):
            return None
        return share.holding

    def _own_master(self, param: Tensor, rows: slice | None) -> Tensor:
        """Return what this rank has of a master, counting rows from where that begins; not a copy."""
        name, state = self._assignment(param).name, self.state.get(param, {})
        if param not in self._released and "master_weight" not in state:
            self._weights.check({param: name})
        if "master_low" in state and self._weights.parked(param) is None:
            self._masters.check(name, param, state)
        return self._masters.whole(param, state, rows)

    @property
    def master_version(self) -> int:
        """What grows with each step, load, refresh and change of masters: equal numbers, equal masters."""
        return self._masters.changes

    def refresh_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Rebuild masters from the weights, after these were loaded from outside; momentum stays.

        Args:
            params: None for all.

        Raises:
            ValueError: one is not the optimizer's, or a weight is misshapen or not finite; nothing was
                changed.
            RuntimeError: one is released.
        """
        chosen = self._chosen(params)
        refuse_released(self._released.values(), "refresh_masters()")
        self._weights.check(chosen)
        self._assembly.settle()
        self._assembly.finish_reading()
        with lasting():
            for param, name in chosen.items():
                weight, part = self._weights.read(param), self._weights.part(param)
                if self._is_replicated(param):  # all ranks see the same, and raise the same
                    weight = part = param.detach()
                refuse_unusable(name, weight, part.shape)
            for param in chosen:
                if param in self.state:
                    self._masters.rebuild(param, self.state[param])

    def apply_to_masters(
        self, params: Iterable[Tensor] | None, fn: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Change FP32 masters and write the weights from them: for QK-clip, merges, averages.

        All of `params` is held a second time in FP32, where its masters are, until all of it is known to be
        usable. Over ranks it is a collective: all of them call it with the same `params`, and an `fn` that
        makes the same of the same. A master that is spread over ranks is put together for `fn`, one at a
        time, and each rank keeps its own part of the result.

        Args:
            params: parameters of this optimizer; None: all.
            fn: gets a copy of each complete master, shaped as its parameter; changes it in place and
                returns None, or returns another.

        Raises:
            ValueError: a parameter is not the optimizer's, a result is misshapen or not finite, or ranks
                give other `params`; nothing was written on any rank.
            RuntimeError: another rank raised; nothing was written.
        """
        with lasting():
            with self._membership.all_or_none():
                chosen = self._editable(params)
            self._agree_on(chosen.values())
            edited = self._edited(chosen, fn)
            try:
                with self._membership.all_or_none():
                    for param, values in edited.items():
                        with self._torn_on_failure(chosen[param]):
                            self._masters.replace(param, self._state_for(param), values)
            except BaseException:
                # Rows of other ranks are not where these are.
                halves = [n for p, n in chosen.items() if self._is_replicated(p)]
                self._assembly.torn += [n for n in halves if n not in self._assembly.torn]
                raise
            self._share_weights([param for param in chosen if self._is_replicated(param)])

    def _editable(self, params: Iterable[Tensor] | None) -> dict[Tensor, str]:
        """Return names of these (None: all), which nobody reads or writes, and whose masters are right."""
        chosen = self._chosen(params)
        self._refuse_pieces(chosen, "apply_to_masters()")
        refuse_released(self._released.values(), "apply_to_masters()")
        self.drain()
        refuse_torn(self._assembly.torn)
        self._weights.check(chosen)
        self._assembly.finish_reading()
        for param, name in chosen.items():
            self._masters.check(name, param, self.state.get(param, {}))
        return chosen

    def _edited(
        self, chosen: Mapping[Tensor, str], fn: Callable[[Tensor], Tensor | None]
    ) -> dict[Tensor, Tensor]:
        """Return what `fn` makes of this rank's parts of masters; raise on all ranks where one cannot."""
        edited: dict[Tensor, Tensor] = {}
        failure: Exception | None = None
        for param, name in chosen.items():
            master, holding = self._own_master(param, None), self._spread(param)
            if holding is not None:  # also after a failure: the others are about to gather it
                master = self.gathered_master(param).to(master.device)
            if failure is None:
                try:
                    values = edited_master(name, param, master, fn)
                    edited[param] = values if holding is None else _cut(values, holding)
                except Exception as error:
                    failure = error
        with self._membership.all_or_none():
            if failure is not None:
                raise failure
        return edited

    def _state_for(self, param: Tensor) -> State:
        """Return the state of a parameter, which gets an entry only where it has a master."""
        found: State = (
            self.state[param] if self._weights.has_master(param) else self.state.get(param, {})
        )
        return found

    def _agree_on(self, names: Iterable[str]) -> None:
        """Raise on all ranks where they are about to change other masters."""
        control = self._membership.control()
        if control is not None:
            lines = [f"{name}: apply_to_masters" for name in names]
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            agree(digest, lambda: lines, control.ranks)

    def _is_replicated(self, param: Tensor) -> bool:
        """Whether several ranks hold the very tensor, and each updates a part of it."""
        share = self._assignments[param].share
        return share is not None and share.copies is not None

    def _share_weights(self, params: Sequence[Tensor]) -> None:
        """Give other ranks the rows that this one wrote of replicated weights, and take theirs."""
        assignments = {param: self._assignments[param] for param in params}
        sharing = self._membership.sharing(self.param_groups, assignments, ready={})
        if sharing is not None:
            sharing.begin(frozenset(range(len(self._assignments))))
            sharing.finish()
        self._masters.note(params)

    @contextlib.contextmanager
    def _torn_on_failure(self, name: str) -> Iterator[None]:
        """Note that what a parameter has is half written, where that raises."""
        try:
            yield
        except BaseException:
            self._assembly.torn.append(name)
            raise


def _cut(values: Tensor, holding: Holding) -> Tensor:
    """Return a rank's part of a master, alone in its memory."""
    return values[holding.own.slices].clone(memory_format=torch.contiguous_format)
