"""Where the tensors of a step are: in the optimizer's state, or staged in slots and rooms.

The arithmetic of `muonloom.compute` is the same for both, operation by operation: that is why placement
changes no bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from muonloom.bound import Bound, cut
from muonloom.cuts import flat_views
from muonloom.layout import BlockSpec, MatrixView
from muonloom.math import join_, low_halves, settle_ties_
from muonloom.plan import Run, Span
from muonloom.schedule import Schedule
from muonloom.staging import Staging
from muonloom.weights import insist
from muonloom.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class SpanState:
    """FP32, 1-D: what AdamW works on, in place."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class Places(Protocol):
    """Finds the state of part `part` of unit `unit`."""

    def changes_in_place(self, unit: int, part: int) -> bool:
        """Whether an update changes what lasts before it is finished."""

    def momentum(self, unit: int, part: int) -> Tensor:
        """Return a run's momentum."""

    def kept_momentum(self, unit: int, part: int) -> Tensor:
        """Return a run's momentum where it is kept between steps."""

    def master(self, unit: int, part: int, workspace: Workspace) -> Tensor:
        """Return a run's FP32 masters; overwrites the workspace's FP32 buffers, may return the second."""

    def finish(self, unit: int, part: int, master: Tensor, scratch: Tensor) -> None:
        """Write the weight from a run's finished masters."""

    def span(self, unit: int, part: int, workspace: Workspace, start: int) -> SpanState:
        """Return a span's state; its elements begin at `start` of the workspace's FP32 buffers."""

    def finish_span(self, unit: int, part: int, state: SpanState, scratch: Tensor) -> None:
        """Write the weight from a span's finished state."""

    def wrote(self, unit: int, part: int) -> None:
        """Take note that a part is finished."""


def settle(master: Tensor, dtype: torch.dtype, scratch: Tensor) -> None:
    """Move masters off the one tie that has no split form: in every placement, so that all agree."""
    if dtype == torch.bfloat16:
        settle_ties_(master, scratch)


def write(weight: Tensor, master: Tensor) -> None:
    """Write a weight from its finished master."""
    insist(lambda: weight.copy_(master))


def have_written(bound: Bound, master: Tensor, rows: tuple[int, int]) -> None:
    """Have a parameter's writer write `rows` of dimension 0 from finished masters, shaped as these."""
    writer = bound.writer
    assert writer is not None
    values = master.contiguous()
    insist(lambda: writer.write(bound.parameter, values, slice(*rows)))


class _Parts:
    """Finds a part and the parameter that it belongs to."""

    def __init__(self, schedule: Schedule) -> None:
        self._units = schedule.units
        self._bounds: Sequence[Bound | None] = ()

    def bind(self, bounds: Sequence[Bound | None]) -> None:
        """Take the tensors of the next step."""
        self._bounds = bounds

    def _run(self, unit: int, part: int) -> tuple[Run, Bound, BlockSpec]:
        run = self._units[unit].parts[part]
        assert isinstance(run, Run)
        bound = self._bounds[run.parameter]
        assert bound is not None
        assert bound.spec is not None
        return run, bound, bound.spec

    def _span(self, unit: int, part: int) -> tuple[Span, Bound]:
        span = self._units[unit].parts[part]
        assert isinstance(span, Span)
        bound = self._bounds[span.parameter]
        assert bound is not None
        return span, bound


