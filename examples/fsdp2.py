"""A training loop of one's own over several ranks: FSDP2, BF16 parameters, optimizer state in host memory.

    torchrun --nproc-per-node=2 examples/fsdp2.py
    torchrun --nproc-per-node=2 examples/fsdp2.py --param-dtype float32

Each rank holds a part of each parameter. Matrices that lie whole on one rank are orthogonalized there; only
those that a border cuts travel. The last lines tell what a rank holds and sends: run it with either dtype.
"""

from __future__ import annotations

import argparse
import inspect
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import muonloom


def build_model(dtype: torch.dtype) -> Any:
    """Return a Qwen3-MoE of 560 thousand parameters that reads bytes; the same on all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shard(model: Any, device: str) -> None:
    """Spread each layer's parameters over all ranks; gradients are added up in FP32."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def batch(text: Tensor, step: int, rows: int, length: int) -> Tensor:
    """Return this rank's rows of the step's batch, int64 (rows, length + 1)."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (dist.get_world_size(), rows), generator=draw)
    return torch.stack([text[start : start + length + 1] for start in starts[dist.get_rank()]])


def gathered_bytes(model: Any) -> int:
    """Return the bytes of weights that a rank gets from others in a step: forward, and layers' backward."""
    ranks = dist.get_world_size()
    layers = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    return (everything + layers) * (ranks - 1) // ranks


def report(model: Any, optimizer: muonloom.Muon) -> None:
    """Print bytes by rank."""
    found: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, optimizer.memory())
    if dist.get_rank():
        return
    for rank, memory in enumerate(found):
        places = ("device_weights", "gradients", "host_state")
        print(f"rank {rank}:", ", ".join(f"{place} {memory[place]:,} B" for place in places))
    master = sum(
        state["master_weight"].nbytes
        for state in optimizer.state.values()
        if "master_weight" in state
    )
    print(f"of rank 0's host_state, masters: {master:,} B")
    print(f"weights gathered by a rank in a step, from their shapes: {gathered_bytes(model):,} B")


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--param-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a rank in a step")
    parser.add_argument("--lr", type=float, default=0.02)
    chosen = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = build_model(getattr(torch, chosen.param_dtype)).to(device)
    layout = muonloom.Layout.from_model(model)
    shard(model, device)
    optimizer = muonloom.Muon(
        model.named_parameters(),
        layout=layout,
        lr=chosen.lr,
        adjust_lr_fn="match_rms_adamw",
        placement="host",
    )
    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8)
    for step in range(chosen.steps):
        tokens = batch(text.long(), step, chosen.rows, length=64).to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach().float() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            sent = optimizer.last_step
            print(
                f"step {step + 1:3d}  loss {mean:.3f}  sent by rank 0: {sent.payload_bytes:,} B in "
                f"{sent.collectives} collectives, and {sent.control_bytes} B to agree",
                flush=True,
            )
        if step < chosen.steps - 1:
            optimizer.zero_grad()
    report(model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
