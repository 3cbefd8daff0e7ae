"""FP8 blocks: the same bytes as the reference, on every path, for every kind of number and shape."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference.float8 as reference
from choosing import mostly_slow, slow
from muonloom.math import decode_float8, encode_float8_, float8, float8_native, scale_shape

BLOCKS = [(128, 128), (1, 128), (3, 2), (5, 7), (1, 1)]
FORMATS = {
    "float32": (False, torch.float32),
    "power of two in FP32": (True, torch.float32),
    "ue8m0": (True, torch.float8_e8m0fnu),
}
PATHS = ("torch", "native")


def encode(
    master: Tensor,
    block: tuple[int, int] = (128, 128),
    power_of_two: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    data = torch.empty(master.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(scale_shape(master.shape, block), dtype=dtype)
    encode_float8_(master, data, scale_inv, block=block, power_of_two=power_of_two)
    return data, scale_inv


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Encode everything by one path, however small it is."""
    if request.param == "native" and float8_native.kernels() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(float8, "_COMPILE_NUMEL", 1 if request.param == "native" else math.inf)
    return str(request.param)


def expect_reference(
    master: Tensor, block: tuple[int, int], power_of_two: bool, dtype: torch.dtype
) -> None:
    """Compare every byte of `master`'s encoding, (..., m, n), and every value of its decoding."""
    data, scale_inv = encode(master, block, power_of_two, dtype)
    decoded = decode_float8(data, scale_inv, block=block)
    m, n = master.shape[-2:]
    matrices = (master.reshape(-1, m, n), data.view(torch.uint8).view(-1, m, n))
    scales = scale_inv.float().view(-1, *scale_inv.shape[-2:])
    for x, codes, scale, values in zip(*matrices, scales, decoded.view(-1, m, n), strict=True):
        expected, expected_scale = reference.encode(x.tolist(), block, power_of_two=power_of_two)
        assert scale.tolist() == expected_scale
        assert codes.tolist() == expected
        assert values.tolist() == reference.decode(expected, expected_scale, block)