class ResidentPlaces(_Parts):
    """State stays on the device, in the optimizer's own tensors."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._views = _ViewCache()

    def changes_in_place(self, unit: int, part: int) -> bool:
        """Always."""
        return True

    def momentum(self, unit: int, part: int) -> Tensor:
        """Return a run's momentum."""
        run, bound, spec = self._run(unit, part)
        return self._views.cut(run, spec, bound.state["momentum_buffer"], "momentum")

    def kept_momentum(self, unit: int, part: int) -> Tensor:
        """Return the same."""
        return self.momentum(unit, part)

    def master(self, unit: int, part: int, workspace: Workspace) -> Tensor:
        """Return a run's masters: of the state, or the weight itself."""
        run, bound, spec = self._run(unit, part)
        master = bound.state.get("master_weight", bound.weight)
        return self._views.cut(run, spec, master, "master")

    def finish(self, unit: int, part: int, master: Tensor, scratch: Tensor) -> None:
        """Write the weight, where it is not the master."""
        run, bound, spec = self._run(unit, part)
        if "master_weight" in bound.state:
            settle(master, bound.parameter.dtype, scratch)
            if bound.writer is None:
                write(self._views.cut(run, spec, bound.weight, "weight"), master)
            else:
                rows = _rows(run)
                have_written(bound, bound.state["master_weight"][slice(*rows)], rows)

    def span(self, unit: int, part: int, workspace: Workspace, start: int) -> SpanState:
        """Return a span's state."""
        span, bound = self._span(unit, part)
        master, first, second = (flat(tensor, span) for tensor in _span_tensors(bound))
        # Only a parameter's last span moves its own counter; the others count on a copy.
        step = bound.state["step"]
        step = step if span.last else step.clone()
        return SpanState(master=master, exp_avg=first, exp_avg_sq=second, step=step)

    def finish_span(self, unit: int, part: int, state: SpanState, scratch: Tensor) -> None:
        """Write the weight, and what passed through copies."""
        span, bound = self._span(unit, part)
        settle(state.master, bound.parameter.dtype, scratch)
        values = (state.master, state.exp_avg, state.exp_avg_sq)
        for tensor, value in zip(_span_tensors(bound), values, strict=True):
            put_back(tensor, value, span)
        if "master_weight" in bound.state:
            write_span(bound, state.master, span)

    def wrote(self, unit: int, part: int) -> None:
        """Nothing has to go anywhere."""


class StagedPlaces(_Parts):
    """State is in slots and rooms; FP32 weights are their own masters, where they are."""

    def __init__(self, schedule: Schedule, staging: Staging) -> None:
        super().__init__(schedule)
        self._staging = staging
        self._views = _ViewCache()

    def changes_in_place(self, unit: int, part: int) -> bool:
        """Where the weight is the master."""
        return not self._staging.keys(unit, part) & {"master_weight", "master_low"}

    def momentum(self, unit: int, part: int) -> Tensor:
        """Return a run's momentum in its room."""
        return self._staging.piece(unit, part, "momentum_buffer")

    def kept_momentum(self, unit: int, part: int) -> Tensor:
        """Return a run's momentum in the slab."""
        return self._staging.host_piece(unit, part, "momentum_buffer")

    def master(self, unit: int, part: int, workspace: Workspace) -> Tensor:
        """Return a run's masters: in the slot, joined from two halves, or the weight itself."""
        return self._master(unit, part, lambda: self._weight(unit, part), workspace, 0)

    def finish(self, unit: int, part: int, master: Tensor, scratch: Tensor) -> None:
        """Write the weight, where it is not the master."""
        if self.changes_in_place(unit, part):
            return
        run, bound, _ = self._run(unit, part)
        self._keep_low(unit, part, bound.parameter.dtype, master, scratch)
        if bound.writer is None:
            write(self._weight(unit, part), master)
            return
        # A run of whole atoms lies in the slot as its rows do in the slab: without gaps, in order.
        rows = _rows(run)
        shape = (rows[1] - rows[0], *bound.weight.shape[1:])
        dense = torch.empty(shape, device="meta").stride()
        have_written(bound, master.as_strided(shape, dense, master.storage_offset()), rows)

    def span(self, unit: int, part: int, workspace: Workspace, start: int) -> SpanState:
        """Return a span's state, with a counter of its own: the real one stays on the host."""
        span, bound = self._span(unit, part)
        return SpanState(
            master=self._master(unit, part, lambda: flat(bound.weight, span), workspace, start),
            exp_avg=self._staging.piece(unit, part, "exp_avg"),
            exp_avg_sq=self._staging.piece(unit, part, "exp_avg_sq"),
            step=workspace.counter(part).fill_(float(bound.state["step"])),
        )

    def finish_span(self, unit: int, part: int, state: SpanState, scratch: Tensor) -> None:
        """Write the weight and count the step."""
        span, bound = self._span(unit, part)
        if self.changes_in_place(unit, part):
            put_back(bound.weight, state.master, span)
        else:
            self._keep_low(unit, part, bound.parameter.dtype, state.master, scratch)
            write_span(bound, state.master, span)
        if span.last:
            bound.state["step"] += 1

    def wrote(self, unit: int, part: int) -> None:
        """Have the part stored."""
        self._staging.wrote(unit, part)

    def _weight(self, unit: int, part: int) -> Tensor:
        run, bound, spec = self._run(unit, part)
        return self._views.cut(run, spec, bound.weight, "weight")

    def _master(
        self,
        unit: int,
        part: int,
        weight: Callable[[], Tensor],
        workspace: Workspace,
        start: int,
    ) -> Tensor:
        """Return a part's masters; `weight` gives its weights, which may cost a copy."""
        if "master_weight" in self._staging.keys(unit, part):
            return self._staging.piece(unit, part, "master_weight")
        high = weight()
        if self.changes_in_place(unit, part):
            return high
        joined = workspace.fp32(1, high.shape, start=start)
        scratch = workspace.fp32(0, high.shape, start=start)
        join_(high, self._staging.piece(unit, part, "master_low"), joined, scratch)
        return joined

    def _keep_low(
        self, unit: int, part: int, dtype: torch.dtype, master: Tensor, scratch: Tensor
    ) -> None:
        """Finish the masters, before the weight is written: from then on the slot holds what lasts."""
        settle(master, dtype, scratch)
        if "master_low" in self._staging.keys(unit, part):
            low_halves(master, self._staging.piece(unit, part, "master_low"))


