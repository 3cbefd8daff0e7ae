"""Every block spec against plain slicing, and its views as their own inverse."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muonloom.layout import BlockSpec, MatrixView

Cut = Callable[[Tensor], list[Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A spec, a storage shape that it fits, and the same cut by slicing and concatenating."""

    spec: BlockSpec
    shape: tuple[int, ...]
    cut: Cut


def _whole(m: int, n: int) -> Case:
    return Case(BlockSpec.whole(), (m, n), lambda t: [t])


@st.composite
def sections(draw: st.DrawFn, depth: int, axis: int) -> Case:
    across = draw(st.integers(1, 4))
    inner = [draw(matrices(depth - 1)) for _ in range(draw(st.integers(1, 2)))]
    parts = [case for case in inner if case.shape[1 - axis] == inner[0].shape[1 - axis]]
    if draw(st.booleans()):
        parts += [
            _whole(*((across, parts[0].shape[1]) if axis == 0 else (parts[0].shape[0], across)))
        ]
    parts += [parts[-1]] * draw(st.integers(0, 2))
    sizes = [case.shape[axis] for case in parts]
    pairs = [(size, case.spec) for size, case in zip(sizes, parts, strict=True)]
    make = BlockSpec.rows if axis == 0 else BlockSpec.columns

    def cut(t: Tensor) -> list[Tensor]:
        pieces = t.split(sizes, dim=axis)
        return [m for case, piece in zip(parts, pieces, strict=True) for m in case.cut(piece)]

    shape = list(parts[0].shape)
    shape[axis] = sum(sizes)
    return Case(make(*pairs), tuple(shape), cut)


@st.composite
def gate_ups(draw: st.DrawFn) -> Case:
    half, n, interleaved = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.booleans())

    def cut(t: Tensor) -> list[Tensor]:
        return [t[0::2], t[1::2]] if interleaved else [t[:half], t[half:]]

    return Case(BlockSpec.gate_up(interleaved), (2 * half, n), cut)


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


@st.composite
def heads(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 6))
    block = draw(st.sampled_from([None, *_divisors(count), count + 3]))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    apart, n = draw(st.booleans()), draw(st.integers(1, 4))
    spec = BlockSpec.heads(count, heads_per_block=block, components=sizes if apart else None)
    together = min(block or count, count)

    def cut(t: Tensor) -> list[Tensor]:
        each = t.split(sum(sizes))
        result = []
        for start in range(0, count, together):
            of_block = each[start : start + together]
            pieces = zip(*(head.split(sizes) for head in of_block), strict=True)
            result += [torch.cat(p) for p in pieces] if apart else [torch.cat(of_block)]
        return result

    return Case(spec, (count * sum(sizes), n), cut)


@st.composite
def grouped(draw: st.DrawFn) -> Case:
    """Per-group interleaved query, key and value, each cut by its own heads."""
    groups, queries, dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    total, n = groups * queries, draw(st.integers(1, 3))
    k = draw(st.sampled_from([*_divisors(queries), *(queries * d for d in _divisors(groups))]))
    kv = draw(st.sampled_from(_divisors(groups)))
    query = BlockSpec.heads(total, heads_per_block=k)
    key = BlockSpec.heads(groups, heads_per_block=kv)
    parts = ((queries * dim, query), (dim, key), (dim, key))
    spec = BlockSpec.heads(groups, components=parts)

    def cut(t: Tensor) -> list[Tensor]:
        pieces = zip(*(g.split([queries * dim, dim, dim]) for g in t.chunk(groups)), strict=True)
        q, key_rows, value_rows = (torch.cat(piece) for piece in pieces)
        return [*q.split(k * dim), *key_rows.split(kv * dim), *value_rows.split(kv * dim)]

    return Case(spec, (groups * (queries + 2) * dim, n), cut)


@st.composite
def transposes(draw: st.DrawFn, depth: int) -> Case:
    inner = draw(matrices(depth - 1))
    m, n = inner.shape
    return Case(BlockSpec.transposed(inner.spec), (n, m), lambda t: inner.cut(t.T))


def matrices(depth: int = 2) -> st.SearchStrategy[Case]:
    """Specs of one 2-D matrix."""
    size = st.integers(1, 5)
    leaves = st.one_of(st.builds(_whole, size, size), gate_ups(), heads(), grouped())
    if depth == 0:
        return leaves
    return st.one_of(leaves, sections(depth, 0), sections(depth, 1), transposes(depth))


@st.composite
def stacks(draw: st.DrawFn) -> Case:
    inner = draw(matrices())
    case = Case(
        BlockSpec.stacked(inner.spec),
        (draw(st.integers(0, 3)), *inner.shape),
        lambda t: [m for one in t for m in inner.cut(one)],
    )
    if draw(st.booleans()):
        return case
    return Case(
        BlockSpec.stacked(case.spec),
        (draw(st.integers(1, 2)), *case.shape),
        lambda t: [m for one in t for m in case.cut(one)],
    )


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=5)))
    return Case(BlockSpec.conv(), shape, lambda t: [t.flatten(1)])


