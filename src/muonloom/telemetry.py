"""What a step did: recorded as device tensors, turned into plain numbers only when somebody reads it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# By kind of parameter: the sum of squares of its update, and its number of elements.
Squares = dict[str, tuple[float, int]]


class StepReport(dict[str, Any]):
    """Plain values by name, also as attributes: ``report.skipped`` is ``report["skipped"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class PhaseClock:
    """Seconds by phase: wall time on the CPU, device events elsewhere (read without stalling the step)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End the phase that runs, and begin `phase`."""
        if self._marks and self._marks[-1][0] == phase:
            return
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the sum of each phase. On an accelerator this waits for the recorded events."""
        totals: dict[str, float] = {}
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            totals[phase] = totals.get(phase, 0.0) + self._between(begin, end)
        totals.pop("end", None)
        return totals

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self._device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True, kw_only=True)
class MatrixRun:
    """A run of matrices of one parameter in a batch: slice ``offset:offset+count`` of its tensors.

    `head_momentum` is their momentum, (count, ...), where they are blocks of heads: a view, so that
    statistics cost nothing until somebody reads them.
    """

    name: str
    kind: str
    shape: tuple[int, int]
    offset: int
    count: int
    factor: float
    head_momentum: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """One Newton–Schulz call.

    Attributes:
        runs: which parameters its matrices came from.
        norms: Frobenius norms of the results, FP32, one a matrix.
        written: bool, one a matrix: whether its update was applied.
        finite: bool, one a matrix: whether the iteration gave finite numbers.
        idle: bool, one a matrix: whether the gradient was exactly zero.
    """

    runs: tuple[MatrixRun, ...]
    norms: Tensor
    written: Tensor
    finite: Tensor
    idle: Tensor

    @cached_property
    def applied_norms(self) -> list[float]:
        """The norms again, as numbers, with 0 where no update was applied."""
        applied = torch.where(self.written, self.norms, torch.zeros_like(self.norms))
        return [float(norm) for norm in applied.tolist()]


@dataclass(kw_only=True)
class StepRecord:
    """All that `Muon.last_step` tells, before it is read.

    `masters` are names and norms of what was rounded to 16 bits: no norm below FP32's largest number has
    an element that rounds to infinity. `broken` are names of parameters with parts whose matrices another
    rank may have failed to orthogonalize, and whether it did.
    """

    skipped: bool = False
    consecutive_skips: int = 0
    grad_norm: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    batches: list[BatchRecord] = field(default_factory=list)
    masters: list[tuple[str, Tensor]] = field(default_factory=list)
    broken: list[tuple[str, Tensor]] = field(default_factory=list)
    collectives: int = 0
    payload_bytes: int = 0
    control_bytes: int = 0
    adamw_squares: Callable[[], Squares] = dict
    clock: PhaseClock | None = None

    def plain(self) -> StepReport:
        """Return numbers, strings, sequences and dicts only, so that ``json.dumps`` works."""
        matrices: dict[tuple[int, int], int] = {}
        for batch in self.batches:
            for run in batch.runs:
                matrices[run.shape] = matrices.get(run.shape, 0) + run.count
        return StepReport(
            skipped=self.skipped,
            consecutive_skips=self.consecutive_skips,
            grad_norm=self.grad_norm,
            matrices=list(matrices.items()),
            idle=sum(self._count(batch, batch.idle) for batch in self.batches),
            ns_calls=len(self.batches),
            nonfinite_updates=self.failures(),
            update_rms=self._update_rms(),
            heads=self._heads(),
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            collectives=self.collectives,
            payload_bytes=self.payload_bytes,
            control_bytes=self.control_bytes,
            seconds=self.clock.seconds() if self.clock is not None else {},
        )

    def failures(self) -> list[str]:
        """Names of parameters with a matrix for which the iteration gave a non-finite result."""
        names = [name for name, failed in self.broken if bool(failed)]
        for batch in self.batches:
            finite = batch.finite.tolist()
            names += [
                run.name
                for run in batch.runs
                if not all(finite[run.offset : run.offset + run.count])
            ]
        return sorted(set(names))

    def watch(self, name: str, master: Tensor) -> None:
        """Keep the size of a master that was rounded to 16 bits."""
        self.masters.append((name, torch.linalg.vector_norm(master)))

    def suspects(self) -> list[str]:
        """Names of parameters whose weight may have been rounded to infinity."""
        found: set[str] = set()
        for names, norms in self._master_norms():
            whole = zip(names, torch.isfinite(norms).tolist(), strict=True)
            found.update(name for name, finite in whole if not finite)
        return sorted(found)

    def _master_norms(self) -> list[tuple[list[str], Tensor]]:
        """Return names and norms of `masters`, those of one device in one tensor."""
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, norm in self.masters:
            by_device.setdefault(norm.device, []).append((name, norm))
        return [
            ([name for name, _ in pairs], torch.stack([norm for _, norm in pairs]))
            for pairs in by_device.values()
        ]

    def failure_flag(self) -> Tensor | None:
        """Return a bool scalar on the device: False where `failures` and `suspects` are empty."""
        flags = [(~batch.finite).any() for batch in self.batches]
        flags += [failed for _, failed in self.broken]
        flags += [(~torch.isfinite(norms)).any() for _, norms in self._master_norms()]
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else None

    @staticmethod
    def _count(batch: BatchRecord, flags: Tensor) -> int:
        values = flags.tolist()
        return sum(sum(values[run.offset : run.offset + run.count]) for run in batch.runs)

    def _heads(self) -> dict[str, dict[str, Any]]:
        """Say by kind how much its head blocks differ: in RMS of update, and in norm of momentum."""
        per_parameter: dict[tuple[str, str, tuple[int, int]], tuple[list[float], list[float]]] = {}
        for batch in self.batches:
            norms = batch.applied_norms
            for run in batch.runs:
                if run.head_momentum is None:
                    continue
                key = (run.kind, run.name, run.shape)
                updates, momenta = per_parameter.setdefault(key, ([], []))
                scale = run.factor / math.sqrt(math.prod(run.shape))
                updates += [scale * norm for norm in norms[run.offset : run.offset + run.count]]
                dims = tuple(range(1, run.head_momentum.ndim))
                momenta += torch.linalg.vector_norm(
                    run.head_momentum, dim=dims, dtype=torch.float32
                ).tolist()
        heads: dict[str, dict[str, Any]] = {}
        largest: dict[tuple[str, str], float] = {}
        for (kind, _, _), (updates, momenta) in per_parameter.items():
            entry = heads.setdefault(kind, {"blocks": 0, "update_rms": [math.inf, 0.0]})
            entry["blocks"] += len(updates)
            low, high = entry["update_rms"]
            entry["update_rms"] = [min(low, *updates), max(high, *updates)]
            for name, values in (("update_spread", updates), ("momentum_spread", momenta)):
                largest[kind, name] = max(largest.get((kind, name), 0.0), _spread(values))
                entry[name] = largest[kind, name] or None
        return heads

    def _update_rms(self) -> dict[str, float]:
        """RMS of the applied update, decay not included: of each kind, of all Muon, of all AdamW."""
        by_algorithm = {"muon": self._muon_squares(), "adamw": self.adamw_squares()}
        totals: Squares = {}
        for algorithm, squares in by_algorithm.items():
            for kind, (square, numel) in squares.items():
                for key in (algorithm, kind):
                    old_square, old_numel = totals.get(key, (0.0, 0))
                    totals[key] = (old_square + square, old_numel + numel)
        return {key: math.sqrt(square / numel) for key, (square, numel) in totals.items() if numel}

    def _muon_squares(self) -> Squares:
        squares: Squares = {}
        for batch in self.batches:
            norms = batch.applied_norms
            for run in batch.runs:
                square, numel = squares.get(run.kind, (0.0, 0))
                part = norms[run.offset : run.offset + run.count]
                square += run.factor**2 * sum(norm * norm for norm in part)
                squares[run.kind] = (square, numel + run.count * math.prod(run.shape))
        return squares


def _spread(values: list[float]) -> float:
    """Largest ÷ smallest; 0 where the smallest is 0, for which there is no ratio."""
    return max(values) / min(values) if min(values) > 0 else 0.0
