"""docs/training.md names every key of the configuration, with its default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muonloom.train.config import TrainConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", list(TrainConfig.model_fields))
def test_the_guide_names_every_key_and_its_default(section):
    part = GUIDE.partition(f"### `[{section}]`\n")[2].partition("\n### ")[0]
    for key, field in TrainConfig.model_fields[section].annotation.model_fields.items():
        rows = [line for line in part.splitlines() if line.startswith(f"| `{key}` |")]
        if section == "optim" and not rows:
            assert f"`{key}`" in part, key  # documented with muonloom.Muon
            continue
        assert len(rows) == 1, key
        default = rows[0].split("|")[2].strip()
        assert default == ("" if field.default is None else f"`{json.dumps(field.default)}`"), key
