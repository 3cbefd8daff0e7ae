"""FP8 weights in blocks: e4m3 numbers, and for every block the factor that gives the weights back.

The layout is DeepSeek's: ``weight`` (e4m3) and ``weight_scale_inv``, dequantized by multiplying. For each
block of `block` rows and columns of the trailing matrix (the last of a row or a column may be smaller), all
in FP32, rounded to nearest even after each operation::

    amax      = max |x|, at most the largest finite number
    scale_inv = max(amax / 448, 2**-126); 1 where amax is 0
    weight    = e4m3(clamp(x / scale_inv, -448, 448))

With `power_of_two` (UE8M0) ``scale_inv`` is the smallest power of two that is not below that.

- Both divisions are divisions: a product with the reciprocal gives other bytes.
- ``2**-126``, the smallest normal number, keeps blocks of denormals from dividing by zero.
- Infinities saturate to 448, and so nothing is ever NaN. A NaN in the master is the caller's to prevent.
- With `power_of_two`, what lies within 2**123 of 2**128 is decoded as an infinity: it rounds to 2**128.
- Zeros, and what rounds to zero, keep their sign.

The bytes are the same on every path and device: torch's operations, a kernel that the system's C compiler
builds (on a CPU, `float8_native`), and torch.compile (elsewhere, where Triton is). The last two are for
tensors of 64 Ki elements or more.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.math import float8_native

_log = logging.getLogger(__name__)
_Encode = Callable[[Tensor, Tensor, Tensor, bool], None]

# Not the compiler's fault; and after the second kind nothing works.
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)

E4M3_MAX = 448.0
_SMALLEST_NORMAL = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_MANTISSA_BITS = 23
_EXPONENT_MASK = 0x7F800000
# FP32 elements of the part that is encoded at a time: it stays in a CPU's cache, and fills a GPU.
_CPU_PIECE = 1 << 16
_DEVICE_PIECE = 1 << 22
_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
_NATIVE_OUTPUTS = (torch.float32, torch.bfloat16)
# Smaller tensors are encoded before a compiler has read its arguments.
_COMPILE_NUMEL = 1 << 16


def scale_shape(shape: Sequence[int], block: tuple[int, int] = (128, 128)) -> tuple[int, ...]:
    """Return the shape of the scales of a weight ``(..., m, n)``: ``(..., ceil(m/bm), ceil(n/bn))``.

    Raises:
        ValueError: `shape` has less than two dimensions, or `block` is not two positive numbers.
    """
    if len(block) != 2 or min(block) < 1:
        raise ValueError(
            complaint("block", got=block, wanted="two positive numbers", remedy="Use (128, 128).")
        )
    if len(shape) < 2:
        raise ValueError(
            complaint(
                "FP8 weight",
                got=f"shape {tuple(shape)}",
                wanted="two dimensions or more",
                remedy="Blocks are cut from matrices; use BFloat16Writer for the others.",
            )
        )
    *stack, m, n = shape
    return (*stack, -(-m // block[0]), -(-n // block[1]))


def encode_float8_(
    master: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    power_of_two: bool = False,
) -> None:
    """Write the FP8 weight of `master` to `data` and `scale_inv`, without synchronization.

    Beside the results it needs memory for a piece of 256 KiB on a CPU, of 16 MiB elsewhere.

    Args:
        master: FP32 (..., m, n), finite or infinite.
        data: float8_e4m3fn, shaped as `master`, contiguous, on its device.
        scale_inv: shaped as `scale_shape` says, contiguous: FP32, or float8_e8m0fnu (the exponent's byte).
        block: rows and columns that share a scale.
        power_of_two: whether scales are powers of two; float8_e8m0fnu holds no others.

    Raises:
        ValueError: dtypes, shapes, strides or devices are not these.
    """
    if master.dtype != torch.float32:
        raise ValueError(
            complaint("master", got=master.dtype, wanted=torch.float32, remedy="Convert it first.")
        )
    _check(master, data, scale_inv, block, _SCALE_DTYPES[: 2 if power_of_two else 1])
    on_cpu = master.device.type == "cpu"
    encode: _Encode = _encode
    if master.numel() >= _COMPILE_NUMEL:
        native = float8_native.kernels() if on_cpu and master.is_contiguous() else None
        if native is not None:
            native.encode_(master, data, scale_inv, block=block, power_of_two=power_of_two)
            return
        encode = _encode if on_cpu else _fused()
    for piece in _pieces(master.shape, block, _CPU_PIECE if on_cpu else _DEVICE_PIECE):
        encode(piece.of(master), piece.of(data), piece.scales(scale_inv), power_of_two)


def decode_float8(
    data: Tensor,
    scale_inv: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    out: Tensor | None = None,
) -> Tensor:
    """Return ``float32(data) * scale_inv``, the scale of each element's block.

    Args:
        data: float8_e4m3fn (..., m, n), contiguous.
        scale_inv: FP32 or float8_e8m0fnu, shaped as `scale_shape` says, contiguous.
        block: rows and columns that share a scale.
        out: where it goes: shaped as `data`, contiguous, any float dtype (the FP32 product, rounded once).
            None allocates FP32.

    Raises:
        ValueError: dtypes, shapes, strides or devices are not these.
    """
    result = torch.empty_like(data, dtype=torch.float32) if out is None else out
    _check(result, data, scale_inv, block, _SCALE_DTYPES)
    if not result.is_contiguous():
        raise ValueError(
            complaint(
                "out",
                got=f"strides {result.stride()}",
                wanted="contiguous",
                remedy="Copy it after.",
            )
        )
    on_cpu = data.device.type == "cpu"
    if data.numel() >= _COMPILE_NUMEL and on_cpu and result.dtype in _NATIVE_OUTPUTS:
        native = float8_native.kernels()
        if native is not None:
            native.decode_(data, scale_inv, result, block=block)
            return result
    numel = _CPU_PIECE if on_cpu else _DEVICE_PIECE
    for piece in _pieces(data.shape, block, numel):
        scales = piece.scales(scale_inv).to(torch.float32)[:, None, :, None]
        target = piece.of(result)
        if target.dtype == torch.float32:
            target.copy_(piece.of(data)).mul_(scales)
        else:
            target.copy_(piece.of(data).to(torch.float32).mul_(scales))
    return result


class _Piece(NamedTuple):
    """Blocks of one size: rows and columns of elements of one `matrix`; None: of all, taken as one."""

    matrix: int | None
    rows: slice
    columns: slice
    block: tuple[int, int]  # the size of these blocks
    scale_rows: slice
    scale_columns: slice

    def of(self, weight: Tensor) -> Tensor:
        """Return the (blocks, rows, blocks, columns) view of this piece of `weight` (..., m, n)."""
        part = self._matrix(weight)[self.rows, self.columns]
        (m, n), (bm, bn) = part.shape, self.block
        return part.view(m // bm, bm, n // bn, bn)

    def scales(self, scale_inv: Tensor) -> Tensor:
        """Return the (blocks, blocks) view of this piece of `scale_inv`."""
        return self._matrix(scale_inv)[self.scale_rows, self.scale_columns]

    def _matrix(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, -2) if self.matrix is None else tensor.flatten(0, -3)[self.matrix]


def _pieces(shape: Sequence[int], block: tuple[int, int], numel: int) -> Iterator[_Piece]:
    """Cut a weight of `shape` into pieces of equal blocks, of `numel` elements (one block at least)."""
    *stack, m, n = shape
    if math.prod(shape) == 0:
        return
    matrices = math.prod(stack)
    # Where blocks do not straddle the matrices of a stack, it is one tall matrix.
    whole = m % block[0] == 0
    for matrix in (None,) if whole else range(matrices):
        tall = matrices * m if whole else m
        for top, bottom, height in _parts(tall, block[0]):
            for left, right, width in _parts(n, block[1]):
                wide = min(right - left, max(1, numel // (height * width)) * width)
                high = min(bottom - top, max(1, numel // (height * wide)) * height)
                for row in range(top, bottom, high):
                    for column in range(left, right, wide):
                        rows = slice(row, min(row + high, bottom))
                        columns = slice(column, min(column + wide, right))
                        yield _Piece(
                            None if whole or not stack else matrix,
                            rows,
                            columns,
                            (height, width),
                            _in_blocks(rows, block[0]),
                            _in_blocks(columns, block[1]),
                        )


def _parts(size: int, block: int) -> list[tuple[int, int, int]]:
    """Return (begin, end, block) of the whole blocks and of the rest: at most two, none of them empty."""
    body = size - size % block
    parts = [(0, body, block), (body, size, size - body)]
    return [part for part in parts if part[0] < part[1]]


def _in_blocks(elements: slice, block: int) -> slice:
    return slice(elements.start // block, -(-elements.stop // block))


def _check(
    weight: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int],
    scales: tuple[torch.dtype, ...],
) -> None:
    """Refuse what a compiled kernel would take for something else; `weight` is the master or `out`."""
    if (
        data.dtype == torch.float8_e4m3fn
        and scale_inv.dtype in scales
        and weight.shape == data.shape
        and scale_inv.shape == scale_shape(data.shape, block)
        and data.is_contiguous()
        and scale_inv.is_contiguous()
        and weight.device == data.device == scale_inv.device
    ):
        return
    operands = {"weight": weight, "data": data, "scale_inv": scale_inv}
    raise ValueError(
        complaint(
            "FP8 blocks",
            got=", ".join(_described(name, tensor) for name, tensor in operands.items()),
            wanted=f"one shape, float8_e4m3fn and {' or '.join(map(str, scales))}, contiguous, one device",
            remedy=f"scale_shape tells the shape of scale_inv in blocks of {block}.",
        )
    )


def _described(name: str, tensor: Tensor) -> str:
    return (
        f"{name} {tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()} on {tensor.device}"
    )


class _Fused:
    """`_encode` in few kernels by torch.compile; as it is from the first failure on."""

    def __init__(self) -> None:
        self._compiled: _Encode | None = None

    def __call__(self, x: Tensor, data: Tensor, scale_inv: Tensor, power_of_two: bool) -> None:
        try:
            if self._compiled is None:
                # Triton's own division is off by one unit now and then.
                exact: dict[str, Any] = {"eager_numerics.division_rounding": True}
                self._compiled = torch.compile(_encode, dynamic=True, options=exact)
            self._compiled(x, data, scale_inv, power_of_two)
        except Exception as error:
            if self._compiled is _encode:
                raise
            _log.info(
                "FP8 weights are encoded by torch's operations, without a fused kernel: %s", error
            )
            self._compiled = _encode
            _encode(x, data, scale_inv, power_of_two)


@functools.cache
def _fused() -> _Encode:
    return _Fused() if importlib.util.find_spec("triton") else _encode


def _encode(x: Tensor, data: Tensor, scale_inv: Tensor, power_of_two: bool) -> None:
    """Encode (R, bm, C, bn) to e4m3 of that shape and the (R, C) scales."""
    scaled = x.abs()
    scale = _scale(scaled.amax(dim=(1, 3)), power_of_two)
    if scale_inv.dtype == torch.float8_e8m0fnu:
        scale_inv.view(torch.uint8).copy_(scale.view(torch.int32) >> _MANTISSA_BITS)
    else:
        scale_inv.copy_(scale)
    torch.div(x, scale[:, None, :, None], out=scaled)
    # The cast to e4m3 saturates on some devices and gives NaN on others.
    data.copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX))


def _scale(amax: Tensor, power_of_two: bool) -> Tensor:
    """Return the FP32 scales of blocks whose largest magnitudes are `amax`."""
    # By a tensor: a GPU divides by a number as a product with its reciprocal.
    quotient = amax.clamp(max=_LARGEST) / torch.full_like(amax, E4M3_MAX)
    scale = quotient.clamp_(min=_SMALLEST_NORMAL)
    if power_of_two:
        bits = scale.view(torch.int32)
        bits.add_((1 << _MANTISSA_BITS) - 1).bitwise_and_(_EXPONENT_MASK)
    return scale.masked_fill_(amax == 0, 1.0)
