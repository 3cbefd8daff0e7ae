"""FP32 masters for the outside: read whole, rebuilt from loaded weights, changed in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from muonloom.engines import EngineBinding
from muonloom.errors import complaint
from muonloom.failures import refuse_released, refuse_torn, refuse_unusable
from muonloom.masters import edited_master
from muonloom.state import MASTER_KEYS, lasting


class MasterAccess(EngineBinding):
    """The part of `Muon` that hands masters out and takes them back."""

    _drained: bool

    def _groups_by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        return {tensor: group for group in self.param_groups for tensor in group["params"]}

    def drain(self) -> None:
        """Wait until the last step is finished everywhere; see `Muon.drain`."""
        raise AssertionError("the optimizer overrides this")

    def get_full_parameter_master(
        self, param: Tensor, *, rows: slice | None = None
    ) -> Tensor | None:
        """Return the complete FP32 master of `param`, on the host.

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
        state = self.state.get(param, {})
        if param not in self._released and "master_weight" not in state:
            self._weights.check({param: assignment.name})
        if "master_low" in state and self._weights.parked(param) is None:
            self._masters.check(assignment.name, param, state)
        master = self._masters.whole(param, state, rows)
        if self._assembly.host is not None and state.keys() & set(MASTER_KEYS):
            return master
        return master.to("cpu", torch.float32, copy=True)

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
                refuse_unusable(name, self._weights.read(param), param.shape)
            for param in chosen:
                if param in self.state:
                    self._masters.rebuild(param, self.state[param])

    def apply_to_masters(
        self, params: Iterable[Tensor] | None, fn: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Change FP32 masters and write the weights from them: for QK-clip, merges, averages.

        All of `params` is held a second time in FP32, where its masters are, until all of it is known to be
        usable.

        Args:
            params: parameters of this optimizer; None: all.
            fn: gets a copy of each master, shaped as its parameter; changes it in place and returns None,
                or returns another.

        Raises:
            ValueError: a parameter is not the optimizer's, or a result is misshapen or not finite;
                nothing was written.
        """
        chosen = self._chosen(params)
        refuse_released(self._released.values(), "apply_to_masters()")
        self.drain()
        refuse_torn(self._assembly.torn)
        self._weights.check(chosen)
        self._assembly.finish_reading()
        with lasting():
            for param, name in chosen.items():
                self._masters.check(name, param, self.state.get(param, {}))
            edited = {
                param: edited_master(
                    name, param, self._masters.whole(param, self.state.get(param, {})), fn
                )
                for param, name in chosen.items()
            }
            for param, values in edited.items():
                has_master = self._weights.has_master(param)
                state = self.state[param] if has_master else self.state.get(param, {})
                with self._torn_on_failure(chosen[param]):
                    self._masters.replace(param, state, values)

    @contextlib.contextmanager
    def _torn_on_failure(self, name: str) -> Iterator[None]:
        """Note that what a parameter has is half written, where that raises."""
        try:
            yield
        except BaseException:
            self._assembly.torn.append(name)
            raise
