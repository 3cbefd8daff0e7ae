from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muonloom.bench.accuracy import BEGIN, END, accuracy_table, main


def test_the_command_writes_between_its_markers_only(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\ntail\n", encoding="utf-8")
    assert main(["--out", str(page), "--short", "8", "--quick"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\ntail\n")
    assert "old" not in text
    assert text.count("| condition |") == 16  # 4 coefficient sets, 2 methods, 2 dtypes
    assert "polar_express_1.05" in text
    assert main(["--out", str(page), "--short", "8", "--quick"]) == 0
    assert page.read_text(encoding="utf-8") == text


def test_a_page_without_markers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text("nothing\n", encoding="utf-8")
    assert main(["--out", str(page), "--quick"]) == 2
    assert capsys.readouterr().err.startswith("error: --out: got no markers")
    assert main(["--out", str(tmp_path / "absent.md"), "--quick"]) == 2


def test_measurements_agree_with_the_polynomial() -> None:
    """The scalar polynomial gives the singular values, and so their distance to 1."""
    measured = accuracy_table(
        "quintic", "standard", torch.float64, conditions=(1e0, 1e3), aspects=(1, 3), short=8
    )
    assert [(a.condition, a.aspect) for a in measured] == [(1e0, 1), (1e0, 3), (1e3, 1), (1e3, 3)]
    for a in measured:
        s = torch.logspace(0, -3 if a.condition == 1e3 else 0, 8, dtype=torch.float64)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert a.error < 1e-5  # the input is rounded to FP32
        assert a.largest == pytest.approx(float(s.max()), rel=1e-5)
        assert a.smallest == pytest.approx(float(s.min()), rel=1e-3)
        assert a.to_polar == pytest.approx(float((s - 1).norm() / 8**0.5), rel=1e-4)
