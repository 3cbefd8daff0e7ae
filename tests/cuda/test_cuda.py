"""What only a GPU can show: agreement with the CPU, no synchronization, no growth of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import muonloom

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model(dtype: torch.dtype, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 256, bias=True), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)]
    return nn.Sequential(*layers).to(dtype).to(device)


def train(net: nn.Module, opt: muonloom.Muon, steps: int) -> None:
    device, dtype = next(net.parameters()).device, next(net.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 128, generator=generator).to(device, dtype)
        net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.drain()


def test_fp32_steps_agree_with_the_cpu():
    nets = [model(torch.float32, device) for device in ("cpu", "cuda")]
    for net in nets:
        opt = muonloom.Muon(
            net.named_parameters(), lr=1e-2, adamw_lr=1e-3, ns_compute_dtype=torch.float32
        )
        train(net, opt, 3)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        # FP32 sums in another order, three steps; TF32 is off by default.
        torch.testing.assert_close(ours, theirs.cpu(), rtol=2e-3, atol=2e-5)


def test_standard_bf16_is_within_one_percent_of_torch():
    weight = torch.randn(256, 512, device="cuda")
    pair = [nn.Parameter(weight.clone()) for _ in range(2)]
    gradient = torch.randn(256, 512, device="cuda")
    for parameter in pair:
        parameter.grad = gradient.clone()
    muonloom.Muon([pair[0]], ns_method="standard", ns_compute_dtype=torch.bfloat16).step()
    torch.optim.Muon([pair[1]]).step()
    updates = [parameter.detach() - weight for parameter in pair]
    assert float((updates[0] - updates[1]).norm() / updates[1].norm()) < 1e-2


def test_reserved_bytes_do_not_grow():
    net = model(torch.bfloat16, "cuda")
    opt = muonloom.Muon(net.named_parameters(), lr=1e-2, adamw_lr=1e-3)
    train(net, opt, 3)
    reserved = torch.cuda.memory_reserved()
    train(net, opt, 17)
    assert torch.cuda.memory_reserved() == reserved


def test_one_synchronization_a_step():
    net = model(torch.bfloat16, "cuda")
    opt = muonloom.Muon(net.named_parameters(), lr=1e-2, adamw_lr=1e-3)
    train(net, opt, 2)
    net(torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    reads = sum(
        event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense"
    )
    copies = sum(
        event.count for event in profile.key_averages() if event.key == "cudaStreamSynchronize"
    )
    assert reads + copies <= 1
