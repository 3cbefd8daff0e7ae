"""The example runs, and finds what it is there to find."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import muonloom

_PATH = Path(__file__).parents[2] / "examples" / "colocated_rl.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("colocated_rl", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHORT = ["--cycles", "2", "--samples", "4", "--length", "2"]


@pytest.mark.parametrize("experts", ["bfloat16", "float8"])
def test_two_cycles(example: ModuleType, experts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main([*SHORT, "--experts", experts]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:6] == ["cycle", "reward", "before", "released", "resumed", "exact"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    for row in rows:
        _, reward, before, released, resumed, exact, *_ = row.split()
        assert 0 <= float(reward) <= 1
        assert float(before) > float(resumed) > float(released) == 0
        assert exact == "yes"


def test_weights_that_change_are_found(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = muonloom.Muon.resume

    def damaging(optimizer: muonloom.Muon, *args: Any) -> None:
        resume(optimizer, *args)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[5] += 1

    monkeypatch.setattr(muonloom.Muon, "resume", damaging)
    assert example.main(["--cycles", "1", *SHORT[2:]]) == 1
    assert "cycle 1: weights came back changed" in capsys.readouterr().err


def test_memory_that_stays_is_found(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = muonloom.Muon.memory
    calls: list[int] = []

    def growing(optimizer: muonloom.Muon) -> dict[str, int]:
        calls.append(1)
        found = memory(optimizer)
        return {**found, "device_slots": found["device_slots"] + len(calls)}

    monkeypatch.setattr(muonloom.Muon, "memory", growing)
    assert example.main(SHORT) == 1
    errors = capsys.readouterr().err
    assert "bytes stayed on the device" in errors
    assert "cycle 2: before" in errors


def test_the_engine_takes_nothing_twice_and_misses_nothing(example: ModuleType) -> None:
    engine = example.RolloutEngine(example.build_model())
    weights = dict(engine.model.named_parameters())
    stacks = {name: w for name, w in weights.items() if ".experts." in name}
    plain = [(name, w.clone()) for name, w in weights.items() if name not in stacks]
    parts = []
    for name, stack in stacks.items():
        owner, _, kind = name.rpartition(".")
        for index, expert in enumerate(stack.clone()):
            halves = expert.chunk(2) if kind == "gate_up_proj" else [expert]
            for part, half in zip(
                ["gate", "up"] if len(halves) == 2 else ["down"], halves, strict=True
            ):
                parts.append((f"{owner}.{index}.{part}_proj.weight", half))
    engine.load([*plain, *parts])
    with pytest.raises(ValueError, match="elements did not come"):
        engine.load([*plain, *parts[1:]])
    with pytest.raises(ValueError, match="elements did not come"):
        engine.load([*plain, *parts, parts[0]])
    with pytest.raises(KeyError, match=r"model\.other"):
        engine.load([("model.other", torch.zeros(1))])
