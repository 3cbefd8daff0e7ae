"""A training loop on Megatron-Core alone, with muonloom for its optimizer; README.md says more.

torchrun --nproc-per-node=8 examples/megatron/train.py --expert-model-parallel-size 8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from muonloom import HostPlacement
from muonloom.integrations.megatron import get_optimizer
from muonloom.train.sources import standard_library

ON_GPU = torch.cuda.is_available()  # Megatron-Core asks for one; tests put something in its place
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
SIZES += ("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk")
TINY, QWEN3_30B = (2, 64, 4, 2, 16, 8, 32, 2), (48, 2048, 32, 4, 128, 128, 768, 8)
MODELS = {"tiny": TINY, "qwen3-30b-a3b": QWEN3_30B}
VOCABULARIES = {"tiny": 256, "qwen3-30b-a3b": 151936}
RANKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
RANKS += ("expert_model_parallel_size", "expert_tensor_parallel_size")
REPORTED = ("skipped", "matrices", "ns_calls", "bytes_in", "payload_bytes")  # of last_step
PLACEMENTS = {"device": "device", "host": "host", "split": HostPlacement(master_layout="split")}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options; ``--help`` shows them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    for name in RANKS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    parser.add_argument("--placement", choices=PLACEMENTS, default="host", help="of the state")
    parser.add_argument("--heads-per-block", type=int, help="cuts attention projections")
    parser.add_argument("--recompute", action="store_true", help="all layers in backward passes")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=128, help="of a sequence")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=1, help="of a rank in a step")
    parser.add_argument("--checkpoints", type=Path, help="directory; the newest in it goes on")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    return parser.parse_args(arguments)


def model_config(chosen: argparse.Namespace) -> TransformerConfig:
    """Return Qwen3-MoE of the chosen size."""
    settings: dict[str, Any] = {name: getattr(chosen, name) for name in RANKS}
    settings |= zip(SIZES, MODELS[chosen.model], strict=True)
    settings |= {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "qk_layernorm": True}
    settings |= {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    settings |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3}
    settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": True}
    settings |= {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    settings |= {"moe_grouped_gemm": HAVE_TE, "masked_softmax_fusion": HAVE_TE}
    settings |= {"bias_activation_fusion": ON_GPU, "bias_dropout_fusion": ON_GPU}
    settings |= {"moe_token_dispatcher_type": "alltoall" if ON_GPU else "allgather"}
    settings |= {"sequence_parallel": chosen.tensor_model_parallel_size > 1}  # experts ask for it
    if chosen.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        settings |= {"recompute_num_layers": 1}
    return TransformerConfig(finalize_model_grads_func=finalize_model_grads, **settings)


def build(chosen: argparse.Namespace) -> DDP:
    """Return this rank's part of the model, in BF16, wrapped."""
    config = model_config(chosen)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, HAVE_TE, normalization="RMSNorm")
    sizes = {"vocab_size": VOCABULARIES[chosen.model], "max_sequence_length": chosen.length}
    stage = {"pre_process": parallel_state.is_pipeline_first_stage()}
    stage |= {"post_process": parallel_state.is_pipeline_last_stage()}
    rope = {"position_embedding_type": "rope", "rotary_base": 1_000_000}
    model = GPTModel(config, spec, **sizes, **stage, **rope)
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DDP(config, reduction, Float16Module(config, model.to(DEVICE)))
    wrapped.broadcast_params()
    return wrapped


def optimization(chosen: argparse.Namespace, model: DDP) -> tuple[Any, OptimizerParamScheduler]:
    """Return the optimizer, and what changes its learning rates."""
    rates = {"lr": chosen.lr, "min_lr": chosen.lr / 10, "weight_decay": 0.1, "adam_beta2": 0.95}
    # One learning rate for Muon and AdamW; the coefficients of torch.optim.Muon.
    muon = {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2, "muon_nesterov": True}
    optimizer = get_optimizer(
        OptimizerConfig(bf16=True, muon_coefficient_type="simple", **rates, **muon),
        [model],
        heads_per_block=chosen.heads_per_block,
        placement=PLACEMENTS[chosen.placement],
        idle_matrices="skip",  # an expert without tokens keeps its weights
    )
    rise = {"init_lr": chosen.lr / 10, "max_lr": chosen.lr, "lr_warmup_steps": chosen.steps // 10}
    fall = {"min_lr": chosen.lr / 10, "lr_decay_steps": chosen.steps, "lr_decay_style": "cosine"}
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 1, "wd_incr_style": "constant"}
    return optimizer, OptimizerParamScheduler(optimizer, **rise, **fall, **decay)


