"""State dictionaries, copies and pickles of the optimizer, as torch has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from muonloom.assembly import Assembly
from muonloom.dtensors import is_dtensor, like_parameter, local_part
from muonloom.errors import complaint
from muonloom.failures import refuse_released, refuse_torn
from muonloom.groups import check_group
from muonloom.hollow import is_released
from muonloom.membership import Membership
from muonloom.release import DeviceRelease
from muonloom.state import (
    STATE_KEYS,
    State,
    StateByParameter,
    aligned,
    ensure_state,
    lasting,
    portable,
    restored,
)
from muonloom.weights import DeviceWeights


class StateSaving(DeviceRelease):
    """The part of `Muon` that saves and loads."""

    _process_group: Any
    _sharding: dict[str, Any]

    def _assemble(self) -> Assembly:
        raise AssertionError("the optimizer overrides this")

    def _start_again(self) -> None:
        """Have no step behind: after a copy was made, or a pickle was read."""
        raise AssertionError("the optimizer overrides this")

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary of state and groups, after `drain`.

        Its tensors are the optimizer's own, but for split masters, which are put together. Those of a
        DTensor are DTensors, placed as that is.

        Raises:
            RuntimeError: a failed step left a weight half written; or other ranks own parts of the state of
                a parameter that this rank holds all of.
            StaleMasterError: a weight that is half of its master was written from outside.
        """
        self._refuse_shared(
            "state_dict()",
            remedy="Use muonloom.checkpoint.save() on all ranks; or build the optimizer with "
            "process_group=False, so that each rank does and keeps all of it.",
        )
        self.drain()
        refuse_torn(self._assembly.torn)
        whole = portable(super().state_dict())
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        for index, tensor in enumerate(tensors):
            if index in whole["state"]:
                whole["state"][index] = self._shown(tensor, whole["state"][index])
        return whole

    def _shown(self, param: Tensor, state: State) -> State:
        """Return a parameter's state as others know it: masters whole, placed as the parameter is."""
        if "master_low" in state:
            if self._weights.parked(param) is None:
                name = self._assignments[param].name
                self._weights.check({param: name})
                self._masters.check(name, param, state)
            kept = {key: value for key, value in state.items() if key != "master_low"}
            state = {**kept, "master_weight": self._masters.whole(param, state)}
        if not is_dtensor(param):
            return state
        return {k: v if k == "step" else like_parameter(v, param) for k, v in state.items()}

    def _refuse_shared(self, what: str, *, remedy: str) -> None:
        """Refuse to give a part away as if it were the whole."""
        for known in self._assignments.values():
            holding = None if known.share is None else known.share.holding
            if holding is not None and holding.weights != holding.states:
                raise RuntimeError(
                    complaint(
                        known.name,
                        got=f"{what} of state that other ranks own parts of",
                        wanted="all of it on this rank",
                        remedy=remedy,
                    )
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state and group options; masters and momentum keep their dtypes.

        Tensors are whole, as one rank saves them, and this rank takes its part; or they are DTensors,
        placed as the parameter is.

        Raises:
            ValueError: it is of another model, arrangement, placement or dtype, or holds non-finite state;
                nothing was changed.
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
            torn.extend(self._restore([(p, self._own_parts(p, saved)) for p, saved in pairs], old))

        # As hooks, so that the caller's own hooks see and change what they would with torch.
        with (
            lasting(),
            _removed_after(self.register_load_state_dict_pre_hook(check)),
            _removed_after(self.register_load_state_dict_post_hook(restore, prepend=True)),
        ):
            super().load_state_dict(state_dict)
        self._end_loading(torn)

    def _restore(
        self, pairs: Sequence[tuple[Tensor, Mapping[str, Any]]], old: Mapping[Tensor, State]
    ) -> list[tuple[str, Exception]]:
        """Take this rank's parts of saved state; return what could not be written from it, and why."""
        groups = self._groups_by_parameter()
        for param, saved in pairs:
            if saved:
                own, group = old.get(param, {}), groups[param]
                own = restored(param, saved, own, group, store=self._assembly)
                self._masters.restore(param, own, saved.get("master_weight"))
                self.state[param] = own
            self._masters.doubt(param)
        return list(self._rewrite([param for param, _ in pairs]))

    def _end_loading(self, torn: Sequence[tuple[str, Exception]]) -> None:
        self._drained = True
        self._assembly.torn[:] = [name for name, _ in torn]
        for _, failure in torn:
            raise failure

    def updated_rows(self, param: Tensor) -> slice:
        """Return which rows of dimension 0 of a tensor this rank updates; others share the work."""
        self._assignment(param)
        return self._weights.updated_rows(param)

    # -- parts ---------------------------------------------------------------------------------------

    def own_state(self, param: Tensor) -> tuple[slice, dict[str, Tensor]]:
        """Return what this rank keeps of the state of a parameter that several ranks update, after `drain`.

        Returns:
            which rows of dimension 0 of the tensor it updates (maybe none); and its state of these: the
            optimizer's own tensors, zero before the first step, but that masters are whole FP32 ones.

        Raises:
            ValueError: `param` is not the optimizer's.
            RuntimeError: a failed step left a weight half written.
            StaleMasterError: a weight that is half of its master was written from outside.
        """
        known = self._assignment(param)
        self.drain()
        refuse_torn(self._assembly.torn)
        state = self.state[param]
        with lasting():
            self._masters.ensure(param, state)
            if not state.keys() >= set(STATE_KEYS[known.algorithm]):
                # Looked up only here: that takes a look at all parameters.
                group = self._groups_by_parameter()[param]
                ensure_state(param, state, group, store=self._assembly)
        return self._weights.updated_rows(param), dict(self._shown(param, state))

    def load_own_state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take what `own_state` gave, for the same rows, once device weights hold what belongs to it.

        Raises:
            ValueError: a parameter is not the optimizer's, or state has another shape.
        """
        refuse_released(self._released.values(), "load_own_state()")
        for param, saved in states.items():
            known = self._assignment(param)
            for key, value in saved.items():
                wanted = () if key == "step" else known.part_shape
                if tuple(value.shape) != wanted:
                    raise ValueError(
                        complaint(
                            known.name,
                            got=f"{key} of shape {tuple(value.shape)}",
                            wanted=f"{wanted}, of the rows that this rank updates",
                            remedy="See own_state().",
                        )
                    )
        old = {param: dict(state) for param, state in self.state.items()}
        self._assembly.quiesce()
        with lasting():
            torn = self._restore(list(states.items()), old)
        self._end_loading(torn)

    def _own_parts(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return of saved state what this rank keeps."""
        share = self._assignments[param].share

        def own(key: str, value: Any) -> Any:
            if is_dtensor(value):
                return local_part(value)
            return value if share is None or key == "step" else value[share.holding.own.slices]

        return {key: own(key, value) for key, value in saved.items()}

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
            RuntimeError: a parameter has no storage; copying that would crash the process. Or other ranks
                own parts of the state.
        """
        self._refuse_shared(
            "a copy or pickle",
            remedy="Build another optimizer instead, and save by muonloom.checkpoint.save() on all ranks.",
        )
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
        self._process_group, self._sharding = False, {}
        self._membership = Membership(self._weights, common="")
        for tensor in self._assignments:
            self._membership.add(tensor, False)
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
