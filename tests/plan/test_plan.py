"""The plan as data: it covers every matrix once, and depends on the layout and `ns_batch_bytes` alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom.layout import BlockSpec
from muonloom.plan import MatrixEntry, Op, Plan, ScalarEntry, build_plan

FP32 = (("compute_dtype", torch.float32), ("method", "standard"))


def entry(index: int, shape: tuple[int, ...], spec: BlockSpec, *, steps: int = 5) -> MatrixEntry:
    return MatrixEntry(
        index=index,
        name=f"layers.{index}.w",
        kind="layers.*.w",
        shape=shape,
        spec=spec,
        device=torch.device("cpu"),
        eps=1e-7,
        recipe_options=(*FP32, ("ns_steps", steps)),
    )


def scalar(index: int, shape: tuple[int, ...], pool: int = 0) -> ScalarEntry:
    return ScalarEntry(index=index, name=f"s{index}", kind="s", shape=shape, pool=(pool,))


CHOICES = [
    ((8, 4), BlockSpec.whole(), 1),
    ((4, 8), BlockSpec.whole(), 1),
    ((16, 4), BlockSpec.rows(8, 4, 4), 3),
    ((12, 4), BlockSpec.heads(6, heads_per_block=2), 3),
    ((5, 16, 4), BlockSpec.stacked(BlockSpec.gate_up()), 10),
    ((3, 4, 16), BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True))), 6),
    ((8, 2, 2, 1), BlockSpec.conv(), 1),
    ((2, 24, 4), BlockSpec.stacked(BlockSpec.heads(6, heads_per_block=1)), 12),
]


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.sampled_from(CHOICES), max_size=8),
    batch_bytes=st.sampled_from([256, 300, 512, 1 << 12, "auto"]),
)
def test_every_matrix_is_in_exactly_one_batch(picks, batch_bytes):
    entries = [entry(i, shape, spec) for i, (shape, spec, _) in enumerate(picks)]
    plan = build_plan(entries, [], ns_batch_bytes=batch_bytes)
    assert plan.num_matrices == sum(count for *_, count in picks)
    seen = set()
    for batch in plan.batches:
        offset = 0
        for unit in batch.units:
            assert unit.offset == offset
            assert unit.numel == unit.count * batch.rows * batch.columns
            for matrix in range(unit.first, unit.first + unit.count):
                key = (unit.parameter, unit.view, matrix)
                assert key not in seen
                seen.add(key)
            offset += unit.count
        if batch_bytes != "auto":
            assert batch.x_bytes <= batch_bytes
    assert len(seen) == plan.num_matrices
    numels = [math.prod(shape) for shape, *_ in picks]
    assert sum(batch.numel for batch in plan.batches) == sum(numels)


@pytest.mark.parametrize("layers", [1, 2, 48])
def test_calls_do_not_grow_with_depth(layers: int):
    entries = [entry(i, (16, 4), BlockSpec.rows(8, 8)) for i in range(layers)]
    assert build_plan(entries, []).ns_calls == 1
    one_matrix = 8 * 4 * 4
    limited = build_plan(entries, [], ns_batch_bytes=5 * one_matrix)
    assert limited.ns_calls == math.ceil(2 * layers / 5)


def test_different_iterations_do_not_share_a_batch():
    entries = [entry(0, (8, 4), BlockSpec.whole()), entry(1, (8, 4), BlockSpec.whole(), steps=3)]
    assert build_plan(entries, []).ns_calls == 2


def test_a_batch_that_holds_no_matrix_is_an_error_with_name_and_bytes():
    with pytest.raises(ValueError, match=r"^layers\.0\.w: .*128 bytes.*ns_batch_bytes=127"):
        build_plan([entry(0, (8, 4), BlockSpec.whole())], [], ns_batch_bytes=127)


def test_items_are_two_phases_around_each_call():
    plan = build_plan(
        [entry(i, (600, 512), BlockSpec.whole()) for i in range(2)], [scalar(2, (10,))]
    )
    assert [item.op for item in plan.items] == [
        Op.DIRECTION,
        Op.DIRECTION,
        Op.ORTHOGONALIZE,
        Op.UPDATE,
        Op.UPDATE,
        Op.ADAMW,
    ]


def test_digest_tells_plans_apart_and_nothing_else():
    def plan(**options) -> Plan:
        entries = [entry(i, (8, 4), BlockSpec.whole()) for i in range(3)]
        return build_plan(entries, [scalar(3, (7,))], **options)

    assert plan().digest() == plan().digest()
    assert plan().digest() != plan(ns_batch_bytes=256).digest()


def test_large_scalar_parameters_are_cut_at_aligned_places():
    numel = (64 << 20) // 4 * 2 + 10
    plan = build_plan([], [scalar(0, (numel,)), scalar(1, (3,))])
    spans = [span for pack in plan.packs for span in pack.spans if span.parameter == 0]
    assert [span.start for span in spans] == [0, 1 << 24, 2 << 24]
    assert all(span.start % 64 == 0 for span in spans)
    assert spans[-1].stop == numel
    assert [span.last for span in spans] == [False, False, True]


def test_pools_do_not_share_a_call():
    plan = build_plan(
        [], [scalar(0, (3,), pool=0), scalar(1, (3,), pool=1), scalar(2, (3,), pool=0)]
    )
    assert [[span.parameter for span in pack.spans] for pack in plan.packs] == [[0, 2], [1]]
