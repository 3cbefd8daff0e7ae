"""A run that ended at any moment goes on, and comes to what it would have come to, bit for bit."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import muonloom.checkpoint
import muonloom.train.run
from choosing import slow
from muonloom.checkpoint.files import DataFile
from muonloom.errors import ConfigError
from muonloom.train.agreement import MAY_DIFFER, MUST_AGREE
from muonloom.train.config import TrainConfig
from muonloom.train.run import train
from muonloom.train.trainer import Trainer
from train.support import Moment, end_at, execute, left_by, quiet, saved_state

SIGKILL, SIGTERM, SIGINT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
SHORT = (
    *("run.proofs=false", "run.save_model=false", "schedule.steps=12", "checkpoint.every=3"),
    "model.config.attention_dropout=0.1",  # so that a step depends on the state of the generators
)
WAITING = "checkpoint.asynchronous=false"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Half of the time of a tiny run is its picture."""
    monkeypatch.setattr(muonloom.train.run, "plot", lambda *args: None)


class Gone(BaseException):
    """The end of a run in this process, with nothing tidied up."""


@pytest.fixture
def gone_at(monkeypatch):
    """Return a function that has runs end in the middle of a step."""
    original = Trainer.backward

    def _gone_at(last):
        def backward(self, step):
            loss = original(self, step)
            if step == last:
                raise Gone
            return loss

        monkeypatch.setattr(Trainer, "backward", backward)

    return _gone_at


def directory(tmp_path: Path, name: str = "tiny") -> Path:
    return tmp_path / "runs" / name


@pytest.fixture
def whole(tiny_config, tmp_path):
    """Return a function that gives what a run without an interruption came to."""

    def _whole(*overrides):
        execute(tiny_config, *SHORT, *overrides, "run.name=whole")
        return left_by(directory(tmp_path, "whole"))

    return _whole


# -- ends of a process -----------------------------------------------------------------------------


def test_killed_again_and_again_it_comes_to_the_same_end(tiny_config, tmp_path, whole):
    # Moments, and the step of the checkpoint that is left. Where nobody waits for a save, a later one
    # may be there when the process dies; the others are moments within a save.
    waiting, beside = (*SHORT, WAITING), SHORT
    for overrides, moment, step in [
        (beside, Moment(where="step", call=2), 0),
        (beside, Moment(where="write", call=3), 0),
        (waiting, Moment(where="step", call=5), 3),
        (waiting, Moment(where="log", call=2), 3),  # in the middle of a line
        (
            waiting,
            Moment(where="evaluation", call=2),
            3,
        ),  # the one before is of the untrained model
        (beside, Moment(where="finish", call=1), 3),
        (beside, Moment(where="rename", call=2), 3),  # the one that makes it visible
        (waiting, Moment(where="rename", call=3), 3),  # `latest` still points to the one before
        (waiting, Moment(where="step", call=5), 6),
        (beside, Moment(where="picture", call=1), 12),
    ]:
        assert end_at(tiny_config, overrides, moment) == -SIGKILL, moment
        found = muonloom.checkpoint.latest(directory(tmp_path) / "checkpoints")
        assert (found and found.name) == (f"step-{step:06}" if step else None), moment
    assert end_at(tiny_config, SHORT, None) == 0
    assert left_by(directory(tmp_path)) == whole()
    resumed = json.loads((directory(tmp_path) / "summary.json").read_text())["resumed_from"]
    assert resumed == 12


@pytest.mark.parametrize(("number", "code"), [(SIGTERM, 143), (SIGINT, 130)])
def test_a_signal_saves_the_step_and_the_next_start_goes_on(
    tiny_config, tmp_path, whole, number, code
):
    # At a step of neither a checkpoint nor an evaluation; at one of both; at the last.
    for start, (call, step) in enumerate([(2, 2), (4, 6), (6, 12)]):
        moment = Moment(where="step", call=call, signals=(number,))
        assert end_at(tiny_config, SHORT, moment) == code
        assert saved_state(directory(tmp_path))["step"] == step
        summary = json.loads((directory(tmp_path) / "summary.json").read_text())
        assert summary["interrupted"] is True
        assert summary["resumed_from"] == [None, 2, 6][start]
    assert end_at(tiny_config, SHORT, None) == 0
    assert left_by(directory(tmp_path)) == whole()


