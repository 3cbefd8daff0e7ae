"""The benchmarks of device weights: what they compute and write."""

from __future__ import annotations

import pytest

from muonloom.bench import float8_training, release


@pytest.mark.parametrize("float8", [False, True])
def test_release_and_resume_are_timed_beside_a_copy(float8):
    found = release.measure(float8, shape=(2, 128, 128), rounds=1)
    assert found.weights == ("FP8" if float8 else "BF16")
    assert min(found.release_s, found.resume_s, found.copy_s) > 0
    *_, row = release.markdown([found], master_bytes=1 << 20)
    assert row.startswith(f"| {found.weights} |")


def test_the_table_stands_between_the_markers_and_the_rest_stays(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{release.BEGIN}\nold\n{release.END}\nafter\n")
    found = release.Measured(weights="BF16", release_s=0.01, resume_s=0.2, copy_s=0.1)
    monkeypatch.setattr(release, "measure", lambda float8: found)
    assert release.main(["--out", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| BF16 | 10.0 ms | 200 ms | 100 ms | 2.00 |" in text


def test_means_are_compared_with_the_pooled_deviation():
    losses = {"BF16 experts": [1.0, 1.2, 1.4], "FP8 experts": [1.1, 1.3, 1.5]}
    difference, pooled = float8_training.spread(losses)
    assert difference == pytest.approx(0.1)
    assert pooled == pytest.approx(0.2)
    lines = float8_training.markdown(losses)
    assert "| FP8 experts | 1.1000, 1.3000, 1.5000 | 1.3000 |" in lines
    assert lines[-1].startswith("The means differ by +0.1000: 0.5 pooled standard deviations")
