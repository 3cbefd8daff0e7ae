"""Yielded tensors are the caller's own, and little is alive beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from export.support import PeakBytes, model_of, optimizer_of, step, trained
from muonloom import HostPlacement, Muon
from muonloom.export import export_weights

SPLIT = HostPlacement(master_layout="split")
DTYPES = [torch.bfloat16, torch.float32, "float8_block"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_the_callers_own(dtype: Any) -> None:
    model, optimizer = trained("qwen3_moe")
    before = {p: optimizer.get_full_parameter_master(p).clone() for p in model.parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen: set[int] = set()
    found = list(export_weights(model, optimizer, dtype=dtype))
    for name, tensor in found:
        storage = tensor.untyped_storage()
        assert tensor.is_contiguous(), name
        assert storage.nbytes() == tensor.nbytes, name
        assert storage.data_ptr() not in seen, name
        seen.add(storage.data_ptr())
        tensor.view(torch.uint8).fill_(1)
    for param, master in before.items():
        assert torch.equal(optimizer.get_full_parameter_master(param), master)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])


def peak_of(exported: Any) -> tuple[int, int]:
    """The most bytes alive while a caller drops each tensor at once, and the largest tensor's."""
    largest = 0
    with PeakBytes() as bytes_now:
        while (pair := next(exported, None)) is not None:
            largest = max(largest, pair[1].nbytes)
            del pair
    assert bytes_now.alive() == 0
    return bytes_now.peak, largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("placement", ["host", SPLIT, "device"], ids=["host", "split", "device"])
def test_memory_beside_the_tensor_being_made_is_bounded(placement: Any, dtype: Any) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 2048}
    model = model_of("qwen3_moe", num_experts=16, **wide)
    optimizer = optimizer_of(model, placement=placement)
    step(model, optimizer)
    most = 12 * 2 * 128 * 256  # both halves of one expert, of 16
    peak, largest = peak_of(export_weights(model, optimizer, dtype=dtype, max_bytes=most))
    assert peak <= most + largest
    stack = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert most < stack.numel()  # a copy of all experts in any dtype is found
    head = model.get_parameter("lm_head.weight")
    assert most < 2 * head.numel()


def test_too_little_for_a_conversion_is_refused_before_anything_is_yielded() -> None:
    model, optimizer = trained("qwen3_moe")
    needed = 12 * 40 * 32
    name = r"model\.layers\.1\.mlp\.experts\.gate_up_proj"
    with pytest.raises(ValueError, match=rf"max_bytes: got .*at least {needed}, to make {name}"):
        export_weights(model, optimizer, max_bytes=needed - 1)
    assert dict(export_weights(model, optimizer, max_bytes=needed))


def test_blocks_are_encoded_a_row_of_them_at_a_time() -> None:
    model = nn.Linear(64, 300, bias=False, dtype=torch.bfloat16)
    optimizer = Muon(model.named_parameters())
    step(model, optimizer)
    needed = 8 * 128 * 64
    whole = dict(export_weights(model, optimizer, dtype="float8_block"))
    with pytest.raises(ValueError, match=f"at least {needed}, to make weight"):
        export_weights(model, optimizer, dtype="float8_block", max_bytes=needed - 1)
    found = dict(export_weights(model, optimizer, dtype="float8_block", max_bytes=needed))
    assert whole.keys() == found.keys() == {"weight", "weight_scale_inv"}
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8))


def test_renaming_alone_needs_a_row() -> None:
    model, optimizer = trained("llama")
    with pytest.raises(ValueError, match="max_bytes"):
        export_weights(model, optimizer, max_bytes=8 * 48 - 1)
    peak, largest = peak_of(export_weights(model, optimizer, max_bytes=8 * 48))
    assert peak == largest
    split = optimizer_of(model, placement=SPLIT)
    step(model, split)
    peak, largest = peak_of(export_weights(model, split, max_bytes=8 * 48))
    assert peak <= largest + 8 * 48


def test_a_device_is_reached() -> None:
    model, optimizer = trained("mixtral")
    for dtype in DTYPES:
        for name, tensor in export_weights(model, optimizer, dtype=dtype, device="meta"):
            assert tensor.device.type == "meta", name