@pytest.mark.parametrize("numbers", [(SIGTERM, SIGTERM), (SIGINT, SIGTERM)])
def test_a_second_signal_ends_it_at_once(tiny_config, tmp_path, numbers):
    moment = Moment(where="step", call=5, signals=numbers)
    assert end_at(tiny_config, [*SHORT, WAITING], moment) == 143
    assert saved_state(directory(tmp_path))["step"] == 3
    assert not (directory(tmp_path) / "summary.json").exists()


def test_without_checkpoints_a_signal_saves_nothing(tiny_config, tmp_path):
    moment = Moment(where="step", call=2, signals=(SIGTERM,))
    assert end_at(tiny_config, [*SHORT, "checkpoint.every=0"], moment) == 143
    assert not (directory(tmp_path) / "checkpoints").exists()


@pytest.mark.slow
def test_the_default_run_killed_at_random_moments_comes_to_the_same_end(tmp_path):
    config = Path(__file__).parents[2] / "configs" / "default.toml"
    common = (
        *("schedule.steps=40", "checkpoint.every=4", "eval.every=10", "eval.sequences=12"),
        *("eval.final_sequences=24", "eval.sample_tokens=8", "run.proofs=false"),
        f"run.directory={tmp_path}",
    )
    draw = random.Random(0)
    kills = 0
    for _ in range(40):
        where = draw.choice(["step", "write", "finish", "rename", "log", "evaluation"])
        call = draw.randint(1, {"step": 12, "write": 400}.get(where, 6))
        code = end_at(config, [*common, "run.name=killed"], Moment(where=where, call=call))
        if code == 0:
            break
        assert code == -SIGKILL, (where, call)
        kills += 1
    assert kills >= 5
    assert end_at(config, [*common, "run.name=whole"], None) == 0
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "whole")


# -- all kinds of state ----------------------------------------------------------------------------

EXPERTS = json.dumps(
    {
        **{"model_type": "glm_moe_dsa", "vocab_size": 256, "hidden_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
        **{"v_head_dim": 8, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 16},
        **{"first_k_dense_replace": 1, "intermediate_size": 32, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 64},
    }
).replace(":", " =")
HOST = ("optim.placement=host", "optim.host.slot_bytes=16384", "optim.host.num_slots=2")
SPLIT = (*HOST, "model.dtype=bfloat16", "optim.host.master_layout=split")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optim.algorithm=adamw", "schedule.accumulate=2", "schedule.clip_norm=0"),
        ("model.dtype=bfloat16", "optim.heads_per_block=1", "schedule.decay=cosine"),
        slow((*HOST, "optim.heads_per_block=1")),
        (*SPLIT, "optim.momentum_dtype=bfloat16", "optim.free_gradients=true"),
        slow(
            (
                f"model.config={EXPERTS}",
                "model.expert_weights=float8_block",
                "optim.idle_matrices=skip",
            )
        ),
        (f"model.config={EXPERTS}", "model.expert_weights=float8_block", *HOST),
    ],
    ids=["device", "adamw", "bfloat16", "host", "split", "float8", "float8-host"],
)
def test_every_kind_of_state_goes_on(tiny_config, tmp_path, gone_at, whole, overrides):
    expected = whole(*overrides)
    for last in (5, 11):
        gone_at(last)
        with pytest.raises(Gone):
            execute(tiny_config, *SHORT, *overrides, WAITING)
    gone_at(None)
    summary = execute(tiny_config, *SHORT, *overrides, WAITING)
    assert summary["resumed_from"] == 9
    assert left_by(directory(tmp_path)) == expected


