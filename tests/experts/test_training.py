"""With the optimizer: masters from the source, FP8 bytes from the masters, in every placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonloom
from experts.support import attached, backward, expert_model, stacks, token_ids
from layout.tiny import fresh
from muonloom.errors import ConfigError, StaleMasterError
from muonloom.experts import Float8Experts
from muonloom.train.config import ModelConfig
from muonloom.train.model import attach_experts

FAMILY = "glm_moe_dsa"
PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": muonloom.HostPlacement(slot_bytes=1 << 16, num_slots=3),
}


def optimizer(model: nn.Module, engine: Any, placement: Any = "device") -> muonloom.Muon:
    layout = muonloom.Layout.from_model(model)
    groups = muonloom.parameter_groups(model, layout)
    return muonloom.Muon(
        groups, layout=layout, lr=1e-2, adamw_lr=1e-3, engine=engine, placement=placement
    )


def step(model: nn.Module, opt: muonloom.Muon, seed: int = 0) -> None:
    opt.zero_grad()
    backward(model, seed=seed)
    opt.step()
    opt.drain()


def held_bytes(engine: Float8Experts) -> list[Tensor]:
    return [
        tensor.view(torch.uint8).clone()
        for _, writer in engine.named_writers()
        for tensor in writer.tensors()
    ]


def test_masters_start_from_the_source_and_the_source_is_let_go() -> None:
    exact = {name: p.detach().clone() for name, p in stacks(expert_model(FAMILY)).items()}
    model, engine = attached(FAMILY)
    opt = optimizer(model, engine)
    opt.drain()
    for name, parameter in stacks(model).items():
        assert torch.equal(opt.get_full_parameter_master(parameter), exact[name])
    assert engine.memory()["host_sources"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [FAMILY, "gpt_oss"])
def test_the_bytes_are_those_of_the_masters_in_both_placements(
    family: str, dtype: torch.dtype
) -> None:
    results = []
    for placement in PLACEMENTS.values():
        model, engine = attached(family, dtype)
        before = held_bytes(engine)
        opt = optimizer(model, engine, placement)
        for seed in range(3):
            step(model, opt, seed)
        for parameter, writer in engine.named_writers():
            assert writer.agrees(parameter, opt.get_full_parameter_master(parameter))
        results.append(held_bytes(engine))
        assert not any(map(torch.equal, before, results[-1]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_release_and_resume_are_exact(placement: str) -> None:
    model, engine = attached(FAMILY)
    opt = optimizer(model, engine, PLACEMENTS[placement])
    step(model, opt)
    before, logits = held_bytes(engine), model(token_ids()).logits
    opt.release()
    assert engine.memory()["device_weights"] == engine.memory()["device_workspace"] == 0
    with pytest.raises(RuntimeError, match=r"storage was given up|given back"):
        model(token_ids())
    opt.resume()
    assert all(map(torch.equal, before, held_bytes(engine)))
    assert torch.equal(model(token_ids()).logits, logits)
    step(model, opt)


def test_weights_that_are_loaded_need_a_refresh() -> None:
    model, engine = attached(FAMILY)
    opt = optimizer(model, engine)
    step(model, opt)
    other = expert_model(FAMILY)
    for parameter in stacks(other).values():
        parameter.data.mul_(2.0)
    model.load_state_dict(other.state_dict())
    with pytest.raises(StaleMasterError):
        step(model, opt)
    opt.refresh_masters()
    opt.drain()
    for parameter in stacks(model).values():
        expected = engine.dequantize(parameter, torch.float32)
        assert torch.equal(opt.get_full_parameter_master(parameter), expected)
    step(model, opt)


def test_the_trainers_key() -> None:
    config = {"config": {"model_type": "mixtral"}}
    plain = ModelConfig(**config)
    assert attach_experts(expert_model(), plain) is None
    engine = attach_experts(expert_model(), ModelConfig(**config, expert_weights="float8_block"))
    assert isinstance(engine, Float8Experts)
    with pytest.raises(ConfigError, match=r"model\.expert_weights: got .float8_block. .model: got"):
        attach_experts(fresh("llama"), ModelConfig(**config, expert_weights="float8_block"))
