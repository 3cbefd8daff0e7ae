"""What the optimizer tells: ``last_step``, ``memory()``, ``trace``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import muonloom
from muonloom import BlockSpec, Layout
from optimizer.support import (
    EXACT,
    give_gradients,
    listening,
    model_parameters,
    parameter,
    randn,
    tensors_of,
)

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}
KEYS = {"skipped", "consecutive_skips", "grad_norm", "matrices", "idle", "ns_calls", "update_rms",
        "bytes_in", "bytes_out", "seconds"}  # fmt: skip


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(plain(v) for v in value)
    return type(value) in (bool, int, float, str, type(None))


def test_last_step_is_plain_and_complete():
    named = model_parameters()
    opt = muonloom.Muon(named, **OPTIONS)
    for bad in (False, True):
        give_gradients(tensors_of(named), 1)
        if bad:
            named[0][1].grad.fill_(float("nan"))  # type: ignore[union-attr]
        with listening():
            opt.step()
        assert set(opt.last_step) >= KEYS
        assert plain(opt.last_step)
        assert json.loads(json.dumps(opt.last_step)) == json.loads(json.dumps(opt.last_step))
        assert opt.last_step["skipped"] is bad
    assert opt.last_step["matrices"] == []
    assert opt.last_step["ns_calls"] == 0


def test_last_step_reads_as_attributes_too():
    opt = muonloom.Muon([parameter(4, 6)])
    opt.step()
    assert opt.last_step.skipped is False
    assert opt.last_step.idle == 0
    with pytest.raises(AttributeError):
        opt.last_step.no_such_key  # noqa: B018


def test_what_is_counted():
    shapes = {"layers.0.experts.w": (3, 8, 6), "layers.0.q.weight": (8, 6), "norm.weight": (6,)}
    layout = Layout.from_shapes(
        shapes, overrides={"*experts.w": BlockSpec.stacked(BlockSpec.transposed(BlockSpec.whole()))}
    )
    named = [(n, parameter(*s)) for n, s in shapes.items()]
    opt = muonloom.Muon(named, layout=layout, **OPTIONS)
    give_gradients(tensors_of(named), 1)
    opt.step()
    report = opt.last_step
    assert {tuple(shape): n for shape, n in report["matrices"]} == {(6, 8): 3, (8, 6): 1}
    total = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in named))  # type: ignore[union-attr]
    assert report["grad_norm"] == pytest.approx(total, rel=1e-5)
    assert (report["idle"], report["skipped"], report["consecutive_skips"]) == (0, False, 0)
    assert all(v >= 0 for v in report["seconds"].values())
    assert report["seconds"]
    assert (report["bytes_in"], report["bytes_out"]) == (0, 0)


def test_update_rms_is_the_size_of_what_was_applied():
    named = model_parameters(depth=2)
    before = {n: p.detach().double().clone() for n, p in named}
    opt = muonloom.Muon(named, weight_decay=0.0, **OPTIONS, **EXACT)
    give_gradients(tensors_of(named), 1)
    opt.step()
    by_kind: dict[str, list[torch.Tensor]] = {}
    for name, p in named:
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        by_kind.setdefault(kind, []).append((p.detach().double() - before[name]).reshape(-1))
    rms = opt.last_step["update_rms"]
    for kind, changes in by_kind.items():
        wanted = float(torch.cat(changes).square().mean().sqrt())
        assert rms[kind] == pytest.approx(wanted, rel=1e-4), kind


def test_the_report_of_a_step_does_not_change_with_the_next_one():
    p = parameter(4, 6)
    opt = muonloom.Muon([p])
    p.grad = randn(4, 6, seed=1)
    opt.step()
    first = opt.last_step
    kept = json.dumps(first)
    p.grad = 10 * randn(4, 6, seed=2)
    opt.step()
    assert json.dumps(first) == kept
    assert json.dumps(opt.last_step) != kept


def test_grad_norm_beyond_the_range_of_fp32_squares():
    p = parameter(4, 6)
    opt = muonloom.Muon([p])
    p.grad = torch.full((4, 6), 1e30)
    opt.step()
    assert opt.last_step["grad_norm"] == pytest.approx(1e30 * math.sqrt(24), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_counts_real_bytes(dtype: torch.dtype):
    named = model_parameters(dtype=dtype)
    params = tensors_of(named)
    opt = muonloom.Muon(named, **OPTIONS)
    give_gradients(params, 1)
    opt.step()
    memory = opt.memory()
    assert set(memory) == {"host_state", "device_state", "device_slots", "device_workspace",
                           "device_weights", "gradients"}  # fmt: skip
    assert all(type(v) is int for v in memory.values())
    numel = sum(p.numel() for p in params)
    size = numel * params[0].element_size()
    state = sum(v.numel() * v.element_size() for s in opt.state.values() for v in s.values())
    assert memory["device_weights"] == size
    assert memory["gradients"] == size
    assert state <= memory["device_state"] <= state + 64 * len(params)
    assert (memory["host_state"], memory["device_slots"]) == (0, 0)
    assert memory["device_workspace"] > 0
    opt.zero_grad()
    assert opt.memory()["gradients"] == 0


def test_memory_counts_a_shared_storage_once():
    flat = torch.zeros(48)
    params = [torch.nn.Parameter(flat[:24].view(4, 6)), torch.nn.Parameter(flat[24:].view(4, 6))]
    assert muonloom.Muon(params).memory()["device_weights"] == 48 * 4


def test_memory_does_not_grow():
    named = model_parameters()
    opt = muonloom.Muon(named, **OPTIONS)
    ledgers = []
    for step in range(20):
        give_gradients(tensors_of(named), step)
        opt.step()
        ledgers.append(opt.memory())
    assert ledgers[2] == ledgers[-1]


def test_trace_writes_a_chrome_trace(tmp_path: Path):
    p = parameter(4, 6)
    opt = muonloom.Muon([p])
    p.grad = randn(4, 6, seed=1)
    with opt.trace(tmp_path / "trace.json"):
        opt.step()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("mm" in str(event.get("name", "")) for event in events)
