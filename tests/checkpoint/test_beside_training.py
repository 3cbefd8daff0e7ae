"""Saves beside training: what is saved is the state of its step, and training goes on as ever."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import muonloom.segments
import muonloom.snapshot
from checkpoint.disks import largest, saved, stalled, to_save
from checkpoint.support import PLACEMENTS, Run, throttled
from choosing import mostly_slow, slow
from muonloom.device import Backend, SynchronousBackend
from muonloom.device.hazards import CheckedBackend
from muonloom.host import padded
from muonloom.schedule import Op
from muonloom.segments import SnapshotTensor
from muonloom.snapshot import Snapshot
from staging.support import BACKENDS, assert_same_bits, engine_of, mixed, on_backend

DTYPES: dict[str, Any] = {"bf16": torch.bfloat16, "fp32": torch.float32, "mixed": mixed}
LIGHT = ("synchronous", "threaded")
EXTRAS = ("none", "one segment", "default", "all")
ALL_BYTES = 10_000_000
STRETCH = 3
"""Steps beside each save."""

OPTIONS: dict[str, Any] = {"ns_steps": 2}


def absent(name: str, step: int) -> bool:
    """Have parts of units, whole packs and, at times, most of the model without a gradient."""
    if step % 5 == 3:
        return "layers.0" not in name
    return random.Random(f"{name} {step}").random() < 0.25


@functools.cache
def reference(dtype: str, steps: int) -> list[dict[str, Tensor]]:
    """Return all there is before each step, of a run that is never saved."""
    run = Run("device", dtype=DTYPES[dtype], **OPTIONS)
    found = [run.everything()]
    for _ in range(steps):
        run.go(1, absent=absent)
        found.append(run.everything())
    return found


def roomy(extra: str, run: Run) -> int | None:
    """Return `extra_host_bytes`."""
    if extra == "one segment":
        names = {parameter: name for name, parameter in run.named}
        segments = run.opt._snapshot(names, [], 0).segments
        run.opt._assembly.finish_reading()
        return padded(largest(segments))
    return {"none": 0, "default": None, "all": ALL_BYTES}[extra]


def assert_saved(path: Path, everything: dict[str, Tensor]) -> None:
    found = saved(path)
    assert found.pop("counter").tolist() == [0, 0, 0]
    assert_same_bits(to_save(everything), found)


def check(backends: list[Backend]) -> None:
    for backend in backends:
        if isinstance(backend, CheckedBackend):
            backend.check()


CASES = [
    *itertools.product(PLACEMENTS, DTYPES, ["synchronous"]),
    *itertools.product(PLACEMENTS, ["mixed"], ["threaded"]),
    *itertools.product(["one slot", "split"], ["bf16"], ["hostile"]),
    *itertools.product(["host", "split"], ["mixed"], ["checked"]),
    *itertools.product(["host", "one slot"], ["bf16"], ["checked hostile"]),
]
CASES_EACH_TIME = [
    ("device", "fp32", "synchronous"),
    ("host", "bf16", "synchronous"),
    ("host", "fp32", "synchronous"),
    ("one slot", "mixed", "synchronous"),
    ("split", "mixed", "synchronous"),
    ("split", "mixed", "threaded"),
    ("split", "bf16", "hostile"),
    ("split", "mixed", "checked"),
    ("host", "bf16", "checked hostile"),
]


def extras_of(index: int) -> tuple[str, ...]:
    """Return in turn where to begin, and two only where a step costs much."""
    turned = EXTRAS[index % 4 :] + EXTRAS[: index % 4]
    return turned if CASES[index][2] in LIGHT else turned[:2]


@pytest.mark.parametrize(("placement", "dtype", "backend"), mostly_slow(CASES, but=CASES_EACH_TIME))
def test_saves_with_any_room_while_steps_change_everything(
    placement: str, dtype: str, backend: str, tmp_path: Path
):
    """Each save is as late as it can be: the disk moves only while a step waits for it."""
    index = CASES.index((placement, dtype, backend))
    first = index % 4
    wanted = reference(dtype, 3 + 4 * STRETCH)
    with on_backend(BACKENDS[backend]) as backends:
        run = Run(PLACEMENTS[placement], dtype=DTYPES[dtype], **OPTIONS).go(first, absent=absent)
        for extra in extras_of(index):
            start, room = run.step, roomy(extra, run)
            with stalled(lazy=True):
                handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=room)
                run.go(STRETCH, absent=absent)
                if extra == "all":
                    assert not handle.done()
            report = handle.result()
            assert_saved(tmp_path / "save", wanted[start])
            assert (report.copied_bytes > 0) == (extra != "none")
        check(backends)
        assert_same_bits(wanted[run.step], run.everything())


@pytest.mark.parametrize("placement", ["device", "split"])
def test_tensors_in_many_segments(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(muonloom.snapshot, "LEAST_SEGMENT_BYTES", 512)
    monkeypatch.setattr(muonloom.snapshot, "SEGMENT_BYTES", 1024)
    wanted = reference("mixed", 6)
    with on_backend(BACKENDS["checked"]) as backends:
        run = Run(PLACEMENTS[placement], dtype=mixed, **OPTIONS).go(2, absent=absent)
        with stalled(lazy=True):
            handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=20_000)
            run.go(STRETCH, absent=absent)
        assert 0 < handle.result().copied_bytes <= 20_000
        check(backends)
    assert_saved(tmp_path / "save", wanted[2])


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_a_save_on_a_slow_disk_spans_three_steps_and_loads_as_the_state_of_its_own(
    placement: str, tmp_path: Path
):
    wanted = reference("mixed", 6)
    run = Run(PLACEMENTS[placement], dtype=mixed, **OPTIONS).go(2, absent=absent)
    with throttled(200_000) as written:
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
        run.go(3, absent=absent)
        assert not handle.done()
        assert len(written) > 0
        report = handle.result()
    assert report.copied_bytes > 0
    assert report.held_seconds < 0.2 * report.seconds
    other = Run(PLACEMENTS["host"], dtype=mixed, seed=1, **OPTIONS).go(1)
    other.load(tmp_path / "save")
    assert_same_bits(wanted[2], other.everything())
    assert_same_bits(wanted[5], other.go(3, absent=absent).everything())
    assert_same_bits(wanted[5], run.everything())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_slow_disk_without_room_for_copies(placement: str, tmp_path: Path):
    run = Run(PLACEMENTS[placement], dtype=mixed, **OPTIONS).go(2, absent=absent)
    with throttled(1_500_000):
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=0)
        run.go(2, absent=absent)
        report = handle.result()
    assert report.copied_bytes == 0
    assert report.held_seconds > 0
    assert_saved(tmp_path / "save", reference("mixed", 6)[2])
    assert_same_bits(reference("mixed", 6)[4], run.everything())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_skipped_step_neither_waits_nor_copies(placement: str, tmp_path: Path):
    run = Run(PLACEMENTS[placement], **OPTIONS).go(2, absent=absent)
    before = run.everything()
    with stalled():
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=0)
        for _, parameter in run.named:
            parameter.grad = torch.full_like(parameter, torch.nan)
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="Step skipped"):
                run.opt.step()
        assert handle.held_seconds == 0
        assert not handle.done()
    assert handle.result().copied_bytes == 0
    assert_saved(tmp_path / "save", before)
    assert_same_bits(before, run.everything())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_gets_no_gradient_is_neither_waited_for_nor_copied(placement: str, tmp_path: Path):
    run = Run(PLACEMENTS[placement], dtype=torch.float32, **OPTIONS).go(2)
    before = run.everything()

    def most(name: str, step: int) -> bool:
        return name != "layers.1.norm.weight"

    with stalled():
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
        run.go(3, absent=most)
    # FP32: weight and two moments of 16 elements, and what shares their rows, which is nothing.
    assert handle.result().copied_bytes == 3 * 4 * 16
    assert_saved(tmp_path / "save", before)


def test_a_state_that_appears_during_a_save_is_not_in_it(tmp_path: Path):
    for placement in PLACEMENTS.values():
        run = Run(placement, **OPTIONS)
        run.go(1, absent=lambda name, step: "layers.1" in name)
        before = run.everything()
        with stalled():
            handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
            run.go(2)
        handle.result()
        assert_saved(tmp_path / "save", before)


@pytest.mark.parametrize("backend", [slow("threaded"), "hostile", "checked hostile"])
def test_a_save_beside_steps_that_overlap_the_next_forward(backend: str, tmp_path: Path):
    wanted = reference("mixed", 6)
    with on_backend(BACKENDS[backend]) as backends:
        run = Run(PLACEMENTS["host"], dtype=mixed, **OPTIONS)
        run.opt.overlap_forward(run.model)
        run.go(2, absent=absent)
        with stalled(lazy=True):
            handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=30_000)
            run.go(STRETCH, absent=absent)
        handle.result()
        check(backends)
    assert_saved(tmp_path / "save", wanted[2])
    assert_same_bits(wanted[5], run.everything())


# -- back-pressure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_without_room_a_step_goes_on_only_as_the_disk_does(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No part of the state is changed before it was read, however late that is."""
    run = Run(PLACEMENTS[placement], dtype=torch.float32, **OPTIONS).go(2)
    ahead: list[int] = []
    genuine = Snapshot.before_write

    def before_write(self: Snapshot, task: int, parts: Any) -> Any:
        touched = [s for part in parts for s in self._touched.get((task, part), ())]
        found = genuine(self, task, parts)
        assert all(s.event is not None and s.event.query() for s in touched)
        ahead.append(disk.writes)
        return found

    monkeypatch.setattr(Snapshot, "before_write", before_write)
    with stalled(lazy=True) as disk:
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=0)
        snapshot = run.opt._assembly._snapshot
        assert snapshot is not None
        num_segments = len(snapshot.segments)
        disk.arrive()
        assert disk.writes == 0
        run.go(1)
        # One step changes all of the state, but for a buffer: all that was read before is written.
        assert num_segments - 2 <= disk.writes < num_segments
        assert len(set(ahead)) > 3
    assert handle.result().held_seconds > 0