def test_a_run_goes_on_in_another_placement(tiny_config, tmp_path, gone_at, whole):
    common = ("model.dtype=bfloat16", WAITING)
    expected = whole(*common)
    for last, placement in ((4, HOST), (7, SPLIT)):
        gone_at(last)
        with pytest.raises(Gone):
            execute(tiny_config, *SHORT, *common, *placement)
    gone_at(None)
    execute(tiny_config, *SHORT, *common, "checkpoint.verify=manifest")
    found = left_by(directory(tmp_path))
    # What moved between host and device is told in the log.
    for run in (found, expected):
        for line in run["metrics"]:
            line.pop("bytes_in", None), line.pop("bytes_out", None)
    assert found == expected


# -- new runs --------------------------------------------------------------------------------------


def test_a_start_after_a_finished_run_is_a_new_run(tiny_config, tmp_path):
    first = execute(tiny_config, *SHORT)
    (directory(tmp_path) / "checkpoints" / "notes.txt").write_text("mine")
    console = quiet()
    second = execute(tiny_config, *SHORT, "optim.lr=0.02", "schedule.steps=6", console=console)
    assert second["resumed_from"] is None
    assert "resumed" not in console.file.getvalue()
    assert second["loss"]["held_out"] != first["loss"]["held_out"]
    kept = sorted(path.name for path in (directory(tmp_path) / "checkpoints").iterdir())
    assert [name for name in kept if name != "latest"] == [
        "notes.txt",
        "step-000003",
        "step-000006",
    ]


def test_a_new_run_that_is_killed_is_not_taken_for_the_finished_one(tiny_config, tmp_path, gone_at):
    execute(tiny_config, *SHORT)
    gone_at(2)
    with pytest.raises(Gone):
        execute(tiny_config, *SHORT, "run.seed=1")
    assert not (directory(tmp_path) / "summary.json").exists()
    gone_at(None)
    assert execute(tiny_config, *SHORT)["resumed_from"] is None


def test_resume_false_begins_anew(tiny_config, tmp_path, gone_at, whole):
    gone_at(8)
    with pytest.raises(Gone):
        execute(tiny_config, *SHORT, WAITING)
    gone_at(None)
    summary = execute(tiny_config, *SHORT, "checkpoint.resume=false")
    assert summary["resumed_from"] is None
    assert left_by(directory(tmp_path)) == whole()


def test_the_screen_says_where_it_went_on(tiny_config, tmp_path, gone_at):
    gone_at(8)
    with pytest.raises(Gone):
        execute(tiny_config, *SHORT, WAITING)
    gone_at(None)
    console = quiet()
    assert train(tiny_config, [*SHORT, WAITING], console=console) == 0
    assert "resumed from step 6" in console.file.getvalue()


def test_a_run_that_is_stopped_says_that_it_can_go_on(tiny_config, monkeypatch):
    original = Trainer.backward

    def backward(self, step):
        if step == 1:
            signal.raise_signal(SIGTERM)
        return original(self, step)

    monkeypatch.setattr(Trainer, "backward", backward)
    before, console = signal.getsignal(SIGTERM), quiet()
    assert train(tiny_config, SHORT, console=console) == 143
    assert signal.getsignal(SIGTERM) is before
    shown = console.file.getvalue()
    assert "Stopping after this step (SIGTERM)" in shown
    assert "Saved after step 1; the same command goes on from there." in shown


