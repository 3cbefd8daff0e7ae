from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import Parameter

from muonloom.bench.flops import counted_flops, recipe_flops
from muonloom.bench.shapes import (
    COUNTED_SPLIT,
    DEEPSEEK_QUARTER,
    GLM5_QUARTER,
    QUICK_SPLIT,
    SPLIT_MODELS,
    BatchShape,
)
from muonloom.bench.split import (
    BATCHED,
    ONE_AT_A_TIME,
    QUERY,
    QUERY_AND_KEY_VALUE,
    SPLIT_VARIANTS,
    WHOLE,
    SplitWork,
    Variant,
    VariantTiming,
    _rates,
    count_calls,
    measure_loop,
    measure_variants,
    one_block_a_call,
    plan_of,
    projections,
    whole_variants,
)
from muonloom.bench.split_results import (
    SPLIT_COLUMNS,
    STEP_WORK,
    plain_loop,
    plain_variants,
    split_figures,
    split_rows,
)
from muonloom.bench.timing import Timing
from muonloom.math import make_recipe
from muonloom.optimizer import Muon

CPU = torch.device("cpu")
NAMES = ("model.layers.0.self_attn.q_b_proj.weight", "model.layers.0.self_attn.kv_b_proj.weight")
ONE_HEAD, COMPONENTS = SPLIT_VARIANTS[0], SPLIT_VARIANTS[-1]


def matrices(size, variant):
    layout = variant.layout(size)
    return [Counter(layout[name].matrices) for name in NAMES]


