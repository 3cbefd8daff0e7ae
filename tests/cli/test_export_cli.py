from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import muonloom
from export.support import model_of, optimizer_of, trained
from muonloom.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "2"
    model, optimizer = trained("llama")
    muonloom.checkpoint.save(path, model=model, optimizer=optimizer, step=1234)
    return path


def test_a_checkpoint_becomes_a_model(checkpoint, tmp_path):
    result = invoke(checkpoint, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    nbytes = sum(tensor.nbytes for tensor in found.values())
    assert result.stdout == (
        f"{tmp_path / 'out'}: {len(found)} tensors, {nbytes:,} bytes (files: 1), "
        f"from step 1,234 in {checkpoint}\n"
    )


def test_options_are_passed_on(checkpoint, tmp_path):
    config = tmp_path / "config.json"
    model_of("llama").config.to_json_file(config)
    options = ["--dtype", "float32", "--model", config, "--max-shard-bytes", 9000]
    result = invoke(checkpoint, tmp_path / "out", *options, "--max-bytes", 10_000)
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert {t.dtype for f in files for t in load_file(f).values()} == {torch.float32}
    assert "at least" in invoke(checkpoint, tmp_path / "no", "--max-bytes", 100).stderr


def test_ragged_blocks_are_a_warning(tmp_path):
    model = model_of("llama", hidden_size=160)
    path = tmp_path / "0"
    muonloom.checkpoint.save(path, model=model, optimizer=optimizer_of(model), step=0)
    result = invoke(path, tmp_path / "out", "--dtype", "float8_block")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("muonloom: warning: 14 FP8 matrices, such as model.layers.")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["missing", "out"], "muonloom: missing/manifest.json: got no manifest"),
        (["empty", "out"], "muonloom: empty: got a directory without a finished checkpoint"),
        (["SAVED", "empty"], "muonloom: empty: got a path that exists"),
        (["SAVED", "out", "--dtype", "int4"], "muonloom: --dtype: got int4"),
        (["SAVED", "out", "--max-bytes", "-1"], "muonloom: max_bytes: got -1"),
        (["SAVED", "out", "--max-shard-bytes", "0"], "muonloom: --max-shard-bytes: got 0"),
        (["SAVED", "out", "--model", "empty"], "muonloom: empty/config.json: got No such file"),
        (["SAVED", "text/out"], "muonloom: text/out"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(
    checkpoint, tmp_path, monkeypatch, arguments, begins
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a file")
    result = invoke(*(checkpoint if word == "SAVED" else word for word in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith(begins)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(found.name for found in tmp_path.iterdir()) == ["empty", "text"]


def test_it_is_listed_and_imports_wait(fresh):
    assert "export" in CliRunner().invoke(app, ["--help"]).stdout
    code = (
        "import sys; import muonloom.cli; "
        "print([m for m in ('transformers', 'muonloom.export_command') if m in sys.modules])"
    )
    shown = fresh.run(code)
    assert shown.stdout == "[]\n", shown.stderr
