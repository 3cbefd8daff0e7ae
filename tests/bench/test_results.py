from __future__ import annotations

import pytest
import torch

from muonloom.bench.orthogonalization import GRAM_FP32, OURS, STANDARD_BF16, BatchWork
from muonloom.bench.peers import REFERENCE
from muonloom.bench.report import figure_rows, gate_text, result_rows
from muonloom.bench.results import figures, plain_batch, plain_step
from muonloom.bench.shapes import MOE, QUICK_MOE, BatchShape
from muonloom.bench.step import StepWork, moe_layout, share_outside
from muonloom.bench.text import number
from muonloom.bench.timing import Timing
from muonloom.math import make_recipe

GATE = {
    "passed": True,
    "error": 1e-3,
    "error_ratio": 0.1,
    "largest_singular_value": 1.15,
    "spectra": [],
}


def timed(name, *samples, role="peer", dtype="bfloat16", flops=1e9, **options):
    return Timing(
        name=name, role=role, dtype=dtype, flops=flops, samples_s=list(samples), **options
    )


def batch_work(**options):
    shape = BatchShape(count=64, rows=192, columns=1536, goal=1.6, bound="1.7")
    timings = [
        timed(OURS, 3.0, 1.0, 2.0, role="ours", flops=100e9),
        timed(REFERENCE, 4.0, 5.0, 3.0, role="reference", flops=150e9),
        timed(STANDARD_BF16, 4.0),
        timed(GRAM_FP32, 2.0, dtype="float32"),
        timed("gemm bfloat16 XXt", 1.0, role="ceiling", flops=60e9),
        timed("gemm bfloat16 BX", 1.0, role="ceiling", flops=55e9),
        timed("gemm float32 BX", 1.0, role="ceiling", dtype="float32", flops=30e9),
        Timing(name="HeavyBall", status="not installed"),
    ]
    return BatchWork(
        shape=shape,
        recipe=make_recipe(192, 1536, device_type="cpu"),
        timings=timings,
        gates={OURS: GATE, GRAM_FP32: GATE},
        **options,
    )


def test_ratios_bounds_and_ceilings_follow_from_the_medians():
    work = plain_batch(batch_work())
    by_name = {entry["name"]: entry for entry in work["contenders"]}
    assert by_name[OURS]["median_s"] == 2.0
    assert by_name[REFERENCE]["ratio"] == 4.0 / 2.0
    assert by_name[GRAM_FP32]["ratio"] == 2.0 / 2.0
    assert by_name[REFERENCE]["quartiles_s"] == [3.5, 4.5]
    assert work["ceilings"] == {"bfloat16": 60e9, "float32": 30e9}
    assert work["bound"] == pytest.approx(4.0 / (100e9 / 60e9))
    assert "ratio" not in by_name["HeavyBall"]


def test_figures_compare_with_their_goals():
    found = {figure["name"]: figure for figure in figures([plain_batch(batch_work())])}
    ratio = found["64x192x1536: torch.optim.Muon's time ÷ ours"]
    assert (ratio["value"], ratio["reached"]) == (2.0, True)
    own = found["64x192x1536: own FLOP/s ÷ bfloat16 GEMM ceiling"]
    assert own["value"] == pytest.approx(50 / 60)
    assert not own["reached"]
    gram = found["64x192x1536: FP32 Gram ÷ standard BF16 time"]
    assert (gram["value"], gram["reached"]) == (0.5, True)
    assert found["64x192x1536: FP32 Gram, largest error"]["reached"]


def test_a_reference_that_was_not_timed_gives_no_ratio():
    work = batch_work()
    work.timings[1] = Timing(name=REFERENCE, role="reference", status="failed: X")
    plain = plain_batch(work)
    assert plain["bound"] is None
    assert not any("torch.optim" in figure["name"] for figure in figures([plain]))
    row = next(row for row in result_rows(plain) if row[0] == REFERENCE)
    assert row[1] == "failed: X"


def test_the_share_outside_the_iteration_is_the_median_over_steps():
    phases = [
        {"guard": 1.0, "orthogonalize": 9.0},
        {"guard": 3.0, "orthogonalize": 7.0},
        {"guard": 2.0, "orthogonalize": 8.0},
    ]
    assert share_outside(phases) == pytest.approx(0.2)
    work = StepWork(
        size=QUICK_MOE,
        numel=1,
        matrices=[(2, 2, 1)],
        timings=[
            timed(OURS, 2.0, role="ours", flops=10e9),
            timed(REFERENCE, 3.0, role="reference"),
        ],
        phases_s=phases,
    )
    plain = plain_step(work, ceilings={"bfloat16": 10e9, "float32": 1e9})
    assert plain["bound"] == 3.0
    ratio, share = figures([plain])
    assert ratio["value"] == 1.5
    assert share["value"] == pytest.approx(0.2)
    assert not share["reached"]


def test_the_benchmarks_model_has_48_million_parameters_and_the_experts_of_the_goal():
    layout = moe_layout(MOE)
    shapes = [matrix for rule in layout.values() for matrix in rule.matrices]
    assert sum(m * n for m, n in shapes) == pytest.approx(48e6, rel=0.01)
    assert sum(shape in ((256, 768), (768, 256)) for shape in shapes) == 4 * (16 * 3 + 1)
    assert all(rule.algorithm == "muon" for rule in layout.values())


def test_rows_say_what_was_measured_of_work_that_was_cut():
    work = batch_work()
    work.timings[2].measured = "1 of 64 matrices"
    rows = result_rows(plain_batch(work))
    assert rows[0][0] == OURS
    assert rows[2][0] == f"{STANDARD_BF16} [1 of 64 matrices, 1 rounds]"
    assert rows[-1][:2] == ["HeavyBall", "not installed"]
    assert rows[1][3:6] == ["2", "1.6", "2.4"]


def test_numbers_and_gates_are_short():
    assert [number(x) for x in (None, 1.23456, 12345.6, 0.00123456)] == [
        "–",
        "1.23",
        "12,346",
        "0.00123",
    ]
    assert gate_text(GATE) == "pass 0.10× σ1.15"
    assert gate_text(GATE | {"passed": False, "error_ratio": 1e-5}) == "FAIL <0.01× σ1.15"
    assert gate_text(GATE, verdict=False) == "0.10× σ1.15"
    figure = {"name": "x", "value": 0.5, "goal": 0.75, "most": True, "bound": None, "reached": True}
    assert figure_rows([figure]) == [["x", "0.5", "≤ 0.75", "–", "yes"]]


def test_the_layouts_matrices_are_those_that_peers_get():
    from muonloom.bench.step import _matrices

    tensors = {name: torch.randn(shape) for name, shape in QUICK_MOE.parameters().items()}
    layout = moe_layout(QUICK_MOE)
    ours = sorted(matrix for name in tensors for matrix in layout[name].matrices)
    assert sorted(tuple(matrix.shape) for matrix in _matrices(tensors)) == ours
