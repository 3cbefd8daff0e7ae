"""What docs/many-ranks.md shows runs as it stands, on as many ranks as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import muonloom
from train.launching import launch

GUIDE = Path(__file__).parents[2] / "docs" / "many-ranks.md"
SNIPPETS = {
    name: (int(ranks), code)
    for code, ranks, name in re.findall(
        r"```python\n(# torchrun --nproc-per-node=(\d+) (\w+)\.py\n.*?)```",
        GUIDE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a snippet, and gives what each rank printed."""
    monkeypatch.chdir(tmp_path)

    def _run(name: str, num_ranks: int | None = None) -> list[str]:
        ranks, code = SNIPPETS[name]
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        ended = launch([[str(path)]] * (num_ranks or ranks))
        assert [rank.code for rank in ended] == [0] * len(ended), [rank.err for rank in ended]
        return [rank.out for rank in ended]

    return _run


def test_every_snippet_is_run():
    blocks = GUIDE.read_text(encoding="utf-8").count("```python\n")
    assert len(SNIPPETS) == blocks == 7


def test_ddp_divides_the_work_and_the_state(run):
    # One 96 × 64 matrix each: momentum in FP32, and its weight to the other rank.
    assert run("ddp") == [
        "0 [((96, 64), 1)] 24576 24576\n",
        "1 [((64, 96), 1)] 24576 24576\n",
    ]


def test_pieces_are_updated_as_one_matrix_by_one_copy(run):
    out = run("pieces")
    assert sorted(line.split(" ", 1)[1] for line in out if "((96, 64), 1)" in line) == [
        "[((96, 64), 1)] slice(0, 96, None)\n"
    ]
    assert [line.strip().endswith("slice(0, 96, None)") for line in out] == [
        True,
        True,
        False,
        False,
    ]


def test_hsdp_keeps_a_part_of_the_state_on_each_rank(run):
    # Masters and momentum of half of the elements.
    out = [line.split() for line in run("hsdp")]
    assert [row[0] for row in out] == ["0", "1", "2", "3"]
    assert {int(row[2]) for row in out} == {2 * 4 * 96 * 64 // 2 * 2}
    # Each matrix has one owner, which gets the other half of it and gives the result to three ranks.
    assert sum(int(row[1]) for row in out) > 0


def test_experts_send_nothing(run):
    assert run("experts") == [
        "0 [((32, 64), 4), ((64, 32), 4)] 0\n",
        "1 [((32, 64), 4), ((64, 32), 4)] 0\n",
    ]


def test_tensor_parallel_matrices_are_done_whole(run):
    out = run("tensor_parallel")
    assert [line.split("]")[0] for line in out] == ["0 [((96, 64), 1)", "1 [((64, 96), 1)"]


def test_a_difference_is_the_same_error_on_all_ranks(run):
    first, second = run("differ")
    assert first == second
    assert re.match(
        r"weight: got .*lr=0\.02.* on rank 0; .*lr=0\.03.* on rank 1; wanted the same", first
    )


def test_checkpoints_load_on_other_numbers_of_ranks(run):
    for num_ranks, step in ((2, 2), (1, 4), (3, 6)):
        run("save", num_ranks)
        newest = muonloom.checkpoint.latest("checkpoints")
        assert newest is not None
        assert newest.name == f"step-{step}"
