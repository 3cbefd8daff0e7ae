"""`muonloom train` on several ranks comes to what one process comes to, and ends as one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from muonloom.errors import ConfigError
from muonloom.train.agreement import check_agreement
from muonloom.train.checkpoints import seed_rank
from muonloom.train.config_file import load_config
from muonloom.train.launch import Launch
from muonloom.train.proofs import choose_proofs
from muonloom.train.team import Team
from train.launching import Ended, launch, train_on
from train.support import Moment, execute, metrics

SHORT = (
    *("run.proofs=false", "run.save_model=false", "eval.sample_tokens=0"),
    *("schedule.batch_size=4", "schedule.accumulate=2", "eval.sequences=6"),
)
TIMEOUT_S = 3

# Sums over rows come in another order, and single weights near 0 feel that more than losses do.
CLOSE = {"rel": 1e-5}
CLOSE_WEIGHTS = {"rtol": 1e-3, "atol": 1e-4}


def directory(tmp_path: Path, name: str) -> Path:
    return tmp_path / "runs" / name


def curve(run: Path) -> list[tuple[str, int, float]]:
    return [(x["kind"], x["step"], x["loss"]) for x in metrics(run) if x["kind"] != "optimizer"]


def assert_same_curve(run: Path, whole: Path) -> None:
    found, wanted = curve(run), curve(whole)
    assert [key for *key, _ in found] == [key for *key, _ in wanted]
    assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in wanted], **CLOSE)


def assert_all_end(ranks: list[Ended], code: int) -> None:
    assert [rank.code for rank in ranks] == [code] * len(ranks), [rank.err for rank in ranks]


def only_line(ranks: list[Ended]) -> str:
    """Return the one line that all ranks together have printed on stderr."""
    lines = [line for rank in ranks for line in rank.err.splitlines()]
    assert len(lines) == 1, lines
    return lines[0]


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "claims"),
    [
        (2, ("optim.placement=host",), 2),
        (3, ("parallel.mode=fsdp2", "model.config.tie_word_embeddings=true"), 1),
        (4, ("parallel.mode=hsdp", "parallel.replicas=2", "optim.heads_per_block=1"), 2),
    ],
    ids=["replicated", "fsdp2", "hsdp"],
)
def test_ranks_come_to_what_one_process_does(tiny_config, tmp_path, num_ranks, overrides, claims):
    # 4 rows in a forward of 3 ranks, and 6 held-out ones in two forwards: shares differ in size.
    common = (*SHORT, "run.proofs=true", "run.save_model=true", "eval.sample_tokens=4")
    alone = [override for override in overrides if not override.startswith("parallel.")]
    execute(tiny_config, *common, *alone, "run.name=one")
    ranks = train_on(num_ranks, tiny_config, *common, *overrides, "run.name=many")
    assert_all_end(ranks, 0)
    assert [rank.out + rank.err for rank in ranks[1:]] == [""] * (num_ranks - 1)
    one, many = directory(tmp_path, "one"), directory(tmp_path, "many")
    assert_same_curve(many, one)
    norms = [[x["gradient_norm"] for x in metrics(d) if x["kind"] == "step"] for d in (many, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    summaries = [json.loads((d / "summary.json").read_text()) for d in (many, one)]
    assert summaries[0]["parallel"]["ranks"] == num_ranks
    for key in ("layout", "data", "completion", "model"):
        assert summaries[0][key] == summaries[1][key], key
    assert summaries[0]["training"]["tokens"] == summaries[1]["training"]["tokens"]
    assert [proof["holds"] for proof in summaries[0]["proofs"]] == [True] * claims
    weights = [load_file(d / "model" / "model.safetensors") for d in (many, one)]
    torch.testing.assert_close(*weights, **CLOSE_WEIGHTS)
    kinds = [json.loads((d / "model" / "config.json").read_text()) for d in (many, one)]
    assert kinds[0] == kinds[1]


def test_a_run_goes_on_with_another_number_of_ranks(tiny_config, tmp_path):
    common = (*SHORT, "schedule.steps=9", "checkpoint.every=2")
    execute(tiny_config, *common, "run.name=one")
    # A signal that reaches one rank ends all after the same step.
    stopped = {0: Moment(where="step", call=2, signals=(signal.SIGTERM,))}
    done = 0
    for num_ranks, mode in ((4, "fsdp2"), (2, "replicated"), (1, "auto"), (3, "fsdp2")):
        moments = {} if done == 6 else {num_ranks - 1: stopped[0]}
        ranks = train_on(num_ranks, tiny_config, *common, f"parallel.mode={mode}", moments=moments)
        assert_all_end(ranks, 0 if done == 6 else 143)
        assert (f"resumed from step {done} " in ranks[0].out) == (done > 0)
        done += 2
        if moments:
            assert "Stopping after this step (SIGTERM)" in ranks[0].out
            assert f"Saved after step {done};" in ranks[0].out
    assert_same_curve(directory(tmp_path, "tiny"), directory(tmp_path, "one"))


def test_a_run_that_was_killed_goes_on_bit_for_bit(tiny_config, tmp_path):
    common = (
        *SHORT,
        *("parallel.mode=fsdp2", "checkpoint.every=2"),
        "model.config.attention_dropout=0.1",  # each rank draws its own
    )
    assert_all_end(train_on(2, tiny_config, *common, "run.name=one"), 0)
    killed = dict.fromkeys((0, 1), Moment(where="step", call=4))
    ranks = train_on(2, tiny_config, *common, "checkpoint.asynchronous=false", moments=killed)
    assert_all_end(ranks, -signal.SIGKILL)
    ranks = train_on(2, tiny_config, *common)
    assert_all_end(ranks, 0)
    assert "resumed from step 2 " in ranks[0].out
    assert metrics(directory(tmp_path, "tiny")) == metrics(directory(tmp_path, "one"))


def test_ranks_draw_what_no_other_draws():
    draws = []
    for rank in (1, 2, 1):
        seed_rank(0, rank=rank)
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


# -- ranks that are lost ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "number"), [("replicated", signal.SIGKILL), ("fsdp2", signal.SIGSTOP)]
)
def test_the_others_name_a_rank_that_died_or_hangs(tiny_config, mode, number):
    began = time.monotonic()
    ranks = train_on(
        3,
        tiny_config,
        *(*SHORT, "checkpoint.every=0", "schedule.steps=1000000", "eval.every=0"),
        *(f"parallel.mode={mode}", f"parallel.timeout_s={TIMEOUT_S}"),
        moments={1: Moment(where="step", call=3, signals=(number,))},
        waits_for=(0, 2),
    )
    assert time.monotonic() - began < 60
    assert [ranks[0].code, ranks[2].code] == [1, 1]
    assert "no answer from rank 1 in" in only_line(ranks)
    lost = ranks[1].seconds or min(rank.seconds for rank in ranks if rank.seconds) - TIMEOUT_S
    assert max(ranks[0].seconds, ranks[2].seconds) < lost + TIMEOUT_S + 5


# -- errors that a user can put right ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "by_rank", "line"),
    [
        (2, ("optim.lrr=1",), {}, "optim.lrr: got an unknown key"),
        (2, ("optim.ns_coefficients=fancy",), {}, "optim.ns_coefficients: got 'fancy'"),
        (2, ("model.config.num_key_value_heads=3",), {}, "model: got a model whose forward fails"),
        (
            2,
            ("schedule.batch_size=1",),
            {},
            "schedule.batch_size: got 1; wanted a sequence or more",
        ),
        (2, ("run.directory=/dev/null",), {}, "run.directory: got /dev/null/tiny"),
        (2, ("parallel.mode=none",), {}, 'parallel.mode: got "none" on 2 ranks'),
        (3, ("parallel.mode=hsdp", "parallel.replicas=2"), {}, "parallel.replicas: got 2; wanted"),
        (2, ("parallel.backend=nccl",), {}, 'parallel.backend: got "nccl" on a CPU'),
        (2, (), {1: ("optim.lr=0.5",)}, "optim.lr: got 0.5 on rank 1; wanted 0.01, as on rank 0"),
    ],
    ids=lambda value: None if not isinstance(value, tuple) or not value else value[-1],
)
def test_an_error_is_one_line_and_told_once(tiny_config, num_ranks, overrides, by_rank, line):
    ranks = train_on(num_ranks, tiny_config, *SHORT, *overrides, by_rank=by_rank)
    assert_all_end(ranks, 2)
    assert only_line(ranks).startswith(f"muonloom: {line}")
    assert ranks[0].err


def test_an_error_of_one_rank_names_it(tiny_config):
    ranks = train_on(
        2,
        tiny_config,
        *(*SHORT, f"parallel.timeout_s={TIMEOUT_S}"),
        by_rank={1: ("data.files=['/nothing/*.txt']",)},
    )
    assert [rank.code for rank in ranks] == [1, 2]
    assert only_line(ranks).startswith("muonloom: rank 1: data.files: got '/nothing/*.txt'")


FULL_DISK = """
import os, sys
from muonloom.checkpoint.files import DataFile
from muonloom.cli import app

