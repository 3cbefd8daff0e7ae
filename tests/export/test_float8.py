"""FP8 weights in blocks, from the masters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from export.support import model_of, optimizer_of, step
from muonloom import Muon
from muonloom.export import export_weights
from muonloom.math.float8 import decode_float8, encode_float8_, scale_shape

# Blocks of 128: some whole, some not.
WIDE = {"hidden_size": 160, "moe_intermediate_size": 144, "intermediate_size": 136}


@pytest.fixture(scope="module", params=["glm_moe_dsa", "qwen3_next"])
def exported(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, Muon]:
    model = model_of(request.param, **WIDE)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    return model, optimizer


def encoded(master: Tensor) -> tuple[Tensor, Tensor]:
    data = torch.empty(master.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(scale_shape(master.shape))
    encode_float8_(master.contiguous(), data, scale_inv)
    return data, scale_inv


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_bytes_come_from_the_masters(exported: tuple[torch.nn.Module, Muon]) -> None:
    masters = dict(export_weights(*exported, dtype=torch.float32))
    bf16 = dict(export_weights(*exported))
    found = dict(export_weights(*exported, dtype="float8_block"))
    num_encoded = differing = 0
    for name, master in masters.items():
        if f"{name}_scale_inv" not in found:
            assert torch.equal(found.pop(name), bf16[name]), name
            continue
        data, scale_inv = encoded(master)
        assert same_bytes(found.pop(name), data), name
        assert torch.equal(found.pop(f"{name}_scale_inv"), scale_inv), name
        num_encoded += 1
        differing += not same_bytes(data, encoded(bf16[name].float())[0])
    assert not found
    assert num_encoded > 20
    assert differing > 20


def test_which_are_encoded(exported: tuple[torch.nn.Module, Muon]) -> None:
    found = {name for name, _ in export_weights(*exported, dtype="float8_block")}
    assert "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv" in found
    assert any(name.endswith("o_proj.weight_scale_inv") for name in found)
    for kept in ("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight"):
        assert any(name.endswith(kept) for name in found), kept
        assert not any(name.endswith(f"{kept}_scale_inv") for name in found), kept


def test_stacks_that_stay_stacks_are_bf16() -> None:
    model = model_of("gpt_oss")
    optimizer = optimizer_of(model)
    step(model, optimizer)
    found = dict(export_weights(model, optimizer, dtype="float8_block"))
    assert found["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in found


def test_plain_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(130, 40), torch.nn.LayerNorm(40)).bfloat16()
    model.register_parameter("matrix", torch.nn.Parameter(torch.randn(8, 8).bfloat16()))
    optimizer = Muon(model.named_parameters(), adamw_lr=1e-3, placement="host")
    found = dict(export_weights(model, optimizer, dtype="float8_block"))
    names = ["matrix", "matrix_scale_inv", "0.weight", "0.weight_scale_inv"]
    assert list(found) == [*names, "0.bias", "1.weight", "1.bias"]
    assert found["0.weight_scale_inv"].shape == (1, 2)


def test_transformers_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for accelerate, and uses none of it where weights are dequantized on a CPU.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    # It takes a block's size from the number of blocks, so that ragged edges are lost on it.
    whole = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 384}
    model = model_of("qwen3_moe", **whole)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    found = dict(export_weights(model, optimizer, dtype="float8_block"))
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()  # type: ignore[union-attr, operator]
    quantization = FineGrainedFP8Config(weight_block_size=(128, 128)).to_dict()
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": quantization})
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    again = dict(export_weights(loaded, optimizer_of(loaded)))
    assert any(name.endswith("experts.2.up_proj.weight_scale_inv") for name in found)
    for name, tensor in again.items():
        wanted = found[name]
        if wanted.dtype == torch.float8_e4m3fn:
            wanted = decode_float8(wanted, found[f"{name}_scale_inv"]).to(torch.bfloat16)
        assert torch.equal(tensor, wanted), name
