"""How a state is cut into segments, in which order, and what memory the copies of them take."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import muonloom.snapshot
from checkpoint.disks import largest, stalled
from checkpoint.support import PLACEMENTS, Bare
from checkpoint.support import Run as Trained
from choosing import mostly_slow
from muonloom import BlockSpec, Layout, Muon
from muonloom.bound import cut
from muonloom.cuts import flat_views
from muonloom.host import HostArena, padded
from muonloom.plan import Run, Span
from muonloom.schedule import Op
from muonloom.segments import Change, Segment, SnapshotTensor, cut_up, rows_of
from staging.support import engine_of, mixed, random_case

PAGE = 4096
SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (7,),
    (0, 4),
    (4, 0),
    (9, 3),
    (40, 8),
    (3, 4, 5),
    (1, 60),
]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> SnapshotTensor:
    return SnapshotTensor(key="x", dtype=dtype, shape=shape, read=lambda rows, out: None)


# -- cutting ------------------------------------------------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> tuple[list[SnapshotTensor], list[Change]]:
    tensors = [
        tensor_of(shape, draw(st.sampled_from([torch.float32, torch.bfloat16])))
        for shape in draw(st.lists(st.sampled_from(SHAPES), max_size=4))
    ]
    changes = []
    for tensor in tensors:
        for _ in range(draw(st.integers(0, 5)) if tensor.length else 0):
            start = draw(st.integers(0, tensor.length - 1))
            stop = draw(st.integers(start + 1, tensor.length))
            task, part = draw(st.integers(0, 6)), draw(st.integers(0, 2))
            rows = slice(start, stop)
            changes.append(Change(task=task, part=part, tensor=tensor, rows=rows))
    return tensors, changes


@settings(max_examples=200, deadline=None)
@given(states(), st.sampled_from([1, 32, 4 << 20]))
def test_every_row_is_in_one_segment_and_every_change_meets_all_of_its_own(
    state: tuple[list[SnapshotTensor], list[Change]], segment_bytes: int
):
    tensors, changes = state
    segments, touched = cut_up(tensors, changes, segment_bytes=segment_bytes)
    for tensor in tensors:
        rows = [r for s in segments if s.tensor is tensor for r in range(*s.rows.indices(1000))]
        assert sorted(rows) == list(range(tensor.length if tensor.row_bytes else 0))
    for segment in segments:
        assert 0 < segment.nbytes <= max(segment_bytes, segment.tensor.row_bytes)
    changed: dict[tuple[int, int], set[Segment]] = {}
    for change in changes:
        own = [s for s in segments if s.tensor is change.tensor and meets(s.rows, change.rows)]
        changed.setdefault((change.task, change.part), set()).update(own)
    assert {k: set(v) for k, v in touched.items()} == {k: v for k, v in changed.items() if v}
    first = [min((t for (t, _), s in changed.items() if x in s), default=99) for x in segments]
    assert first == sorted(first)


def meets(one: slice, other: slice) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400))
def test_the_rows_of_a_part_hold_all_of_its_elements_and_begin_and_end_with_some(seed: int):
    case = random_case(seed)
    _, opt = case.build("device")
    specs = [opt._assignments[p].spec for group in opt.param_groups for p in group["params"]]
    shapes = [tuple(p.shape) for group in opt.param_groups for p in group["params"]]
    for work in opt._assembly.plan.works:
        for part in work.parts:
            shape, spec = shapes[part.parameter], specs[part.parameter]
            rows = rows_of(part, shape, spec)
            held = mark(part, shape, spec).nonzero()[:, 0] if shape else torch.zeros(1)
            assert (rows.start, rows.stop) == (int(held.min()), int(held.max()) + 1)


def mark(part: Run | Span, shape: Sequence[int], spec: BlockSpec | None) -> Tensor:
    """Return ones where a part is."""
    whole = torch.zeros(tuple(shape))
    if isinstance(part, Span):
        whole.view(-1)[part.start : part.stop] = 1
    else:
        assert spec is not None
        cut(flat_views(spec, whole), part).fill_(1)
    return whole


def test_a_scalar_is_one_row():
    span = Span(parameter=0, start=0, stop=1, last=True)
    assert rows_of(span, (), None) == slice(0, 1)
    assert tensor_of(()).length == 1
    assert tensor_of(()).row_bytes == 4


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_changes_all_of_the_state_and_each_byte_of_it_by_its_own_tasks(placement: str):
    """Together the parts of a schedule cover every tensor, and UPDATE covers what it changes in place."""
    run = Trained(PLACEMENTS[placement], dtype=mixed, ns_steps=1).go(1)
    snapshot = run.opt._snapshot({p: n for n, p in run.named}, [], 0)
    schedule = engine_of(run.opt).schedule
    found = {segment for segments in snapshot._touched.values() for segment in segments}
    assert found == set(snapshot.segments)
    expected = {Op.UPDATE, Op.ADAMW}
    if placement != "device":
        expected |= {Op.STORE, Op.STORE_MOMENTUM}
    assert {schedule.tasks[task].op for task, _ in snapshot._touched} == expected
    numel = sum(math.prod(t.shape) * t.dtype.itemsize for t in snapshot.tensors)
    assert sum(segment.nbytes for segment in snapshot.segments) == numel


def test_columns_of_a_matrix_meet_all_of_its_rows():
    shapes = {"a.weight": (8, 24)}
    overrides = {"a.weight": BlockSpec.columns(8, 16)}
    named = [("a.weight", torch.nn.Parameter(torch.randn(8, 24)))]
    opt = Muon(named, layout=Layout.from_shapes(shapes, overrides=overrides), lr=0.1)
    runs = [part for work in opt._assembly.plan.works for part in work.parts]
    spec = opt._assignments[named[0][1]].spec
    assert [rows_of(run, (8, 24), spec) for run in runs] == [slice(0, 8)] * 2


# -- memory -------------------------------------------------------------------------------------------


class Arenas:
    """Stands for `HostArena`, and knows all that were made."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[HostArena]] = []
        self.nbytes: list[int] = []

    def __call__(self, nbytes: int, **options: Any) -> HostArena:
        arena = HostArena(nbytes, **options)
        self.made.append(weakref.ref(arena))
        self.nbytes.append(arena.nbytes)
        return arena


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Arenas:
    found = Arenas()
    monkeypatch.setattr(muonloom.snapshot, "HostArena", found)
    return found


