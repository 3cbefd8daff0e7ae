"""What a user of host placement sees: bytes, errors, masters, reports."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import muonloom
import muonloom.host.slab
import muonloom.planning
from muonloom import HostPlacement
from muonloom.host import Limit
from muonloom.schedule import Op
from staging.support import (
    OPTIONS,
    Named,
    assert_same_bits,
    everything,
    give_gradients,
    layout,
    mixed,
    model,
)

SLOT = 4 * 64 * 32


def deep(depth: int, dtype: torch.dtype = torch.bfloat16) -> Named:
    generator = torch.Generator().manual_seed(0)
    named: Named = []
    for i in range(depth):
        for key, shape in (("up", (64, 32)), ("down", (32, 64)), ("norm", (32,))):
            values = torch.randn(shape, generator=generator).to(dtype)
            named.append((f"layers.{i}.{key}.weight", Parameter(values)))
    return named


def steps(named: Named, opt: muonloom.Muon, count: int) -> None:
    for step in range(count):
        give_gradients(named, step)
        opt.step()


# -- bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 3])
def test_device_bytes_are_slots_and_workspace_whatever_the_depth(num_slots: int):
    ledgers = []
    for depth in (2, 48):
        named = deep(depth)
        opt = muonloom.Muon(
            named,
            placement=HostPlacement(slot_bytes=SLOT, num_slots=num_slots),
            ns_batch_bytes=2 * 64 * 32 * 4,
            **OPTIONS,
        )
        steps(named, opt, 3)
        early = opt.memory()
        steps(named, opt, 47 if depth == 2 else 3)
        opt.drain()
        assert opt.memory() == early
        ledgers.append(early)
    small, large = ledgers
    assert small["device_slots"] == large["device_slots"] == num_slots * SLOT
    assert small["device_workspace"] == large["device_workspace"] > 0
    assert small["device_state"] == large["device_state"] == 0
    numel = 48 * (2 * 64 * 32)
    assert 8 * numel <= large["host_state"] < 8 * numel + 48 * 32 * 12 + 4096 + 64 * 48 * 7


@pytest.mark.parametrize(
    ("master_layout", "momentum_dtype", "each_way"),
    [
        ("full", torch.float32, 8),
        ("full", torch.bfloat16, 6),
        ("split", torch.float32, 6),
        ("split", torch.bfloat16, 4),
    ],
)
def test_traffic_of_a_matrix(master_layout: str, momentum_dtype: torch.dtype, each_way: int):
    named = [pair for pair in deep(5) if "norm" not in pair[0]]
    placement = HostPlacement(slot_bytes=SLOT, master_layout=master_layout)
    opt = muonloom.Muon(named, placement=placement, momentum_dtype=momentum_dtype, **OPTIONS)
    numel = sum(p.numel() for _, p in named)
    for step in range(3):
        steps(named, opt, 1)
        report = opt.last_step
        assert report["bytes_in"] == report["bytes_out"] == each_way * numel, step
    assert opt.memory()["host_state"] == -(-each_way * numel // 4096) * 4096


def test_fp32_parameters_move_their_momentum_only_and_are_told_of(caplog: pytest.LogCaptureFixture):
    named = deep(2, torch.float32)
    numel = sum(p.numel() for _, p in named)
    with caplog.at_level(logging.INFO, "muonloom"):
        opt = muonloom.Muon(named, placement="host", **OPTIONS)
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"host {opt.memory()['host_state']} bytes, device 0 bytes" in line for line in lines)
    assert any(f"6 FP32 parameters ({4 * numel} bytes) are their own masters" in x for x in lines)
    steps(named, opt, 1)
    matrices = sum(p.numel() for name, p in named if "norm" not in name)
    assert opt.last_step["bytes_in"] == 4 * matrices + 8 * (numel - matrices)
    assert all("master_weight" not in state for state in opt.state.values())


def test_state_tensors_never_move():
    named = model(mixed)
    opt = muonloom.Muon(named, layout=layout(), placement="host", **OPTIONS)
    steps(named, opt, 1)
    before = {(p, k): t.data_ptr() for p, s in opt.state.items() for k, t in s.items()}
    opt.drain()
    saved = opt.state_dict()
    for index, state in saved["state"].items():
        for key, tensor in state.items():
            assert tensor.data_ptr() in before.values(), (index, key)  # views, not copies
    opt.load_state_dict(saved)
    steps(named, opt, 1)
    after = {(p, k): t.data_ptr() for p, s in opt.state.items() for k, t in s.items()}
    assert after == before


def test_over_the_limit_is_an_error_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    named = deep(8)
    needed = 8 * sum(p.numel() for name, p in named if "norm" not in name)
    arenas: list[int] = []
    genuine = muonloom.host.slab.HostArena
    monkeypatch.setattr(
        muonloom.host.slab,
        "HostArena",
        lambda nbytes, **options: arenas.append(nbytes) or genuine(nbytes, **options),
    )
    for free, fits in ((needed // 2, False), (2 * needed, True)):
        limit = Limit(source="/sys/fs/cgroup/memory.max", free_bytes=free)
        monkeypatch.setattr(muonloom.host.slab, "read_limits", lambda limit=limit: (limit,))
        if fits:
            muonloom.Muon(named, placement="host", **OPTIONS)
            assert len(arenas) == 1
        else:
            with pytest.raises(MemoryError, match=r"^placement: got .*memory\.max"):
                muonloom.Muon(named, placement="host", **OPTIONS)
            assert not arenas


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"slot_bytes": 0}, "slot_bytes"),
        ({"slot_bytes": -5}, "slot_bytes"),
        ({"slot_bytes": 1.5}, "slot_bytes"),
        ({"slot_bytes": "large"}, "slot_bytes"),
        ({"slot_bytes": True}, "slot_bytes"),
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": 2.0}, "num_slots"),
        ({"master_layout": "half"}, "master_layout"),
        ({"master_layout": None}, "master_layout"),
    ],
)
def test_bad_options_lead_with_their_name(options: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=rf"^{name}: got .*wanted"):
        HostPlacement(**options)


@pytest.mark.parametrize("placement", ["cpu", None, 3, HostPlacement])
def test_bad_placements(placement: Any):
    with pytest.raises(ValueError, match=r"^placement: got .*'device', 'host' or a muonloom.Host"):
        muonloom.Muon(deep(1), placement=placement, **OPTIONS)


def test_a_matrix_larger_than_a_slot_is_named_with_its_bytes():
    with pytest.raises(ValueError, match=r"^layers\.0\.up\.weight: .*8192 bytes.*slot_bytes=8191"):
        muonloom.Muon(deep(1), placement=HostPlacement(slot_bytes=SLOT - 1), **OPTIONS)
    muonloom.Muon(deep(1), placement=HostPlacement(slot_bytes=SLOT), **OPTIONS)


def test_a_tiny_slot_is_enough_for_adamw():
    """Spans are cut to the slot; no bit depends on where."""
    results = []
    for placement in ("device", HostPlacement(slot_bytes=768)):
        embed = Parameter(torch.linspace(-1, 1, 5000).view(50, 100).bfloat16())
        opt = muonloom.Muon([("embed.weight", embed), ("w", Parameter(torch.ones(4, 4)))],
                            placement=placement, **OPTIONS)  # fmt: skip
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            embed.grad = torch.randn(embed.shape, generator=generator).bfloat16()
            opt.step()
        results.append(everything([("embed.weight", embed)], opt))
    assert_same_bits(*results)


def test_split_refuses_fp16_by_name():
    named = [("a.weight", Parameter(torch.ones(4, 4, dtype=torch.float16)))]
    with pytest.raises(
        ValueError, match=r"^a\.weight: got a torch\.float16 parameter.*BF16 or FP32"
    ):
        muonloom.Muon(named, placement=HostPlacement(master_layout="split"), **OPTIONS)
    muonloom.Muon(named, placement="host", **OPTIONS)


# -- masters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master_layout", ["full", "split"])
def test_the_complete_master_on_the_host(master_layout: str):
    named = model()
    opt = muonloom.Muon(
        named, layout=layout(), placement=HostPlacement(master_layout=master_layout), **OPTIONS
    )
    twin = model()
    other = muonloom.Muon(twin, layout=layout(), **OPTIONS)
    steps(named, opt, 2)
    steps(twin, other, 2)
    with pytest.raises(RuntimeError, match=r"^embed\.weight: .*drain"):
        opt.get_full_parameter_master(named[0][1])
    opt.drain()
    other.drain()
    for (name, mine), (_, theirs) in zip(named, twin, strict=True):
        master = opt.get_full_parameter_master(mine)
        assert master.dtype == torch.float32
        assert master.device.type == "cpu"
        assert torch.equal(master, other.get_full_parameter_master(theirs)), name
        assert torch.equal(master.bfloat16(), mine)
        if master_layout == "full":
            assert master is opt.state[mine]["master_weight"]


@pytest.mark.parametrize("placement", ["device", "host", HostPlacement(master_layout="split")])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_master_that_rounds_to_infinity_raises(placement: Any, algorithm: str):
    weight = Parameter(torch.full((8, 8), 3.38e38, dtype=torch.bfloat16))
    fine = Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    lr = {"muon": 2.3e37, "adamw": 2e36}[algorithm]  # to between BF16's largest number and FP32's
    groups = [
        {"params": [("big.weight", weight)], "algorithm": algorithm, "lr": lr},
        {"params": [("fine.weight", fine)], "lr": 0.01},
    ]
    opt = muonloom.Muon(groups, placement=placement, weight_decay=0.0)
    weight.grad, fine.grad = -torch.ones_like(weight), torch.zeros_like(fine)
    opt.step()
    with pytest.raises(FloatingPointError, match=r"^big\.weight: got a master that .* infinity"):
        opt.drain()
    master = opt.get_full_parameter_master(weight)
    assert bool(torch.isfinite(master).all())
    assert bool(torch.isinf(weight).any())
    opt.apply_to_masters([weight], lambda m: m.mul_(0.5))
    assert bool(torch.isfinite(weight).all())
    weight.grad = None
    fine.grad = torch.ones_like(fine)
    opt.step()
    opt.drain()


@pytest.mark.parametrize("placement", ["device", "host"])
def test_large_finite_weights_do_not_raise(placement: str):
    weight = Parameter(torch.full((8, 8), 1e30, dtype=torch.bfloat16))
    opt = muonloom.Muon([("big.weight", weight)], placement=placement, lr=1.0, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        opt.step()
    opt.drain()


def test_an_overflow_that_nobody_drained_is_raised_by_the_next_step():
    weight = Parameter(torch.full((8, 8), 3.38e38, dtype=torch.bfloat16))
    opt = muonloom.Muon([("big.weight", weight)], placement="host", lr=2.3e37, weight_decay=0.0)
    weight.grad = -torch.ones_like(weight)
    opt.step()
    with pytest.raises(FloatingPointError, match=r"^big\.weight"):
        opt.step()


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_parameter_that_changes_its_dtype(placement: str):
    """It is its own master from then on, once its new values were accepted."""
    named = deep(2)
    opt = muonloom.Muon(named, placement=placement, **OPTIONS)
    steps(named, opt, 1)
    opt.drain()
    changed = named[0][1]
    changed.data = changed.data.float()
    opt.refresh_masters([changed])
    before = changed.detach().clone()
    steps(named, opt, 2)
    opt.drain()
    assert "master_weight" not in opt.state[changed]
    assert not torch.equal(before, changed)


# -- lives and state ----------------------------------------------------------------------------------


def test_a_dropped_optimizer_gives_its_memory_back_at_once():
    """Without a run of the garbage collector, which does not know how much a slab is."""
    gc.collect()
    gc.disable()
    try:
        named = deep(2)
        opt = muonloom.Muon(named, placement="host", **OPTIONS)
        steps(named, opt, 2)
        opt.drain()
        slab = weakref.ref(opt._assembly._slabs)
        assert slab() is not None
        del opt
        assert slab() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("placement", ["device", "host", HostPlacement(master_layout="split")])
def test_a_live_dictionary_survives_a_cleared_state(placement: Any):
    named = model(mixed)
    opt = muonloom.Muon(named, layout=layout(), placement=placement, **OPTIONS)
    steps(named, opt, 2)
    before = everything(named, opt)
    saved = opt.state_dict()
    opt.state.clear()
    opt.load_state_dict(saved)
    assert_same_bits(everything(named, opt), before)


def test_a_split_master_is_not_read_from_a_changed_weight():
    named = model()
    placement = HostPlacement(master_layout="split")
    opt = muonloom.Muon(named, layout=layout(), placement=placement, **OPTIONS)
    steps(named, opt, 1)
    opt.drain()
    with torch.no_grad():
        named[1][1].add_(1)
    for read in (opt.state_dict, lambda: opt.get_full_parameter_master(named[1][1])):
        with pytest.raises(muonloom.StaleMasterError, match=r"^layers\.0\.q\.weight"):
            read()
    opt.refresh_masters([named[1][1]])
    assert torch.equal(opt.get_full_parameter_master(named[1][1]), named[1][1].float())


def test_state_that_a_caller_put_in_place_moves_into_the_slab():
    results = []
    for placement in ("device", "host"):
        named = model()
        opt = muonloom.Muon(named, layout=layout(), placement=placement, **OPTIONS)
        steps(named, opt, 1)
        opt.drain()
        state = opt.state[named[1][1]]
        mine = torch.ones_like(state["momentum_buffer"])
        state["momentum_buffer"] = mine
        steps(named, opt, 1)
        opt.drain()
        state["momentum_buffer"].mul_(2)
        steps(named, opt, 1)
        results.append(everything(named, opt))
    assert_same_bits(*results)


def test_momentum_keeps_its_dtype_when_the_group_changes_its_mind():
    results = []
    for placement in ("device", "host"):
        named = deep(3)
        opt = muonloom.Muon(named, placement=placement, **OPTIONS)
        steps(named, opt, 1)
        for group in opt.param_groups:
            group["momentum_dtype"] = torch.bfloat16
            group["ns_steps"] = 4
        steps(named, opt, 2)
        results.append(everything(named, opt))
    assert_same_bits(*results)


def test_reordered_groups_keep_the_order_of_spans(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(muonloom.planning._PACK_NUMEL, "cpu", 64)
    results = []
    for placement in ("device", "host"):
        for turned in (False, True):
            named = [("norm.a", Parameter(torch.ones(300))), ("norm.b", Parameter(torch.ones(200)))]
            named.append(("w.weight", Parameter(torch.ones(4, 4))))
            opt = muonloom.Muon(named, placement=placement, **OPTIONS)
            for step in range(3):
                give_gradients(named, step)
                opt.step()
                if turned:
                    for group in opt.param_groups:
                        group["params"].reverse()
            opt.drain()
            results.append([p.detach().clone() for _, p in named])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_built_in_inference_mode_or_under_a_default_device():
    for context in (torch.inference_mode(), torch.device("meta")):
        weight = Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        bias = Parameter(torch.ones(4, dtype=torch.bfloat16))
        with context:
            opt = muonloom.Muon([("w", weight), ("b", bias)], placement="host", **OPTIONS)
        for _ in range(2):
            weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
            if isinstance(context, torch.device):
                with context:
                    opt.step()
            else:
                opt.step()
        opt.drain()
        assert not torch.equal(weight, torch.ones_like(weight))
        assert opt.state[bias]["step"].device.type == "cpu"


# -- reports ------------------------------------------------------------------------------------------


def test_the_report_and_the_trace(tmp_path: Path):
    named = model()
    opt = muonloom.Muon(named, layout=layout(), placement="host", **OPTIONS)
    steps(named, opt, 2)
    give_gradients(named, 2)
    with opt.trace(tmp_path / "trace.json"):
        opt.step()
    report = json.loads(json.dumps(opt.last_step))
    assert report["bytes_in"] == report["bytes_out"] > 0
    assert {"guard", "direction", "orthogonalize", "update", "adamw"} <= report["seconds"].keys()
    assert all(seconds >= 0 for seconds in report["seconds"].values())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert {f"muonloom {op.value}" for op in Op} <= names


def test_an_optimizer_without_parameters():
    opt = muonloom.Muon([], placement="host")
    opt.step()
    opt.drain()
    assert opt.memory()["host_state"] == opt.memory()["device_slots"] == 0
