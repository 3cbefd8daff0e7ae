"""Atoms, restricted and stitched specs against an oracle that numbers every element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layout.test_blocks import cases, matrices
from layout.tiny import CONFIGS, tiny
from muonloom.layout import BlockSpec, Layout, restricted, row_atoms, stitched

Shape = tuple[int, ...]
Rows = tuple[int, int]
Matrix = tuple[bool, bool, tuple[tuple[int, ...], ...]]

STRIDES = ("dense", "reversed", "gapped")


# -- specs ------------------------------------------------------------------------------------------


@st.composite
def cut_heads(draw: st.DrawFn) -> tuple[BlockSpec, Shape]:
    """Single heads, whose sections are cut further."""
    parts = [draw(matrices(1))]
    others = st.lists(matrices(1), max_size=2)
    parts += [case for case in draw(others) if case.shape[1] == parts[0].shape[1]]
    sizes = [(case.shape[0], case.spec) for case in parts]
    count = draw(st.integers(1, 4))
    rows = count * sum(size for size, _ in sizes)
    spec = BlockSpec.heads(count, heads_per_block=1, components=sizes)
    return spec, (rows, parts[0].shape[1])


specs = st.one_of(cases.map(lambda case: (case.spec, case.shape)), cut_heads())


# -- the oracle -------------------------------------------------------------------------------------


def numbered(shape: Shape) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def laid_out(tensor: Tensor, strides: str) -> Tensor:
    """The same values with other strides."""
    if strides == "reversed":
        dims = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(dims).contiguous().permute(dims)
    if strides == "gapped":
        return torch.stack([tensor, -tensor - 1], dim=-1)[..., 0]
    return tensor.clone()


def listed(spec: BlockSpec, tensor: Tensor) -> list[Matrix]:
    """All matrices in order: whether of a batch, whether transposed, and the elements."""
    return [
        (view.batch_dims > 0, view.transposed, tuple(map(tuple, matrix)))
        for view in spec.views(tensor)
        for matrix in view.tensor.reshape(view.count, view.rows, view.columns).tolist()
    ]


def expected_atoms(spec: BlockSpec, shape: Shape) -> tuple[Rows, ...]:
    """Part the rows wherever no matrix is on both sides."""
    columns = math.prod(shape[1:])
    parted = set(range(shape[0] + 1))
    for _, _, matrix in listed(spec, numbered(shape)):
        rows = [number // columns for row in matrix for number in row]
        parted -= set(range(min(rows) + 1, max(rows) + 1))
    return tuple(itertools.pairwise(sorted(parted)))


def inside(found: list[Matrix], shape: Shape, rows: Rows) -> list[Matrix]:
    numbers = range(*(row * math.prod(shape[1:]) for row in rows))
    return [m for m in found if all(number in numbers for row in m[2] for number in row)]


def check_restricted(spec: BlockSpec, shape: Shape, rows: Rows, strides: str) -> BlockSpec:
    part = restricted(spec, shape, rows)
    wanted = inside(listed(spec, numbered(shape)), shape, rows)
    lying = laid_out(numbered(shape)[slice(*rows)], strides)
    sliced = laid_out(numbered(shape), strides)[slice(*rows)]
    for tensor in (lying, sliced):
        assert listed(part, tensor) == wanted
        pointers = {view.tensor.untyped_storage().data_ptr() for view in part.views(tensor)}
        assert pointers <= {tensor.untyped_storage().data_ptr()}
    assert part.cuts_heads == spec.cuts_heads
    return part


# -- atoms and what lies in them --------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(specs.filter(lambda case: math.prod(case[1]) > 0))
def test_atoms_are_the_smallest_ranges_of_whole_matrices(case: tuple[BlockSpec, Shape]) -> None:
    assert row_atoms(*case) == expected_atoms(*case)


@settings(max_examples=250, deadline=None)
@given(specs.filter(lambda case: math.prod(case[1]) > 0), st.sampled_from(STRIDES), st.data())
def test_restricted_views_are_the_wholes_in_their_order(
    case: tuple[BlockSpec, Shape], strides: str, data: st.DataObject
) -> None:
    spec, shape = case
    borders = [0, *(stop for _, stop in row_atoms(spec, shape))]
    place = st.sampled_from(borders)
    start, stop = sorted((data.draw(place), data.draw(place)))
    part = check_restricted(spec, shape, (start, stop), strides)
    local = (stop - start, *shape[1:])
    within = [border - start for border in borders if start <= border <= stop]
    assert row_atoms(part, local) == tuple(itertools.pairwise(within))
    a, b = sorted(data.draw(st.tuples(st.sampled_from(within), st.sampled_from(within))))
    assert restricted(part, local, (a, b)) == restricted(spec, shape, (start + a, start + b))
    check_restricted(part, local, (a, b), strides)


STACKED, HEADS = BlockSpec.stacked, BlockSpec.heads
HALVES = BlockSpec.gate_up()
MIXED = BlockSpec.gate_up(interleaved=True)
NEOX = HEADS(2, components=((3, HEADS(2, heads_per_block=1)),) * 2)
# Each case: a spec, a shape, and where atoms end.
ATOMS: dict[str, tuple[BlockSpec, Shape, list[int]]] = {
    "whole": (BlockSpec.whole(), (7, 3), [7]),
    "experts": (STACKED(HALVES), (3, 6, 4), [1, 2, 3]),
    "experts of gpt-oss": (STACKED(BlockSpec.transposed(MIXED)), (2, 4, 6), [1, 2]),
    "stacks of stacks": (STACKED(STACKED()), (2, 3, 4, 5), [1, 2]),
    "halves": (HALVES, (8, 3), [4, 8]),
    "interleaved": (MIXED, (8, 3), [8]),
    "transposed": (BlockSpec.transposed(BlockSpec.rows(2, 4)), (8, 6), [8]),
    "columns": (BlockSpec.columns(2, 4), (8, 6), [8]),
    "columns of halves": (BlockSpec.columns((2, HALVES), (2, HALVES)), (8, 4), [4, 8]),
    "transposed columns": (BlockSpec.transposed(BlockSpec.columns(2, 6)), (8, 6), [2, 8]),
    "sections": (BlockSpec.rows(4, (4, HALVES), 1), (9, 3), [4, 6, 8, 9]),
    "heads": (HEADS(6, heads_per_block=2), (12, 3), [4, 8, 12]),
    "MLA": (HEADS(3, heads_per_block=1, components=(3, 1)), (12, 2), [3, 4, 7, 8, 11, 12]),
    "MLA in blocks": (HEADS(4, heads_per_block=2, components=(2, 1)), (12, 2), [6, 12]),
    "q and k by group": (NEOX, (12, 2), [3, 6, 9, 12]),
    "convolution": (BlockSpec.conv(), (4, 3, 2, 2), [4]),
}


@pytest.mark.parametrize("case", ATOMS)
def test_atoms_of_known_specs(case: str) -> None:
    spec, shape, ends = ATOMS[case]
    assert row_atoms(spec, shape) == tuple(itertools.pairwise([0, *ends]))
    for rows in itertools.combinations([0, *ends], 2):
        check_restricted(spec, shape, rows, "dense")


def known_specs(model_type: str) -> set[tuple[BlockSpec, Shape]]:
    """How each parameter of a model is cut, under all options that its family has."""
    apart = [False, True] if "kv_lora_rank" in CONFIGS[model_type] else [False]
    return {
        (rule.spec, rule.shape)
        for heads_per_block, components in itertools.product([None, 1, 2], apart)
        for rule in Layout.from_model(
            tiny(model_type), heads_per_block=heads_per_block, mla_components=components
        ).values()
        if rule.spec is not None
    }


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_parameter_of_known_models(model_type: str) -> None:
    for spec, shape in known_specs(model_type):
        atoms = row_atoms(spec, shape)
        assert atoms == expected_atoms(spec, shape)
        middle = len(atoms) // 2
        for rows in {atoms[middle], (0, atoms[middle][1]), (atoms[middle][0], shape[0])}:
            check_restricted(spec, shape, rows, "gapped")


def test_components_of_a_part_of_the_heads_keep_the_order_of_the_whole() -> None:
    spec = HEADS(3, heads_per_block=1, components=(2, 1))
    part = restricted(spec, (9, 1), (2, 9))
    found = [sorted(itertools.chain(*m)) for _, _, m in listed(part, numbered((9, 1))[2:])]
    assert found == [[3, 4], [6, 7], [2], [5], [8]]


def test_neighbours_stay_one_view() -> None:
    spec = HEADS(64, heads_per_block=1)
    (view,) = restricted(spec, (256, 3), (16, 128)).views(torch.empty(112, 3))
    assert (view.batch_dims, view.count, view.shape) == (1, 28, (4, 3))
    experts = STACKED(HALVES)
    assert restricted(experts, (256, 6, 4), (8, 16)) == experts


def test_one_block_of_heads_still_counts_as_cut() -> None:
    spec = HEADS(32, heads_per_block=4)
    part = restricted(spec, (64, 3), (8, 16))
    assert part.cuts_heads
    (view,) = part.views(torch.empty(8, 3))
    assert (view.batch_dims, view.count) == (1, 1), "as a block among others"
    assert not restricted(HALVES, (8, 3), (0, 4)).cuts_heads


def test_answers_are_kept() -> None:
    for spec, shape in ((HEADS(64 * 256, heads_per_block=1), (64 * 256 * 2, 3)),
                        (STACKED(HALVES), (256, 4, 2))):  # fmt: skip
        atoms = row_atoms(spec, torch.Size(shape))
        assert len(atoms) in (64 * 256, 256)
        assert atoms is row_atoms(spec, shape)
        assert restricted(spec, shape, atoms[3]) is restricted(spec, torch.Size(shape), atoms[3])


@pytest.mark.parametrize("rows", [(0, 3), (2, 4), (5, 8), (4, 0), (0, 12), (-4, 4), (3, 3)])
def test_rows_that_part_a_matrix_are_refused(rows: Rows) -> None:
    with pytest.raises(ValueError, match=rf"^rows: got {rows[0]} to {rows[1]} of .*gate_up\(\)"):
        restricted(HALVES, (8, 3), rows)


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (4, 2), (4, 3, 1)])
def test_a_restricted_spec_fits_its_rows_only(shape: Shape) -> None:
    part = restricted(HALVES, (8, 3), (0, 4))
    with pytest.raises(ValueError, match=r"^some\.name: got dimensions .* wanted rows 0 to 4 of"):
        part.views(torch.empty(shape), name="some.name")


def test_a_shape_that_does_not_fit_has_no_atoms() -> None:
    with pytest.raises(ValueError, match="got 7 rows; wanted an even number"):
        row_atoms(HALVES, (7, 3))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (BlockSpec.whole(), (0, 4)),
        (BlockSpec.whole(), (5, 0)),
        (HEADS(2, heads_per_block=1), (4, 0)),
        (STACKED(HALVES), (0, 4, 2)),
        (STACKED(HALVES), (3, 0, 2)),
        (STACKED(STACKED()), (2, 0, 3, 4)),
        (BlockSpec.conv(), (3, 0, 2)),
    ],
)
def test_parameters_without_elements(spec: BlockSpec, shape: Shape) -> None:
    assert row_atoms(spec, shape) == tuple((row, row + 1) for row in range(shape[0]))
    assert restricted(spec, shape, (0, shape[0])) == spec
    for rows in itertools.combinations_with_replacement(range(shape[0] + 1), 2):
        part = restricted(spec, shape, rows)
        views = part.views(torch.empty(rows[1] - rows[0], *shape[1:]))
        assert not any(view.count * view.rows * view.columns for view in views)


def test_no_rows_have_no_matrices() -> None:
    for border in (0, 4, 8):
        part = restricted(HALVES, (8, 3), (border, border))
        assert part.views(torch.empty(0, 3)) == ()
        assert row_atoms(part, (0, 3)) == ()


# -- sections ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(specs.filter(lambda case: math.prod(case[1]) > 0), st.sampled_from(STRIDES), st.data())
def test_sections_are_cut_each_by_its_own(
    case: tuple[BlockSpec, Shape], strides: str, data: st.DataObject
) -> None:
    spec, shape = case
    borders = [0, *(stop for _, stop in row_atoms(spec, shape))]
    ends = sorted({0, shape[0], *data.draw(st.lists(st.sampled_from(borders), max_size=4))})
    tensor = laid_out(numbered(shape), strides)
    parts: list[tuple[int, BlockSpec]] = []
    wanted: list[Matrix] = []
    for start, stop in itertools.pairwise(ends):
        if data.draw(st.booleans()):
            parts.append((0, data.draw(st.sampled_from([BlockSpec.whole(), HALVES, STACKED()]))))
        is_fragment = data.draw(st.booleans())
        inner = BlockSpec.conv() if is_fragment else restricted(spec, shape, (start, stop))
        parts.append((stop - start, inner))
        wanted += listed(inner, numbered(shape)[start:stop])
    whole = stitched(*parts)
    assert listed(whole, tensor) == wanted
    seen = torch.cat([view.tensor.flatten() for view in whole.views(tensor)])
    assert torch.equal(seen.sort().values, numbered(shape).flatten())
    assert row_atoms(whole, shape) == expected_atoms(whole, shape)
    a, b = data.draw(st.sampled_from(row_atoms(whole, shape)))
    check_restricted(whole, shape, (a, b), strides)


def test_writing_through_sections_reaches_the_tensor() -> None:
    tensor = torch.zeros(6, 2, 3)
    conv, experts = BlockSpec.conv(), STACKED()
    spec = stitched((1, conv), (3, experts), (0, HALVES), (2, conv))
    views = spec.views(tensor)
    assert [(view.count, view.shape) for view in views] == [(1, (1, 6)), (3, (2, 3)), (1, (2, 6))]
    for number, view in enumerate(views, start=1):
        view.tensor.fill_(number)
    assert tensor[:, 0, 0].tolist() == [1, 2, 2, 2, 3, 3]
    assert len(tensor.unique()) == 3


def test_sections_of_heads_count_as_cut() -> None:
    heads = HEADS(4, heads_per_block=1)
    assert stitched((4, BlockSpec.conv()), (8, heads)).cuts_heads
    assert not stitched((4, BlockSpec.conv()), (0, heads)).cuts_heads


def test_sections_of_nothing() -> None:
    assert stitched().views(torch.empty(0, 3)) == ()
    assert stitched((0, HALVES)).views(torch.empty(0, 3, 4)) == ()


@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (0,)])
def test_sections_must_sum(rows: Shape) -> None:
    spec = stitched(*((n, BlockSpec.whole()) for n in rows))
    with pytest.raises(
        ValueError, match=rf"^some\.name: got sizes .* sum to {sum(rows)}; wanted .* 4"
    ):
        spec.views(torch.empty(4, 3), name="some.name")


@settings(max_examples=60, deadline=None)
@given(specs.filter(lambda case: math.prod(case[1]) > 0))
def test_the_new_specs_are_data(case: tuple[BlockSpec, Shape]) -> None:
    spec, shape = case
    names = ("whole", "rows", "columns", "stacked", "gate_up", "heads", "transposed", "conv")
    known = {name: getattr(BlockSpec, name) for name in names}
    known |= {"restricted": restricted, "stitched": stitched}
    part = restricted(spec, shape, row_atoms(spec, shape)[-1])
    for made in (part, stitched((3, part), (0, spec))):
        again = eval(repr(made), known)
        assert again == made
        assert hash(again) == hash(made)
    assert stitched((3, spec)) != stitched((2, spec))
