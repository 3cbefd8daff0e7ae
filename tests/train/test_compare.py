from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from muonloom.train.compare import Trial, best, compare, scaled
from muonloom.train.config_file import load_config


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(compare)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_comparison_runs_each_rate_and_draws_the_best(tiny_config, tmp_path):
    adamw = tmp_path / "adamw.toml"
    text = tiny_config.read_text().replace('name = "tiny"', 'name = "tiny-adamw"')
    adamw.write_text(text.replace("[optim]", '[optim]\nalgorithm = "adamw"'))
    out = tmp_path / "images" / "curves.png"
    result = run(tiny_config, adamw, "--out", out, "--factors", "1,3", "--set", "schedule.steps=3")
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    trials = json.loads(out.with_suffix(".json").read_text())
    assert [trial["name"] for trial in trials] == ["tiny", "tiny", "tiny-adamw", "tiny-adamw"]
    assert [trial["lr"] for trial in trials] == pytest.approx([0.01, 0.03, 0.01, 0.03])
    assert all(trial["training"]["steps"] == 3 for trial in trials)
    assert str(tmp_path / "runs") not in out.with_suffix(".json").read_text()
    assert result.stdout.count("\n| tiny") == 4


def test_scaling_moves_every_rate_that_is_given(tiny_config):
    config = load_config(tiny_config, ["optim.adamw_lr=0.5"])
    twice = scaled(config, 2)
    assert (twice.optim.lr, twice.optim.adamw_lr) == (0.02, 1.0)
    assert scaled(load_config(tiny_config), 2).optim.adamw_lr is None
    assert twice.run.name == "tiny-lr-0.02"


def test_the_best_has_the_lowest_loss():
    trials = [Trial(name="a", lr=x, summary={"loss": {"held_out": y}}) for x, y in ((1, 3), (2, 2))]
    assert best(trials).lr == 2


@pytest.mark.parametrize("arguments", [["missing.toml"], ["{config}", "--factors", "1,x"]])
def test_bad_arguments_are_one_line(tiny_config, tmp_path, arguments):
    given = [argument.format(config=tiny_config) for argument in arguments]
    result = run(*given, "--out", tmp_path / "x.png")
    assert result.exit_code == 2
    assert result.stderr.startswith("compare: ")
    assert result.stderr.count("\n") == 1