def test_the_models_are_the_published_ones_divided_by_four():
    published = {"GLM-5 / 4": (64, 2048, 512, 192, 64, 256)}
    published["DeepSeek-V3 / 4"] = (128, 1536, 512, 128, 64, 128)
    for name, (heads, q_lora, kv_lora, nope, rope, value) in published.items():
        q_b, kv_b = projections(SPLIT_MODELS[name], QUERY_AND_KEY_VALUE).values()
        assert q_b == (heads * (nope + rope) // 4, q_lora // 4)
        assert kv_b == (heads * (nope + value) // 4, kv_lora // 4)
        assert list(projections(SPLIT_MODELS[name], QUERY).values()) == [q_b]


def test_variants_cut_what_their_names_say():
    assert matrices(GLM5_QUARTER, Variant(name=WHOLE)) == [{(4096, 512): 1}, {(7168, 128): 1}]
    assert matrices(GLM5_QUARTER, ONE_HEAD) == [{(64, 512): 64}, {(112, 128): 64}]
    assert matrices(GLM5_QUARTER, SPLIT_VARIANTS[1]) == [{(256, 512): 16}, {(448, 128): 16}]
    assert matrices(GLM5_QUARTER, SPLIT_VARIANTS[2]) == [{(1024, 512): 4}, {(1792, 128): 4}]
    assert matrices(GLM5_QUARTER, COMPONENTS) == [
        {(48, 512): 64, (16, 512): 64},
        {(48, 128): 64, (64, 128): 64},
    ]
    assert matrices(DEEPSEEK_QUARTER, ONE_HEAD) == [{(48, 384): 128}, {(64, 128): 128}]
    assert matrices(DEEPSEEK_QUARTER, COMPONENTS)[1] == {(32, 128): 256}


def test_each_method_for_whole_matrices_is_tried_once():
    variants = whole_variants({"w": (4096, 512)}, CPU)
    assert variants[0] == Variant(name=WHOLE)
    tried = [
        make_recipe(
            4096,
            512,
            device_type="cpu",
            method=variant.options.get("ns_method", "auto"),
            compute_dtype=variant.options.get("ns_compute_dtype"),
        )
        for variant in variants
    ]
    assert len(set(tried)) == len(tried)
    kinds = {(recipe.method, recipe.compute_dtype) for recipe in tried}
    assert {("gram", torch.float32), ("standard", torch.float32)} <= kinds


@pytest.mark.parametrize("variant", [Variant(name=WHOLE), *SPLIT_VARIANTS], ids=lambda v: v.name)
def test_the_plans_calls_are_those_of_the_optimizers_step(variant):
    parameters = {
        name: Parameter(torch.randn(shape)) for name, shape in QUICK_SPLIT.parameters().items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer = Muon(parameters.items(), layout=variant.layout(QUICK_SPLIT))
    optimizer.step()
    plan = plan_of(QUICK_SPLIT, variant)
    assert plan.ns_calls == optimizer.last_step["ns_calls"]
    assert plan.num_matrices == sum(count for _, count in optimizer.last_step["matrices"])


def test_calls_do_not_depend_on_the_depth_and_matrices_do():
    for row, variant in zip(count_calls(), (Variant(name=WHOLE), *SPLIT_VARIANTS), strict=True):
        assert row["calls"]["2"] == row["calls"]["48"]
        assert row["matrices"]["48"] == 24 * row["matrices"]["2"]
        stored = {
            (view.rows, view.columns)
            for rule in variant.layout(COUNTED_SPLIT).values()
            for view in rule.spec.views(torch.empty(rule.shape, device="meta"))
        }
        assert row["calls"]["2"] == len(stored)


@pytest.fixture(scope="module")
def measured():
    variants = [Variant(name=WHOLE), ONE_HEAD, one_block_a_call(QUICK_SPLIT, CPU)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muonloom.bench.timing.LEAST_SAMPLE_S", 1e-3)
        return measure_variants(
            "tiny: q_b",
            QUICK_SPLIT,
            projections(QUICK_SPLIT, QUERY),
            variants,
            rounds=2,
            device=CPU,
            bounds=True,
        )


def test_steps_are_measured_with_their_phases_and_counted_flops(measured):
    whole, one_head, one_a_call = measured.rows
    assert [row.matrices for row in measured.rows] == [{(64, 32): 1}, {(4, 32): 16}, {(4, 32): 16}]
    assert [row.ns_calls for row in measured.rows] == [1, 1, 16]
    assert [row.step.name for row in measured.rows] == [WHOLE, "k = 1", "k = 1, a block a call"]
    recipe = make_recipe(4, 32, device_type="cpu")
    assert one_head.step.flops == one_a_call.step.flops == 16 * recipe_flops(recipe, 4, 32)
    assert whole.bound_s is None
    assert one_head.bound_s > 0
    for row in measured.rows:
        assert len(row.step.samples_s) == 2
        assert len(row.phases_s) >= 2
        assert 0 < row.iterate_s < row.orthogonalize_s


def row(variant, step_s, direction_s, iterate_s, *, flops, bound_s=None):
    return VariantTiming(
        variant=variant,
        step=Timing(name=variant.name, role="ours", flops=flops, samples_s=[step_s]),
        phases_s=[{"direction": direction_s, "orthogonalize": iterate_s, "update": 1.0}] * 3,
        matrices=Counter({(4, 8): 2}),
        ns_calls=1,
        bound_s=bound_s,
    )


def split_work(name, one_head_s=1.0):
    rows = [
        row(Variant(name=WHOLE), 12.0, 2.0, 9.0, flops=40.0),
        row(Variant(name="whole, gram FP32"), 11.0, 2.0, 8.0, flops=32.0),
        row(ONE_HEAD, 4.0, 1.0, one_head_s, flops=8.0, bound_s=0.5),
    ]
    return SplitWork(name=name, size=QUICK_SPLIT, shapes={"w": (8, 8)}, rows=rows)


def test_ratios_are_to_the_fastest_whole_matrices():
    plain = plain_variants(split_work("GLM: q_b"))
    assert plain["best_whole"] == "whole, gram FP32"
    default, best, one_head = plain["rows"]
    assert best["orthogonalize_ratio"] == best["flops_ratio"] == best["step"]["ratio"] == 1.0
    assert default["orthogonalize_ratio"] == pytest.approx(11 / 10)
    assert one_head["orthogonalize_ratio"] == pytest.approx(2 / 10)
    assert one_head["iterate_ratio"] == pytest.approx(1 / 8)
    assert one_head["flops_ratio"] == pytest.approx(8 / 32)
    assert one_head["step"]["ratio"] == pytest.approx(4 / 11)
    assert one_head["bound"] == pytest.approx(0.5 / 10)
    assert one_head["flops_per_s"] == 8.0
    assert dict(zip(SPLIT_COLUMNS, split_rows(plain)[2], strict=True)) == {
        "cut": "k = 1",
        "matrices": "2×4×8",
        "orth. ms": "2,000",
        "÷ whole": "0.2",
        "iter. ÷": "0.125",
        "FLOPs ÷": "0.25",
        "GFLOP/s": "8e-09",
        "step ÷": "0.364",
    }


def loop(batched_s, looped_s):
    return {"name": "2x4x8", "ratio": looped_s / batched_s, "bound": 4.0, "contenders": []}


def figures_of(*, one_head_s=1.0, calls=(6, 6), looped_s=3.0):
    works = [split_work("GLM: q_b", one_head_s), split_work(STEP_WORK)]
    rows = [{"calls": dict(zip(("2", "48"), calls, strict=True))}]
    split = {"works": [plain_variants(work) for work in works], "calls": rows}
    found = split_figures(split | {"loop": loop(1.0, looped_s)})
    return {figure["name"]: figure for figure in found}


def test_figures_compare_with_their_goals():
    found = figures_of()
    assert len(found) == 4
    q_b = found["GLM: q_b, k = 1 ÷ whole"]
    assert (q_b["value"], q_b["goal"], q_b["bound"]) == (0.2, 0.2, 0.05)
    assert found[f"{STEP_WORK}, k = 1 ÷ whole"]["value"] == pytest.approx(4 / 11)
    assert all(figure["reached"] for figure in found.values())


def test_figures_that_miss_say_so():
    found = figures_of(one_head_s=2.0, calls=(6, 7), looped_s=2.0)
    reached = {name.split(",")[0].split(":")[0]: f["reached"] for name, f in found.items()}
    assert reached == {
        "GLM": False,
        STEP_WORK.split(",")[0]: True,
        "2x4x8": False,
        "cuts whose Newton–Schulz calls differ between 2 and 48 layers": False,
    }


def test_the_loop_does_the_batchs_work():
    shape = BatchShape(count=3, rows=8, columns=24)
    work = measure_loop(shape, rounds=2, device=CPU)
    recipe = make_recipe(8, 24, device_type="cpu")
    assert (work.batched.name, work.looped.name) == (BATCHED, ONE_AT_A_TIME)
    assert work.batched.flops == work.looped.flops == 3 * recipe_flops(recipe, 8, 24)
    plain = plain_loop(work)
    assert plain["ratio"] == work.looped.median_s / work.batched.median_s
    assert plain["bound"] == work.looped.median_s / work.bound_s
    assert [entry["name"] for entry in plain["contenders"]] == [BATCHED, ONE_AT_A_TIME]


def test_bounds_take_the_fastest_product_of_each_shape():
    products = {(4, 8): ["a", "b"], (2, 8): ["c"]}
    timings = [Timing(name="t", flops=12.0, samples_s=[seconds]) for seconds in (4.0, 3.0, 6.0)]
    assert _rates(products, timings) == {(4, 8): 4.0, (2, 8): 2.0}


def test_halved_products_of_whole_matrices_count_as_what_is_multiplied():
    # 512 rows: symmetric products are computed by panels, and a ratio of formulas would flatter blocks
    weight = Parameter(torch.randn(640, 512))
    weight.grad = torch.randn_like(weight)
    optimizer = Muon([("w", weight)], ns_compute_dtype=torch.float32)
    recipe = make_recipe(640, 512, device_type="cpu", compute_dtype=torch.float32)
    assert counted_flops(optimizer.step) < 0.8 * recipe_flops(recipe, 640, 512)
