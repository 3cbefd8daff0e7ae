"""What happens before a step's work, and after it: gradients, state and verdict brought together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonloom.binding import bind
from muonloom.bound import Bound
from muonloom.by_name import StateByName
from muonloom.engine import Engine
from muonloom.failures import refuse_torn
from muonloom.groups import check_group
from muonloom.guard import Verdict
from muonloom.state import ensure_state
from muonloom.telemetry import Squares, StepRecord
from muonloom.update_size import adamw_squares


class Stepping(StateByName):
    """The part of `Muon` that gets a step ready."""

    _record: StepRecord | None

    def _inspect(self) -> tuple[list[Bound | None], Verdict]:
        """Pair parameters with their gradients, and decide with all ranks whether to take the step."""
        failure: Tensor | None = None
        moved: Tensor | None = None
        bounds: list[Bound | None] = []
        error: Exception | None = None
        try:
            for i, group in enumerate(self.param_groups):
                check_group(group, owner=f"param_groups[{i}].")
            self._begin_step()
            engine = self._current_engine()
            refuse_torn(self._assembly.torn)
            engine.check()
            engine.wait_for_weights()
            self._assembly.prefetch()  # before the one read, which waits for the gradients
            bounds = self._bind()
            failure = None if self._drained or not self._record else self._record.failure_flag()
            moved = self._masters.suspicion()
            if not self._membership.is_alone and not self._are_certain(bounds):
                moved = torch.ones((), dtype=torch.bool, device=self._device())
        except Exception as caught:  # the others are waiting to hear of it
            error = caught
        verdict, present = self._membership.verdict(
            bounds,
            self.param_groups,
            self._assignments,
            failure=failure,
            moved=moved,
            error=error,
            has_state=bool(self.state),
        )
        if any(here is None and there for here, there in zip(bounds, present, strict=True)):
            bounds = self._bind(present, known=bounds)
        return bounds, verdict

    def _bind(
        self, present: Sequence[bool] | None = None, known: Sequence[Bound | None] = ()
    ) -> list[Bound | None]:
        return bind(
            self.param_groups,
            self._assignments,
            self.state,
            self._weights,
            split=self._assembly.splits_masters,
            present=present,
            known=known,
        )

    def _are_certain(self, bounds: Sequence[Bound | None]) -> bool:
        present = [bound for bound in bounds if bound is not None]
        return all(self._masters.is_certain(bound.parameter, bound.state) for bound in present)

    def _finish(
        self, weights: Sequence[Tensor], record: StepRecord, before: tuple[int, int, int]
    ) -> None:
        """Take note of a step whose weights are written."""
        self._masters.note(weights)
        counts = [now - then for now, then in zip(self._membership.traffic(), before, strict=True)]
        record.collectives, record.payload_bytes, record.control_bytes = counts

    def _device(self) -> torch.device:
        tensors = (tensor for group in self.param_groups for tensor in group["params"])
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _prepare(self, bounds: Sequence[Bound | None], *, doubt: bool) -> None:
        """Refuse stale weights, then make the state that is missing."""
        present = [bound for bound in bounds if bound is not None]
        if doubt:
            self._masters.doubt_changed(bound.parameter for bound in present)
        if not self._are_certain(bounds):
            self._assembly.settle()  # masters are about to be compared, and may be on their way
        for bound in present:
            self._masters.check(bound.name, bound.parameter, bound.state)
        groups, made = self._groups_by_parameter(), False
        for bound in present:
            param = bound.parameter
            bound.state = self.state[param]
            known = len(bound.state)
            self._masters.ensure(param, bound.state)
            ensure_state(param, bound.state, groups[param], store=self._assembly)
            made |= len(bound.state) > known
        if made:
            self._assembly.prefetch()  # again: what was loaded ahead is not all

    def _adamw_squares(self, bounds: Sequence[Bound | None]) -> Callable[[], Squares]:
        kinds = self._assembly.plan.kinds
        scalars = [
            (kinds[i], bound)
            for i, bound in enumerate(bounds)
            if bound is not None and bound.spec is None
        ]
        return lambda: adamw_squares(scalars)

    def _current_engine(self) -> Engine:
        return self._assembly.update(self.param_groups, self._assignments, self.state)
