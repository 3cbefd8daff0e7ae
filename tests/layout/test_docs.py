"""The guide's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from muonloom.layout import family_names

GUIDE = Path(__file__).parents[2] / "docs" / "layout.md"


def test_the_code_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), namespace)
    assert "acme_moe" in family_names()
    table = capsys.readouterr().out
    assert re.search(r"model\.layers\.\*\.self_attn\.q_b_proj\.weight +3 .*4 x \(16, 32\)", table)
