"""`muonloom export` writes what `export_weights` yields, without the model or the optimizer."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import muonloom.checkpoint
from export.support import PeakBytes, model_of, optimizer_of, step, trained
from fresh import Fresh
from muonloom import HostPlacement, Muon
from muonloom.checkpoint.manifest import FILE_NAME, read_manifest
from muonloom.errors import CheckpointError, ConfigError
from muonloom.experts import Float8Experts
from muonloom.export import export_weights
from muonloom.export_command import run_export
from muonloom.math.float8 import decode_float8

# Blocks of 128: some whole, some not.
WIDE = {"hidden_size": 160, "moe_intermediate_size": 144, "intermediate_size": 136}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": WIDE,
    "glm_moe_dsa": WIDE,
    "llama": {"tie_word_embeddings": True},
}
DTYPES = ["bfloat16", "float16", "float32", "float8_block"]


def save(path: Path, model: nn.Module, optimizer: Muon, at: int = 2) -> Path:
    muonloom.checkpoint.save(path, model=model, optimizer=optimizer, step=at)
    return path


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, Muon, Path]:
    model = model_of(request.param, **MODELS[request.param])
    optimizer = optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer, save(tmp_path_factory.mktemp("saved") / "2", model, optimizer)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama") / "2", *trained("llama"))


def weights_in(folder: Path) -> dict[str, Tensor]:
    """All tensors, each from the file that the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert index.pop(name) == file.name
                found[name] = opened.get_tensor(name)
    assert not index
    return found


def assert_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        raw, same = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(raw, same), name


