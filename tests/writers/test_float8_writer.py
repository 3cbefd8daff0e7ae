"""FP8 weights in blocks: given or allocated tensors, whole write atoms, and nothing that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import reference.float8 as reference
from muonloom import float8_writer
from muonloom.float8_writer import Float8BlockWriter
from muonloom.math import scale_shape
from writers.contract import Case, WriterContract, snapshot, write_all


def tensors(
    shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    return {
        "data": torch.zeros(shape, dtype=torch.float8_e4m3fn),
        "scale_inv": torch.ones(scale_shape(shape, block)).to(dtype),
    }


def allocating(**options: Any) -> Any:
    return lambda param: Float8BlockWriter(**options)


def given(dtype: torch.dtype, **options: Any) -> Any:
    return lambda param: Float8BlockWriter(
        **options, **tensors(tuple(param.shape), options["block"], dtype)
    )


SHAPES = ((140, 130), (9, 7), (3, 20, 30), (2, 2, 9, 5), (0, 4))
BLOCKS = ((128, 128), (1, 128), (40, 3))
CASES = {
    f"{name} {block} {shape}": Case(make=make(block), shape=shape)
    for shape in SHAPES
    for block in BLOCKS
    for name, make in {
        "allocated float32": lambda block: allocating(block=block),
        "allocated ue8m0": lambda block: allocating(block=block, scale_format="ue8m0"),
        "given float32": lambda block: given(torch.float32, block=block),
        "given ue8m0": lambda block: given(torch.float8_e8m0fnu, block=block, scale_format="ue8m0"),
        "given ue8m0 in FP32": lambda block: given(
            torch.float32, block=block, scale_format="ue8m0"
        ),
    }.items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestFloat8BlockWriter(WriterContract):
    pass


@pytest.mark.parametrize("shape", [(9, 7), (3, 9, 7)], ids=str)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_bytes_are_the_reference(shape: tuple[int, ...], scale_format: Any) -> None:
    param = Parameter(torch.zeros(shape))
    writer = Float8BlockWriter((4, 3), scale_format=scale_format)
    writer.prepare(param)
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    write_all(writer, param, master)
    codes = writer.storage.data.view(torch.uint8).view(-1, 9, 7)
    scales = writer.storage.scale_inv.float().view(-1, 3, 3)
    for index, matrix in enumerate(master.view(-1, 9, 7)):
        expected = reference.encode(matrix.tolist(), (4, 3), power_of_two=scale_format == "ue8m0")
        assert (codes[index].tolist(), scales[index].tolist()) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(40, 24), (3, 40, 24)], ids=str)
def test_what_is_allocated_is_filled_from_the_parameter(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8_writer, "_PIECE_NUMEL", 24 * 16)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    param = Parameter(values.clone())
    writer = Float8BlockWriter((8, 8))
    storage = writer.storage
    assert writer.tensors() == ()
    writer.prepare(param)
    assert writer.storage is storage
    assert writer.tensors() == (storage.data, storage.scale_inv)
    assert writer.agrees(param, values.float())
    assert torch.equal(param, values)


def test_scales_take_the_least_room() -> None:
    for scale_format, dtype in (("float32", torch.float32), ("ue8m0", torch.float8_e8m0fnu)):
        writer = Float8BlockWriter(scale_format=scale_format)  # type: ignore[arg-type]
        writer.prepare(Parameter(torch.ones(256, 384)))
        assert writer.storage.scale_inv.dtype == dtype
        assert writer.storage.scale_inv.shape == (2, 3)
        assert writer.storage.data.shape == (256, 384)


def test_tensors_given_are_the_tensors_written() -> None:
    given_tensors = tensors((9, 7), (4, 4), torch.float32)
    writer = Float8BlockWriter((4, 4), **given_tensors)
    param = Parameter(torch.ones(9, 7))
    writer.prepare(param)
    assert writer.storage.data is given_tensors["data"]
    assert writer.storage.scale_inv is given_tensors["scale_inv"]
    assert given_tensors["data"].float().eq(0).all(), "what was given keeps its values"
    write_all(writer, param, torch.ones(9, 7))
    assert given_tensors["data"].float().eq(448).all()


def test_tensors_that_an_engine_moved_are_written_at_their_new_place() -> None:
    param = Parameter(torch.ones(9, 7))
    writer = Float8BlockWriter((4, 4))
    writer.prepare(param)
    old = snapshot(writer)
    writer.storage.data = torch.zeros_like(writer.storage.data)
    writer.storage.scale_inv = torch.zeros_like(writer.storage.scale_inv)
    write_all(writer, param, torch.ones(9, 7))
    assert snapshot(writer) == old


@pytest.mark.parametrize("ndim", [2, 3])
def test_rows_per_block(ndim: int) -> None:
    param = Parameter(torch.ones((6,) * ndim))
    assert Float8BlockWriter((4, 4)).rows_per_block(param) == (4 if ndim == 2 else 1)


@pytest.mark.parametrize("rows", [slice(1, 9), slice(0, 3), slice(4, 7)], ids=str)
def test_part_of_a_block_is_our_own_mistake(rows: slice) -> None:
    param = Parameter(torch.ones(9, 7))
    writer = Float8BlockWriter((4, 4))
    writer.prepare(param)
    with pytest.raises(AssertionError):
        writer.write(param, torch.ones(9, 7)[rows], rows)


def test_the_source_is_handed_out_once() -> None:
    param = Parameter(torch.ones(4, 4))
    writer = Float8BlockWriter((4, 4))
    assert writer.take_source(param) is None
    source = torch.ones(4, 4, dtype=torch.bfloat16)
    writer.set_source(source)
    assert writer.take_source(param) is source
    assert writer.take_source(param) is None


def test_agreement_covers_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_writer, "_PIECE_NUMEL", 5 * 4)
    for shape in ((9, 5), (2, 9, 5)):
        param = Parameter(torch.ones(shape))
        writer = Float8BlockWriter((4, 4))
        writer.prepare(param)
        master = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        write_all(writer, param, master)
        for tensor in writer.tensors():
            view = tensor.view(torch.uint8).view(-1)
            for place in range(view.numel()):
                view[place] ^= 64
                assert not writer.agrees(param, master)
                view[place] ^= 64
        assert writer.agrees(param, master)


def bad(**changes: Any) -> dict[str, Any]:
    return {"block": (4, 4), **tensors((9, 7), (4, 4), torch.float32), **changes}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (bad(scale_inv=None), "^Float8BlockWriter: got data without scale_inv; wanted both"),
        (bad(data=None), "^Float8BlockWriter: got scale_inv without data; wanted both"),
        (bad(data=torch.zeros(9, 7)), r"^data: got torch.float32; wanted torch.float8_e4m3fn"),
        (
            bad(scale_inv=torch.ones(2, 3)),
            r"^scale_inv: got \(2, 3\); wanted \(3, 2\) for data \(9, 7\) in blocks of \(4, 4\)\. Pass",
        ),
        (
            bad(scale_inv=torch.ones(3, 2).bfloat16()),
            r"^scale_inv: got torch.bfloat16; wanted torch.f",
        ),
        (
            bad(scale_inv=torch.ones(3, 2).to(torch.float8_e8m0fnu)),
            r"^scale_inv: got torch.float8_e8m0fnu; wanted torch.float32",
        ),
        (bad(scale_inv=torch.ones(2, 3).t()), r"^scale_inv: got strides \(1, 3\); wanted a contig"),
        (
            bad(data=torch.zeros(9, 14, dtype=torch.float8_e4m3fn)[:, ::2]),
            r"^data: got strides \(14, 2\); wanted a contiguous tensor",
        ),
        (bad(scale_inv=torch.ones(3, 2, device="meta")), "^scale_inv: got meta; wanted cpu, where"),
        (bad(scale_format="e8m0"), "^scale_format: got 'e8m0'; wanted 'float32' or 'ue8m0'"),
        (bad(block=(0, 4)), r"^block: got \(0, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    Float8BlockWriter(**bad())
    with pytest.raises(ValueError, match=message):
        Float8BlockWriter(**options)


@pytest.mark.parametrize("shape", [(), (7,)], ids=str)
def test_vectors_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"two dimensions or more.*BFloat16Writer"):
        Float8BlockWriter().prepare(Parameter(torch.ones(shape)))


def test_a_released_parameter_needs_tensors() -> None:
    param = Parameter(torch.ones(9, 7))
    param.untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"^Float8BlockWriter: got no tensors.*Pass data= and scale_inv="
    ):
        Float8BlockWriter().prepare(param)
    writer = Float8BlockWriter(**bad())
    writer.prepare(param)
    write_all(writer, param, torch.ones(9, 7))
    assert torch.equal(writer.read(param), torch.ones(9, 7))
