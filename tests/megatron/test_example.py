"""examples/megatron/train.py learns, and goes on bit for bit from what it saved."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from megatron import shim
from megatron.support import run_megatron

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron" / "train.py"
SHORT = ("--steps", "4", "--save-every", "2", "--length", "64", "--rows", "2")


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
        ("--expert-model-parallel-size", "2", "--placement", "split", "--heads-per-block", "1"),
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
    return tuple(torch.distributed.get_process_group_ranks(group) for group in found)


def test_the_arrangement_of_the_readme_is_one_that_megatron_makes() -> None:
    for rank, (data, expert, expert_tensor, expert_data) in enumerate(run_megatron(8, groups)):
        assert data == list(range(rank % 2, 8, 2))
        assert expert == list(range(8))
        assert expert_tensor == expert_data == [rank]
