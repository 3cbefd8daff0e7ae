"""Writers, release and resume on a GPU: the same bytes, and memory that the allocator really gets back."""

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

PLACEMENTS = ["device", "host", HostPlacement(slot_bytes=1 << 20, num_slots=2)]


def build(placement: Any, *, float8: bool) -> tuple[nn.Module, muonloom.Muon, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16().cuda()
    optimizer = muonloom.Muon(model.named_parameters(), placement=placement, lr=1e-2, adamw_lr=1e-3)
    writers = []
    for layer in (model[0], model[2]) if float8 else ():
        writers.append(muonloom.Float8BlockWriter())
        optimizer.register_writer(layer.weight, writers[-1])
        layer.weight.untyped_storage().resize_(0)
    return model, optimizer, writers


def step(model: nn.Module, optimizer: muonloom.Muon, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
    optimizer.step()


def weights(model: nn.Module, writers: list[Any]) -> list[Tensor]:
    found = [p for p in model.parameters() if p.untyped_storage().nbytes()]
    found += [tensor for writer in writers for tensor in writer.tensors()]
    return [tensor.detach().view(torch.uint8).cpu() for tensor in found]


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_release_gives_the_allocator_its_bytes_back_and_resume_the_same_weights(placement, float8):
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model, optimizer, writers = build(placement, float8=float8)
    for seed in range(2):
        step(model, optimizer, seed)
    before = weights(model, writers)
    for _ in range(3):
        optimizer.release(model=model)
        kept = torch.cuda.memory_allocated() - base
        assert kept < 256 << 10, "some flags and samples are all that is left"
        junk = torch.full((32 << 20,), 77, dtype=torch.uint8, device="cuda")
        del junk
        optimizer.resume()
        assert all(map(torch.equal, before, weights(model, writers)))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_fp8_weights_have_the_bytes_that_a_cpu_gives(placement):
    model, optimizer, writers = build(placement, float8=True)
    for seed in range(3):
        step(model, optimizer, seed)
    optimizer.drain()
    for layer, writer in zip((model[0], model[2]), writers, strict=True):
        master = optimizer.get_full_parameter_master(layer.weight)
        expected = muonloom.Float8BlockWriter(
            data=torch.empty(master.shape, dtype=torch.float8_e4m3fn),
            scale_inv=torch.empty(writer.storage.scale_inv.shape),
        )
        expected.write(layer.weight, master, slice(0, len(master)))
        for ours, theirs in zip(writer.tensors(), expected.tensors(), strict=True):
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_placement_changes_no_byte_with_writers():
    found = []
    for placement in PLACEMENTS:
        model, optimizer, writers = build(placement, float8=True)
        for seed in range(3):
            step(model, optimizer, seed)
        optimizer.drain()
        found.append(weights(model, writers))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