def write(self, data, start):
    raise OSError(28, "No space left on device")

if os.environ["RANK"] == "1":
    DataFile.write = write
app(sys.argv[1:])
"""


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_a_disk_that_is_full_for_one_rank_ends_all_in_one_line(tiny_config, tmp_path, is_async):
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK)
    options = (*SHORT, "checkpoint.every=2", f"checkpoint.asynchronous={is_async}")
    settings = [part for option in (*options, "parallel.mode=fsdp2") for part in ("--set", option)]
    ranks = launch([[str(script), "train", str(tiny_config), *settings]] * 2)
    assert_all_end(ranks, 2)
    line = only_line(ranks)
    assert line.startswith("muonloom: checkpoint: ")
    assert "No space left on device" in line


@pytest.mark.parametrize("mode", ["replicated", "fsdp2", "hsdp"])
def test_one_process_cannot_be_what_only_ranks_are(tiny_config, mode):
    more = ("parallel.replicas=2",) if mode == "hsdp" else ()
    with pytest.raises(ConfigError, match=r"^parallel\.mode: got .* in one process; .*torchrun"):
        execute(tiny_config, *SHORT, f"parallel.mode={mode}", *more)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["parallel.mode=fsdp"], r"^parallel\.mode: got 'fsdp'; wanted 'auto', 'none'"),
        (["parallel.mode=hsdp"], r"^parallel\.replicas: got nothing"),
        (["parallel.replicas=2"], r'^parallel\.replicas: got a value that mode = "auto"'),
        (["parallel.reduce_dtype=bfloat16"], r"^parallel\.reduce_dtype: got a value .*fsdp2"),
        (["parallel.timeout_s=0"], r"^parallel\.timeout_s: got 0"),
        (["parallel.rank=1"], r"^parallel\.rank: got an unknown key"),
    ],
)
def test_the_section_is_checked_key_by_key(tiny_config, overrides, match):
    with pytest.raises(ConfigError, match=match):
        load_config(tiny_config, overrides)


# -- parts -----------------------------------------------------------------------------------------


def test_one_process_is_a_team_of_one():
    team = Team()
    assert (team.rank, team.size, team.is_first, str(team)) == (0, 1, True, "")
    assert team.mean(2.5) == 2.5
    assert math.isnan(team.sum(math.nan))
    assert team.on_first(lambda: "here") == "here"
    rows = torch.arange(6).view(3, 2)
    assert team.share(rows) is not None
    assert torch.equal(team.share(rows), rows)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_all_rows_once(size):
    rows = torch.arange(12).view(6, 2)
    shares = [Team(Launch(rank=rank, size=size)).share(rows) for rank in range(size)]
    assert torch.equal(torch.cat(shares), rows)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_environment_of_torchrun_is_read(monkeypatch):
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, str(value))
    assert Launch.from_environment() == Launch()  # a batch system sets some of them too
    monkeypatch.setenv("MASTER_PORT", "1")
    assert Launch.from_environment() == Launch(rank=5, size=8, local_rank=1, is_launched=True)


def test_only_what_can_be_shown_is_proved():
    def claims(size: int, **options: Any) -> list[str]:
        team = Team(Launch(size=size))
        return [proof.show.__name__ for proof in choose_proofs(team=team, **options)]

    assert claims(1, can_copy=True, num_parts=1)[1:] == ["placements_agree"]
    assert claims(1, can_copy=False, num_parts=1)[1:] == []
    assert claims(4, can_copy=False, num_parts=2)[1:] == ["replicas_agree"]
    assert claims(4, can_copy=False, num_parts=4)[1:] == []


def test_a_checkpoint_of_before_the_section_still_agrees():
    asked = {"run.seed": 0, "text": "", "parallel.reduce_dtype": "float32"}
    check_agreement({"run.seed": 0, "text": ""}, asked, Path("saved"))
    with pytest.raises(ConfigError, match=r"^parallel\.reduce_dtype: got .float32"):
        check_agreement({**asked, "parallel.reduce_dtype": "bfloat16"}, asked, Path("saved"))


# -- torchrun ----------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(tiny_config, tmp_path):
    """Return a function that starts an endless run of two ranks and waits for its first step."""
    started = []

    def _torchrun(*overrides):
        endless = (*SHORT, "schedule.steps=1000000", "eval.every=0", *overrides)
        settings = [part for override in endless for part in ("--set", override)]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
                *("-m", "muonloom", "train", str(tiny_config), *settings),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        log = directory(tmp_path, "tiny") / "metrics.jsonl"
        until = time.monotonic() + 120
        while not log.exists() or '"step", "step": 3' not in log.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        return process

    yield _torchrun
    for process in started:
        process.kill()
        process.wait()


def test_torchrun_passes_a_signal_on_and_all_stop(torchrun, tmp_path):
    process = torchrun("checkpoint.every=1000")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "Stopping after this step (SIGTERM)" in out, err
    summary = json.loads((directory(tmp_path, "tiny") / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["parallel"] == {"mode": "replicated", "ranks": 2}
    (saved,) = (directory(tmp_path, "tiny") / "checkpoints").glob("step-*")
    assert saved.name == f"step-{summary['training']['steps']:06}"


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun_is_named_long_before_the_timeout(torchrun):
    process = torchrun("checkpoint.every=0", "parallel.timeout_s=1000")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "muonloom: process_group: got no answer from rank" in err