@pytest.mark.parametrize("keep_last", [1, 3])
def test_so_many_checkpoints_stay(tiny_config, tmp_path, keep_last):
    execute(tiny_config, *SHORT, f"checkpoint.keep_last={keep_last}")
    steps = sorted(path.name for path in (directory(tmp_path) / "checkpoints").glob("step-*"))
    assert steps == [f"step-{step:06}" for step in (3, 6, 9, 12)[-keep_last:]]


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def stopped(tiny_config, gone_at):
    """A run that ended after its checkpoint of step 3."""
    gone_at(5)
    with pytest.raises(Gone):
        execute(tiny_config, *SHORT, WAITING)
    gone_at(None)
    return tiny_config


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("optim.lr=0.02", r"^optim\.lr: got 0\.02; wanted 0\.01 of the run .*step-000003"),
        ("run.seed=1", r"^run\.seed: got 1; wanted 0"),
        ("schedule.steps=13", r"^schedule\.steps: got 13; wanted 12"),
        ("model.config.hidden_size=32", r"^model\.config\.hidden_size: got 32; wanted 16"),
        ("model.config.rope_theta=5.0", r"^model\.config\.rope_theta: got 5\.0; wanted nothing"),
        ('optim.overrides={"lm_head*" = "adamw"}', r"^optim\.overrides: got .*lm_head"),
        ("data.eval_fraction=0.6", r"^data\.eval_fraction: got 0\.6; wanted 0\.3"),
    ],
)
def test_another_training_is_refused_by_its_key(stopped, tmp_path, override, match):
    before = (directory(tmp_path) / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=match) as caught:
        execute(stopped, *SHORT, override)
    for remedy in ("checkpoint.resume=false", "another run.name"):
        assert remedy in str(caught.value)
    assert (directory(tmp_path) / "metrics.jsonl").read_bytes() == before
    assert execute(stopped, *SHORT)["resumed_from"] == 3


def test_another_text_is_refused(stopped, text_files):
    (text_files / "9.txt").write_text("more to read")
    with pytest.raises(ConfigError, match=r"^data: got another text; wanted the text of the run"):
        execute(stopped, *SHORT)


def test_the_same_text_from_elsewhere_is_the_same(stopped, text_files, tmp_path):
    text_files.rename(tmp_path / "moved")
    summary = execute(stopped, *SHORT, f'data.files=["{tmp_path}/moved/*"]', "eval.sample_tokens=2")
    assert summary["resumed_from"] == 3


def test_a_damaged_checkpoint_says_what_to_do(stopped, tmp_path):
    (path,) = (directory(tmp_path) / "checkpoints").glob("step-000003")
    (data,) = path.glob("data-*")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"got bytes in .* remove .*step-000003; to start anew"):
        execute(stopped, *SHORT)


@pytest.mark.parametrize("damage", [None, b"", b'{"kind": "step"}\n'])
def test_a_log_that_lacks_steps_is_named(stopped, tmp_path, damage):
    log = directory(tmp_path) / "metrics.jsonl"
    log.unlink() if damage is None else log.write_bytes(damage)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: got .* the 3 steps"):
        execute(stopped, *SHORT)


@pytest.mark.parametrize("overrides", [(), (WAITING,)], ids=["beside", "waiting"])
def test_a_disk_that_takes_no_checkpoint_is_one_line(tiny_config, tmp_path, monkeypatch, overrides):
    original = DataFile.write

    def write(self, data, start):
        if self.path.parent.name == "step-000006":
            raise OSError(28, "No space left on device")
        original(self, data, start)

    monkeypatch.setattr(DataFile, "write", write)
    with pytest.raises(ConfigError, match=r"^checkpoint: .* got No space .* Make room\. The next"):
        execute(tiny_config, *SHORT, *overrides)
    monkeypatch.undo()
    assert execute(tiny_config, *SHORT)["resumed_from"] == 3


def test_each_key_is_decided():
    sections = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    assert set(MUST_AGREE) == set(MAY_DIFFER) == set(sections)
    for name, section in sections.items():
        decided = (*MUST_AGREE[name], *MAY_DIFFER[name])
        assert sorted(decided) == sorted(section.model_fields), name


# -- the log ---------------------------------------------------------------------------------------


def test_tensorboard_shows_each_step_once(tiny_config, tmp_path, gone_at):
    common = (*SHORT, WAITING, "run.tensorboard=true")
    for last in (5, 8):
        gone_at(last)
        with pytest.raises(Gone):
            execute(tiny_config, *common)
    gone_at(None)
    execute(tiny_config, *common)
    board = EventAccumulator(str(directory(tmp_path) / "tensorboard")).Reload()
    for name, steps in (("train/loss", range(1, 13)), ("held_out/loss", range(0, 13, 3))):
        assert [event.step for event in board.Scalars(name)] == list(steps)
