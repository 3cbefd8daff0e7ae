"""`Muon`: the `torch.optim.Optimizer` that composes layout, plan and engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from muonloom.assembly import Assembly
from muonloom.assignment import Assignment, assign, refuse_unknown, whole_shapes
from muonloom.binding import announce, only_makes_state
from muonloom.config import HostPlacement, check_options
from muonloom.device import Backend, backend_for
from muonloom.failures import (
    refuse_failed_iterations,
    refuse_overflow,
    refuse_released,
)
from muonloom.groups import (
    as_groups,
    check_group,
    check_not_twice,
    named_members,
    refuse_misplaced,
    split_group,
)
from muonloom.guard import SkipPolicy
from muonloom.layout import Layout
from muonloom.masters import MasterBook
from muonloom.membership import Membership
from muonloom.overlap import OverlapHandle, overlap_forward
from muonloom.sharding import Sharding
from muonloom.state import StateByParameter
from muonloom.stepping import Stepping
from muonloom.telemetry import PhaseClock, StepRecord, StepReport
from muonloom.weights import DeviceWeights
from muonloom.writers import ExpertEngine

_log = logging.getLogger("muonloom")

_GROUP_ONLY = frozenset({"params", "param_names", "algorithm"})


class Muon(Stepping):
    """Muon for matrices, AdamW for everything else, in one optimizer.

    Each matrix ``W`` (m, n) with gradient ``G`` takes, in FP32 but for the iteration::

        M = momentum·M + (1 - momentum)·G
        U = momentum·M + (1 - momentum)·G if nesterov else M
        X = orthogonalize(U)
        W = W (1 - lr·weight_decay) - lr·muon_scale(m, n, adjust_lr_fn)·X

    Equal matrices of all layers go through one batched Newton–Schulz call. Parameters that are not
    FP32 get an FP32 master. A parameter without gradient is never touched. Source: K. Jordan, "Muon"
    (2024); names and defaults are those of ``torch.optim.Muon``.

    Args:
        params: parameters, named parameters, or groups of either, each with its own options. A group
            that holds both kinds becomes two (``group["algorithm"]`` is ``"muon"`` or ``"adamw"``).
        layout: which matrices each parameter has; needs named parameters. Without one, named
            parameters go by their shapes, and unnamed ones must all be 2-D.
        lr: learning rate of the matrices, and of AdamW where nothing else is given.
        weight_decay: decoupled, applied with `lr` alone, before the update.
        momentum: coefficient of the moving average.
        nesterov: whether to look ahead.
        ns_coefficients: a triple, a sequence of triples, or a name of `ns_coefficient_names`.
        eps: floor of the norm of a matrix after it was divided by its largest element.
        ns_steps: iterations.
        adjust_lr_fn: a rule of `muon_scale`.
        adamw_lr: AdamW's rate; a group's own `adamw_lr`, then its `lr`, come first.
        adamw_betas: decay rates of AdamW's moments.
        adamw_eps: AdamW's denominator.
        adamw_weight_decay: None takes `weight_decay`.
        momentum_dtype: ``torch.float32`` or ``torch.bfloat16``; the arithmetic is FP32 always.
        ns_method: ``"standard"``, ``"gram"`` or ``"auto"``.
        ns_compute_dtype: None picks the fastest dtype that keeps the documented accuracy.
        ns_batch_bytes: the most bytes of matrices, in the compute dtype, in one Newton–Schulz call.
        idle_matrices: what a matrix whose gradient is exactly zero does: ``"update"`` by its
            momentum, as torch does, or ``"skip"``, as if it had no gradient (experts without tokens).
        skip_nonfinite: whether a step with a NaN or infinite gradient is left out, instead of raising.
        max_consecutive_skips: so many steps in a row may be left out; the next one raises.
        free_gradients: whether to set each ``.grad`` to None as soon as the step needs it no more, so
            that memory falls during the step, also where the step is skipped; ``main_grad`` stays.
        process_group: the ranks that hold these parameters and get the same gradients; each updates a part
            of them, and keeps the state of that alone. None: all ranks, where `torch.distributed` is
            initialized; False: this rank is alone. Also an option of a group. DTensors go by their mesh.
        sharding: by name, of plain tensors (no DTensors) that are pieces of a parameter, or that one rank
            updates: how they lie on the ranks. The layout goes by the whole parameters.
        step_group: the ranks that decide on each step together, where not all of them have the same
            parameters (pipeline stages, experts of one's own). None: those that have parameters in common.
        engine: writes the device weights of the parameters that it holds; see `bind`.
        placement: where masters and momentum live: ``"device"``, ``"host"`` or a `HostPlacement`. The
            numbers are the same, bit for bit.

    Raises:
        ValueError: a bad option, or a parameter that fits neither the layout nor its group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        layout: Layout | None = None,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        momentum_dtype: torch.dtype = torch.float32,
        ns_method: str = "auto",
        ns_compute_dtype: torch.dtype | None = None,
        ns_batch_bytes: int | str = "auto",
        idle_matrices: str = "update",
        skip_nonfinite: bool = True,
        max_consecutive_skips: int = 20,
        free_gradients: bool = False,
        process_group: ProcessGroup | Literal[False] | None = None,
        sharding: Mapping[str, Sharding] | None = None,
        step_group: ProcessGroup | None = None,
        engine: ExpertEngine | None = None,
        placement: str | HostPlacement = "device",
    ) -> None:
        group_defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "momentum_dtype": momentum_dtype,
            "ns_method": ns_method,
            "ns_compute_dtype": ns_compute_dtype,
            "idle_matrices": idle_matrices,
        }
        self._settings: dict[str, Any] = {
            "adamw_lr": adamw_lr,
            "adamw_weight_decay": adamw_weight_decay,
            "ns_batch_bytes": ns_batch_bytes,
            "free_gradients": free_gradients,
            "placement": placement,
        }
        check_options(
            {
                **self._settings,
                "skip_nonfinite": skip_nonfinite,
                "max_consecutive_skips": max_consecutive_skips,
                "process_group": process_group,
            }
        )
        check_group(group_defaults)
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(
                f"layout: got {type(layout).__name__}; wanted a muonloom.Layout. "
                "Make one by Layout.from_model(model)."
            )
        self._layout = layout
        self._assignments: dict[Tensor, Assignment] = {}
        self._weights = DeviceWeights()
        self._released: dict[Tensor, str] = {}
        self._gone, self._sentries = {}, []
        self._process_group = process_group
        alike = (ns_batch_bytes, skip_nonfinite, max_consecutive_skips)
        self._membership = Membership(
            self._weights, common=f"optimizer: {alike}", step_group=step_group
        )
        self._sharding = dict(sharding or {})
        self._assembly = self._assemble()
        self._masters = MasterBook(self._assembly, self._weights)
        self._rate_was_given = adamw_lr is not None
        self._skips = SkipPolicy(allowed=skip_nonfinite, most=max_consecutive_skips)
        self._drained = True
        self._record: StepRecord | None = None
        self._report: StepReport | None = None
        self._is_built = False
        groups = as_groups(params)
        # torch refuses an empty list; a rank or a stage that owns nothing is ordinary here.
        super().__init__(groups or [{"params": []}], group_defaults)
        self._is_built = True
        self.state = StateByParameter()
        try:
            refuse_unknown(self._sharding, self._assignments.values())
            self._membership.share_out(self._assignments, claimed=self._claimed(engine))
            self._bind_known(engine)
            self._current_engine()
            announce(
                self.param_groups,
                self._assignments,
                self._assembly.plan,
                store=self._assembly,
                host_bytes=self._assembly.host_bytes if self._assembly.host else None,
                warn=not self._rate_was_given,
                is_stage=step_group is not None,
            )
        except BaseException:
            self._give_back(self._assignments)
            raise

    # -- parameter groups ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that holds matrices and others becomes two.

        A group with no parameter, or with frozen ones only, is dropped.

        Raises:
            ValueError: see `Muon`.
            RuntimeError: the optimizer is released.
        """
        refuse_released(self._released.values(), "add_param_group()")
        owner = f"param_groups[{len(self.param_groups)}]."
        check_options({k: v for k, v in param_group.items() if k not in _GROUP_ONLY}, owner=owner)
        check_options({"algorithm": param_group.get("algorithm", "muon")}, owner=owner)
        first = sum(len(group["params"]) for group in self.param_groups)
        members = named_members(param_group, first)
        param_group = dict(param_group)
        process_group = param_group.pop("process_group", self._process_group)
        if not any(tensor.requires_grad for _, tensor in members):
            _log.info(
                "Muon: dropped a group of %d parameters, none of them trainable", len(members)
            )
            return
        refuse_misplaced(param_group, owner=owner)
        check_not_twice(members, known=self._assignments, first=first)
        algorithm = param_group.get("algorithm")
        pieces = whole_shapes(members, self._sharding)
        assignments = assign(
            members, layout=self._layout, algorithm=algorithm, first=first, pieces=pieces
        )
        self._rate_was_given |= "adamw_lr" in param_group
        self._rate_was_given |= algorithm == "adamw" and "lr" in param_group
        defaults = {**self.defaults, **self._settings}
        halves = split_group(param_group, members, assignments, defaults)
        for half in halves:
            check_group({**self.defaults, **half}, owner=owner)
        before = len(self.param_groups)
        try:
            for half in halves:
                super().add_param_group(half)
            for (_, tensor), assignment in zip(members, assignments, strict=True):
                self._assignments[tensor] = assignment
                sharding = self._sharding.get(assignment.name)
                self._membership.add(tensor, process_group, sharding=sharding)
            if self._is_built:
                self._membership.share_out(self._assignments, claimed=self._claimed(None))
                self._bind_known()
                self._current_engine()
        except Exception:
            del self.param_groups[before:]
            for _, tensor in members:
                self._assignments.pop(tensor, None)
                self._membership.forget(tensor)
            raise

    # -- the step -----------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: a gradient is not finite, and may not be skipped; nothing was written.
                Or the iteration of the step before gave non-finite numbers (see `drain`).
            StaleMasterError: a weight was written from outside; nothing was written here.
            RuntimeError: a weight was given back by `release`, or is not where its writer had it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clock, traffic = PhaseClock(self._device()), self._membership.traffic()
        clock.enter("guard")
        bounds, verdict = self._inspect()
        engine = self._current_engine()
        if verdict.earlier_failure:
            with self._membership.all_or_none():
                self.drain()
        self._drained = False
        if self._skips.must_skip(verdict):
            skips = self._skips.in_a_row
            self._take(
                StepRecord(skipped=True, consecutive_skips=skips, grad_norm=verdict.grad_norm)
            )
            self._skips.warn(verdict)
            if self._settings["free_gradients"]:
                self.zero_grad(set_to_none=True)  # or one bad batch would spoil all steps after it
            self._end_step(skipped=True)
            return loss
        had_state = bool(self.state) or verdict.has_state
        if verdict.weights_moved:
            with self._membership.all_or_none():
                self._prepare(bounds, doubt=True)
        else:
            self._prepare(bounds, doubt=False)
        record = StepRecord(grad_norm=verdict.grad_norm, clock=clock)
        record.adamw_squares = self._adamw_squares(bounds)
        self._take(record)
        weights = [bound.parameter for bound in bounds if bound is not None]
        if had_state or not only_makes_state(verdict, bounds):
            engine.run(
                bounds,
                record,
                clock,
                free_gradients=self._settings["free_gradients"],
                after=lambda: self._finish(weights, record, traffic),
            )
            self._assembly.wait_for_unawaited()
        self._end_step(skipped=False)
        return loss

    def _assemble(self) -> Assembly:
        return Assembly(
            weights=self._weights,
            placement=self._settings["placement"],
            ns_batch_bytes=self._settings["ns_batch_bytes"],
            make_backend=self._make_backend,
            membership=self._membership,
        )

    @staticmethod
    def _make_backend(device: torch.device) -> Backend:
        """Return the streams of `device`; tests and benchmarks put others here."""
        return backend_for(device)

    def _start_again(self) -> None:
        self._drained = True
        self._record, self._report = None, None

    # -- what the last step did ---------------------------------------------------------------------

    @property
    def last_step(self) -> StepReport:
        """What the last step did on this rank, as plain values; empty before the first one.

        Keys: `skipped`, `consecutive_skips`, `grad_norm`, `matrices` (pairs of logical shape and
        count; an owner's of what ranks share), `idle`, `ns_calls`, `nonfinite_updates` (names),
        `collectives`, `payload_bytes` and `control_bytes` that this rank sent, `update_rms` (by kind of
        parameter, learning rate included), `heads` (by kind that is cut in head blocks: `blocks`, smallest
        and largest `update_rms`, and the largest ratio over the heads of one parameter of `update_spread`
        and `momentum_spread`), `bytes_in`, `bytes_out`, `seconds` (by phase).
        """
        if self._report is None:
            self._assembly.settle()
            self._report = StepReport() if self._record is None else self._record.plain()
        return self._report

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out; unlike `last_step`, this waits for nothing."""
        return self._record is not None and self._record.skipped

    def _take(self, record: StepRecord) -> None:
        self._record, self._report = record, None

    def _forget_step(self) -> None:
        self._report, self._record = self.last_step, None

    def drain(self) -> None:
        """Wait until the last step is finished everywhere: host slabs hold it, nothing moves.

        Raises:
            FloatingPointError: the iteration gave a non-finite result for a matrix, which kept its weight,
                master and momentum while all others were updated. Or a master was rounded to infinity.
            Exception: what failed on the way, after all that had been begun was brought to an end.
        """
        self._assembly.settle()
        undrained, self._drained = not self._drained, True
        if undrained and self._record is not None:
            tensors = {known.name: tensor for tensor, known in self._assignments.items()}
            suspects = self._record.suspects()
            refuse_overflow({name: self._weights.tensors(tensors[name]) for name in suspects})
            refuse_failed_iterations(self._record.failures())

    def overlap_forward(self, model: nn.Module) -> OverlapHandle:
        """Let late units of a step run beside the next forward pass of `model`.

        From now on `step` returns before all weights are written, and hooks on `model` wait for those
        that a module needs: elements of a module list (a transformer's layers) for all of theirs, what
        holds such a list for its own, other modules for all inside them. Saving and loading the model's
        state, `zero_grad`, `drain` and the next `step` wait for all. Whoever reads or writes weights or
        gradients otherwise calls `drain` first: also a model whose own forward reads weights of a module
        that it does not call. In device placement nothing is ever late, and nothing changes.

        Returns:
            A handle whose ``remove()`` ends it; also a context manager.

        Raises:
            ValueError: a parameter of the optimizer is not in `model`.
        """
        refuse_released(self._released.values(), "overlap_forward()")
        handle = overlap_forward(model, self._assignments, self._assembly)
        self._current_engine()
        return handle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that a late unit still reads are not overwritten."""
        if not set_to_none:
            self._assembly.wait_for_weights()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write a Chrome/Perfetto trace of what runs inside the ``with`` block to `path`."""
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(str(path))
