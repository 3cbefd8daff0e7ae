"""The independent reference of FP8 blocks: exact rationals, rounded where FP32 and e4m3 round.

Nothing here imports the package or torch. A matrix is a list of rows of Python floats that FP32 holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Matrix = Sequence[Sequence[float]]
LARGEST_FP32 = Fraction(2**24 - 1) * 2**104
SMALLEST_NORMAL = Fraction(1, 2**126)
# Code 8e + f: f·2⁻⁹ for e = 0, else (8 + f)·2^(e - 10). Code 127 is NaN.
CODES = {
    Fraction(code % 8 + (8 if code > 7 else 0)) * Fraction(2) ** (max(code // 8, 1) - 10): code
    for code in range(127)
}
VALUES = {code: number for number, code in CODES.items()}


def rounded(value: Fraction, *, digits: int, lowest: int) -> Fraction:
    """Return the nearest m·2^e, ties to even m, with `digits` binary digits in m and e >= `lowest`."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - digits
    if value >= Fraction(2) ** (exponent + digits):
        exponent += 1
    unit = Fraction(2) ** max(exponent, lowest)
    return round(value / unit) * unit


def fp32(value: Fraction) -> Fraction:
    return rounded(value, digits=24, lowest=-149)


def e4m3(value: Fraction) -> int:
    """Return the code of a magnitude; all from 448 on are 448."""
    return CODES[min(rounded(value, digits=4, lowest=-9), Fraction(448))]


def scale(block: Sequence[float], *, power_of_two: bool) -> Fraction:
    amax = max(magnitude(x) for x in block)
    if amax == 0:
        return Fraction(1)
    least = max(fp32(amax / 448), SMALLEST_NORMAL)
    if not power_of_two:
        return least
    below = Fraction(2) ** (least.numerator.bit_length() - least.denominator.bit_length() - 1)
    return next(below * factor for factor in (1, 2, 4) if below * factor >= least)


def magnitude(x: float) -> Fraction:
    return LARGEST_FP32 if math.isinf(x) else abs(Fraction(x))


def byte(x: float, by: Fraction) -> int:
    code = 126 if math.isinf(x) else e4m3(fp32(magnitude(x) / by))
    return code + (128 if math.copysign(1, x) < 0 else 0)


def encode(
    matrix: Matrix, block: tuple[int, int], *, power_of_two: bool
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the bytes of an (m, n) matrix and the scales of its blocks."""
    m, n = len(matrix), len(matrix[0])
    codes = [[0] * n for _ in range(m)]
    scales: list[list[float]] = []
    for top in range(0, m, block[0]):
        scales.append([])
        for left in range(0, n, block[1]):
            rows = range(top, min(top + block[0], m))
            columns = range(left, min(left + block[1], n))
            by = scale([matrix[i][j] for i in rows for j in columns], power_of_two=power_of_two)
            scales[-1].append(float(by))
            for i in rows:
                for j in columns:
                    codes[i][j] = byte(matrix[i][j], by)
    return codes, scales


def decode(
    codes: Sequence[Sequence[int]], scales: Matrix, block: tuple[int, int]
) -> list[list[float]]:
    """Return the values of the bytes, products rounded to FP32."""
    return [
        [value(code, Fraction(scales[i // block[0]][j // block[1]])) for j, code in enumerate(row)]
        for i, row in enumerate(codes)
    ]


def value(code: int, by: Fraction) -> float:
    product = fp32(VALUES[code % 128] * by)
    return math.copysign(float(product) if product < 2**128 else math.inf, -1 if code > 127 else 1)
