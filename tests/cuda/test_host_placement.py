"""Host placement on a GPU: the same bits, real pinned slabs, one synchronization, no growth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonloom
from muonloom import HostPlacement

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS: dict[str, Any] = {"lr": 1e-2, "adamw_lr": 1e-3}
PLACEMENTS = [
    HostPlacement(),
    HostPlacement(slot_bytes=256 * 128 * 4, num_slots=2),
    HostPlacement(num_slots=1),
    HostPlacement(master_layout="split"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build(placement: Any, dtype: torch.dtype, **options: Any) -> tuple[Net, muonloom.Muon]:
    torch.manual_seed(0)
    net = Net().to(dtype).cuda()
    return net, muonloom.Muon(net.named_parameters(), placement=placement, **OPTIONS, **options)


def train(net: nn.Module, opt: muonloom.Muon, steps: int) -> None:
    dtype = next(net.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 128, generator=generator).to("cuda", dtype)
        net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def everything(net: nn.Module, opt: muonloom.Muon) -> list[Tensor]:
    opt.drain()
    states = opt.state_dict()["state"].values()
    tensors = [value for state in states for key, value in sorted(state.items())]
    return [tensor.detach().cpu() for tensor in (*net.parameters(), *tensors)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("overlaps", [False, True])
def test_placement_changes_no_bit(placement: HostPlacement, dtype: torch.dtype, overlaps: bool):
    results = []
    for place in ("device", placement):
        net, opt = build(place, dtype, ns_batch_bytes=2 * 256 * 128 * 4)
        if overlaps:
            opt.overlap_forward(net)
        train(net, opt, 5)
        results.append(everything(net, opt))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_slabs_are_pinned_and_exact():
    net, opt = build("host", torch.bfloat16)
    train(net, opt, 1)
    opt.drain()
    for state in opt.state.values():
        for key, tensor in state.items():
            assert tensor.device.type == "cpu"
            assert key == "step" or tensor.is_pinned()
    needed = sum(
        t.numel() * t.element_size()
        for s in opt.state.values()
        for k, t in s.items()
        if k != "step"
    )
    assert opt.memory()["host_state"] < needed + 64 * 3 * len(opt.state) + 4096


def test_device_memory_is_what_the_ledger_says_and_does_not_grow():
    net, opt = build(HostPlacement(slot_bytes=256 * 128 * 4), torch.bfloat16)
    train(net, opt, 3)
    opt.drain()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    ledger = opt.memory()
    assert ledger["device_slots"] == 3 * 256 * 128 * 4
    held = ledger["device_slots"] + ledger["device_workspace"] + ledger["device_weights"]
    assert allocated <= held + (1 << 20)  # samples of weights, norms
    train(net, opt, 47)
    opt.drain()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.memory_allocated() == allocated


def test_one_synchronization_a_step():
    net, opt = build("host", torch.bfloat16)
    train(net, opt, 2)
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    net(x).float().square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    waits = {"aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize"}
    assert sum(event.count for event in profile.key_averages() if event.key in waits) <= 1


def test_a_caller_may_change_streams_between_steps():
    results = []
    for changes in (False, True):
        net, opt = build("host", torch.bfloat16)
        for _ in range(3):
            stream = torch.cuda.Stream() if changes else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                train(net, opt, 1)
            torch.cuda.current_stream().wait_stream(stream)
        results.append(everything(net, opt))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