def batch(chosen: argparse.Namespace, text: Tensor, step: int) -> Iterator[dict[str, Any]]:
    """Yield this rank's microbatches, which depend on step, data-parallel rank and options alone."""
    draw = torch.Generator().manual_seed(step)
    shape = (parallel_state.get_data_parallel_world_size(), chosen.microbatches, chosen.rows)
    starts = torch.randint(len(text) - chosen.length, shape, generator=draw)
    positions = torch.arange(chosen.length, device=DEVICE).expand(chosen.rows, -1)
    mask = torch.ones(chosen.length, chosen.length, device=DEVICE).triu(1).bool()[None, None]
    for rows in starts[parallel_state.get_data_parallel_rank()]:
        tokens = torch.stack([text[at : at + chosen.length + 1] for at in rows]).long().to(DEVICE)
        inputs = {"input_ids": tokens[:, :-1], "position_ids": positions, "attention_mask": mask}
        yield {**inputs, "labels": tokens[:, 1:]}


def forward(microbatches: Iterator[dict[str, Any]], model: Any) -> Any:
    """Return what the pipeline's schedule asks for: an output, and how to make a loss of it."""
    return model(**next(microbatches)), lambda output: (output.mean(), output.detach().mean())


def gradients(chosen: argparse.Namespace, model: DDP, text: Tensor, step: int) -> float:
    """Have a step's gradients in `main_grad`; return the loss over all ranks, in nats a byte."""
    model.zero_grad_buffer()
    given = {"num_microbatches": chosen.microbatches, "micro_batch_size": chosen.rows}
    given |= {"seq_length": chosen.length}
    given |= {"data_iterator": batch(chosen, text, step), "model": model}
    losses = get_forward_backward_func()(forward_step_func=forward, **given)
    total = torch.tensor([float(sum(losses)), float(len(losses))], device=DEVICE)
    dist.all_reduce(total)  # the last pipeline stage alone has losses
    return float(total[0] / total[1])


def sharded(parts: dict[str, Any], step: int) -> dict[str, Any]:
    """Return what is saved, and what is loaded into."""
    state = {"model": parts["model"].sharded_state_dict()}
    state["optimizer"] = parts["optimizer"].sharded_state_dict(state)
    return {**state, "scheduler": parts["scheduler"].state_dict(), "step": step}


def resumed(parts: dict[str, Any], root: Path) -> int:
    """Load the newest checkpoint that is whole; return how many steps it has behind it."""
    paths = sorted(root.glob("step-*"), key=lambda path: int(path.name[5:]))
    whole = [path for path in paths if dist_checkpointing.check_is_distributed_checkpoint(path)]
    if not whole:
        return 0
    found = dist_checkpointing.load(sharded(parts, 0), str(whole[-1]))
    for name, part in parts.items():
        part.load_state_dict(found[name])
    return int(found["step"])


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, in a process group that is there; return the losses."""
    chosen = parsed(arguments)
    parallel_state.initialize_model_parallel(**{name: getattr(chosen, name) for name in RANKS})
    model_parallel_cuda_manual_seed(1)
    model = build(chosen)
    optimizer, scheduler = optimization(chosen, model)
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    first = resumed(parts, chosen.checkpoints) if chosen.checkpoints else 0
    source = b"".join(document.text.encode() for document in standard_library())  # bytes are tokens
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    losses: list[float] = []
    for step in range(first, chosen.steps):
        losses.append(gradients(chosen, model, text, step))
        is_taken, norm, _ = optimizer.step()
        if is_taken:
            scheduler.step(1)
        if dist.get_rank() == 0:
            did = {key: optimizer.muon.last_step.get(key) for key in REPORTED}
            print(f"step {step + 1}  loss {losses[-1]:.3f}  norm {norm:.3f}  {did}", flush=True)
        if chosen.checkpoints and (step + 1) % chosen.save_every == 0:
            (path := chosen.checkpoints / f"step-{step + 1}").mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(sharded(parts, step + 1), str(path))
    return losses


if __name__ == "__main__":
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    main()
    dist.barrier()
    dist.destroy_process_group()