cases = st.one_of(matrices(), stacks(), convolutions())


def _numbered(shape: tuple[int, ...], strides: str) -> Tensor:
    dense = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    if strides == "reversed" and dense.dim() > 1:
        dims = tuple(reversed(range(dense.dim())))
        return dense.permute(dims).contiguous().permute(dims)
    if strides == "gapped":
        return torch.stack([dense, -dense - 1], dim=-1)[..., 0]
    return dense


def _logical(view: MatrixView) -> list[Tensor]:
    batch = view.tensor.reshape(view.count, view.rows, view.columns)
    return list(batch.mT if view.transposed else batch)


def _keys(ms: list[Tensor]) -> Counter[tuple[tuple[float, ...], ...]]:
    return Counter(tuple(tuple(row) for row in m.tolist()) for m in ms)


@settings(max_examples=200, deadline=None)
@given(cases, st.sampled_from(["dense", "reversed", "gapped"]))
def test_views_are_the_matrices_and_share_storage(case: Case, strides: str) -> None:
    tensor = _numbered(case.shape, strides)
    views = case.spec.views(tensor)
    assert _keys([m for view in views for m in _logical(view)]) == _keys(case.cut(tensor))
    seen = [number for view in views for number in view.tensor.flatten().tolist()]
    assert sorted(seen) == sorted(tensor.flatten().tolist())
    for view in views:
        assert view.tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert math.prod(view.tensor.shape[: view.batch_dims]) == view.count
        assert view.tensor.numel() == view.count * view.rows * view.columns


@settings(max_examples=120, deadline=None)
@given(cases, st.sampled_from(["dense", "reversed", "gapped"]))
def test_writing_through_the_views_is_the_inverse(case: Case, strides: str) -> None:
    tensor = _numbered(case.shape, strides)
    before = tensor.clone()
    views = case.spec.views(tensor)
    kept = [view.tensor.clone() for view in views]
    tensor.fill_(-1)
    for view, values in zip(views, kept, strict=True):
        view.tensor.copy_(values)
    assert torch.equal(tensor, before)
    for view in views:
        view.tensor.copy_(view.tensor * 2 + 1)
    assert torch.equal(tensor, before * 2 + 1)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_shapes_are_known_without_data(case: Case) -> None:
    wanted = [tuple(m.shape) for m in case.cut(_numbered(case.shape, "dense"))]
    assert Counter(case.spec.matrices(case.shape)) == Counter(wanted)
    on_meta = case.spec.views(torch.empty(case.shape, device="meta"))
    described = [
        (v.batch_dims, v.count, v.rows, v.columns, v.transposed, v.tensor.stride())
        for v in case.spec.views(torch.empty(case.shape))
    ]
    assert described == [
        (v.batch_dims, v.count, v.rows, v.columns, v.transposed, v.tensor.stride()) for v in on_meta
    ]


@settings(max_examples=100, deadline=None)
@given(cases)
def test_the_faster_dimension_comes_last(case: Case) -> None:
    for view in case.spec.views(torch.empty(case.shape)):
        inside = list(zip(view.tensor.shape, view.tensor.stride(), strict=True))[view.batch_dims :]
        if view.rows < 2 or view.columns < 2 or not view.tensor.numel():
            continue
        fastest = min((d for d, (n, _) in enumerate(inside) if n > 1), key=lambda d: inside[d][1])
        rows_before = math.prod(n for n, _ in inside[:fastest])
        assert rows_before % view.rows == 0, "the fastest dimension is one of the columns"


@settings(max_examples=60, deadline=None)
@given(cases, st.sampled_from(["reversed", "gapped"]))
def test_the_orientation_is_the_specs_and_not_one_tensors(case: Case, strides: str) -> None:
    """A strided gradient meets its dense momentum in the same order of rows and columns."""
    dense, other = (case.spec.views(_numbered(case.shape, s)) for s in ("dense", strides))
    for one, two in zip(dense, other, strict=True):
        assert torch.equal(
            one.tensor.reshape(one.count, one.rows, one.columns),
            two.tensor.reshape(two.count, two.rows, two.columns),
        )


@given(cases)
@settings(max_examples=50, deadline=None)
def test_specs_are_data(case: Case) -> None:
    assert hash(case.spec) == hash(dataclasses.replace(case.spec))  # type: ignore[type-var]
    assert case.spec == dataclasses.replace(case.spec)  # type: ignore[type-var]
    assert eval(repr(case.spec), _constructors()) == case.spec


def _constructors() -> dict[str, object]:
    names = ("whole", "rows", "columns", "stacked", "gate_up", "heads", "transposed", "conv")
    return {name: getattr(BlockSpec, name) for name in names}


def test_gpt_oss_experts_are_two_transposed_matrices_each() -> None:
    spec = BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True)))
    stored = torch.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    (view,) = spec.views(stored)
    assert view.shape == (4, 3)
    assert (view.count, view.rows, view.columns, view.transposed) == (4, 3, 4, True)
    gate, up = stored[1, :, 0::2].T, stored[1, :, 1::2].T
    assert torch.equal(_logical(view)[2], gate)
    assert torch.equal(_logical(view)[3], up)


