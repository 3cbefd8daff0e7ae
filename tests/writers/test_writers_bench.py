"""The benchmark of writers prints a row a writer, and sets BF16 at 1."""

from __future__ import annotations

import pytest

from muonloom.bench import writers


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    writers.main(["--quick"])
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == 7
    assert [row.split("|")[2].strip() for row in rows] == [
        "BF16 write-back",
        "FP8 128×128, FP32 scales",
        "FP8 128×128, UE8M0",
        "FP8 1×128, FP32 scales",
    ]
    assert rows[0].split("|")[5].strip() == "1.00"
