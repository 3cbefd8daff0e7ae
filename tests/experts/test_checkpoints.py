"""Saved ordinarily or in the FP8 layout, and loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from experts.support import FAMILIES, attached, backward, expert_model, stacks
from muonloom.experts import Float8Experts
from muonloom.math.float8 import decode_float8

SHAPES: dict[str, dict[str, Any]] = {
    # Rows of gate and of up: whole blocks; less than a block together; less than a block each.
    "aligned": {"hidden_size": 128, "moe_intermediate_size": 128},
    "one block": {"hidden_size": 32, "moe_intermediate_size": 24},
    "across": {"hidden_size": 32, "moe_intermediate_size": 96},
}


def deepseek(shapes: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    model = expert_model("deepseek_v3", dtype, **SHAPES[shapes])
    return model, Float8Experts.attach(model, **options)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_save_pretrained_is_ordinary(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, engine = attached(family, dtype)
    logits = backward(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    assert "float8" not in json.dumps(config)
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(tensor.dtype != torch.float8_e4m3fn for tensor in tensors.values())
    loaded = load(tmp_path, dtype)
    held = stacks(model)
    for name, parameter in stacks(loaded).items():
        assert torch.equal(parameter, engine.dequantize(held[name]))
    if dtype == torch.float32:  # a model that was cast has rotary frequencies of lower precision
        assert torch.equal(backward(loaded), logits)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_fp8_layout_is_deepseeks(shapes: str, scale_format: str, tmp_path: Path) -> None:
    model, engine = deepseek(shapes, scale_format=scale_format)
    engine.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert config.get("scale_fmt") == (None if scale_format == "float32" else "ue8m0")
    module, half = "model.layers.1.mlp.experts", SHAPES[shapes]["moe_intermediate_size"]
    (fused,) = (p for n, p in stacks(model).items() if n == f"{module}.gate_up_proj")
    (down,) = (p for n, p in stacks(model).items() if n == f"{module}.down_proj")
    for expert in range(5):
        parts = {
            "gate_proj": engine.dequantize(fused)[expert, :half],
            "up_proj": engine.dequantize(fused)[expert, half:],
            "down_proj": engine.dequantize(down)[expert],
        }
        for name, values in parts.items():
            data = tensors[f"{module}.{expert}.{name}.weight"]
            scale_inv = tensors[f"{module}.{expert}.{name}.weight_scale_inv"]
            assert data.dtype == torch.float8_e4m3fn
            assert f"{module}.{expert}.{name}" not in config["modules_to_not_convert"]
            found = decode_float8(data, scale_inv)
            if shapes == "across" and name != "down_proj" and scale_format == "float32":
                # Quantized once more: half of e4m3's last bit, 2**-4 relative; 2**-9 absolute of 448.
                atol = float(values.abs().max()) * 2**-9 / 448
                torch.testing.assert_close(found, values, rtol=2**-4, atol=atol)
            else:
                assert torch.equal(found, values)
    others = {name for name, t in tensors.items() if t.dtype != torch.float8_e4m3fn}
    state = model.state_dict()
    for name in others & state.keys():
        assert torch.equal(tensors[name], state[name])
        if name.endswith(".weight") and state[name].ndim == 2:
            assert name.removesuffix(".weight") in config["modules_to_not_convert"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "glm_moe_dsa"])
def test_the_names_of_other_families(family: str, tmp_path: Path) -> None:
    model, engine = attached(family)
    model.save_pretrained(tmp_path / "plain")
    engine.save_pretrained(tmp_path / "fp8")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    fp8 = load_file(tmp_path / "fp8" / "model.safetensors")
    scales = {name for name in fp8 if name.endswith("_scale_inv")}
    assert fp8.keys() - scales == plain.keys()
    assert {name.removesuffix("_scale_inv") for name in scales} == {
        name for name, tensor in fp8.items() if tensor.dtype == torch.float8_e4m3fn
    }


def saved_and_attached_again(
    shapes: str, dtype: torch.dtype, tmp_path: Path, **options: Any
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Numbers and scales (before, after) of every weight, through Transformers' loader."""
    pytest.importorskip("accelerate", reason="Transformers loads FP8 checkpoints with accelerate")
    model, engine = deepseek(shapes, dtype, **options)
    engine.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype)
    for name, parameter in stacks(loaded).items():
        assert parameter.dtype == dtype
        if shapes != "across":
            assert torch.equal(parameter, engine.dequantize(stacks(model)[name]))
    again = Float8Experts.attach(loaded, **options)
    pairs = zip(engine.named_writers(), again.named_writers(), strict=True)
    return [
        (one.storage.data, other.storage.data, one.storage.scale_inv, other.storage.scale_inv)
        for (_, one), (_, other) in pairs
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", ["aligned", "one block"])
def test_transformers_loads_it_and_the_bytes_come_back(
    shapes: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for data, again, scale_inv, scale_again in saved_and_attached_again(shapes, dtype, tmp_path):
        assert torch.equal(data.view(torch.uint8), again.view(torch.uint8))
        # What the loader rounds to its dtype, the largest magnitude of a block is part of.
        rtol = torch.finfo(dtype).eps
        torch.testing.assert_close(scale_again, scale_inv, rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shapes", ["aligned", "one block"])
def test_powers_of_two_come_back_exactly(shapes: str, tmp_path: Path) -> None:
    pairs = saved_and_attached_again(shapes, torch.bfloat16, tmp_path, scale_format="ue8m0")
    for data, again, scale_inv, scale_again in pairs:
        assert torch.equal(data.view(torch.uint8), again.view(torch.uint8))
        assert torch.equal(scale_inv.view(torch.uint8), scale_again.view(torch.uint8))


def test_shards(tmp_path: Path) -> None:
    _, engine = deepseek("aligned", torch.bfloat16)
    engine.save_pretrained(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert "model.layers.1.mlp.experts.4.up_proj.weight_scale_inv" in index


def test_saving_fp8_never_dequantizes_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, engine = deepseek("aligned")
    monkeypatch.setattr(
        "muonloom.experts.weights.ExpertWeight.dequantized",
        lambda *args: pytest.fail("dequantized"),
    )
    engine.save_pretrained(tmp_path)


def test_layouts_that_deepseek_does_not_have_are_refused(tmp_path: Path) -> None:
    _, engine = attached("gpt_oss")
    with pytest.raises(
        ValueError, match=r"experts\.gate_up_proj: got experts that are stored trans"
    ):
        engine.save_pretrained(tmp_path)
    model = expert_model("deepseek_v3", moe_intermediate_size=192)
    engine = Float8Experts.attach(model)
    with pytest.raises(ValueError, match="got 192 rows or columns of a matrix in blocks of 128"):
        engine.save_pretrained(tmp_path)
    engine.release()
    with pytest.raises(RuntimeError, match="call resume first"):
        engine.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