def test_equal_neighbours_become_one_batch() -> None:
    (view,) = BlockSpec.columns(2, 2, 2).views(torch.empty(5, 6))
    assert (view.count, view.shape) == (3, (5, 2))


def test_query_with_gate_and_two_key_value_blocks_is_four_independent_matrices() -> None:
    query_gate = BlockSpec.heads(1, components=(16, 16))
    spec = BlockSpec.rows((32, query_gate), 4, 4)
    shapes = spec.matrices((40, 7))
    assert shapes == ((16, 7), (16, 7), (4, 7), (4, 7))


def test_all_q_all_k_all_v_equals_interleaved_after_permutation() -> None:
    fused = torch.randn(4 * 3 * 2, 5)
    interleaved = BlockSpec.heads(
        4, components=[(2, BlockSpec.heads(4, heads_per_block=2)) for _ in range(3)]
    )
    sectioned = BlockSpec.rows(*((8, BlockSpec.heads(4, heads_per_block=2)),) * 3)
    permuted = fused.reshape(4, 3, 2, 5).transpose(0, 1).reshape(24, 5)
    one = [m for v in interleaved.views(fused) for m in _logical(v)]
    other = [m for v in sectioned.views(permuted) for m in _logical(v)]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("spec", "shape", "matrix"),
    [
        (BlockSpec.conv(), (64, 1, 3, 3), (64, 9)),
        (BlockSpec.conv(), (8, 4, 1, 7), (8, 28)),
        (BlockSpec.conv(), (8, 4, 7, 1), (8, 28)),
        (BlockSpec.conv(), (8, 4), (8, 4)),
        (BlockSpec.transposed(), (32, 128), (128, 32)),
        (BlockSpec.whole(), (0, 4), (0, 4)),
        (BlockSpec.whole(), (4, 0), (4, 0)),
    ],
)
def test_logical_shapes(spec: BlockSpec, shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert spec.matrices(shape) == (matrix,)


def test_same_shape_kernels_are_cut_alone_and_may_be_channels_last() -> None:
    kernel = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    (view,) = BlockSpec.conv().views(kernel)
    assert torch.equal(view.tensor.reshape(6, 36), kernel.reshape(6, 36))
    view.tensor.zero_()
    assert not kernel.any()


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (BlockSpec.whole(), (3,), ("dimensions (3,)", "exactly two")),
        (BlockSpec.whole(), (2, 3, 4), ("dimensions (2, 3, 4)", "stacked()")),
        (BlockSpec.stacked(), (3, 4), ("dimensions (3, 4)", "Leave stacked() out")),
        (BlockSpec.conv(), (3,), ("dimensions (3,)", "(out, in, *kernel)")),
        (BlockSpec.rows(1, 2), (4, 4), ("sizes (1, 2)", "sum to 3", "sum of 4")),
        (BlockSpec.columns(1, 2), (3, 4), ("sizes (1, 2)", "sum of 4, the columns")),
        (BlockSpec.gate_up(), (3, 4), ("3 rows", "even")),
        (BlockSpec.gate_up(True), (3, 4), ("3 rows", "even")),
        (BlockSpec.heads(4, heads_per_block=1), (6, 2), ("6 rows", "multiple of 4 heads")),
        (BlockSpec.heads(2, components=(2, 2)), (6, 2), ("sizes (2, 2)", "sum of 3")),
        (
            BlockSpec.heads(4, components=((6, BlockSpec.heads(12, heads_per_block=2)), 1)),
            (28, 2),
            ("split into 6 equal blocks",),
        ),
    ],
)
def test_a_shape_that_does_not_fit_is_named(
    spec: BlockSpec, shape: tuple[int, ...], words: tuple[str, ...]
) -> None:
    for call in (
        lambda: spec.views(torch.empty(shape), name="layers.0.w"),
        lambda: spec.matrices(shape, name="layers.0.w"),
    ):
        with pytest.raises(ValueError, match=r"^layers\.0\.w: got ") as caught:
            call()
        assert all(word in str(caught.value) for word in words)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockSpec.rows(), "rows: got no sizes"),
        (lambda: BlockSpec.rows(2, 0), "rows: got 0; wanted a whole number >= 1"),
        (lambda: BlockSpec.columns(True), "columns: got True"),
        (lambda: BlockSpec.heads(0), "num_heads: got 0"),
        (lambda: BlockSpec.heads(6, heads_per_block=0), "heads_per_block: got 0"),
        (lambda: BlockSpec.heads(6, heads_per_block=4), "These work: 1, 2, 3, 6."),
        (lambda: BlockSpec.heads(6, components=()), "heads components: got no sizes"),
    ],
)
def test_impossible_specs_are_refused_at_construction(
    make: Callable[[], BlockSpec], message: str
) -> None:
    with pytest.raises(ValueError, match="got ") as caught:
        make()
    assert message in str(caught.value)


def test_an_inner_spec_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="stacked: got 'whole'; wanted a BlockSpec"):
        BlockSpec.stacked("whole")  # type: ignore[arg-type]
