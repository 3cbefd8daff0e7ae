"""The example of a loop over FSDP2 runs, learns, and counts what it says it counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from train.launching import launch

_PATH = Path(__file__).parents[2] / "examples" / "fsdp2.py"
PARAMETERS = 559_872


def numbers(line: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"(\d[\d,]*) B\b", line)]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_two_ranks(dtype: str, size: int) -> None:
    command = [str(_PATH), "--steps", "4", "--rows", "2", "--param-dtype", dtype]
    first, second = launch([command] * 2)
    assert [first.code, second.code] == [0, 0], first.err + second.err
    assert second.out == ""
    *steps, rank_0, rank_1, masters, gathered = first.out.splitlines()

    losses = [float(line.split()[3]) for line in steps]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1
    for line in steps:
        payload, control = numbers(line)
        # Matrices that a border cuts, there or back: less than the rank's half of all weights, in FP32.
        assert 0 < payload < PARAMETERS // 2 * 4
        assert control == 64

    half = PARAMETERS // 2
    for line in (rank_0, rank_1):
        weights, gradients, state = numbers(line)
        assert weights == gradients == half * size
        # FP32 momentum, AdamW's second moment, and a master where the parameter is none.
        assert half * (4 + 4 * (size == 2)) < state < half * (8 + 4 * (size == 2))
    assert numbers(masters) == [half * 4 * (size == 2)]
    (received,) = numbers(gathered)
    assert half * size < received < PARAMETERS * size
