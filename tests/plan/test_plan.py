"""The plan as data: it covers every matrix once, and depends on the layout and `ns_batch_bytes` alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom.layout import BlockSpec
from muonloom.plan import Plan
from muonloom.planning import MatrixEntry, ScalarEntry, build_plan

FP32 = (("compute_dtype", torch.float32), ("method", "standard"))


def entry(index: int, shape: tuple[int, ...], spec: BlockSpec, *, steps: int = 5) -> MatrixEntry:
    return MatrixEntry(
        index=index,
        turn=index,
        name=f"layers.{index}.w",
        kind="layers.*.w",
        shape=shape,
        spec=spec,
        device=torch.device("cpu"),
        eps=1e-7,
        recipe_options=(*FP32, ("ns_steps", steps)),
    )


def scalar(index: int, shape: tuple[int, ...], pool: int = 0) -> ScalarEntry:
    cpu = torch.device("cpu")
    return ScalarEntry(
        index=index, turn=index, name=f"s{index}", kind="s", shape=shape, device=cpu, pool=(pool,)
    )


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
        for run in batch.runs:
            assert run.offset == offset
            assert run.numel == run.count * batch.rows * batch.columns
            for matrix in range(run.first, run.first + run.count):
                key = (run.parameter, run.view, matrix)
                assert key not in seen
                seen.add(key)
            offset += run.count
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


def test_works_come_in_the_order_of_a_forward_pass():
    entries = [
        entry(1, (8, 4), BlockSpec.whole()),
        entry(2, (4, 16), BlockSpec.whole()),
        entry(3, (8, 4), BlockSpec.whole()),
        entry(4, (8, 4), BlockSpec.whole()),
    ]
    plan = build_plan(entries, [scalar(0, (10,)), scalar(5, (3,))], ns_batch_bytes=256)
    first = [
        min(part.parameter for part in getattr(work, "runs", None) or work.spans)
        for work in plan.works
    ]
    assert first == [0, 1, 2, 4]


def test_digest_tells_plans_apart_and_nothing_else():
    def plan(**options) -> Plan:
        entries = [entry(i, (8, 4), BlockSpec.whole()) for i in range(3)]
        return build_plan(entries, [scalar(3, (7,))], **options)

    assert plan().digest() == plan().digest()
    assert plan().digest() != plan(ns_batch_bytes=256).digest()
    assert (
        plan().digest() == plan(slot_bytes=8 * 4 * 4).digest()
    )  # the size of a slot changes no result


def test_large_scalar_parameters_are_cut_at_aligned_places():
    numel = (2 << 16) + 10
    plan = build_plan([], [scalar(0, (numel,)), scalar(1, (3,))])
    spans = [span for pack in plan.packs for span in pack.spans if span.parameter == 0]
    assert [span.start for span in spans] == [0, 1 << 16, 2 << 16]
    assert all(span.start % 64 == 0 for span in spans)
    assert spans[-1].stop == numel
    assert [span.last for span in spans] == [False, False, True]


def test_pools_do_not_share_a_call():
    plan = build_plan(
        [], [scalar(0, (3,), pool=0), scalar(1, (3,), pool=1), scalar(2, (3,), pool=0)]
    )
    assert [[span.parameter for span in pack.spans] for pack in plan.packs] == [[0, 2], [1]]
