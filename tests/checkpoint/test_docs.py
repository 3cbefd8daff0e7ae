"""What docs/checkpoints.md shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import muonloom

GUIDE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def snippets() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if "import muonloom" in block]


def test_the_loop_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    loop = snippets()[0]
    exec(compile(loop, "docs", "exec"), {})
    assert muonloom.checkpoint.latest("checkpoints") == Path("checkpoints/step-20")
    again = loop.replace("range(start, 20)", "range(start, 30)")
    names: dict[str, Any] = {}
    exec(compile(again, "docs", "exec"), names)
    assert names["start"] == 20
    kept = sorted(path.name for path in Path("checkpoints").iterdir())
    assert kept == ["latest", "step-20", "step-30"]


def test_state_of_torchs_two_optimizers_comes_over():
    names: dict[str, Any] = {}
    exec(compile(snippets()[1], "docs", "exec"), names)
    assert names["optimizer"].param_groups[0]["lr"] == 0.02
