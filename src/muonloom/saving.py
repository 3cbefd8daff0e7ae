"""State dictionaries, copies and pickles of the optimizer, as torch has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from muonloom.assembly import Assembly
from muonloom.failures import refuse_released, refuse_torn
from muonloom.groups import check_group
from muonloom.hollow import is_released
from muonloom.release import DeviceRelease
from muonloom.state import StateByParameter, aligned, lasting, portable, restored
from muonloom.weights import DeviceWeights


class StateSaving(DeviceRelease):
    """The part of `Muon` that saves and loads."""

    def _assemble(self) -> Assembly:
        raise AssertionError("the optimizer overrides this")

    def _start_again(self) -> None:
        """Have no step behind: after a copy was made, or a pickle was read."""
        raise AssertionError("the optimizer overrides this")

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary of state and groups, after `drain`.

        Its tensors are the optimizer's own, but for split masters, which are put together.

        Raises:
            RuntimeError: a failed step left a weight half written.
            StaleMasterError: a weight that is half of its master was written from outside.
        """
        self.drain()
        refuse_torn(self._assembly.torn)
        whole = portable(super().state_dict())
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        for index, tensor in enumerate(tensors):
            state = whole["state"].get(index, {})
            if "master_low" in state:
                if self._weights.parked(tensor) is None:
                    name = self._assignments[tensor].name
                    self._weights.check({tensor: name})
                    self._masters.check(name, tensor, state)
                kept = {key: value for key, value in state.items() if key != "master_low"}
                whole["state"][index] = {
                    **kept,
                    "master_weight": self._masters.whole(tensor, state),
                }
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state and group options; masters and momentum keep their dtypes.

        Raises:
            ValueError: it is of another model, arrangement or dtype, or holds non-finite state; nothing
                was changed.
        """
        refuse_released(self._released.values(), "load_state_dict()")
        old = {param: dict(state) for param, state in self.state.items()}
        self._assembly.quiesce()
        self._weights.check({p: n for p, n in self._names().items() if self._weights.writer(p)})
        pairs: list[tuple[Tensor, dict[str, Tensor]]] = []
        torn: list[tuple[str, Exception]] = []

        def check(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            ordered, found = aligned(saved, self.param_groups, store=self._assembly)
            for i, group in enumerate(ordered["param_groups"]):
                check_group(group, owner=f"param_groups[{i}].")
            pairs.extend(found)
            return {**ordered, "state": {}}  # torch would copy all of it to the device first

        def restore(_: Optimizer) -> None:
            groups = self._groups_by_parameter()
            for param, saved in pairs:
                if saved:
                    own, group = old.get(param, {}), groups[param]
                    own = restored(param, saved, own, group, store=self._assembly)
                    self._masters.restore(param, own, saved.get("master_weight"))
                    self.state[param] = own
                self._masters.doubt(param)
            torn.extend(self._rewrite([param for param, _ in pairs]))

        # As hooks, so that the caller's own hooks see and change what they would with torch.
        with (
            lasting(),
            _removed_after(self.register_load_state_dict_pre_hook(check)),
            _removed_after(self.register_load_state_dict_post_hook(restore, prepend=True)),
        ):
            super().load_state_dict(state_dict)
        self._drained = True
        self._assembly.torn[:] = [name for name, _ in torn]
        for _, failure in torn:
            raise failure

    def _rewrite(self, params: Iterable[Tensor]) -> Iterator[tuple[str, Exception]]:
        """Write weights that writers hold from their masters, which alone give FP8 back exactly.

        Yields:
            The names of those for which that failed, and why.
        """
        for param in params:
            state = self.state.get(param, {})
            if self._weights.writer(param) is not None and "master_weight" in state:
                try:
                    self._masters.rewrite(param, state["master_weight"])
                except Exception as failure:
                    yield self._assignments[param].name, failure

    def __getstate__(self) -> dict[str, Any]:
        """Keep what `torch.optim.Optimizer` drops, but for the engine, which is made anew, and for writers.

        Raises:
            RuntimeError: a parameter has no storage; copying that would crash the process.
        """
        self._assembly.settle()
        refuse_released(self._released.values(), "a copy")
        for param, assignment in self._assignments.items():
            refuse_released([assignment.name] if is_released(param) else [], "a copy")
        kept = (
            "_is_built",
            "_settings",
            "_layout",
            "_assignments",
            "_masters",
            "_rate_was_given",
            "_skips",
        )
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied optimizer; torch also puts loaded groups in place by this."""
        super().__setstate__(state)
        self.state = StateByParameter(self.state)
        if "_settings" not in state:
            return
        self._weights = DeviceWeights()
        self._released, self._gone, self._sentries = {}, {}, []
        self._assembly = self._assemble()
        self._masters.move_to(self._assembly, self._weights)
        self._start_again()


@contextlib.contextmanager
def _removed_after(handle: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
