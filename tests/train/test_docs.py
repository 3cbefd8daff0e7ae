"""docs/training.md and docs/host-placement.md name every key and option, with its default."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

import muonloom
from muonloom.train.config import HostConfig, TrainConfig

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "training.md").read_text(encoding="utf-8")
HOST_GUIDE = (DOCS / "host-placement.md").read_text(encoding="utf-8")
SECTIONS = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
SECTIONS["optim.host"] = HostConfig


@pytest.mark.parametrize("section", list(SECTIONS))
def test_the_guide_names_every_key_and_its_default(section):
    part = GUIDE.partition(f"### `[{section}]`\n")[2].partition("\n### ")[0]
    for key, field in SECTIONS[section].model_fields.items():
        rows = [line for line in part.splitlines() if line.startswith(f"| `{key}` |")]
        if section == "optim" and not rows:
            assert f"`{key}`" in part, key  # documented with muonloom.Muon
            continue
        assert len(rows) == 1, key
        default = rows[0].split("|")[2].strip()
        assert default == ("" if field.default is None else f"`{json.dumps(field.default)}`"), key


def test_the_guide_to_host_placement_names_every_option_and_its_default():
    options = dict(inspect.signature(muonloom.HostPlacement).parameters)
    muon = inspect.signature(muonloom.Muon).parameters
    options |= {name: muon[name] for name in ("momentum_dtype", "ns_batch_bytes", "free_gradients")}
    for name, parameter in options.items():
        (row,) = [line for line in HOST_GUIDE.splitlines() if line.startswith(f"| `{name}` |")]
        default = parameter.default
        shown = json.dumps(default) if isinstance(default, str) else str(default)
        assert row.split("|")[2].strip() == f"`{shown}`", name


def test_the_example_of_the_guide_to_host_placement_runs(capsys):
    code = HOST_GUIDE.partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    assert "'device_state': 0" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:params. none of .* is a matrix")
@pytest.mark.parametrize(
    ("dtype", "master_layout", "momentum_dtype", "algorithm", "row", "column"),
    [
        (torch.bfloat16, "full", torch.float32, "muon", "full masters", 1),
        (torch.bfloat16, "full", torch.bfloat16, "muon", "full masters", 2),
        (torch.bfloat16, "full", torch.float32, "adamw", "full masters", 3),
        (torch.bfloat16, "split", torch.float32, "muon", "split masters", 1),
        (torch.bfloat16, "split", torch.bfloat16, "muon", "split masters", 2),
        (torch.bfloat16, "split", torch.float32, "adamw", "split masters", 3),
        (torch.float32, "split", torch.float32, "muon", "either layout", 1),
        (torch.float32, "full", torch.bfloat16, "muon", "either layout", 2),
        (torch.float32, "full", torch.float32, "adamw", "either layout", 3),
    ],
)
def test_the_traffic_table_is_what_the_optimizer_counts(
    dtype, master_layout, momentum_dtype, algorithm, row, column
):
    (cells,) = [line.split("|") for line in HOST_GUIDE.splitlines() if f"{row} |" in line]
    bytes_an_element = int(cells[column + 1].strip(" *"))
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = muonloom.Muon(
        [{"params": [("weight", weight)], "algorithm": algorithm, "lr": 0.1}],
        momentum_dtype=momentum_dtype,
        placement=muonloom.HostPlacement(master_layout=master_layout),
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    report = optimizer.last_step
    assert report.bytes_in == report.bytes_out == bytes_an_element * weight.numel()
    assert optimizer.memory()["host_state"] == bytes_an_element * weight.numel()
