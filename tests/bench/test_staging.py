from __future__ import annotations

import copy
import json

import pytest
import torch

from muonloom.bench.staging import (
    SetupTiming,
    StagingWork,
    WholeStateSwap,
    floor_s,
    measure_placements,
)
from muonloom.bench.staging_memory import LAYERS, make_model, measure_memory, on_device, shapes
from muonloom.bench.staging_overlap import (
    APART,
    FORWARD_ALONE,
    OVERLAPPING,
    RESIDENT,
    measure_overlap,
)
from muonloom.bench.staging_results import (
    MEMORY_COLUMNS,
    STAGING_COLUMNS,
    plain_placements,
    row_of,
    staging_figures,
    staging_tables,
)
from muonloom.bench.staging_setups import (
    DEVICE,
    HOST,
    OVERLAPPED,
    QUICK_SIZE,
    SIZES,
    SPLIT,
    SPLIT_BOUND,
    SWAP,
    THREADS,
    TRANSFER_BOUND,
    Setup,
    make_muon,
    matrices,
    setups,
    slots_name,
)
from muonloom.bench.timing import Timing
from muonloom.device import SynchronousBackend, ThreadedBackend
from muonloom.optimizer import Muon

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def memory():
    return measure_memory(quick=True, device=CPU)


def optimizer(setup, size=QUICK_SIZE, backend=None):
    gradients = matrices(size, CPU, seed=1)
    return make_muon(setup, size, gradients, CPU, backend=backend or SynchronousBackend())


