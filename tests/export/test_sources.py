"""What is read: masters, never a released weight; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.support import assert_same, model_of, optimizer_of, saved, step, trained
from muonloom import HostPlacement, Muon
from muonloom.experts import Float8Experts
from muonloom.export import export_weights
from muonloom.hollow import hollow_


def test_released_weights_are_not_read() -> None:
    model, optimizer = trained("qwen3_moe")
    before = dict(export_weights(model, optimizer))
    for name, param in model.named_parameters():
        hollow_(param, name, "Call resume().")
    assert_same(dict(export_weights(model, optimizer)), before)


@pytest.mark.parametrize(
    "placement", ["host", "device", HostPlacement(master_layout="split")], ids=str
)
def test_the_same_while_released(placement: Any) -> None:
    model = model_of("glm_moe_dsa")  # has a persistent buffer
    model.get_parameter("model.layers.1.mlp.experts.down_proj").requires_grad_(False)
    optimizer = optimizer_of(model, placement=placement)
    for _ in range(2):
        step(model, optimizer)
        before = dict(export_weights(model, optimizer))
        optimizer.release(model=model)
        assert_same(dict(export_weights(model, optimizer)), before)
        optimizer.resume()
        assert_same(dict(export_weights(model, optimizer)), before)


def test_an_expert_engine_takes_nothing_from_the_masters() -> None:
    model = model_of("qwen3_moe")
    down = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    stack = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").detach().clone()
    engine = Float8Experts.attach(model)
    optimizer = optimizer_of(model, engine=engine)
    found = dict(export_weights(model, optimizer))
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert torch.equal(found[name], stack[2].chunk(2)[1])
    step(model, optimizer)
    found = dict(export_weights(model, optimizer, dtype="float8_block"))
    data, _ = dict(engine.named_writers())[down].tensors()
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert torch.equal(found[name].view(torch.uint8), data[2].view(torch.uint8))


def test_frozen_parameters_come_from_the_model(tmp_path: Path) -> None:
    model = model_of("olmoe")
    stack = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").requires_grad_(False)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    assert_same(dict(export_weights(model, optimizer)), saved(model, tmp_path))
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    for dtype in (torch.float32, "float8_block"):
        found = dict(export_weights(model, optimizer, dtype=dtype))
        assert torch.equal(found[name], stack[0].chunk(2)[1])
        assert f"{name}_scale_inv" not in found


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_released_storage_without_a_master_is_named(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].weight.requires_grad_(False)
    optimizer = Muon([p for p in model.named_parameters() if p[1].requires_grad], adamw_lr=1e-3)
    name = "1.weight" if kind == "parameter" else "1.running_mean"
    tensor = model.get_parameter(name) if kind == "parameter" else model.get_buffer(name)
    hollow_(tensor, name, "Call resume().")
    with pytest.raises(ValueError, match=rf"^{name}: got storage that was given up.*Bring it back"):
        dict(export_weights(model, optimizer))


@pytest.mark.parametrize("drained", [False, True])
def test_a_step_in_between_is_an_error(drained: bool) -> None:
    model, optimizer = trained("llama")
    exported = export_weights(model, optimizer)
    next(exported)
    optimizer.step()
    if drained:
        optimizer.drain()
    with pytest.raises(RuntimeError, match="masters that changed between two tensors"):
        next(exported)


def test_changed_masters_in_between_are_an_error() -> None:
    model, optimizer = trained("llama")
    exported = export_weights(model, optimizer)
    next(exported)
    optimizer.apply_to_masters([next(model.parameters())], lambda master: master.mul_(2))
    with pytest.raises(RuntimeError, match="masters that changed between two tensors"):
        next(exported)


def test_it_drains_by_itself() -> None:
    model, optimizer = trained("llama")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert dict(export_weights(model, optimizer))


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float8"}, {"dtype": torch.float64}, {"dtype": None}]
    + [{"max_bytes": bad} for bad in (0, -1, 1.5, True, "1GB")],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    model, optimizer = trained("llama")
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}: got .*; wanted "):
        export_weights(model, optimizer, **options)


def test_another_optimizer() -> None:
    model, _ = trained("llama")
    with pytest.raises(TypeError, match=r"^optimizer: got SGD; wanted a muonloom\.Muon"):
        export_weights(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]


def test_the_optimizer_of_another_model() -> None:
    _, optimizer = trained("llama")
    with pytest.raises(
        ValueError, match=r"^optimizer: got parameters none of which is in the model"
    ):
        export_weights(nn.Linear(4, 4), optimizer)


def test_float16() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = Muon(model.named_parameters())
    ((_, found),) = export_weights(model, optimizer, dtype=torch.float16)
    assert torch.equal(found, model.weight.detach().half())
    with torch.no_grad():
        model.weight[3, 3] = -7e4
    with pytest.raises(ValueError, match=r"^weight: got a weight that float16 cannot hold"):
        dict(export_weights(model, optimizer, dtype=torch.float16))
    dict(export_weights(model, optimizer))