# -- what must not be left out ------------------------------------------------------------------------

IN_PLACE = (Op.UPDATE, Op.ADAMW)
STORES = (Op.STORE, Op.STORE_MOMENTUM)

TOO_LATE = {("split", Op.UPDATE), ("split", Op.ADAMW)}

# Where an op is the first that changes what is saved.
NEEDED = [
    *(("host", "bf16", op) for op in STORES),
    *(("host", "fp32", op) for op in (*IN_PLACE, *STORES)),
    *(("split", "bf16", op) for op in (*IN_PLACE, *STORES)),
    *(("device", "fp32", op) for op in IN_PLACE),
]


@contextmanager
def without_asking(op: Op) -> Iterator[None]:
    genuine = Snapshot.before_write

    def before_write(self: Snapshot, task: int, parts: Any) -> Any:
        asked = self.ops[task] is not op  # type: ignore[attr-defined]
        return genuine(self, task, parts) if asked else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "before_write", before_write)
        yield


@contextmanager
def without_rule(op: Op) -> Iterator[None]:
    genuine = muonloom.segments.changed_keys

    def changed_keys(task: Any, *arguments: Any, **options: Any) -> Any:
        return frozenset() if task.op is op else genuine(task, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muonloom.segments, "changed_keys", changed_keys)
        yield