def live(model: nn.Module, optimizer: Muon, dtype: str, **options: Any) -> dict[str, Tensor]:
    kind = dtype if dtype == "float8_block" else getattr(torch, dtype)
    return dict(export_weights(model, optimizer, dtype=kind, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_export_weights_yields(
    saved: tuple[nn.Module, Muon, Path], dtype: str, tmp_path: Path
) -> None:
    model, optimizer, path = saved
    done = run_export(path, tmp_path / "out", dtype=dtype)
    wanted = live(model, optimizer, dtype)
    assert_bits(weights_in(tmp_path / "out"), wanted)
    assert (done.step, done.num_tensors) == (2, len(wanted))


def test_little_memory_and_small_files_change_nothing(
    saved: tuple[nn.Module, Muon, Path], tmp_path: Path
) -> None:
    model, optimizer, path = saved
    limits = {"max_bytes": 600_000, "max_shard_bytes": 6000}
    for dtype in ("bfloat16", "float8_block"):
        out = tmp_path / dtype
        done = run_export(path, out, dtype=dtype, **limits)  # type: ignore[arg-type]
        assert_bits(weights_in(out), live(model, optimizer, dtype))
        assert done.num_files == len(list(out.glob("*.safetensors"))) > 3


@pytest.mark.parametrize(
    "placement", ["device", HostPlacement(master_layout="split")], ids=["device", "split"]
)
def test_every_placement_gives_it(placement: Any, tmp_path: Path) -> None:
    model, optimizer = trained("qwen3_moe", placement=placement)
    run_export(save(tmp_path / "2", model, optimizer), tmp_path / "out")
    assert_bits(weights_in(tmp_path / "out"), dict(export_weights(model, optimizer)))


def test_before_the_first_step(tmp_path: Path) -> None:
    model = model_of("olmoe")
    optimizer = optimizer_of(model)
    run_export(save(tmp_path / "0", model, optimizer), tmp_path / "out")
    assert_bits(weights_in(tmp_path / "out"), dict(export_weights(model, optimizer)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_parts_and_frozen_parts_stay(dtype: str, tmp_path: Path) -> None:
    model = model_of("glm4_moe")
    model.get_submodule("model.norm").float()
    model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").requires_grad_(False)
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module._buffers["e_score_correction_bias"] = torch.randn(3)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    run_export(save(tmp_path / "1", model, optimizer), tmp_path / "out", dtype=dtype)
    wanted = live(model, optimizer, dtype)
    assert wanted["model.norm.weight"].dtype == torch.float32
    assert_bits(weights_in(tmp_path / "out"), wanted)


def test_an_fp32_model_is_rounded(tmp_path: Path) -> None:
    model = model_of("olmoe", torch.float32)
    optimizer = optimizer_of(model, placement="device")
    step(model, optimizer)
    run_export(save(tmp_path / "1", model, optimizer), tmp_path / "out")
    found = weights_in(tmp_path / "out")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert_bits(found, dict(export_weights(model, optimizer)))


def test_fp8_experts_come_from_their_masters(tmp_path: Path) -> None:
    model = model_of("qwen3_moe")
    optimizer = optimizer_of(model, engine=Float8Experts.attach(model))
    step(model, optimizer)
    run_export(save(tmp_path / "1", model, optimizer), tmp_path / "out")
    assert_bits(weights_in(tmp_path / "out"), dict(export_weights(model, optimizer)))


def test_wrapped_models(tmp_path: Path) -> None:
    model, optimizer = trained("mixtral")
    compiled: Any = torch.compile(model, backend="eager")
    run_export(save(tmp_path / "2", compiled, optimizer), tmp_path / "out")
    assert_bits(weights_in(tmp_path / "out"), dict(export_weights(model, optimizer)))


def test_ties_are_those_of_the_training_process(tmp_path: Path) -> None:
    model = model_of("llama", tie_word_embeddings=True)
    embedding = model.get_parameter("model.embed_tokens.weight")
    model.get_submodule("lm_head").weight = nn.Parameter(embedding.detach().clone() + 1)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    run_export(save(tmp_path / "1", model, optimizer), tmp_path / "out")
    wanted = dict(export_weights(model, optimizer))
    assert {"lm_head.weight", "model.embed_tokens.weight"} < wanted.keys()
    assert_bits(weights_in(tmp_path / "out"), wanted)


# -- the directory -----------------------------------------------------------------------------------


def test_transformers_loads_it(saved: tuple[nn.Module, Muon, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, optimizer, path = saved
    run_export(path, tmp_path / "out", max_shard_bytes=50_000)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.bfloat16
    wanted = dict(model.named_parameters())
    for name, param in loaded.named_parameters():
        master = optimizer.get_full_parameter_master(wanted[name])
        assert torch.equal(param, master.bfloat16()), name
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded.to(torch.bfloat16)(tokens).logits, model(tokens).logits)


def test_transformers_loads_fp8(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    # It takes a block's size from the number of blocks, so that ragged edges are lost on it.
    whole = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 384}
    model = model_of("qwen3_moe", **whole)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    path = save(tmp_path / "1", model, optimizer)
    done = run_export(path, tmp_path / "out", dtype="float8_block")
    assert done.ragged == ()
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    found = weights_in(tmp_path / "out")
    num_decoded = 0
    for name, tensor in dict(export_weights(loaded, optimizer_of(loaded))).items():
        wanted = found[name]
        if wanted.dtype == torch.float8_e4m3fn:
            wanted = decode_float8(wanted, found[f"{name}_scale_inv"]).to(torch.bfloat16)
            num_decoded += 1
        assert torch.equal(tensor, wanted), name
    assert num_decoded > 15


def test_the_configuration(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3_moe")
    path = save(tmp_path / "2", model, optimizer)
    for dtype, stated in (*((d, d) for d in DTYPES[:3]), ("float8_block", "bfloat16")):
        run_export(path, tmp_path / dtype, dtype=dtype)
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert config["dtype"] == stated
        assert config["architectures"] == ["Qwen3MoeForCausalLM"]
        assert ("quantization_config" in config) == (dtype == "float8_block")
        assert (tmp_path / dtype / "generation_config.json").is_file()
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }


def test_modules_that_stay_bf16_are_named_also_where_files_do_not_have_them(tmp_path: Path) -> None:
    stacked, tied = trained("gpt_oss"), model_of("llama", tie_word_embeddings=True)
    for name, pair in (("stacked", stacked), ("tied", (tied, optimizer_of(tied)))):
        run_export(save(tmp_path / f"{name}-2", *pair), tmp_path / name, dtype="float8_block")
    names = {
        name: json.loads((tmp_path / name / "config.json").read_text())["quantization_config"][
            "modules_to_not_convert"
        ]
        for name in ("stacked", "tied")
    }
    assert "model.layers.1.mlp.experts" in names["stacked"]
    assert names["tied"] == ["lm_head", "model.embed_tokens"]


def test_ragged_blocks_are_told(tmp_path: Path) -> None:
    model = model_of("llama", hidden_size=160)
    path = save(tmp_path / "0", model, optimizer_of(model))
    done = run_export(path, tmp_path / "out", dtype="float8_block")
    assert "model.layers.0.self_attn.q_proj.weight" in done.ragged
    assert run_export(path, tmp_path / "bf16").ragged == ()


def test_files_hold_no_more_than_asked(llama: Path, tmp_path: Path) -> None:
    done = run_export(llama, tmp_path / "out", max_shard_bytes=5000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            nbytes = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
        assert nbytes <= 5000
        total += nbytes
    assert len(files) <= 2 * total / 5000 + 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total == done.nbytes
    each = run_export(llama, tmp_path / "each", max_shard_bytes=1)
    assert each.num_files == each.num_tensors


def test_memory_is_bounded(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 2048}
    model = model_of("qwen3_moe", num_experts=16, **wide)
    path = save(tmp_path / "0", model, optimizer_of(model))
    most = 12 * 2 * 128 * 256  # both halves of one expert, of 16
    largest = 2048 * 256 * 2
    for dtype in ("bfloat16", "float8_block"):
        with PeakBytes() as bytes_now:
            run_export(path, tmp_path / dtype, dtype=dtype, max_bytes=most)
        assert bytes_now.peak <= most + largest
    assert most + largest < 4 * 16 * 2 * 128 * 256  # the FP32 master of one stack is found


# -- which checkpoint, which model -------------------------------------------------------------------


def test_the_newest_of_a_directory(tmp_path: Path) -> None:
    model, optimizer = trained("llama")
    save(tmp_path / "first", model, optimizer)
    before = dict(export_weights(model, optimizer))
    step(model, optimizer, 2)
    save(tmp_path / "second", model, optimizer, at=3)
    done = run_export(tmp_path, tmp_path / "out")
    assert (done.checkpoint, done.step) == (tmp_path / "second", 3)
    assert_bits(weights_in(tmp_path / "out"), dict(export_weights(model, optimizer)))
    run_export(tmp_path / "first", tmp_path / "out-2")
    assert_bits(weights_in(tmp_path / "out-2"), before)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got a directory without a finished checkpoint"):
        run_export(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"missing.*got no manifest"):
        run_export(tmp_path / "missing", tmp_path / "out")


def without_model(path: Path) -> None:
    manifest = dataclasses.replace(read_manifest(path), model=None)
    (path / FILE_NAME).write_text(manifest.to_json())


def test_a_configuration_may_be_given(tmp_path: Path) -> None:
    model, optimizer = trained("mixtral")
    path = save(tmp_path / "2", model, optimizer)
    without_model(path)
    with pytest.raises(ConfigError, match=r"no configuration of transformers.*Give --model"):
        run_export(path, tmp_path / "out")
    given = tmp_path / "given"
    model.save_pretrained(given)  # type: ignore[operator]
    (given / "generation_config.json").write_text('{"temperature": 0.25}')
    wanted = dict(export_weights(model, optimizer))
    for name, config in (("a", given), ("b", given / "config.json")):
        run_export(path, tmp_path / name, model=config)
        assert_bits(weights_in(tmp_path / name), wanted)
    copied = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert copied == {"temperature": 0.25}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"has a model\.layers\.2\.\S+; .* which has none"),
        ({"num_hidden_layers": 1}, r"has no model\.layers\.1\.\S+; .* which has one"),
        ({"vocab_size": 65}, r"has \(65, 32\) as \S+; .* which has \(64, 32\)"),
    ],
    ids=str,
)
def test_another_model_is_refused(
    changes: dict[str, int], message: str, llama: Path, tmp_path: Path
) -> None:
    config = json.dumps({**read_manifest(llama).model["config"], **changes})  # type: ignore[index]
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        ConfigError, match=f"config.json: got a configuration whose model {message}"
    ):
        run_export(llama, tmp_path / "out", model=tmp_path / "config.json")
    assert not (tmp_path / "out").exists()


# -- what goes wrong ---------------------------------------------------------------------------------


def test_damage_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    path = save(tmp_path / "2", *trained("llama"))
    tensor = read_manifest(path).tensors["model.model.layers.1.mlp.up_proj.weight"]
    (chunk,) = tensor.chunks
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.start + 4 * 32 * 48 - 1)
        last = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(CheckpointError, match=r"^model\.model\.layers\.1\.mlp\.up_proj\.weight: "):
        run_export(path, tmp_path / "out", max_bytes=20_000)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["2", "latest"]


def test_what_exists_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(ConfigError, match=f"{name}: got a path that exists"):
            run_export(llama, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_parents_are_made(llama: Path, tmp_path: Path) -> None:
    run_export(llama, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "fp8"},
            r"^--dtype: got fp8; wanted bfloat16 or float16 or float32 or float8_block",
        ),
        ({"max_bytes": 0}, "^max_bytes: got 0"),
        ({"max_bytes": 100}, r"^max_bytes: got 100; wanted at least \d+, to make "),
        ({"max_shard_bytes": 0}, "^--max-shard-bytes: got 0"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_export(llama, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr("muonloom.model_files.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match="out: got 100 bytes of free disk"):
        run_export(llama, tmp_path / "a" / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_midway(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    pwrite = os.pwrite

    def failing(descriptor: int, data: Any, start: int) -> int:
        written.append(start)
        if len(written) == 9:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, start)

    monkeypatch.setattr("muonloom.checkpoint.files.os.pwrite", failing)
    with pytest.raises(ConfigError, match=r"model-00001-of-00001.safetensors: .*No space left"):
        run_export(llama, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_killed_in_the_middle_no_model_is_there(llama: Path, fresh: Fresh, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from muonloom.checkpoint.files import DataFile\n"
        "from muonloom.export_command import run_export\n"
        "finish, finished = DataFile.finish, []\n"
        "def dying(self):\n"
        "    finish(self)\n"
        "    finished.append(self)\n"
        "    if sum('model-' in file.path.name for file in finished) == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "DataFile.finish = dying\n"
        "run_export(Path(sys.argv[1]), Path(sys.argv[2]), max_shard_bytes=9000)\n"
    )
    assert fresh.run(code, llama, tmp_path / "out").returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.")
    assert left.name.endswith(".partial")
    run_export(llama, tmp_path / "out")
    assert weights_in(tmp_path / "out")