def work(seconds):
    """Rows as if measured: T = 1 s, and a link's transfer time is its T."""
    size = SIZES["cpu"]
    rows = []
    for setup in setups(CPU):
        part = {DEVICE: 0, SPLIT: size.full_bytes // 2}.get(setup.name, size.full_bytes)
        rate = None if setup.link is None else size.full_bytes / setup.link
        took = seconds.get((setup.name, setup.link), 1.0)
        rows.append(
            SetupTiming(
                setup=setup,
                bytes_per_s=rate,
                bytes_a_step=part,
                back_to_back=Timing(name="", samples_s=[took, took, 9.0]),
                alone=Timing(name="", samples_s=[2 * took]),
                phases_s=[{"wait": 0.25}, {}, {"wait": 0.5}],
            )
        )
    return StagingWork(size=size, rows=rows)


def figures_of(seconds, memory):
    staging = plain_placements(work(seconds)) | {"memory": memory}
    return {figure["name"]: figure for figure in staging_figures(staging)}


@pytest.mark.parametrize("setup", setups(CPU), ids=lambda s: f"{s.name}, {s.link}")
def test_each_unit_is_a_batch_of_its_own_and_all_state_moves(setup):
    opt = optimizer(setup)
    opt.step()
    opt.step()
    expected = {DEVICE: 0, SWAP: 0, SPLIT: QUICK_SIZE.full_bytes // 2}
    moved = expected.get(setup.name, QUICK_SIZE.full_bytes)
    assert opt.last_step["ns_calls"] == QUICK_SIZE.units
    assert opt.last_step["bytes_in"] == opt.last_step["bytes_out"] == moved
    assert opt.memory()["device_slots"] == setup.num_slots * QUICK_SIZE.slot_bytes


@pytest.mark.parametrize("size", [*SIZES.values(), QUICK_SIZE])
def test_masters_of_a_unit_fill_a_slot(size):
    assert size.units * size.slot_bytes * 2 == size.full_bytes == 8 * size.numel


def test_setups_are_told_apart_by_name_and_link():
    found = setups(CPU)
    assert found[0] == Setup(name=DEVICE)
    assert len({(setup.name, setup.link) for setup in found}) == len(found)
    assert [s.num_slots for s in found if s.link == OVERLAPPED] == [3, 2, 1, 0]


def test_an_accelerators_link_is_taken_as_it_is():
    found = setups(torch.device("cuda"))
    assert [setup.name for setup in found] == [DEVICE, HOST, SPLIT, SWAP]
    assert {setup.link for setup in found} == {None}


def test_the_floor_is_the_longest_of_computing_loads_and_stores():
    floor = {"resident_s": 1.0, "units": 10}
    # computing: 0.02 in, one step, 0.04 out
    assert floor_s(**floor, transfer_s=0.4, steps=1) == pytest.approx(1.06)
    assert floor_s(**floor, transfer_s=0.4, steps=3) == pytest.approx((3 + 0.06) / 3)
    # stores: 0.1 in, 0.1 computed, all out
    assert floor_s(**floor, transfer_s=2.0, steps=1) == pytest.approx(2.2)
    # loads: all in, 0.4 out; its last unit costs more than computing the first
    assert floor_s(**floor, transfer_s=4.0, steps=1) == pytest.approx(4.4)
    assert floor_s(**floor, transfer_s=0.0, steps=2) == 1.0
    assert floor_s(**floor, transfer_s=0.4, steps=2, in_turn=True) == pytest.approx(1.8)


def test_a_swap_brings_all_state_in_and_takes_all_of_it_out():
    backend = ThreadedBackend()
    swapped, resident = optimizer(Setup(name=SWAP)), optimizer(Setup(name=DEVICE))
    swapped.step()
    resident.step()
    swap = WholeStateSwap(swapped, backend, CPU)
    assert swap.bytes_a_step == QUICK_SIZE.full_bytes
    for entry in swapped.state.values():
        for tensor in entry.values():
            tensor.fill_(7.0)  # what a swap brings in is the host's
    for _ in range(2):
        swap.step()
        swap.drain()
        resident.step()
    for (_, mine), (_, theirs) in zip(swapped.state.items(), resident.state.items(), strict=True):
        for key, tensor in mine.items():
            assert torch.equal(tensor, theirs[key])
    for tensor, host in swap._pairs:
        assert torch.equal(tensor, host)
    backend.close()


def test_a_quick_run_times_every_setup(monkeypatch):
    monkeypatch.setattr("muonloom.bench.timing.LEAST_SAMPLE_S", 1e-3)
    measured = measure_placements(QUICK_SIZE, rounds=1, device=CPU)
    assert [row.setup for row in measured.rows] == setups(CPU)
    for row in measured.rows:
        assert len(row.back_to_back.samples_s) == len(row.alone.samples_s) == 1
        assert row.phases_s
        assert all("update" in phases for phases in row.phases_s)
        if row.setup.link is not None and row.bytes_per_s is not None:
            limit_s = row.bytes_a_step / row.bytes_per_s
            # A link is never faster than its rate; in turn it is used twice.
            least = 2 * limit_s if row.setup.name == SWAP else limit_s
            assert row.alone.median_s > 0.9 * least
    plain = plain_placements(measured)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["rows"][0]["back_to_back"]["ratio"] == 1.0


def test_ratios_are_of_medians_and_to_the_device():
    plain = plain_placements(work({(HOST, None): 1.5}))
    row = row_of(plain, HOST)
    assert row["back_to_back"]["ratio"] == 1.5
    assert row["alone"]["ratio"] == 3.0
    assert row["waits"] == 0.25
    assert row_of(plain, slots_name(3), OVERLAPPED)["in_turn"] == pytest.approx(1.8)
    assert row_of(plain, SPLIT, SPLIT_BOUND)["transfer_s"] == pytest.approx(1.2)
    assert row_of(plain, HOST, OVERLAPPED) is None


def test_figures_have_the_asked_goals_and_bounds(memory):
    most = slots_name(3)
    found = figures_of(
        {
            (HOST, None): 1.03,
            (THREADS, None): 1.05,
            (most, OVERLAPPED): 1.08,
            (most, TRANSFER_BOUND): 1.3,
            (most, SPLIT_BOUND): 2.5,
            (SPLIT, SPLIT_BOUND): 1.4,
            (SWAP, OVERLAPPED): 1.8,
            (SWAP, TRANSFER_BOUND): 3.4,
        },
        memory,
    )
    times = {name: f for name, f in found.items() if "T" in name or "limit" in name}
    assert [f["goal"] for f in times.values()] == [1.04, 1.04, 1.09, 1.08, 0.58, 1.8, 1.8]
    assert [f["reached"] for f in times.values()] == [True, False, True, True, True, False, True]
    values = [f["value"] for f in times.values()]
    floor = floor_s(resident_s=1.0, transfer_s=1.2, units=12, steps=3)
    expected = [1.03, 1.05, 1.08, 1.3 / floor, 1.4 / 2.5, 1.8 / 1.08, 3.4 / 1.3]
    assert values == pytest.approx(expected)
    overlapped = times[f"{most} ÷ {DEVICE}, link {OVERLAPPED} T"]
    assert overlapped["bound"] == pytest.approx(1 + 0.6 / 12 / 3 * 1.0)


def test_without_limited_links_only_the_swap_and_memory_are_judged(memory):
    whole = work({(HOST, None): 1.0})
    kept = [row for row in whole.rows if row.setup.link is None]
    swap = SetupTiming(
        setup=Setup(name=SWAP),
        bytes_per_s=None,
        bytes_a_step=1,
        back_to_back=Timing(name="", samples_s=[2.0]),
        alone=Timing(name="", samples_s=[2.0]),
        phases_s=[{}],
    )
    plain = plain_placements(StagingWork(size=whole.size, rows=[*kept, swap]))
    found = staging_figures(plain | {"memory": memory})
    assert [f["value"] for f in found[:1]] == [2.0]
    assert len(found) == 1 + 4


def test_memory_on_the_device_is_that_of_two_layers_and_does_not_grow(memory):
    assert [depth["layers"] for depth in memory["depths"]] == list(LAYERS)
    first, last = (depth["bytes"] for depth in memory["depths"])
    assert last["host_state"] > 10 * first["host_state"]
    assert on_device(first) == on_device(last)
    found = [f for f in figures_of({}, memory).values() if "T" not in f["name"]]
    assert [f["reached"] for f in found[-4:]] == [True] * 4


@pytest.mark.parametrize(
    ("place", "index", "key"),
    [
        ("depths", -1, "device_slots"),
        ("depths", -1, "device_workspace"),
        ("depths", -1, "device_state"),
        ("growth", -1, "device_workspace"),
    ],
)
def test_more_memory_fails_a_figure(memory, place, index, key):
    changed = copy.deepcopy(memory)
    changed[place][index]["bytes"][key] += 256
    figures = figures_of({}, changed).values()
    assert sum(not f["reached"] for f in figures if f["goal"] == 0) >= 1


def test_the_deep_model_fills_a_batch_of_every_shape_at_two_layers():
    _, shallow = make_model(LAYERS[0], CPU)
    shallow.step()
    calls = shallow.last_step["ns_calls"]
    _, deep = make_model(2 * LAYERS[0], CPU)
    deep.step()
    assert deep.last_step["ns_calls"] == 2 * calls
    assert len(shapes(48)) == 1 + 48 * 8


def test_steps_with_forward_passes_are_timed_apart_and_overlapped(monkeypatch):
    monkeypatch.setattr("muonloom.bench.timing.LEAST_SAMPLE_S", 1e-3)
    asked = []
    real = Muon.overlap_forward

    def overlap_forward(self, model):
        asked.append((self, [p for block in model.blocks for p in block.weights]))
        return real(self, model)

    monkeypatch.setattr(Muon, "overlap_forward", overlap_forward)
    overlap = measure_overlap(QUICK_SIZE, resident_s=0.02, rounds=1, device=CPU)
    assert [row["name"] for row in overlap["rows"]] == [
        FORWARD_ALONE,
        RESIDENT,
        APART,
        OVERLAPPING,
    ]
    ((opt, weights),) = asked
    assert weights == opt.param_groups[0]["params"]
    _, resident, apart, _ = overlap["rows"]
    for row in overlap["rows"]:
        assert row["ratio"] == row["median_s"] / resident["median_s"]
    assert apart["median_s"] > 0.9 * TRANSFER_BOUND * 0.02


def test_tables_have_a_cell_for_every_column(memory):
    overlap = {"forward": 0.5, "link": 1.2}
    overlap["rows"] = [{"name": APART, "median_s": 2.0, "ratio": 1.5}]
    plain = plain_placements(work({})) | {"overlap": overlap, "memory": memory}
    times, beside, held = staging_tables(plain)
    assert times[1] == STAGING_COLUMNS
    assert held[1] == MEMORY_COLUMNS
    assert beside[2] == [[APART, "2,000", "1.5"]]
    for _, columns, rows in (times, beside, held):
        assert rows
        assert all(len(row) == len(columns) for row in rows)
    assert times[2][0][:4] == [DEVICE, "–", "1,000", "1"]
    assert "24 BF16 matrices of 512×512 in 12 units" in times[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_quick_run_on_cuda():
    device = torch.device("cuda")
    measured = measure_placements(QUICK_SIZE, rounds=1, device=device)
    plain = plain_placements(measured) | {"memory": measure_memory(quick=True, device=device)}
    assert len(staging_figures(plain)) == 1 + 4
    assert plain["memory"]["growth"][0]["bytes"]["reserved"] > 0
