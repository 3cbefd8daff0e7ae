"""Carry a plan out. The engine decides nothing: each item of the plan has one method here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonloom.config import AdamWOptions, MuonOptions
from muonloom.layout import BlockSpec, MatrixView
from muonloom.math import iterate, muon_scale, normalize_
from muonloom.plan import Batch, Item, Op, Pack, Plan, Unit, flat_views
from muonloom.telemetry import BatchRecord, MatrixRun, PhaseClock, Squares, StepRecord
from muonloom.update import adamw_, advance_momentum_, apply_update_, update_direction
from muonloom.workspace import Workspace

_RMS_CHUNK = 1 << 22

# AdamW squares gradients in FP32; up to this the second moment and the moving averages stay finite.
_LARGEST_SQUARABLE = 1e19


@dataclass(kw_only=True)
class Bound:
    """One parameter and its tensors for one step.

    Attributes:
        name: canonical name.
        weight: the device weight.
        gradient: shaped as `weight`, or None: the parameter stays as it is.
        state: the optimizer's state of this parameter.
        options: its group's numbers.
        spec: how it is cut; None for an AdamW parameter.
    """

    name: str
    weight: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    options: MuonOptions | AdamWOptions
    spec: BlockSpec | None

    @property
    def master(self) -> Tensor:
        """The FP32 weight that the optimizer owns: the parameter itself where that is FP32."""
        return self.state.get("master_weight", self.weight)


@dataclass(frozen=True)
class _Views:
    """A Muon parameter's long-lived tensors, cut as its block spec says."""

    places: tuple[tuple[int, tuple[int, ...]], ...]
    master: list[MatrixView]
    momentum: list[MatrixView]
    weight: list[MatrixView] | None


@dataclass
class _Flight:
    """The batch that is being worked on.

    `idle` and `held` are bool, one a matrix: whether its gradient is zero, and whether its group wants it
    to stay as it is for that.
    """

    batch: Batch
    x: Tensor
    idle: Tensor
    held: Tensor
    result: Tensor | None = None
    keep: Tensor | None = None


class Engine:
    """Runs plans; owns the workspaces and the cache of views."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._workspaces: dict[torch.device, Workspace] = {}
        self._views: dict[int, _Views] = {}

    @property
    def workspace_bytes(self) -> int:
        """The bytes of all workspaces, as allocated."""
        return sum(workspace.nbytes for workspace in self._workspaces.values())

    def load(self, plan: Plan) -> None:
        """Take the plan that the next `run` carries out, and drop what belonged to the last one."""
        self._plan = plan
        self._views.clear()
        self._workspaces.clear()

    @torch.no_grad()
    def run(
        self,
        parameters: Sequence[Bound | None],
        record: StepRecord,
        clock: PhaseClock,
        *,
        free_gradients: bool = False,
    ) -> None:
        """Do one step.

        Args:
            parameters: indexed as the plan's; None for one that has no part in this step.
            record: gets what was done.
            clock: gets when.
            free_gradients: set ``.grad`` to None as soon as a parameter's gradient was last read.
        """
        plan = self._plan
        assert plan is not None
        step = _Step(self, plan, parameters, record)
        if free_gradients:
            step.uses = plan.gradient_uses()
        for item in plan.items:
            clock.enter(item.op.value)
            step.do(item)

    def workspace(self, device: torch.device) -> Workspace:
        """Return the workspace of `device`."""
        if device not in self._workspaces:
            assert self._plan is not None
            self._workspaces[device] = Workspace(self._plan, device)
        return self._workspaces[device]

    def views(self, index: int, bound: Bound) -> _Views:
        """Return the views of a parameter's long-lived tensors, made again where a storage moved."""
        master, momentum, weight = bound.master, bound.state["momentum_buffer"], bound.weight
        places = tuple((t.data_ptr(), t.stride()) for t in (master, momentum, weight))
        cached = self._views.get(index)
        if cached is None or cached.places != places:
            assert bound.spec is not None
            cached = _Views(
                places,
                flat_views(bound.spec, master),
                flat_views(bound.spec, momentum),
                None if master is weight else flat_views(bound.spec, weight),
            )
            self._views[index] = cached
        return cached


