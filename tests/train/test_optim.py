"""`[optim]` as the optimizer gets it, and its refusals as lines that name a key."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import muonloom
from muonloom.errors import ConfigError
from muonloom.host import Limit
from muonloom.train import optim
from muonloom.train.config import OptimConfig
from muonloom.train.optim import build_optimizer, placement_of


def build(**options) -> muonloom.Muon:
    config = OptimConfig.model_validate({"adjust_lr_fn": "match_rms_adamw", **options})
    model = nn.Sequential(*(nn.Linear(8, 6, bias=False) for _ in range(3))).to(torch.bfloat16)
    layout = muonloom.Layout.from_shapes({n: tuple(p.shape) for n, p in model.named_parameters()})
    return build_optimizer(model, layout, config)


def stepped(**options) -> muonloom.Muon:
    optimizer = build(**options)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.drain()
    return optimizer


def test_placements_are_those_of_the_table():
    assert placement_of(OptimConfig()) == "device"
    assert placement_of(OptimConfig(placement="host")) == muonloom.HostPlacement()
    host = {"slot_bytes": 4096, "num_slots": 2, "master_layout": "split"}
    config = OptimConfig.model_validate({"placement": "host", "host": host})
    assert placement_of(config) == muonloom.HostPlacement(**host)


def test_state_goes_where_the_table_says():
    on_device, on_host = stepped().memory(), stepped(placement="host").memory()
    assert on_device["host_state"] == on_device["device_slots"] == on_host["device_state"] == 0
    assert on_device["device_state"] > 0
    assert on_host["host_state"] > 0


def test_the_size_and_number_of_slots_are_taken():
    memory = stepped(placement="host", host={"slot_bytes": 4096, "num_slots": 2}).memory()
    assert memory["device_slots"] == 2 * 4096


def test_split_masters_and_narrow_momentum_are_taken():
    host = {"master_layout": "split"}
    optimizer = stepped(placement="host", host=host, momentum_dtype="bfloat16")
    for state in optimizer.state.values():
        assert {key: value.dtype for key, value in state.items()} == {
            "momentum_buffer": torch.bfloat16,
            "master_low": torch.int16,
        }


def test_free_gradients_is_taken():
    optimizer = stepped(free_gradients=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(parameter.grad is None for parameter in parameters)


def test_small_batches_are_taken():
    assert stepped().last_step.ns_calls == 1
    assert stepped(ns_batch_bytes=8 * 6 * 4).last_step.ns_calls > 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"placement": "host", "host": {"slot_bytes": 64}}, r"^optim: 0\.weight: .*slot_bytes=64"),
        ({"ns_batch_bytes": 64}, r"^optim: 0\.weight: .*ns_batch_bytes=64"),
        ({"ns_coefficients": "fancy"}, r"^optim\.ns_coefficients: got 'fancy'"),
    ],
)
def test_refusals_name_a_key(options, match):
    with pytest.raises(ConfigError, match=match):
        build(**options)


def test_too_little_host_memory_is_one_line(monkeypatch):
    limits = (Limit(source="/sys/fs/cgroup/memory.max", free_bytes=100),)
    monkeypatch.setattr("muonloom.host.slab.read_limits", lambda: limits)
    with pytest.raises(ConfigError, match=r"^optim\.placement: got \d+ bytes .*memory\.max"):
        build(placement="host")
    build()


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(12, "Cannot allocate memory"), r"^optim\.placement: .*Cannot allocate memory"),
        (MemoryError(), r"^optim\.placement: .*MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), r"^optim\.placement: .*CUDA out of"),
        (RuntimeError('placement: got "no" from the driver'), r'^optim\.placement: got "no"'),
    ],
)
def test_what_system_device_and_driver_refuse_is_one_line(monkeypatch, error, match):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(optim.muonloom, "Muon", refuse)
    with pytest.raises(ConfigError, match=match) as caught:
        build(placement="host")
    assert "\n" not in str(caught.value)


def test_a_fault_of_ours_is_not_dressed_up(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("internal")

    monkeypatch.setattr(optim.muonloom, "Muon", fail)
    with pytest.raises(RuntimeError, match=r"^internal$") as caught:
        build()
    assert not isinstance(caught.value, ConfigError)
