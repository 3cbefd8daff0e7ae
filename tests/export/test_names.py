"""Names, shapes and values are those of `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.support import assert_same, model_of, optimizer_of, saved, step, trained
from fresh import Fresh
from layout.tiny import fresh
from muonloom import HostPlacement, Muon
from muonloom.export import export_weights

FAMILIES = [
    "llama",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "glm_moe_dsa",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
    "minimax_m2",
    "gpt2",  # its head is tied
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_save_pretrained_writes(model_type: str, tmp_path: Path) -> None:
    model, optimizer = trained(model_type)
    assert_same(dict(export_weights(model, optimizer)), saved(model, tmp_path))


@pytest.mark.parametrize(
    "placement", ["device", HostPlacement(master_layout="split")], ids=["device", "split"]
)
def test_every_placement_gives_it(placement: Any, tmp_path: Path) -> None:
    model, optimizer = trained("qwen3_moe", placement=placement)
    assert_same(dict(export_weights(model, optimizer)), saved(model, tmp_path))


def test_a_model_that_was_loaded_keeps_the_names_of_its_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_of("mixtral").save_pretrained(tmp_path / "first")  # type: ignore[operator]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    found = dict(export_weights(model, optimizer))
    assert_same(found, saved(model, tmp_path / "second"))
    assert any(".block_sparse_moe.experts.2.w3." in name for name in found)


def test_a_model_before_its_first_step(tmp_path: Path) -> None:
    model = model_of("olmoe")
    assert_same(dict(export_weights(model, optimizer_of(model))), saved(model, tmp_path))


def test_fp32_parts_of_a_bf16_model_stay(tmp_path: Path) -> None:
    model = model_of("glm4_moe")
    norm = model.get_submodule("model.norm").float()
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module._buffers["e_score_correction_bias"] = torch.randn(3)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    found = dict(export_weights(model, optimizer))
    assert found["model.norm.weight"].dtype == torch.float32
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert_same(found, saved(model, tmp_path))
    assert not torch.equal(norm.weight, torch.ones(32))


def test_an_fp32_model_is_rounded() -> None:
    model = fresh("olmoe")
    optimizer = optimizer_of(model, placement="device")
    step(model, optimizer)
    found = dict(export_weights(model, optimizer))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    norm = model.get_parameter("model.norm.weight")
    assert torch.equal(found["model.norm.weight"], norm.detach().bfloat16())


def test_several_tensors_of_the_model_become_one_of_the_file(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    model = model_of("llama")
    model._weight_conversions = [  # type: ignore[assignment]
        WeightConverter(
            "self_attn.kv.weight",
            ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            [Chunk(0)],
        ),
        WeightConverter("self_attn.o.weight", "self_attn.o_proj.weight", [Transpose(0, 1)]),
    ]
    optimizer = optimizer_of(model)
    step(model, optimizer)
    found = dict(export_weights(model, optimizer))
    assert found["model.layers.1.self_attn.kv.weight"].shape == (40, 32)
    assert_same(found, saved(model, tmp_path))


def test_masters_are_exported_not_weights() -> None:
    model, optimizer = trained("llama")
    found = dict(export_weights(model, optimizer, dtype=torch.float32))
    for name, param in model.named_parameters():
        assert torch.equal(found[name], optimizer.get_full_parameter_master(param)), name
    head = model.get_parameter("lm_head.weight")
    assert not torch.equal(found["lm_head.weight"], head.detach().float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(24, 16)
        self.embed = nn.Embedding(16, 24)
        self.head = nn.Linear(24, 16, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def plain() -> tuple[Tied, Muon]:
    model = Tied().to(torch.bfloat16)
    optimizer = Muon(model.named_parameters(), adamw_lr=1e-3, placement="host")
    step(model, optimizer)
    return model, optimizer


def test_plain_modules_keep_their_names() -> None:
    model, optimizer = plain()
    wanted = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    assert "norm.running_mean" in wanted
    assert_same(dict(export_weights(model, optimizer)), wanted)


def test_wrappers_are_looked_through() -> None:
    model, optimizer = plain()
    bare = dict(export_weights(model, optimizer))
    compiled: Any = torch.compile(model, backend="eager")
    assert_same(dict(export_weights(compiled, optimizer)), bare)
    assert_same(dict(export_weights(nn.DataParallel(model), optimizer)), bare)
    outer = nn.Sequential(compiled)
    inner = {f"0.{name}": tensor for name, tensor in bare.items()}
    assert_same(dict(export_weights(outer, optimizer)), inner)


def test_plain_modules_need_no_transformers(fresh: Fresh) -> None:
    code = (
        "import sys, torch, muonloom, muonloom.export as e\n"
        "m = torch.nn.Linear(4, 4, dtype=torch.bfloat16)\n"
        "o = muonloom.Muon(m.named_parameters(), adamw_lr=1e-3)\n"
        "assert [n for n, _ in e.export_weights(m, o)] == ['weight', 'bias']\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = fresh.run(code, strict=True)
    assert done.returncode == 0, done.stderr
