from __future__ import annotations

import json

import pytest
import torch

from muonloom.errors import ConfigError
from muonloom.train.config import ModelConfig
from muonloom.train.model import build_model

CPU = torch.device("cpu")


def build(vocabulary=256, sequence_length=16, **section):
    return build_model(
        ModelConfig(**section), vocabulary=vocabulary, sequence_length=sequence_length, device=CPU
    )


def test_a_table_makes_a_model_in_the_dtype_asked_for(tiny_model):
    model = build(config=tiny_model, dtype="bfloat16")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training


def test_a_config_json_may_carry_keys_that_this_version_lacks(tiny_model, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**tiny_model, "future_field": 1}))
    assert build(config=str(path)).config.hidden_size == 16


def test_a_field_that_only_the_models_code_reads_is_known():
    table = {"model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 16, "head_dim": 4}
    table |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    table |= {"num_experts": 2, "num_experts_per_tok": 1, "rope_theta": 1e4}
    assert build(config=table).model.layers[0].self_attn.q_proj.weight.shape == (8, 16)


def test_a_saved_model_is_read_back(tiny_model, tmp_path):
    model = build(config=tiny_model)
    model.save_pretrained(tmp_path)
    again = build(directory=str(tmp_path))
    for (name, one), (_, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "lama"}, r"^model\.config\.model_type: got 'lama'.*'llama'"),
        ({"model_type": None}, r"^model\.config\.model_type: got None"),
        ({"hiden_size": 8}, r"^model\.config\.hiden_size: .*Did you mean hidden_size"),
        ({"hidden_size": "wide"}, r"^model\.config: got "),
        ({"model_type": "vit"}, r"^model\.config"),
        ({"vocab_size": 100}, r"^model\.config\.vocab_size: got 100; wanted at least 256"),
        ({"max_position_embeddings": 8}, r"^data\.sequence_length: got 16; wanted at most"),
    ],
)
def test_a_table_that_makes_no_model_is_refused(tiny_model, change, match):
    with pytest.raises(ConfigError, match=match) as caught:
        build(config=tiny_model | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"model_type": "none"}'])
def test_a_config_json_that_is_none_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"^model\.config"):
        build(config=str(path))


def test_pickled_weights_are_not_read(tiny_model, tmp_path):
    model = build(config=tiny_model)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"^model\.directory: .*without any \.safetensors"):
        build(directory=str(tmp_path))


def test_code_beside_the_weights_is_not_run(tiny_model, tmp_path):
    build(config=tiny_model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"^model\.directory: got "):
        build(directory=str(tmp_path))
    assert not marker.exists()


def test_a_damaged_directory_is_refused(tiny_model, tmp_path):
    build(config=tiny_model).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ConfigError, match=r"^model\.directory: got "):
        build(directory=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^model\.directory: got .*no directory"):
        build(directory=str(tmp_path / "missing"))


def test_an_experts_implementation_that_is_none_is_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"^model\.experts: got 'magic'"):
        build(config=tiny_model, experts="magic")
