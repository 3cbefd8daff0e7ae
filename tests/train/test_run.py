"""Whole runs of a tiny model, and what they leave behind."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from muonloom.errors import ConfigError
from muonloom.train.config_file import load_config
from muonloom.train.run import TrainingRun, train
from muonloom.train.trainer import Trainer

PNG = b"\x89PNG\r\n\x1a\n"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def execute(config, *overrides):
    return TrainingRun(load_config(config, overrides), console=quiet()).execute()


def metrics(tmp_path):
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_leaves_summary_log_picture_and_model(tiny_config, tmp_path):
    console = quiet()
    assert train(tiny_config, console=console) == 0
    directory = tmp_path / "runs" / "tiny"
    summary = json.loads((directory / "summary.json").read_text())
    assert (directory / "loss.png").read_bytes().startswith(PNG)
    assert (directory / "model" / "model.safetensors").is_file()
    assert summary["training"]["steps"] == 6
    assert summary["training"]["tokens"] == 6 * 2 * 16
    assert summary["loss"]["held_out"] < summary["loss"]["held_out_before"]
    assert set(summary["loss"]["baselines"]) == {"unigram", "bigram", "trigram", "zlib"}
    assert [step for step, _ in summary["loss"]["curve"]] == [0, 3, 6]
    assert [proof["holds"] for proof in summary["proofs"]] == [True, True], summary["proofs"]
    assert summary["memory"]["gradients"] > 0
    assert 0 < summary["training"]["optimizer_share"] < 1
    assert len(summary["completion"]["before"]) > 0
    screen = console.file.getvalue()
    assert "no GPU figure" in screen
    assert "A NaN gradient changes nothing" in screen
    assert "Host and device placement give the same bits" in screen
    assert "memory before the first step: device weights" in screen.replace("\n", " ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_the_host_is_the_run_on_the_device(tiny_config, tmp_path, dtype):
    common = (f"model.dtype={dtype}", "optim.ns_batch_bytes=4096", "run.save_model=false")
    device = execute(tiny_config, *common)
    host = execute(
        tiny_config,
        *common,
        "optim.placement=host",
        "optim.host.num_slots=2",
        "optim.host.slot_bytes=8192",
    )
    for key in ("loss", "completion", "layout"):
        assert host[key] == device[key]
    assert [proof["holds"] for proof in host["proofs"]] == [True, True], host["proofs"]
    assert host["memory"]["device_slots"] == 2 * 8192
    assert host["memory"]["host_state"] > 0 == host["memory"]["device_state"]
    # FP32: momentum of Muon, both moments of AdamW; BF16: masters too.
    per_element = {"muon": 4, "adamw": 8}
    master = 4 if dtype == "bfloat16" else 0
    moved = sum(
        row["elements"] * (per_element[row["algorithm"]] + master) for row in host["layout"]
    )
    assert moved <= host["last_step"]["bytes_out"] < 1.01 * moved
    assert host["last_step"]["bytes_in"] == host["last_step"]["bytes_out"]
    assert (device["last_step"]["bytes_in"], device["last_step"]["bytes_out"]) == (0, 0)


def test_the_ledger_is_told_before_the_first_step(tiny_config, monkeypatch):
    def stops(self, observer):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", stops)
    console = quiet()
    overrides = ["optim.placement=host", "optim.host.slot_bytes=65536"]
    run = TrainingRun(load_config(tiny_config, overrides), console=console)
    with pytest.raises(KeyboardInterrupt):
        run.execute()
    told = console.file.getvalue().replace("\n", " ")
    assert "host state" in told
    assert "device slots 192.0 KiB" in told
    assert "device state" not in told


def test_statistics_over_heads_are_logged(tiny_config, tmp_path):
    execute(tiny_config, "optim.heads_per_block=1", "run.tensorboard=true")
    (first, *_) = [line for line in metrics(tmp_path) if line["kind"] == "optimizer"]
    assert first["heads"], first["heads"].keys()
    for kind, heads in first["heads"].items():
        assert "self_attn" in kind
        assert heads["blocks"] > 1
        assert heads["momentum_spread"] > 1


def test_the_layout_table_counts_every_matrix_and_element(tiny_config):
    summary = execute(tiny_config)
    rows = {row["kind"]: row for row in summary["layout"]}
    assert rows["model.layers.*.mlp.up_proj.weight"]["shapes"] == [[32, 16]]
    assert rows["lm_head.weight"]["algorithm"] == "adamw"
    assert sum(row["elements"] for row in rows.values()) == summary["model"]["parameters"]
    matrices = sum(row["matrices"] for row in rows.values())
    assert matrices == sum(count for _, count in summary["last_step"]["matrices"]) == 7


def test_the_log_has_each_step_and_evaluation(tiny_config, tmp_path):
    execute(tiny_config)
    lines = metrics(tmp_path)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 3, 6]
    assert [line["step"] for line in lines if line["kind"] == "optimizer"] == [3, 6]
    assert steps[0]["learning_rates"] == {"muon": 0.005, "adamw": 0.005}  # warm-up
    assert steps[1]["learning_rates"]["muon"] == pytest.approx(0.01)


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(tiny_config):
    one, two = execute(tiny_config), execute(tiny_config)
    other = execute(tiny_config, "run.seed=1")
    assert one["loss"] == two["loss"]
    assert one["completion"] == two["completion"]
    assert one["loss"]["held_out"] != other["loss"]["held_out"]


def test_accumulated_gradients_are_those_of_the_whole_batch(tiny_config):
    whole = execute(tiny_config, "schedule.batch_size=4")
    parts = execute(tiny_config, "schedule.batch_size=1", "schedule.accumulate=4")
    assert parts["training"]["tokens"] == whole["training"]["tokens"]
    # FP32 sums in another order over six steps.
    assert parts["loss"]["held_out"] == pytest.approx(whole["loss"]["held_out"], abs=2e-3)


@pytest.mark.parametrize("overrides", [["model.dtype=bfloat16"], ["model.autocast=true"]])
def test_bfloat16_trains(tiny_config, overrides):
    summary = execute(tiny_config, *overrides)
    assert summary["loss"]["held_out"] < summary["loss"]["held_out_before"]
    assert summary["model"]["dtype"] == ("bfloat16" if "dtype" in overrides[0] else "float32")


@pytest.mark.parametrize("overrides", [[], ["optim.heads_per_block=1", "optim.placement=host"]])
def test_adamw_alone_has_no_matrices(tiny_config, overrides):
    summary = execute(tiny_config, "optim.algorithm=adamw", *overrides)
    assert all(proof["holds"] for proof in summary["proofs"]), summary["proofs"]
    assert {row["algorithm"] for row in summary["layout"]} == {"adamw"}
    assert summary["last_step"]["matrices"] == []
    assert summary["loss"]["held_out"] < summary["loss"]["held_out_before"]


def test_clipping_bounds_the_gradient_that_the_optimizer_sees(tiny_config, tmp_path):
    summary = execute(tiny_config, "schedule.clip_norm=0.01")
    assert summary["last_step"]["grad_norm"] == pytest.approx(0.01, rel=1e-2)
    assert metrics(tmp_path)[1]["gradient_norm"] > 0.01
    execute(tiny_config, "schedule.clip_norm=0")
    assert metrics(tmp_path)[1]["gradient_norm"] is None


def test_tensorboard_events_are_of_this_run_alone(tiny_config, tmp_path):
    for _ in range(2):
        execute(tiny_config, "run.tensorboard=true")
    events = list((tmp_path / "runs" / "tiny" / "tensorboard").glob("events.*"))
    assert len(events) == 1
    assert events[0].stat().st_size > 500


def test_switches_leave_things_out(tiny_config, tmp_path):
    summary = execute(
        tiny_config,
        *("run.save_model=false", "run.proofs=false", "eval.sample_tokens=0", "eval.every=0"),
    )
    assert summary["proofs"] == []
    assert summary["completion"] is None
    assert [step for step, _ in summary["loss"]["curve"]] == [0]
    assert "model" not in summary["files"]["names"]


def test_a_trained_model_is_a_model_to_train_on(tiny_config, tmp_path):
    first = execute(tiny_config)
    table = tiny_config.read_text().splitlines()
    directory = tmp_path / "runs" / "tiny" / "model"
    lines = [
        f'directory = "{directory}"' if line.startswith("config = ") else line for line in table
    ]
    again = tmp_path / "again.toml"
    again.write_text("\n".join(lines))
    second = execute(again, "eval.sequences=8", "eval.final_sequences=8")
    assert second["loss"]["held_out_before"] == pytest.approx(first["loss"]["held_out"], abs=1e-5)


def test_an_interrupt_ends_after_the_step_and_still_writes(tiny_config, tmp_path, monkeypatch):
    import signal

    original = Trainer.backward

    def interrupted_backward(self, step):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return original(self, step)

    monkeypatch.setattr(Trainer, "backward", interrupted_backward)
    before = signal.getsignal(signal.SIGINT)
    assert train(tiny_config, console=quiet()) == 130
    assert signal.getsignal(signal.SIGINT) is before
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["training"]["steps"] == 2
    assert summary["proofs"] == []
    assert (tmp_path / "runs" / "tiny" / "loss.png").is_file()


def test_a_second_interrupt_stops_at_once(tiny_config, monkeypatch):
    import signal

    def twice(self, step):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("unreached")

    monkeypatch.setattr(Trainer, "backward", twice)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, console=quiet())


def test_a_forward_that_fails_names_the_model_section(tiny_config):
    # Three key/value heads cannot serve two query heads: only the forward notices.
    with pytest.raises(ConfigError, match=r"^model: got a model whose forward fails"):
        execute(tiny_config, "model.config.num_key_value_heads=3")


def test_a_directory_that_cannot_be_made_is_named(tiny_config, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"^run\.directory: got "):
        execute(tiny_config, f"run.directory={tmp_path / 'taken'}")


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (
            [
                "optim.heads_per_block=3",
                "model.config.num_attention_heads=4",
                "model.config.num_key_value_heads=4",
            ],
            r"^optim: .*q_proj.*heads_per_block=3 for 4 heads",
        ),
        (['optim.ns_coefficients="fancy"'], r"^optim\.ns_coefficients: got 'fancy'"),
        (['optim.overrides={"nothing.*" = "muon"}'], r"^optim.*nothing"),
        (["run.device=tpu"], r"^run\.device: got 'tpu'"),
    ],
)
def test_options_that_the_optimizer_refuses_name_their_key(tiny_config, overrides, match):
    with pytest.raises(ConfigError, match=match):
        execute(tiny_config, *overrides)


def test_divergence_is_reported_and_not_trained_through(tiny_config, monkeypatch):
    def spoilt(self, step):
        original(self, step)
        for parameter in self.model.parameters():
            parameter.grad.fill_(math.nan)
        return math.nan

    original = Trainer.backward
    monkeypatch.setattr(Trainer, "backward", spoilt)
    with (
        pytest.warns(RuntimeWarning, match="skipped"),
        pytest.raises(FloatingPointError),
    ):
        execute(tiny_config, "optim.max_consecutive_skips=2", "schedule.clip_norm=0")
