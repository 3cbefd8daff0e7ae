"""BF16 weights: rounded to nearest even into a tensor of one's own, or into the parameter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from muonloom import bits
from muonloom.bfloat16_writer import BFloat16Writer
from writers.contract import Case, WriterContract, write_all


def with_data(param: Parameter) -> BFloat16Writer:
    return BFloat16Writer(torch.full(param.shape, -1.0, dtype=torch.bfloat16))


def without_data(param: Parameter) -> BFloat16Writer:
    return BFloat16Writer()


SHAPES = ((), (5,), (7, 9), (3, 4, 5), (0, 4))
CASES = {
    **{f"data {shape}": Case(make=with_data, shape=shape) for shape in SHAPES},
    **{
        f"{dtype} parameter {shape}": Case(
            make=without_data, shape=shape, dtype=dtype, released=False
        )
        for shape in SHAPES
        for dtype in (torch.bfloat16, torch.float32)
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestBFloat16Writer(WriterContract):
    pass


def test_the_bits_are_those_of_the_plain_writeback() -> None:
    master = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    param = Parameter(torch.empty(64, 64))
    writer = with_data(param)
    write_all(writer, param, master)
    assert torch.equal(writer.data, master.to(torch.bfloat16))


def test_storage_is_the_tensor_given() -> None:
    data = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert BFloat16Writer(data).storage is data
    assert BFloat16Writer(data).data is data
    assert BFloat16Writer().storage is None


def test_agreement_is_of_bits_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "_PIECE_NUMEL", 16)
    param = Parameter(torch.zeros(9, 8))
    writer = with_data(param)
    master = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    write_all(writer, param, master)
    assert writer.agrees(param, master)
    writer.data[-1, -1] = -writer.data[-1, -1]
    assert not writer.agrees(param, master)
    writer.data.zero_()
    assert writer.agrees(param, torch.zeros(9, 8))
    assert not writer.agrees(param, -torch.zeros(9, 8))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^data: got torch.float16; wanted torch.bfloat16"):
        BFloat16Writer(torch.zeros(2, dtype=torch.float16))


def test_a_released_parameter_needs_a_tensor() -> None:
    param = Parameter(torch.zeros(3, 3))
    param.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^BFloat16Writer.data: got None.*Pass data="):
        BFloat16Writer().prepare(param)
