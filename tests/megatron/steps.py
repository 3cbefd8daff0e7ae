"""Steps of training as Megatron-LM takes them, on the same data with any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.models import LENGTH, VOCABULARY, Tiny

SEQUENCES = 4  # of a step, over all ranks and microbatches


def batch(tiny: Tiny, step: int) -> list[dict[str, Tensor]]:
    """Return this rank's microbatches: its share of `SEQUENCES`, which depend on the step alone."""
    generator = torch.Generator().manual_seed(1000 * tiny.seed + step)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    share = tokens.chunk(parallel_state.get_data_parallel_world_size())
    return [
        {
            "input_ids": part[:, :-1],
            "labels": part[:, 1:],
            "position_ids": torch.arange(LENGTH).expand(len(part), -1),
            "attention_mask": torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None],
        }
        for part in share[parallel_state.get_data_parallel_rank()].chunk(tiny.num_microbatches)
    ]


def forward_backward(tiny: Tiny, model: Sequence[DistributedDataParallel], step: int) -> float:
    """Have Megatron-Core leave a step's gradients in `main_grad`; return the loss over all ranks."""
    for chunk in model:
        chunk.zero_grad_buffer()
        chunk.config.finalize_model_grads_func = finalize_model_grads
    microbatches = batch(tiny, step)
    iterators = [iter(microbatches) for _ in model]
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(microbatches),
        seq_length=LENGTH,
        micro_batch_size=len(microbatches[0]["input_ids"]),
    )
    # Only the last pipeline stage has losses.
    total = torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _forward(microbatches: Iterator[dict[str, Tensor]], model: nn.Module) -> Any:
    return model(**next(microbatches)), _loss


def _loss(output: Tensor) -> tuple[Tensor, Tensor]:
    loss = output.float().mean()
    return loss, loss.detach().clone()


def train(
    tiny: Tiny,
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    *,
    steps: int,
    first: int = 0,
) -> list[float]:
    """Take steps as Megatron-LM's training loop does; return their losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(forward_backward(tiny, model, step))
        taken, *_ = optimizer.step()
        assert taken
    return losses


def optimizer_config(tiny: Tiny, **settings: Any) -> OptimizerConfig:
    defaults = {
        "optimizer": "muon",
        "lr": 0.02,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": tiny.dtype == torch.bfloat16,
        "params_dtype": tiny.dtype,
    }
    return OptimizerConfig(**{**defaults, **settings})


def megatron_muon(tiny: Tiny, model: Sequence[DistributedDataParallel], **settings: Any) -> Any:
    """Return Megatron-Core's own optimizer with its `TensorParallelMuon`.

    With bfloat16 weights it is the layer-wise one, which over several data-parallel ranks needs
    ``buffers="layer_wise"`` here: without, it gathers pieces of several sizes, which gloo does not. With
    float32 weights, which Megatron-Core cannot divide layer-wise, all ranks do all.
    """
    is_layer_wise = tiny.dtype == torch.bfloat16
    config = optimizer_config(tiny, use_layer_wise_distributed_optimizer=is_layer_wise, **settings)
    return get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)
