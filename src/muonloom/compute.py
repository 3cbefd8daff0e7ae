"""The compute tasks of one step, on tensors that `muonloom.places` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from muonloom.bound import Bound, cut
from muonloom.collectives import Ranks
from muonloom.config import AdamWOptions, MuonOptions
from muonloom.cuts import flat_views
from muonloom.exchange import Crossing
from muonloom.layout import MatrixView
from muonloom.math import iterate, muon_scale, normalize_
from muonloom.places import Places, SpanState
from muonloom.plan import Batch, Exchange, OwnedBatch, Pack, Run, Span, Work
from muonloom.schedule import Op, Schedule, Task
from muonloom.state import MASTER_KEYS
from muonloom.telemetry import BatchRecord, MatrixRun, StepRecord
from muonloom.update import adamw_, advance_momentum_, apply_update_, update_direction
from muonloom.workspace import Workspace, Workspaces

# AdamW squares gradients in FP32; up to this the second moment and the moving averages stay finite.
_LARGEST_SQUARABLE = 1e19


@dataclass
class _Flight:
    """The batch that is being worked on.

    `idle` and `held` are bool, one a matrix: whether its gradient is zero, and whether its group wants it
    to stay as it is for that.
    """

    work: int
    x: Tensor
    idle: Tensor
    held: Tensor
    result: Tensor | None = None
    keep: Tensor | None = None


@dataclass
class _Trip:
    """The exchange that is being worked on."""

    work: int
    crossing: Crossing


class StepCompute:
    """The state of one step: which batch is in the workspace, and what it left there.

    Attributes:
        begun: (unit, part) whose lasting weights or state are being written.
        written: (unit, part) for which that is done.
    """

    def __init__(
        self,
        schedule: Schedule,
        places: Places,
        bounds: Sequence[Bound | None],
        record: StepRecord,
        *,
        workspaces: Workspaces,
        uses: Counter[int] | None,
        ranks_of: Callable[[tuple[int, ...]], Ranks],
    ) -> None:
        self._schedule = schedule
        self._places = places
        self._bounds = bounds
        self._record = record
        self._workspaces = workspaces
        self._uses = uses
        self._ranks_of = ranks_of
        self._flight: _Flight | None = None
        self._trip: _Trip | None = None
        self._gradients: dict[int, list[MatrixView]] = {}
        self.begun: set[tuple[int, int]] = set()
        self.written: set[tuple[int, int]] = set()
        self._live = {w for w, work in enumerate(schedule.works) if self._is_live(work)}

    def do(self, task: Task) -> None:
        """Carry out one task of the compute stream."""
        if task.work not in self._live:
            return
        work = self._schedule.works[task.work]
        if isinstance(work, Pack):
            self._adamw(task.unit, work)
        elif task.op is not Op.ORTHOGONALIZE:
            phase = self._direction if task.op is Op.DIRECTION else self._update
            for part, run in enumerate(self._schedule.units[task.unit].parts):
                assert isinstance(run, Run)
                phase(work, task, part, run)
        elif isinstance(work, Exchange):
            self._cross(work, task)
        else:
            self._orthogonalize(work, task)

    def _is_live(self, work: Work) -> bool:
        """Whether some parameter of a work, of an exchange on any rank, has a gradient."""
        if isinstance(work, Exchange):
            return any(self._bounds[parameter] is not None for parameter in work.parameters)
        return any(map(self._present, work.parts))

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are still held."""
        return [b.gradient for b in self._bounds if b is not None and b.gradient is not None]

    def drop_gradients(self) -> None:
        """Let go of all gradients: the step's record outlives them, and must not keep them."""
        self._gradients.clear()
        for bound in self._bounds:
            if bound is not None:
                bound.gradient = None

    def present_parts(self, unit: int) -> frozenset[int]:
        """Return the parts of a unit that have a gradient in this step."""
        parts = self._schedule.units[unit].parts
        return frozenset(i for i, part in enumerate(parts) if self._present(part))

    def _present(self, part: Run | Span) -> bool:
        return self._bounds[part.parameter] is not None

    def _bound(self, run: Run) -> tuple[Bound, MuonOptions]:
        bound = self._bounds[run.parameter]
        assert bound is not None
        assert isinstance(bound.options, MuonOptions)
        return bound, bound.options

    def _gradient(self, run: Run) -> Tensor:
        if run.parameter not in self._gradients:
            bound, _ = self._bound(run)
            assert bound.spec is not None
            assert bound.gradient is not None
            self._gradients[run.parameter] = flat_views(bound.spec, bound.gradient)
        return cut(self._gradients[run.parameter], run)

    def _direction(self, work: Batch | Exchange, task: Task, part: int, run: Run) -> None:
        """Leave a run's normalized direction in the workspace; its state stays untouched.

        The momentum is advanced only in `_update`, when the iteration is known to have given finite
        numbers: a matrix whose iteration fails must keep its old momentum bit for bit.
        """
        workspace = self._workspaces.of(work.device)
        if isinstance(work, Exchange):
            crossing = self._crossing(work, task)
            if not crossing.sends(run.offset):
                return  # another rank holds the same
            if not self._present(run):
                crossing.leave_out(run.offset)
                return
            direction, gradient = self._direction_of(task, part, run, workspace)
            scratch = workspace.fp32(1, gradient.shape)
            crossing.send(run.offset, direction, gradient, scratch=scratch)
            return
        flight = self._flight_of(work, task, workspace)
        place = slice(run.offset, run.offset + run.count)
        x = flight.x[place]
        if not self._present(run):
            x.zero_()  # the batch keeps its partition, whoever has a gradient
            return
        _, options = self._bound(run)
        direction, gradient = self._direction_of(task, part, run, workspace)
        normalize_(direction.view(x.shape), eps=work.eps, out=x, like_torch=work.recipe.like_torch)
        dims = _matrix_dims(gradient, run)
        # Two vectorized reductions; the infinity norm runs element by element on a CPU.
        largest, least = torch.amax(gradient, dims), torch.amin(gradient, dims)
        idle = ((largest == 0) & (least == 0)).view(-1)
        flight.idle[place] = idle
        if options.skip_idle:
            flight.held[place] = idle

    def _direction_of(
        self, task: Task, part: int, run: Run, workspace: Workspace
    ) -> tuple[Tensor, Tensor]:
        """Return a run's direction, in a FP32 buffer of the workspace, and its gradient."""
        _, options = self._bound(run)
        gradient = self._gradient(run)
        direction = update_direction(
            self._places.momentum(task.unit, part),
            gradient,
            momentum=options.momentum,
            nesterov=options.nesterov,
            out=workspace.fp32(0, gradient.shape),
            scratch=workspace.fp32(1, gradient.shape),
        )
        return direction, gradient

    def _flight_of(self, batch: Batch, task: Task, workspace: Workspace) -> _Flight:
        if self._flight is None or self._flight.work != task.work:
            flags = torch.zeros(2, batch.count, dtype=torch.bool, device=batch.device)
            self._flight = _Flight(task.work, workspace.x(batch), idle=flags[0], held=flags[1])
        return self._flight

    def _crossing(self, exchange: Exchange, task: Task) -> Crossing:
        if self._trip is None or self._trip.work != task.work:
            memory = self._workspaces.of(exchange.device).exchange()
            crossing = Crossing(exchange, self._ranks_of(exchange.ranks), memory)
            self._trip = _Trip(task.work, crossing)
        return self._trip.crossing

    def _orthogonalize(self, batch: Batch, task: Task) -> None:
        flight = self._flight
        assert flight is not None
        keep = self._iterate(batch, flight, self._matrix_runs(task.work))
        # On the CPU a look costs nothing, and spares the select in the common case.
        flight.keep = None if batch.device.type == "cpu" and bool(keep.all()) else keep

    def _iterate(self, batch: Batch, flight: _Flight, runs: Iterable[MatrixRun]) -> Tensor:
        """Orthogonalize a batch; return for each matrix whether it is to be updated."""
        scratch = self._workspaces.of(batch.device).scratch(batch)
        flight.result = iterate(flight.x, batch.recipe, scratch)
        wide = torch.promote_types(flight.result.dtype, torch.float32)
        norms = torch.linalg.vector_norm(flight.result, dim=(-2, -1), dtype=wide)
        finite = torch.isfinite(norms)
        keep = finite & ~flight.held
        self._record.batches.append(
            BatchRecord(
                runs=tuple(runs), norms=norms, written=keep, finite=finite, idle=flight.idle
            )
        )
        return keep

    def _matrix_runs(self, work: int) -> Iterator[MatrixRun]:
        for u, unit in self._schedule.units_of(work):
            for part, run in enumerate(unit.parts):
                if not self._present(run):
                    continue
                assert isinstance(run, Run)
                bound, _ = self._bound(run)
                assert bound.spec is not None
                heads = bound.spec.cuts_heads and run.batched
                yield self._matrix_run(run, self._places.kept_momentum(u, part) if heads else None)

    def _matrix_run(self, run: Run, head_momentum: Tensor | None) -> MatrixRun:
        bound, options = self._bound(run)
        return MatrixRun(
            name=bound.name,
            kind=run.kind,
            shape=run.shape,
            offset=run.offset,
            count=run.count,
            factor=options.lr * muon_scale(*run.shape, options.adjust_lr_fn),
            head_momentum=head_momentum,
        )

    def _cross(self, exchange: Exchange, task: Task) -> None:
        """Bring fragments to their owners, orthogonalize what is owned here, and bring results back."""
        crossing = self._crossing(exchange, task)
        crossing.go()
        for owned in exchange.owned:
            self._orthogonalize_owned(owned, crossing)
        crossing.come_back()

    def _orthogonalize_owned(self, owned: OwnedBatch, crossing: Crossing) -> None:
        batch = owned.batch
        workspace = self._workspaces.of(batch.device)
        flags = torch.zeros(2, batch.count, dtype=torch.bool, device=batch.device)
        flight = _Flight(-1, workspace.x(batch), idle=flags[0], held=flags[1])
        parts: list[tuple[slice, Tensor]] = []
        for run, shipment in zip(batch.runs, owned.shipments, strict=True):
            place = slice(run.offset, run.offset + run.count)
            x = flight.x[place]
            part = cut(crossing.views(shipment), run)
            parts.append((place, part))
            if not self._present(run):
                x.zero_()
                continue
            _, options = self._bound(run)
            direction = workspace.fp32(0, part.shape).copy_(part)
            normalize_(
                direction.view(x.shape), eps=batch.eps, out=x, like_torch=batch.recipe.like_torch
            )
            flight.idle[place] = crossing.idle(shipment, run)
            if options.skip_idle:
                flight.held[place] = flight.idle[place]
        runs = [self._matrix_run(run, None) for run in batch.runs if self._present(run)]
        keep = self._iterate(batch, flight, runs)
        assert flight.result is not None
        if batch.device.type != "cpu" or not bool(keep.all()):
            crossing.mark(flight.result, keep=keep, held=flight.held)
        for place, part in parts:
            part.copy_(flight.result[place].view(part.shape))

    def _update(self, work: Batch | Exchange, task: Task, part: int, run: Run) -> None:
        if not self._present(run):
            return
        bound, options = self._bound(run)
        workspace = self._workspaces.of(work.device)
        self._begin(task.unit, part, early=True)
        master = self._places.master(task.unit, part, workspace)
        direction, keep, scale = self._result(work, run, options, master)
        scratch = workspace.fp32(0, master.shape)
        advance_momentum_(
            self._places.momentum(task.unit, part),
            self._gradient(run),
            momentum=options.momentum,
            keep=keep,
            scratch=scratch,
        )
        apply_update_(
            master,
            direction,
            lr=options.lr,
            weight_decay=options.weight_decay,
            scale=scale,
            keep=keep,
            scratch=scratch,
        )
        self._begin(task.unit, part, early=False)
        self._places.finish(task.unit, part, master, scratch)
        self._finished(task.unit, part, bound, master)

    def _result(
        self, work: Batch | Exchange, run: Run, options: MuonOptions, master: Tensor
    ) -> tuple[Tensor, Tensor | None, float]:
        """Return a run's result, where it is to be taken (None: everywhere), and the factor of its rate."""
        if isinstance(work, Exchange):
            assert self._trip is not None
            direction, scale = self._trip.crossing.scaled(
                run.offset, lambda m, n: muon_scale(m, n, options.adjust_lr_fn)
            )
            finite = torch.isfinite(direction)
            if work.device.type == "cpu" and bool(finite.all()):
                return direction, None, scale
            bound, _ = self._bound(run)
            self._record.broken.append((bound.name, torch.isnan(direction).any()))
            return direction, finite, scale
        flight = self._flight
        assert flight is not None
        assert flight.result is not None
        place = slice(run.offset, run.offset + run.count)
        keep = flight.keep if flight.keep is None else flight.keep[place]
        keep = keep if keep is None else keep.view(_keep_shape(master, run))
        scale = muon_scale(*run.shape, options.adjust_lr_fn)
        return flight.result[place].view(master.shape), keep, scale

    def _begin(self, unit: int, part: int, *, early: bool) -> None:
        """Note that what lasts is being changed: where it is not staged, earlier."""
        if not early or self._places.changes_in_place(unit, part):
            self.begun.add((unit, part))

    def _finished(self, unit: int, part: int, bound: Bound, master: Tensor) -> None:
        self._places.wrote(unit, part)
        self.written.add((unit, part))
        if bound.state.keys() & set(MASTER_KEYS):
            self._record.watch(bound.name, master)
        self._used(self._schedule.units[unit].parts[part].parameter)

    def _used(self, parameter: int) -> None:
        """Let go of the gradient after its last use, where it is to be given back."""
        if self._uses is None:
            return
        self._uses[parameter] -= 1
        bound = self._bounds[parameter]
        if self._uses[parameter] == 0 and bound is not None:
            self._gradients.pop(parameter, None)
            bound.gradient = None

    def _adamw(self, unit: int, pack: Pack) -> None:
        workspace = self._workspaces.of(pack.device)
        present = [
            (part, span, bound)
            for part, span in enumerate(self._schedule.units[unit].parts)
            if isinstance(span, Span) and (bound := self._bounds[span.parameter]) is not None
        ]
        if not present:
            return
        options = present[0][2].options
        assert isinstance(options, AdamWOptions)
        starts = [0, *accumulate(span.numel for _, span, _ in present)][:-1]
        states = [
            self._places.span(unit, part, workspace, start)
            for (part, _, _), start in zip(present, starts, strict=True)
        ]
        gradients = [
            self._fp32_gradient(bound, span, workspace, start)
            for (_, span, bound), start in zip(present, starts, strict=True)
        ]
        for part, _, _ in present:
            self._begin(unit, part, early=True)
        self._call_adamw(states, gradients, options)
        for (part, span, bound), state, start in zip(present, states, starts, strict=True):
            scratch = workspace.fp32(0, (span.numel,), start=start)
            self._begin(unit, part, early=False)
            self._places.finish_span(unit, part, state, scratch)
            self._finished(unit, part, bound, state.master)

    @staticmethod
    def _call_adamw(
        states: Sequence[SpanState], gradients: Sequence[Tensor], options: AdamWOptions
    ) -> None:
        adamw_(
            [state.master for state in states],
            gradients,
            [state.exp_avg for state in states],
            [state.exp_avg_sq for state in states],
            [state.step for state in states],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    def _fp32_gradient(self, bound: Bound, span: Span, workspace: Workspace, start: int) -> Tensor:
        gradient = bound.gradient
        assert gradient is not None
        values = gradient.contiguous().view(-1)[span.start : span.stop]
        # No element passes the global norm, so the clamp is reached only where squares would overflow.
        fits = self._record.grad_norm <= _LARGEST_SQUARABLE
        if fits and values.dtype == torch.float32:
            return values
        wide = workspace.fp32(0, (span.numel,), start=start).copy_(values)
        return wide if fits else wide.clamp_(-_LARGEST_SQUARABLE, _LARGEST_SQUARABLE)


def _matrix_dims(tensor: Tensor, run: Run) -> tuple[int, ...]:
    """The dimensions of a run's tensor that belong to one matrix."""
    return tuple(range(int(run.batched), tensor.ndim))


def _keep_shape(tensor: Tensor, run: Run) -> list[int]:
    lead = [run.count] if run.batched else []
    return lead + [1] * (tensor.ndim - len(lead))