class _Step:
    """The state of one run: which batch is in the workspace, and what it left there."""

    def __init__(
        self, engine: Engine, plan: Plan, parameters: Sequence[Bound | None], record: StepRecord
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._parameters = parameters
        self._record = record
        self._flight: _Flight | None = None
        self._gradients: dict[int, list[MatrixView]] = {}
        self.uses: Counter[int] | None = None
        self._live = {
            index
            for index, batch in enumerate(plan.batches)
            if any(self._present(unit) for unit in batch.units)
        }

    def do(self, item: Item) -> None:
        if item.op is Op.ADAMW:
            self._adamw(self._plan.packs[item.unit])
            return
        batch = self._plan.batches[item.batch]
        if item.batch not in self._live:
            return
        if item.op is Op.DIRECTION:
            self._direction(batch, batch.units[item.unit])
        elif item.op is Op.ORTHOGONALIZE:
            self._orthogonalize(batch)
        else:
            self._update(batch, batch.units[item.unit])

    def _present(self, unit: Unit) -> bool:
        return self._parameters[unit.parameter] is not None

    def _bound(self, unit: Unit) -> tuple[Bound, MuonOptions]:
        bound = self._parameters[unit.parameter]
        assert bound is not None
        assert isinstance(bound.options, MuonOptions)
        return bound, bound.options

    def _gradient(self, unit: Unit) -> Tensor:
        if unit.parameter not in self._gradients:
            bound, _ = self._bound(unit)
            assert bound.spec is not None
            assert bound.gradient is not None
            self._gradients[unit.parameter] = flat_views(bound.spec, bound.gradient)
        return _cut(self._gradients[unit.parameter], unit)

    def _direction(self, batch: Batch, unit: Unit) -> None:
        """Leave the unit's normalized direction in the workspace; its state stays untouched.

        The momentum is advanced only in `_update`, when the iteration is known to have given finite
        numbers: a matrix whose iteration fails must keep its old momentum bit for bit.
        """
        workspace = self._engine.workspace(batch.device)
        if self._flight is None or self._flight.batch is not batch:
            flags = torch.zeros(2, batch.count, dtype=torch.bool, device=batch.device)
            self._flight = _Flight(batch, workspace.x(batch), idle=flags[0], held=flags[1])
        run = slice(unit.offset, unit.offset + unit.count)
        x = self._flight.x[run]
        if not self._present(unit):
            x.zero_()  # the batch keeps its partition, whoever has a gradient
            return
        bound, options = self._bound(unit)
        gradient = self._gradient(unit)
        momentum = _cut(self._engine.views(unit.parameter, bound).momentum, unit)
        direction = update_direction(
            momentum,
            gradient,
            momentum=options.momentum,
            nesterov=options.nesterov,
            out=workspace.fp32(0, gradient.shape),
            scratch=workspace.fp32(1, gradient.shape),
        )
        normalize_(
            direction.view(x.shape), eps=batch.eps, out=x, like_torch=batch.recipe.like_torch
        )
        dims = _matrix_dims(gradient, unit)
        # Two vectorized reductions; the infinity norm runs element by element on a CPU.
        largest, least = torch.amax(gradient, dims), torch.amin(gradient, dims)
        idle = ((largest == 0) & (least == 0)).view(-1)
        self._flight.idle[run] = idle
        if options.skip_idle:
            self._flight.held[run] = idle

    def _orthogonalize(self, batch: Batch) -> None:
        flight = self._flight
        assert flight is not None
        scratch = self._engine.workspace(batch.device).scratch(batch)
        flight.result = iterate(flight.x, batch.recipe, scratch)
        wide = torch.promote_types(flight.result.dtype, torch.float32)
        norms = torch.linalg.vector_norm(flight.result, dim=(-2, -1), dtype=wide)
        finite = torch.isfinite(norms)
        runs = tuple(self._run(unit) for unit in batch.units if self._present(unit))
        keep = finite & ~flight.held
        # On the CPU a look costs nothing, and spares the select in the common case.
        flight.keep = None if batch.device.type == "cpu" and bool(keep.all()) else keep
        self._record.batches.append(
            BatchRecord(runs=runs, norms=norms, written=keep, finite=finite, idle=flight.idle)
        )

    def _run(self, unit: Unit) -> MatrixRun:
        bound, options = self._bound(unit)
        assert bound.spec is not None
        momentum = None
        if bound.spec.cuts_heads and unit.batched:
            momentum = _cut(self._engine.views(unit.parameter, bound).momentum, unit)
        return MatrixRun(
            name=bound.name,
            kind=unit.kind,
            shape=unit.shape,
            offset=unit.offset,
            count=unit.count,
            factor=options.lr * muon_scale(*unit.shape, options.adjust_lr_fn),
            head_momentum=momentum,
        )

    def _update(self, batch: Batch, unit: Unit) -> None:
        if not self._present(unit):
            return
        flight = self._flight
        assert flight is not None
        assert flight.result is not None
        bound, options = self._bound(unit)
        views = self._engine.views(unit.parameter, bound)
        master = _cut(views.master, unit)
        run = slice(unit.offset, unit.offset + unit.count)
        keep = flight.keep
        if keep is not None:
            keep = keep[run].view(_keep_shape(master, unit))
        scratch = self._engine.workspace(batch.device).fp32(0, master.shape)
        advance_momentum_(
            _cut(views.momentum, unit),
            self._gradient(unit),
            momentum=options.momentum,
            keep=keep,
            scratch=scratch,
        )
        apply_update_(
            master,
            flight.result[run].view(master.shape),
            lr=options.lr,
            weight_decay=options.weight_decay,
            scale=muon_scale(*unit.shape, options.adjust_lr_fn),
            keep=keep,
            scratch=scratch,
        )
        if views.weight is not None:
            _cut(views.weight, unit).copy_(master)
        self._used(unit.parameter)

    def _used(self, parameter: int) -> None:
        """Give the gradient back after its last use, where that was asked for."""
        if self.uses is None:
            return
        self.uses[parameter] -= 1
        bound = self._parameters[parameter]
        if self.uses[parameter] == 0 and bound is not None:
            self._gradients.pop(parameter, None)
            bound.gradient = bound.weight.grad = None

    def _adamw(self, pack: Pack) -> None:
        present = [span for span in pack.spans if self._parameters[span.parameter] is not None]
        if not present:
            return
        bounds = [bound for span in present if (bound := self._parameters[span.parameter])]
        options = bounds[0].options
        assert isinstance(options, AdamWOptions)
        cuts = [slice(span.start, span.stop) for span in present]
        # The fused kernels know no strides: what is not contiguous passes through a copy.
        tensors = [(b.master, b.state["exp_avg"], b.state["exp_avg_sq"]) for b in bounds]
        flats = [[tensor.contiguous().view(-1) for tensor in three] for three in tensors]
        adamw_(
            [flat[0][cut] for flat, cut in zip(flats, cuts, strict=True)],
            [self._fp32_gradient(b, cut) for b, cut in zip(bounds, cuts, strict=True)],
            [flat[1][cut] for flat, cut in zip(flats, cuts, strict=True)],
            [flat[2][cut] for flat, cut in zip(flats, cuts, strict=True)],
            # Only a parameter's last span moves its own counter; the others count on a copy.
            [
                b.state["step"] if span.last else b.state["step"].clone()
                for b, span in zip(bounds, present, strict=True)
            ],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        for bound, three, flat, span in zip(bounds, tensors, flats, present, strict=True):
            for tensor, values in zip(three, flat, strict=True):
                if not tensor.is_contiguous():
                    tensor.copy_(values.view(tensor.shape))
            if bound.master is not bound.weight:
                _write(bound.weight, flat[0], slice(span.start, span.stop))
            self._used(span.parameter)

    def _fp32_gradient(self, bound: Bound, cut: slice) -> Tensor:
        gradient = bound.gradient
        assert gradient is not None
        flat = gradient.contiguous().view(-1)[cut].to(torch.float32)
        # No element passes the global norm, so the clamp is reached only where squares would overflow.
        fits = self._record.grad_norm <= _LARGEST_SQUARABLE
        return flat if fits else flat.clamp(-_LARGEST_SQUARABLE, _LARGEST_SQUARABLE)


def _cut(views: Sequence[MatrixView], unit: Unit) -> Tensor:
    tensor = views[unit.view].tensor
    return tensor[unit.first : unit.first + unit.count] if unit.batched else tensor


def _matrix_dims(tensor: Tensor, unit: Unit) -> tuple[int, ...]:
    """The dimensions of a unit's tensor that belong to one matrix."""
    return tuple(range(int(unit.batched), tensor.ndim))


def _keep_shape(tensor: Tensor, unit: Unit) -> list[int]:
    lead = [unit.count] if unit.batched else []
    return lead + [1] * (tensor.ndim - len(lead))


def _write(weight: Tensor, master: Tensor, cut: slice) -> None:
    """Write elements `cut` of a flat master to the weight, in the weight's dtype."""
    if weight.is_contiguous():
        weight.view(-1)[cut].copy_(master[cut])
    else:
        weight.copy_(master.view(weight.shape))


def adamw_squares(bounds: Sequence[tuple[str, Bound]]) -> Squares:
    """Return the size of the AdamW update that the present state stands for, by kind.

    Computed only when somebody asks, in bounded pieces: it would cost a pass over the state each step.
    """
    squares: Squares = {}
    for kind, bound in bounds:
        options, state = bound.options, bound.state
        assert isinstance(options, AdamWOptions)
        count = float(state["step"])
        if count == 0:
            continue  # state was made, and no step taken
        first, second = (1 - beta**count for beta in options.betas)
        total, numel = squares.get(kind, (0.0, 0))
        flat = (state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1))
        for average, square in zip(*(torch.split(t, _RMS_CHUNK) for t in flat), strict=True):
            update = (average / first) / ((square / second).sqrt() + options.eps)
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            total += (options.lr * norm) ** 2
        squares[kind] = (total, numel + bound.weight.numel())
    return squares
