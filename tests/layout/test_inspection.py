"""`inspect`: real configs on the meta device, every input form, and errors in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layout.tiny import CONFIGS, fresh
from muonloom.errors import ConfigError
from muonloom.inspection import (
    HeadSettings,
    Inspection,
    inspect_model,
    render_totals,
    run_inspect,
)
from muonloom.layout import Layout

GLM5 = Path(__file__).parent / "data" / "glm5_config.json"


@pytest.fixture(scope="module")
def glm5() -> Inspection:
    return inspect_model(GLM5)


def test_glm5_takes_seconds_and_has_744_billion_parameters() -> None:
    import transformers  # noqa: F401  # its import is not what is timed

    start = time.process_time()
    inspection = inspect_model(GLM5, settings=HeadSettings(heads_per_block=1))
    assert time.process_time() - start < 20, "3 s when idle; a build of real weights takes hours"
    totals = inspection.totals
    assert totals.parameters == 743_911_199_232
    assert round(totals.parameters / 1e9) == 744
    assert not inspection.notes


def test_glm5_totals_add_up(glm5: Inspection) -> None:
    # By hand, from the published shapes: hidden 6144, 78 layers of which 75 are sparse.
    embedding = 154880 * 6144
    attention = 2048 * 6144 + 16384 * 2048 + 576 * 6144 + 28672 * 512 + 6144 * 16384
    indexer = 4096 * 2048 + 128 * 6144 + 32 * 6144
    dense, expert = 3 * 12288 * 6144, 3 * 2048 * 6144
    muon = 78 * (attention + indexer) + 3 * dense + 75 * (257 * expert + 256 * 6144)
    vectors = 78 * (2048 + 512 + 2 * 128 + 2 * 6144) + 6144
    totals = glm5.totals
    assert totals.muon_parameters == muon
    assert totals.adamw_parameters == 2 * embedding + vectors
    assert totals.parameters == muon + 2 * embedding + vectors
    assert totals.matrices == 78 * 8 + 3 * 3 + 75 * (3 * 257 + 1)
    # Routers are FP32 in the model class, and so are their own masters.
    assert glm5.dtypes == ("bfloat16", "float32")
    assert totals.master_bytes == 4 * (totals.parameters - 75 * 256 * 6144)
    assert totals.momentum_bytes == 4 * muon
    assert totals.adamw_bytes == 8 * totals.adamw_parameters
    assert totals.state_bytes == (totals.master_bytes + totals.momentum_bytes + totals.adamw_bytes)


def test_glm5_head_blocks_have_the_published_shapes() -> None:
    inspection = inspect_model(GLM5, settings=HeadSettings(heads_per_block=1))
    kinds = {kind.kind.rpartition("layers.*.")[2]: kind for kind in inspection.kinds}
    assert kinds["self_attn.q_b_proj.weight"].matrices == (((256, 2048), 64),)
    assert kinds["self_attn.kv_b_proj.weight"].matrices == (((448, 512), 64),)
    assert kinds["self_attn.o_proj.weight"].matrices == (((6144, 16384), 1),)
    assert kinds["mlp.experts.gate_up_proj"].matrices == (((2048, 6144), 512),)
    assert kinds["mlp.experts.gate_up_proj"].count == 75
    assert dict(inspection.shapes)[(448, 512)] == 78 * 64


def _write(path: Path, fields: dict[str, Any]) -> Path:
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def _config(directory: Path, model_type: str = "llama", **changes: Any) -> Path:
    fields = {"model_type": model_type, **CONFIGS[model_type], **changes}
    return _write(directory / "config.json", fields)


def test_a_file_a_directory_and_a_saved_model_agree(tmp_path: Path) -> None:
    model = fresh("glm_moe_dsa")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    of_directory = inspect_model(tmp_path)
    of_file = inspect_model(tmp_path / "config.json")
    assert of_directory.kinds == of_file.kinds == Layout.from_model(model).kinds()
    assert of_directory.totals == of_file.totals
    assert of_directory.totals.parameters == sum(p.numel() for p in model.parameters())
    assert of_directory.totals.master_bytes == 0, "FP32 parameters are their own masters"


def test_a_config_object_is_taken_as_it_is() -> None:
    from transformers import LlamaConfig

    inspection = inspect_model(LlamaConfig(**CONFIGS["llama"]))
    assert inspection.source == "LlamaConfig"
    assert inspection.model_type == "llama"


def _toml(directory: Path, text: str) -> Path:
    path = directory / "train.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_training_file_gives_model_dtype_and_layout_options(tmp_path: Path) -> None:
    config = _config(tmp_path)
    fields = "\n".join(f"{key} = {value}" for key, value in CONFIGS["llama"].items())
    optim = '[optim]\nheads_per_block = 2\ncut_output = true\noverrides = {"*up_proj*" = "adamw"}\n'
    inline = _toml(
        tmp_path,
        f'[model]\ndtype = "bfloat16"\n[model.config]\nmodel_type = "llama"\n{fields}\n{optim}',
    )
    first = inspect_model(inline)
    assert first.dtypes == ("bfloat16",)
    by_path = _toml(tmp_path, f'[model]\nconfig = "{config}"\ndtype = "bfloat16"\n{optim}')
    by_directory = inspect_model(
        _toml(tmp_path, f'[model]\ndirectory = "{tmp_path}"\ndtype = "bfloat16"\n{optim}')
    )
    assert inspect_model(by_path).kinds == by_directory.kinds == first.kinds
    kinds = {kind.kind.rpartition(".*.")[2]: kind for kind in first.kinds}
    assert kinds["self_attn.q_proj.weight"].matrices == (((20, 32), 2),)
    assert kinds["self_attn.o_proj.weight"].matrices == (((32, 20), 2),)
    assert kinds["mlp.up_proj.weight"].algorithm == "adamw"
    given = inspect_model(by_path, settings=HeadSettings(heads_per_block=1))
    kinds = {kind.kind.rpartition(".*.")[2]: kind for kind in given.kinds}
    assert kinds["self_attn.q_proj.weight"].matrices == (((10, 32), 4),)


def test_kimi_k2_is_built_from_deepseek_v3_and_remote_code_is_not_run(tmp_path: Path) -> None:
    fields = {
        "model_type": "kimi_k2",
        **CONFIGS["deepseek_v3"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    (tmp_path / "configuration_deepseek.py").write_text("raise SystemExit('ran remote code')")
    inspection = inspect_model(_write(tmp_path / "config.json", fields))
    assert inspection.model_type == "deepseek_v3"
    assert not inspection.notes


def test_an_unknown_family_is_noted(tmp_path: Path) -> None:
    fields = {"model_type": "opt", "hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 24}
    fields |= {"vocab_size": 32, "num_hidden_layers": 1, "word_embed_proj_dim": 16}
    inspection = inspect_model(_write(tmp_path / "config.json", fields))
    (note,) = inspection.notes
    assert "layers.*.self_attn.q_proj.weight (16, 16) -> muon (matrix, by shape)" in note
    assert any(kind.guessed for kind in inspection.kinds)
    with pytest.raises(ValueError, match=r"^heads_per_block: got a model of unknown type 'opt'"):
        inspect_model(tmp_path, settings=HeadSettings(heads_per_block=1))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json: got Expecting"),
        ("config.json", "[]", "config.json: got a list; wanted a JSON object"),
        ("config.json", "{}", "model_type: got None; wanted a type"),
        ("config.json", '{"model_type": "lama"}', "model_type: got 'lama'"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', "wanted values that llama"),
        ("config.json", '{"model_type": "llama", "vocab_size": -4}', "values that make a model"),
        ("train.toml", "[model", "train.toml: got "),
        ("train.toml", "[run]\n", "model: got no config and no directory"),
        ("train.toml", '[model]\nconfig = "no/such.json"\n', "no/such.json: got No such file"),
    ],
)
def test_files_that_make_no_model(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        inspect_model(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json: got No such file or directory"):
        inspect_model(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"config\.json: got No such file or directory"):
        inspect_model(tmp_path)


def test_the_printed_table_names_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_inspect(_config(tmp_path, "gpt_oss"), heads_per_block=1)
    text = capsys.readouterr().out
    for kind in inspect_model(tmp_path).kinds:
        assert kind.kind.rpartition("layers.*.")[2] in text
    assert "4 x (10, 32)" in text
    assert "query; 4 heads in blocks of 1" in text
    assert "expert biases: a vector per expert" in text
    assert "by Muon" in text
    assert "state bytes" in text


def test_sizes_are_told_in_a_unit_that_fits(glm5: Inspection, tmp_path: Path) -> None:
    assert "state bytes   5,958,435,133,440 (5.42 TiB): FP32 masters 2.71 TiB" in render_totals(
        glm5
    )
    small = render_totals(inspect_model(_config(tmp_path)))
    # 4 B of momentum for 2 layers of (40 + 20 + 20 + 40 + 3 * 48) * 32, no masters.
    assert "FP32 masters 0 B, Muon momentum 66.00 KiB" in small


def test_json_holds_the_same_and_the_sums_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_inspect(
        _config(tmp_path, "glm_moe_dsa"), heads_per_block=2, mla_components=True, as_json=True
    )
    data = json.loads(capsys.readouterr().out)
    assert data["model_type"] == "glm_moe_dsa"
    assert sum(kind["parameters"] for kind in data["kinds"]) == data["totals"]["parameters"]
    assert sum(shape["matrices"] for shape in data["shapes"]) == data["totals"]["matrices"]
    of_kinds = sum(
        kind["count"] * matrix["count"] for kind in data["kinds"] for matrix in kind["matrices"]
    )
    assert of_kinds == data["totals"]["matrices"]
    key = next(kind for kind in data["kinds"] if kind["kind"].endswith("kv_b_proj.weight"))
    assert key["matrices"] == [{"shape": [16, 16], "count": 2}, {"shape": [24, 16], "count": 2}]
    assert key["algorithm"] == "muon"
    assert not key["guessed"]


def test_nothing_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from muonloom import inspection

    built: list[nn.Module] = []
    original = inspection.build_on_meta

    def keep(config: Any, source: str) -> nn.Module:
        built.append(original(config, source))
        return built[-1]

    monkeypatch.setattr(inspection, "build_on_meta", keep)
    inspect_model(_config(tmp_path, "mixtral"))
    assert all(parameter.device == torch.device("meta") for parameter in built[0].parameters())


def test_a_training_file_with_adamw_alone_has_no_matrices():
    root = Path(__file__).parents[2]
    inspection = inspect_model(root / "configs" / "default-adamw.toml")
    assert inspection.totals.matrices == 0
    assert inspection.totals.adamw_parameters == inspection.totals.parameters
    assert inspection.totals.adamw_bytes == 8 * inspection.totals.parameters