ROOMS = (0, 1000, 5000, 50_000, 1_000_000)


@pytest.mark.parametrize(
    ("extra", "placement"),
    mostly_slow(
        itertools.product(ROOMS, PLACEMENTS),
        but={*itertools.product(ROOMS, ["split"]), *itertools.product([0, 5000], PLACEMENTS)},
    ),
)
def test_copies_take_the_room_that_is_given_and_no_more(
    placement: str, extra: int, arenas: Arenas, tmp_path: Path
):
    run = Trained(PLACEMENTS[placement], ns_steps=1).go(1)
    with stalled(lazy=True):
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=extra)
        snapshot = run.opt._assembly._snapshot
        assert snapshot is not None
        smallest = min(padded(segment.nbytes) for segment in snapshot.segments)
        run.go(2)
        assert snapshot._end <= extra
    copied = handle.result().copied_bytes
    assert copied <= extra
    assert (copied > 0) == (smallest <= extra)
    assert arenas.nbytes == [padded(extra, PAGE)]
    assert all(arena() is None for arena in arenas.made)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_by_default_there_is_room_for_two_units(placement: str, arenas: Arenas, tmp_path: Path):
    run = Trained(PLACEMENTS[placement], ns_steps=1).go(1)
    with stalled(lazy=True):
        handle = run.save(tmp_path / "save", async_=True)
        run.go(1)
    handle.result()
    slot_bytes = engine_of(run.opt).schedule.slot_bytes or 4 << 20
    assert arenas.nbytes == [2 * slot_bytes]


def test_a_system_that_refuses_the_room_refuses_the_save_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError("no map")

    run = Trained("host", ns_steps=1).go(1)
    with monkeypatch.context() as patch:
        patch.setattr(muonloom.snapshot, "HostArena", refuse)
        with pytest.raises(OSError, match="no map"):
            run.save(tmp_path / "save", async_=True)
        run.go(1)
    assert not (tmp_path / "save").exists()
    run.save(tmp_path / "save")


@pytest.mark.parametrize("rows", [256, 1024])
def test_what_a_save_holds_does_not_grow_with_the_state(rows: int, tmp_path: Path):
    """One segment passes through memory of its own, however many there are."""
    named = [("a.weight", torch.nn.Parameter(torch.randn(rows, 16)))]
    opt = Muon(named, lr=0.1, ns_steps=1)
    named[0][1].grad = torch.randn(rows, 16)
    opt.step()
    with pytest.MonkeyPatch.context() as patch, stalled() as disk:
        patch.setattr(muonloom.snapshot, "LEAST_SEGMENT_BYTES", 1024)
        patch.setattr(muonloom.snapshot, "SEGMENT_BYTES", 4096)
        handle = muonloom.checkpoint.save(
            tmp_path, model=Bare(named), optimizer=opt, step=1, async_=True
        )
        disk.arrive()
        snapshot = opt._assembly._snapshot
        assert snapshot is not None
        assert len(snapshot._memory) == largest(snapshot.segments) == 4096
        assert len(snapshot.segments) == 2 * rows * 16 * 4 // 4096 + 1
    handle.result()
    assert not len(snapshot._memory)
    assert not snapshot.segments
    assert not snapshot.tensors


def test_segments_fit_the_room_for_copies_as_far_as_that_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(muonloom.snapshot, "LEAST_SEGMENT_BYTES", 1024)
    run = Trained("device", ns_steps=1).go(1)
    names = {parameter: name for name, parameter in run.named}
    sizes = [largest(run.opt._snapshot(names, [], room).segments) for room in (0, 6000, 1 << 20)]
    # A row of an expert is 16 × 24 elements, of FP32 masters.
    assert sizes == [16 * 24 * 4, 2944, 300 * 16 * 4]


def test_copies_that_the_host_has_no_memory_for_are_refused(tmp_path: Path):
    run = Trained("host", ns_steps=1).go(1)
    with pytest.raises(MemoryError, match="copies for a save"):
        run.save(tmp_path / "save", async_=True, extra_host_bytes=1 << 60)
    assert not (tmp_path / "save").exists()
    run.go(1).save(tmp_path / "save")
