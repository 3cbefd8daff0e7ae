"""What examples/megatron and docs/megatron.md show runs, and does what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron import models, shim
from megatron.models import Tiny, build, initialize
from megatron.pieces import gathered
from megatron.steps import forward_backward
from megatron.support import run_megatron
from muonloom.integrations.megatron import get_optimizer, options

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron" / "train.py"
GUIDE = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
BY_ONE = ("--microbatches", "2", "--placement", "device")  # what two ranks do, in one
SHORT = (
    "--steps",
    "4",
    "--save-every",
    "2",
    "--length",
    "64",
    "--rows",
    "2",
    "--heads-per-block",
    "1",
)


def trained(rank: int, *arguments: str) -> tuple[list[float], list[str]]:
    """Return the losses of a run, and the lines that it printed."""
    shim.apply()
    spec = importlib.util.spec_from_file_location("megatron_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        losses = module.main([*SHORT, *arguments])
    return losses, out.getvalue().splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--expert-model-parallel-size", "2", "--placement", "split"),
        ("--pipeline-model-parallel-size", "2", "--microbatches", "2", "--recompute"),
    ],
    ids=["experts", "pipeline"],
)
def test_two_ranks(arguments: tuple[str, ...], tmp_path: Path) -> None:
    arguments = (*arguments, "--checkpoints", str(tmp_path))
    (losses, lines), (others, nothing) = run_megatron(2, trained, *arguments)
    assert losses == others
    assert len(losses) == len(lines) == 4
    assert nothing == []
    assert losses[0] == pytest.approx(5.6, abs=0.3)  # ln 256 = 5.5
    assert losses[-1] < losses[0] - 0.5
    for number, (line, loss) in enumerate(zip(lines, losses, strict=True), start=1):
        assert line.startswith(f"step {number}  loss {loss:.3f}  norm ")
        assert "'skipped': False" in line
        assert "'ns_calls': 0" not in line

    shutil.rmtree(tmp_path / "step-4")
    (tmp_path / "step-3").mkdir()  # as one that was being written when the run was killed
    for resumed, _ in run_megatron(2, trained, *arguments):
        assert resumed == losses[2:]

    shutil.rmtree(tmp_path / "step-4")
    [(alone, _)] = run_megatron(1, trained, *BY_ONE, "--checkpoints", str(tmp_path))
    assert alone == pytest.approx(losses[2:], abs=2e-3)  # sums in another order


def groups(rank: int) -> tuple[list[int], ...]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=8, expert_tensor_parallel_size=1
    )
    found = (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )
    return tuple(dist.get_process_group_ranks(group) for group in found)


def test_the_arrangement_of_the_readme_is_one_that_megatron_makes() -> None:
    for rank, (data, expert, expert_tensor, expert_data) in enumerate(run_megatron(8, groups)):
        assert data == list(range(rank % 2, 8, 2))
        assert expert == list(range(8))
        assert expert_tensor == expert_data == [rank]


# -- the guide --------------------------------------------------------------------------------------------


def guided(rank: int, snippets: list[str], directory: str) -> dict[str, Any]:
    """Run the guide's snippets one after the other, on a small model; return what they made."""
    tiny = Tiny(kind="moe", dtype=torch.bfloat16)
    initialize(tiny)
    with mock.patch.object(models, "_wrapped", lambda tiny, config, chunk: chunk):
        [bare] = build(tiny)
    chunks = build(tiny)
    names: dict[str, Any] = {"model_chunks": chunks, "model": bare, "directory": directory}
    forward_backward(tiny, chunks, 0)
    found: dict[str, Any] = {}
    for snippet in snippets:
        before = gathered(chunks)
        if "dist_checkpointing.load" in snippet:  # in another run
            names["model_chunks"] = chunks = build(replace(tiny, seed=1))
            names["optimizer"] = get_optimizer(names["config"], chunks, placement="host")
        if "scheduler" in snippet:
            names["scheduler"] = OptimizerParamScheduler(
                names["optimizer"], 0.0, 1.0, 0.0, 1, 9, "linear", 0.1, 0.1, 9, "constant"
            )
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(snippet, names)
        if "print(layout)" in snippet:
            found["layout"] = out.getvalue().splitlines()
        if "print(optimizer.muon.last_step)" in snippet:
            assert names["is_taken"]
            assert names["gradient_norm"] > 0
            assert names["num_zeros"] is None
            assert "'ns_calls'" in out.getvalue()
            assert any(not torch.equal(before[key], now) for key, now in gathered(chunks).items())
        if "dist_checkpointing.load" in snippet:
            assert all(torch.equal(before[key], now) for key, now in gathered(chunks).items())
        if "apply_to_masters" in snippet or "refresh_masters" in snippet:
            for key, now in gathered(chunks).items():
                is_chosen = key.endswith("linear_qkv.weight")
                assert torch.allclose(now, before[key] * (0.99 if is_chosen else 1), rtol=1e-2)
                assert torch.equal(now, before[key]) != is_chosen
            forward_backward(tiny, chunks, 1)
            assert names["optimizer"].step()[0]
    found["kept"] = [names["master"] is not None, names["rows"]]
    found["registered"] = type(names["registered"]).__name__
    found["glm5"] = names["glm5"].num_moe_experts
    return found


def test_the_guide_runs(tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(snippets) == 10
    ranks = run_megatron(2, guided, snippets, str(tmp_path))
    [printed] = re.findall(r"```\n(parameter .*?)```", GUIDE, re.DOTALL)
    assert all(own["layout"][0].split() == printed.splitlines()[0].split() for own in ranks)
    # The last parameter, the output layer's, is shared out by rows or lies on one rank.
    assert sorted(own["kept"][0] for own in ranks) in ([False, False], [False, True])
    assert sum(len(range(64)[own["kept"][1]]) for own in ranks) == 64


def printed_layout(rank: int, snippet: str) -> list[str]:
    tiny = Tiny(
        kind="mla_moe",
        num_mtp_layers=1,
        tensor_parallel=2,
        sequence_parallel=True,
        expert_parallel=2,
        expert_tensor_parallel=1,
    )
    initialize(tiny)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(snippet, {"model_chunks": build(tiny)})
    return out.getvalue().splitlines()


def test_the_guide_shows_the_layout_that_is_printed() -> None:
    [snippet] = re.findall(r"```python\n([^`]*print\(layout\)\n)```", GUIDE)
    [shown] = re.findall(r"```\n(parameter .*?)```", GUIDE, re.DOTALL)
    lines, _ = run_megatron(2, printed_layout, snippet)
    rows = {tuple(re.split(r"\s{2,}", line)) for line in lines}
    shown = [tuple(re.split(r"\s{2,}", line)) for line in shown.splitlines()]
    del shown[1]  # dashes
    assert set(shown) <= rows
    left_out = rows - set(shown)
    assert all(name[0].startswith(("mtp.", "---")) or "norm" in name[0] for name in left_out)


def test_the_guide_knows_every_field_that_there_is_an_answer_to() -> None:
    known = {field.name for field in fields(OptimizerConfig)}
    asked = set(re.findall(r"config\.(\w+)", Path(options.__file__).read_text(encoding="utf-8")))
    refused = {"fp16", "loss_scale", "overlap_param_gather", "muon_scalar_optimizer"}
    told = set(re.findall(r"`(\w+)`", GUIDE))
    assert (asked & known) | refused <= told
    muon = {name for name in known if name.startswith(("muon_", "adam_"))}
    assert muon <= told