class _ViewCache:
    """Views of tensors that outlive a step, made again where a storage moved."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, str], tuple[object, list[MatrixView]]] = {}

    def cut(self, run: Run, spec: BlockSpec, tensor: Tensor, role: str) -> Tensor:
        place = (tensor.data_ptr(), tensor.stride(), tensor.dtype)
        cached = self._views.get((run.parameter, role))
        if cached is None or cached[0] != place:
            cached = (place, flat_views(spec, tensor))
            self._views[run.parameter, role] = cached
        return cut(cached[1], run)


def _rows(run: Run) -> tuple[int, int]:
    assert run.rows is not None, "a parameter with a writer is planned in whole write atoms"
    return run.rows


def _span_tensors(bound: Bound) -> tuple[Tensor, Tensor, Tensor]:
    state = bound.state
    return state.get("master_weight", bound.weight), state["exp_avg"], state["exp_avg_sq"]


def flat(tensor: Tensor, span: Span) -> Tensor:
    """Return the elements of a span; what is not contiguous passes through a copy.

    The fused kernels know no strides.
    """
    return tensor.contiguous().view(-1)[span.start : span.stop]


def put_back(tensor: Tensor, values: Tensor, span: Span) -> None:
    """Write the elements of a span to a tensor that `flat` had to copy; others have them already."""
    if not tensor.is_contiguous():
        whole = tensor.contiguous().view(-1)
        whole[span.start : span.stop] = values
        tensor.copy_(whole.view(tensor.shape))


def write_span(bound: Bound, master: Tensor, span: Span) -> None:
    """Write the elements of a span to a weight, in the weight's dtype, or have its writer do it."""
    weight = bound.weight
    if bound.writer is not None:
        shape = bound.weight.shape
        row_numel = math.prod(shape[1:])
        rows = (span.start // row_numel, span.stop // row_numel)
        values = master.view(rows[1] - rows[0], *shape[1:]) if shape else master.view(())
        have_written(bound, values, rows)
    elif weight.is_contiguous():
        write(weight.view(-1)[span.start : span.stop], master)
    else:
        put_back(weight, master.to(weight.dtype), span)
