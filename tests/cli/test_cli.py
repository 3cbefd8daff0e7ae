from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import muonloom
from muonloom.cli import app

CONFIG = """
[run]
name = "tiny"
directory = "runs"
tensorboard = false
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
[data]
source = "files"
files = ["text.txt"]
eval_fraction = 0.3
sequence_length = 16
[optim]
adjust_lr_fn = "match_rms_adamw"
[schedule]
steps = 3
batch_size = 2
[eval]
every = 0
sequences = 4
final_sequences = 4
sample_tokens = 2
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text(" ".join(f"word{n}" for n in range(400)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_version_and_help():
    assert invoke("--version").stdout == f"muonloom {muonloom.__version__}\n"
    shown = invoke("--help").stdout
    assert all(command in shown for command in ("train", "inspect", "bench"))


def test_help_imports_nothing_that_only_commands_need(fresh):
    code = (
        "import sys; import muonloom.cli; "
        "print([m for m in ('transformers', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    shown = fresh.run(code)
    assert shown.stdout == "[]\n", shown.stderr


def test_train_runs_a_config(workdir):
    result = invoke("train", "run.toml", "--set", "schedule.steps=2", "--set", "run.name=two")
    assert result.exit_code == 0, result.output
    assert (workdir / "runs" / "two" / "summary.json").is_file()
    assert "held-out loss" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["train", "missing.toml"], "muonloom: missing.toml: got "),
        (["train", "run.toml", "--set", "optim.lrr=1"], "muonloom: optim.lrr: got "),
        (["train", "run.toml", "--set", "nonsense"], "muonloom: --set: got "),
        (
            ["train", "run.toml", "--set", "optim.host.num_slots=1"],
            "muonloom: optim.host: got a table",
        ),
        (["train", "run.toml", "--set", "data.files=['none.txt']"], "muonloom: data.files: got "),
        (["inspect", "missing"], "muonloom: missing"),
        (["inspect", "text.txt"], "muonloom: text.txt"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(workdir, arguments, begins):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(begins)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_too_little_host_memory_is_one_line_and_exit_code_2(workdir, monkeypatch):
    from muonloom.host import Limit

    limits = (Limit(source="/sys/fs/cgroup/memory.max", free_bytes=100),)
    monkeypatch.setattr("muonloom.host.slab.read_limits", lambda: limits)
    result = invoke("train", "run.toml", "--set", "optim.placement=host")
    assert result.exit_code == 2
    assert result.stderr.startswith("muonloom: optim.placement: got ")
    assert "at most 100 bytes, by /sys/fs/cgroup/memory.max" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (workdir / "runs").exists()


def test_inspect_counts_state_in_the_dtypes_of_a_training_file(workdir):
    import json

    bf16 = CONFIG.replace("[model.config]", "[model]\ndtype = 'bfloat16'\n[model.config]")
    small = "[optim]\nplacement = 'host'\nmomentum_dtype = 'bfloat16'\nhost.master_layout = 'split'"
    (workdir / "full.toml").write_text(bf16)
    (workdir / "small.toml").write_text(bf16.replace("[optim]", small))
    full, less = (
        json.loads(invoke("inspect", name, "--json").stdout)["totals"]
        for name in ("full.toml", "small.toml")
    )
    assert full["master_bytes"] == 2 * less["master_bytes"] == 4 * full["parameters"]
    assert full["momentum_bytes"] == 2 * less["momentum_bytes"] == 4 * full["muon_parameters"]
    assert full["adamw_bytes"] == less["adamw_bytes"]
    assert "split masters" in invoke("inspect", "small.toml").stdout
    assert "FP32 masters" in invoke("inspect", "full.toml").stdout


@pytest.mark.parametrize(
    "arguments", [["train"], ["unknown"], ["inspect", "x", "--heads-per-block", "0"]]
)
def test_wrong_usage_exits_with_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_inspect_passes_its_options_on(workdir):
    import json

    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 64}
    (workdir / "config.json").write_text(json.dumps(config))
    whole = invoke("inspect", "config.json", "--json")
    cut = invoke("inspect", "config.json", "--json", "--heads-per-block", "1")
    assert whole.exit_code == cut.exit_code == 0, whole.output + cut.output
    assert json.loads(whole.stdout) != json.loads(cut.stdout)


@pytest.mark.parametrize(
    ("old", "new", "begins"),
    [
        ("num_hidden_layers", "num_hiden_layers", "model.config"),
        ("[optim]", "[optim]\nheads_per_blok = 1", "optim.heads_per_blok"),
    ],
)
def test_inspect_refuses_what_train_would(workdir, old, new, begins):
    (workdir / "bad.toml").write_text(CONFIG.replace(old, new))
    for command in ("inspect", "train"):
        result = invoke(command, "bad.toml")
        assert result.exit_code == 2
        assert begins in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_ends_cleanly_with_130(workdir):
    endless = ("--set", "schedule.steps=1000000", "--set", "run.save_model=false")
    process = subprocess.Popen(
        [sys.executable, "-m", "muonloom.cli", "train", "run.toml", *endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=workdir,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    log = workdir / "runs" / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count('"kind": "step"') >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted after" in out
    assert "Traceback" not in errors
    assert (workdir / "runs" / "tiny" / "summary.json").is_file()