def hostile(numel: int, seed: int) -> Tensor:
    """Magnitudes of all FP32 exponents, zeros of both signs, infinities, denormals."""
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=draw).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isnan(), torch.tensor(-0.0), x)
    x[torch.randint(numel, (1 + numel // 50,), generator=draw)] = -math.inf
    return x


def kinds(m: int, n: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(m, n, generator=draw)
    yield "normal", normal
    yield "weights of very different sizes", normal * torch.logspace(-9, 0, n)
    yield "huge", normal * 1e38
    yield "denormal", normal * 1e-40
    yield "around the smallest normal number times 448", normal * 2.0**-118
    yield "hostile", hostile(m * n, seed).view(m, n)
    yield "zero", torch.zeros(m, n)
    one = torch.zeros(m, n)
    one[-1, 0] = normal[0, 0]
    yield "zero but for one", one
    yield "negative zero", -torch.zeros(m, n)
    yield "infinite", torch.full((m, n), math.inf)


# A block that holds all of the matrix in every format, the others in one each.
EACH_TIME = [
    *itertools.product([(128, 128)], FORMATS),
    ((1, 128), "ue8m0"),
    ((3, 2), "float32"),
    ((5, 7), "power of two in FP32"),
    ((1, 1), "ue8m0"),
]


@pytest.mark.parametrize(
    ("block", "kind"), mostly_slow(itertools.product(BLOCKS, FORMATS), but=EACH_TIME), ids=str
)
def test_bytes_are_the_reference(block: tuple[int, int], kind: str, path: str) -> None:
    for _, master in kinds(7, 40):
        expect_reference(master, block, *FORMATS[kind])


@pytest.mark.parametrize("seed", [0, slow(1)])
def test_whole_and_ragged_blocks_of_128(seed: int, path: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    master = torch.randn(130, 140, generator=draw) * torch.randn(130, 1, generator=draw).exp()
    expect_reference(master, (128, 128), False, torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=2, max_size=4),
    block=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    power_of_two=st.booleans(),
    native=st.booleans(),
    piece=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_any_shape_block_and_piece(
    shape: list[int],
    block: tuple[int, int],
    power_of_two: bool,
    native: bool,
    piece: int,
    seed: int,
) -> None:
    master = hostile(math.prod(shape), seed).view(shape) if math.prod(shape) else torch.empty(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "_COMPILE_NUMEL", 1 if native else math.inf)
        patch.setattr(float8, "_CPU_PIECE", piece)
        if master.numel():
            expect_reference(master, block, power_of_two, torch.float32)
        else:
            data, scale_inv = encode(master, block, power_of_two)
            assert decode_float8(data, scale_inv, block=block).shape == tuple(shape)


def test_every_midpoint_of_e4m3_and_its_neighbours(path: str) -> None:
    """448 in the block makes the scale 1, so that each number is rounded as it stands."""
    values = torch.tensor([float(value) for value in reference.CODES])
    middles = (values[:-1] + values[1:]) / 2
    points = torch.cat((values, middles))
    around = torch.stack(
        (
            points.nextafter(torch.tensor(-math.inf)),
            points,
            points.nextafter(torch.tensor(math.inf)),
        )
    )
    master = torch.cat((around.flatten().clamp(max=448), torch.tensor([448.0])))
    master = torch.stack((master, -master))
    data, scale_inv = encode(master, master.shape)  # type: ignore[arg-type]
    assert scale_inv.item() == 1
    codes = data.view(torch.uint8)
    assert set(codes.flatten().tolist()) == set(range(256)) - {127, 255}
    expected = [[reference.byte(x, reference.Fraction(1)) for x in row] for row in master.tolist()]
    assert codes.tolist() == expected


def test_every_code_comes_back(path: str) -> None:
    """Encoding a decoded weight again changes no byte where each block holds a 448, as with FP32 scales.

    The scale may come back as its neighbour: 448·scale and the quotient of that by 448 are each rounded.
    Then code·scale divided by the new scale is within 3·2⁻²⁴ of code, far from any midpoint.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.cat((codes[:127], codes[128:255])).repeat(300, 1)
    draw = torch.Generator().manual_seed(0)
    scale_inv = torch.rand(300, 1, generator=draw) * torch.logspace(-30, 30, 300)[:, None]
    for _ in range(2):
        weight = decode_float8(codes.view(torch.float8_e4m3fn), scale_inv, block=(1, 254))
        data, scale_again = encode(weight, (1, 254))
        assert torch.equal(data.view(torch.uint8), codes)
        assert int((scale_again.view(torch.int32) - scale_inv.view(torch.int32)).abs().max()) <= 1
        scale_inv = scale_again


def test_powers_of_two_come_back_with_the_same_values(path: str) -> None:
    """Nothing is rounded. But a block whose largest number is 224 takes half the scale: other bytes."""
    draw = torch.Generator().manual_seed(0)
    master = torch.randn(64, 64, generator=draw)
    data, scale_inv = encode(master, (8, 8), True)
    weight = decode_float8(data, scale_inv, block=(8, 8))
    largest = weight.view(8, 8, 8, 8).abs().amax(dim=(1, 3)) / scale_inv
    again, scale_again = encode(weight, (8, 8), True)
    assert torch.equal(decode_float8(again, scale_again, block=(8, 8)), weight)
    assert torch.equal(scale_again, torch.where(largest <= 224, scale_inv / 2, scale_inv))


def test_error_of_a_round_trip_is_that_of_three_mantissa_bits() -> None:
    """RMS of uniform rounding: a step of 2^(e-3) for numbers of 2^e to 2^(e+1) is 2.6 % of normal data."""
    for seed in (0, 1):
        master = torch.randn(256, 384, generator=torch.Generator().manual_seed(seed))
        data, scale_inv = encode(master)
        error = decode_float8(data, scale_inv) - master
        assert float(error.norm() / master.norm()) == pytest.approx(0.0264, abs=3e-4)


@pytest.mark.parametrize(
    "shape", [(512, 640), (3, 300, 500), (700, 900), (1, 1 << 18), (1 << 18, 1)], ids=str
)
@pytest.mark.parametrize("block", [(128, 128), (1, 128)], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_bytes_are_those_of_torch(
    shape: tuple[int, ...],
    block: tuple[int, int],
    power_of_two: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if float8_native.kernels() is None:
        pytest.skip("no C compiler")
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    master.view(-1)[1000:2000] = hostile(1000, 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    native = encode(master, block, power_of_two)
    read = decode_float8(*native, block=block)
    monkeypatch.setattr(float8_native, "kernels", lambda: None)
    assert torch.equal(decode_float8(*native, block=block), read)
    for got, expected in zip(native, encode(master, block, power_of_two), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_plain_c_gives_the_bytes_of_the_vectorized_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processors run: compiled for the least of x86, where there is no AVX2."""
    if float8_native.kernels() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(float8, "_COMPILE_NUMEL", 1)
    monkeypatch.setattr(float8_native, "_ATTEMPTS", ((),))
    plain = float8_native._kernels.__wrapped__()
    assert plain is not None
    monkeypatch.setattr(float8_native, "kernels", lambda: plain)
    for _, master in kinds(5, 70):
        expect_reference(master, (4, 64), False, torch.float32)


def test_native_writes_are_seen_by_version_counters(path: str) -> None:
    data, scale_inv = encode(torch.ones(4, 4), (2, 2))
    before = (data._version, scale_inv._version)
    encode_float8_(torch.ones(4, 4), data, scale_inv, block=(2, 2))
    assert data._version > before[0]
    assert scale_inv._version > before[1]


@pytest.mark.parametrize("compiler", ["none", "failing"])
def test_without_a_working_compiler_it_goes_on(
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", "/nowhere/cc" if compiler == "none" else str(broken))
    with caplog.at_level(logging.INFO):
        assert float8_native._kernels.__wrapped__() is None
    assert len(caplog.records) == 1
    assert "without compiled kernels" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize(("power_of_two", "dtype"), FORMATS.values(), ids=FORMATS)
def test_fused_bytes_are_those_of_torch(power_of_two: bool, dtype: torch.dtype) -> None:
    """The function that accelerators run through torch.compile, on its CPU back end."""
    fused = float8._Fused()
    for rows, columns in ((256, 384), (512, 128)):
        for _, master in kinds(rows, columns):
            expected = encode(master, (128, 128), power_of_two, dtype)
            got = [torch.empty_like(tensor) for tensor in expected]
            blocks = [
                tensor.view(rows // 128, 128, columns // 128, 128) for tensor in (master, got[0])
            ]
            fused(*blocks, got[1], power_of_two)
            assert fused._compiled is not float8._encode, "it failed and fell back"
            for tensor, other in zip(got, expected, strict=True):
                assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def test_a_failing_fused_kernel_falls_back_for_good(caplog: pytest.LogCaptureFixture) -> None:
    fused = float8._Fused()
    calls: list[object] = []

    def fails(*operands: object) -> None:
        calls.append(operands)
        raise RuntimeError("no back end")

    fused._compiled = fails
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            data, scale = torch.empty(1, 2, 1, 2, dtype=torch.float8_e4m3fn), torch.empty(1, 1)
            fused(torch.ones(1, 2, 1, 2), data, scale, False)
            assert data.float().unique().item() == 448
    assert len(calls) == len(caplog.records) == 1


def test_strided_masters(path: str) -> None:
    master = torch.randn(40, 3, 30, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    expected = encode(master.contiguous(), (16, 8))
    for got, other in zip(encode(master, (16, 8)), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_decoding_into_a_given_tensor_rounds_the_product_once(
    dtype: torch.dtype, path: str
) -> None:
    master = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(0))
    data, scale_inv = encode(master, (8, 8))
    out = torch.empty(master.shape, dtype=dtype)
    assert decode_float8(data, scale_inv, block=(8, 8), out=out) is out
    assert torch.equal(out, decode_float8(data, scale_inv, block=(8, 8)).to(dtype))


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((256, 384), (128, 128), (2, 3)),
        ((257, 1), (128, 128), (3, 1)),
        ((4, 5, 256), (1, 128), (4, 5, 2)),
        ((2, 3, 0, 7), (2, 2), (2, 3, 0, 4)),
    ],
)
def test_scale_shape(
    shape: tuple[int, ...], block: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert scale_shape(shape, block) == expected


def test_scale_shape_refuses_vectors_and_empty_blocks() -> None:
    with pytest.raises(ValueError, match=r"got shape \(7,\).*BFloat16Writer"):
        scale_shape((7,))
    with pytest.raises(ValueError, match=r"^block: got \(0, 2\)"):
        scale_shape((7, 7), (0, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"master": torch.ones(4, 4, dtype=torch.bfloat16)},
        {"master": torch.ones(4, 5)},
        {"data": torch.empty(4, 4, dtype=torch.float8_e5m2)},
        {"data": torch.empty(4, 8, dtype=torch.float8_e4m3fn)[:, ::2]},
        {"scale_inv": torch.empty(2, 3)},
        {"scale_inv": torch.empty(2, 2, dtype=torch.float8_e8m0fnu)},
        {"scale_inv": torch.empty(2, 2, dtype=torch.float64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Tensor]) -> None:
    operands = {
        "master": torch.ones(4, 4),
        "data": torch.empty(4, 4, dtype=torch.float8_e4m3fn),
        "scale_inv": torch.empty(2, 2),
    }
    encode_float8_(**operands, block=(2, 2))
    with pytest.raises(ValueError, match=r"^(FP8 blocks: got weight|master: got)"):
        encode_float8_(**{**operands, **change}, block=(2, 2))


def test_what_cannot_be_decoded_is_refused() -> None:
    data, scale_inv = encode(torch.ones(4, 4), (2, 2))
    with pytest.raises(ValueError, match=r"^out: got strides \(1, 4\)"):
        decode_float8(data, scale_inv, block=(2, 2), out=torch.empty(4, 4).t())
    with pytest.raises(ValueError, match=r"^FP8 blocks: .*blocks of \(1, 2\)"):
        decode_float8(data, scale_inv, block=(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foreign_bytes_are_decoded_alike(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every code, NaN too, under the extreme scales that a checkpoint could hold."""
    if float8_native.kernels() is None:
        pytest.skip("no C compiler")
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(7, 1).view(torch.float8_e4m3fn)
    exponents = torch.tensor([0, 1, 7, 127, 250, 254, 255], dtype=torch.uint8)[:, None]
    fp32 = torch.tensor([0.0, 1e-45, 2.0**-126, 0.3, 1e38, math.inf, math.nan])[:, None]
    for scale_inv in (exponents.view(torch.float8_e8m0fnu), fp32):
        results = []
        for least in (1, math.inf):
            monkeypatch.setattr(float8, "_COMPILE_NUMEL", least)
            out = torch.empty(7, 256, dtype=dtype)
            results.append(decode_float8(codes, scale_inv, block=(1, 256), out=out))
        native, plain = results
        torch.testing.assert_close(native, plain, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(native.signbit() & ~native.isnan(), plain.signbit() & ~plain.isnan())