def spoiled(placement: str, dtype: str, path: Path) -> tuple[list[str], bool]:
    """Save during a step, all reads but the first after it; return wrong tensors, and any hazard."""
    with on_backend(lambda: CheckedBackend(SynchronousBackend())) as backends:
        run = Run(PLACEMENTS[placement], dtype=DTYPES[dtype], **OPTIONS).go(1)
        before = to_save(run.everything())
        Snapshot.ops = [task.op for task in engine_of(run.opt).schedule.tasks]  # type: ignore[attr-defined]
        with stalled() as disk:
            handle = run.save(path / "save", async_=True, extra_host_bytes=ALL_BYTES)
            disk.arrive()
            run.go(1)
        handle.result()
        found = saved(path / "save")
        wrong = [name for name in before if not torch.equal(before[name], found[name])]
        hazards = [h for b in backends if isinstance(b, CheckedBackend) for h in b.hazards]
    del Snapshot.ops  # type: ignore[attr-defined]
    return wrong, bool(hazards)


@pytest.mark.parametrize(("placement", "dtype"), dict.fromkeys(case[:2] for case in NEEDED))
def test_with_all_rules_nothing_is_spoiled(placement: str, dtype: str, tmp_path: Path):
    assert spoiled(placement, dtype, tmp_path) == ([], False)


DROPS = (without_asking, without_rule)
# Each place once, and each op in both ways.
DROPPED_EACH_TIME = [
    (*case, DROPS[(number + number // 4) % 2]) for number, case in enumerate(NEEDED)
]


@pytest.mark.parametrize(
    ("placement", "dtype", "op", "drop"),
    mostly_slow(
        [(*case, drop) for case, drop in itertools.product(NEEDED, DROPS)], but=DROPPED_EACH_TIME
    ),
    ids=lambda value: getattr(value, "__name__", getattr(value, "value", value)),
)
def test_each_rule_is_needed(
    placement: str, dtype: str, op: Op, drop: Callable[[Op], Any], tmp_path: Path
):
    with drop(op):
        wrong, has_hazards = spoiled(placement, dtype, tmp_path)
    assert wrong
    # In device placement work is not submitted; with split masters the store's copy comes, too late.
    assert has_hazards or placement == "device" or (placement, op) in TOO_LATE


@pytest.mark.parametrize("source", ["weight", "master_low"])
def test_each_half_of_a_split_master_is_needed(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the low half alone a copy comes when the weight is new already; by the weight alone, in time."""
    genuine = SnapshotTensor.__init__

    def init(self: SnapshotTensor, **fields: Any) -> None:
        fields["sources"] = fields.get("sources", frozenset()) - {source}
        genuine(self, **fields)

    monkeypatch.setattr(SnapshotTensor, "__init__", init)
    wrong, _ = spoiled("split", "bf16", tmp_path)
    assert bool(wrong) == (source == "weight")


def test_rows_that_are_forgotten_are_spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    genuine = muonloom.segments.rows_of

    def rows_of(*arguments: Any) -> slice:
        rows = genuine(*arguments)
        return slice(rows.start, max(rows.start + 1, rows.stop - 1))

    monkeypatch.setattr(muonloom.segments, "rows_of", rows_of)
    for placement in ("device", "host"):
        wrong, has_hazards = spoiled(placement, "fp32", tmp_path)
        assert wrong
        assert has_hazards == (placement == "host")


def test_a_stream_waits_for_the_copy_that_the_caller_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert spoiled("host", "fp32", tmp_path) == ([], False)
    genuine = Snapshot.before_write
    monkeypatch.setattr(Snapshot, "before_write", lambda *arguments: genuine(*arguments) and None)
    _, has_hazards = spoiled("host", "fp32", tmp_path)
    assert has_hazards
