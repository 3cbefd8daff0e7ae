"""Model, optimizer and scheduler through Megatron-Core's distributed checkpoint: these ranks and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron.models import Tiny, build, initialize
from megatron.pieces import gathered, pieces
from megatron.steps import optimizer_config, train
from megatron.support import run_megatron
from muonloom import HostPlacement
from muonloom.integrations.megatron import get_optimizer

BF16 = torch.bfloat16
SETTINGS = {"muon_extra_scale_factor": 0.2, "muon_coefficient_type": "simple", "min_lr": 1e-3}
SPLIT = HostPlacement(master_layout="split")
EXPERTS = {"kind": "moe", "dtype": BF16}


class Run:
    """A model with its optimizer and scheduler, as Megatron-LM has them."""

    def __init__(self, tiny: Tiny, options: dict[str, Any]) -> None:
        initialize(tiny)
        self.tiny, self.model = tiny, build(tiny)
        config = optimizer_config(tiny, **SETTINGS)
        self.optimizer = get_optimizer(
            config, self.model, ns_compute_dtype=torch.float32, **options
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.02,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=10,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.2,
            wd_incr_steps=10,
            wd_incr_style="linear",
        )

    def steps(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            losses += train(self.tiny, self.model, self.optimizer, steps=1, first=step)
            self.scheduler.step(1)
        return losses

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        chunks = [chunk.module for chunk in self.model]
        model = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
        state = self.optimizer.sharded_state_dict(model, is_loading=is_loading)
        return {**model, "optimizer": state, "scheduler": self.scheduler.state_dict()}

    def save(self, path: str) -> None:
        if dist.get_rank() == 0:
            Path(path).mkdir()
        dist.barrier()
        dist_checkpointing.save(self.sharded(is_loading=False), path)

    def load(self, path: str) -> None:
        found = dist_checkpointing.load(self.sharded(is_loading=True), path)
        for i, chunk in enumerate(self.model):
            chunk.module.load_state_dict(found[f"model{i}"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.scheduler.load_state_dict(found["scheduler"])

    def state(self) -> dict[str, Tensor]:
        """Return all state, put together whole by Megatron's attributes alone."""
        own: dict[str, list[tuple[Any, slice, Tensor]]] = {}
        for piece in pieces(self.model):
            rows, state = self.optimizer.muon.own_state(piece.parameter)
            for key, tensor in state.items():
                if key != "step" and rows.start < rows.stop:
                    place = (piece.rank, piece.num_ranks, piece.dim, piece.stride)
                    own.setdefault(f"{piece.name}.{key}", []).append(
                        (place, tuple(piece.parameter.shape), rows, tensor.cpu().clone())
                    )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        merged: dict[str, list[Any]] = {}
        for rank in everyone:
            for name, parts in rank.items():
                merged.setdefault(name, []).extend(parts)
        return {name: _joined(parts) for name, parts in merged.items()}


def _joined(parts: list[Any]) -> Tensor:
    held: dict[int, Tensor] = {}
    for (rank, *_), shape, rows, tensor in parts:
        held.setdefault(rank, torch.full(shape, torch.nan))[rows] = tensor
    (_, num_ranks, dim, stride), *_ = parts[0]
    assert len(held) == num_ranks
    if dim is None:
        return held[0]
    chunks = [held[rank].chunk(stride, dim) for rank in range(num_ranks)]
    return torch.cat([part for row in zip(*chunks, strict=True) for part in row], dim)


# -- the same ranks -----------------------------------------------------------------------------------


def resumed(rank: int, tiny: Tiny, options: dict[str, Any], path: str) -> None:
    whole = Run(tiny, options)
    whole.steps(0, 2)
    whole.save(path)
    expected = whole.steps(2, 2)
    again = Run(tiny, options)
    again.load(path)
    assert again.scheduler.num_steps == 2
    rates = {group["lr"] for group in again.optimizer.param_groups}
    assert rates == {0.02}  # the warm-up's end, not where it began
    assert again.steps(2, 2) == expected
    again.scheduler.num_steps = 0  # Megatron's adds what it loads
    again.load(path)  # into what has stepped, too
    assert again.steps(2, 2) == expected
    for name, tensor in gathered(whole.model).items():
        assert torch.equal(tensor, gathered(again.model)[name]), name
    first, second = whole.state(), again.state()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{}, {"placement": "host"}, {"placement": SPLIT}], ids=str)
@pytest.mark.parametrize(
    ("world", "tiny"),
    [
        (1, Tiny(dtype=BF16)),
        (2, Tiny(dtype=BF16)),
        (2, Tiny(dtype=BF16, tensor_parallel=2)),
        (2, Tiny(**EXPERTS, expert_parallel=2)),
        (4, Tiny(kind="mla", dtype=BF16, tensor_parallel=2, sequence_parallel=True)),
    ],
    ids=["alone", "DP2", "TP2", "EP2", "MLA, TP2 x DP2"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    world: int, tiny: Tiny, options: dict[str, Any], tmp_path: Path
):
    run_megatron(world, resumed, tiny, {**options, "heads_per_block": 1}, str(tmp_path / "saved"))


# -- other ranks --------------------------------------------------------------------------------------


def saved(
    rank: int, tiny: Tiny, options: dict[str, Any], path: str, steps: int
) -> dict[str, Tensor]:
    run = Run(tiny, options)
    run.steps(0, steps)
    run.save(path)
    return run.state()


def loaded(rank: int, tiny: Tiny, options: dict[str, Any], path: str) -> dict[str, Tensor]:
    run = Run(tiny, options)
    run.load(path)
    found = run.state()
    run.steps(2, 1)
    return found


ARRANGEMENTS = {
    "alone": (1, Tiny(**EXPERTS)),
    "DP2": (2, Tiny(**EXPERTS)),
    "EP2": (2, Tiny(**EXPERTS, expert_parallel=2)),
    "TP2": (2, Tiny(**EXPERTS, tensor_parallel=2, sequence_parallel=True)),
    "TP2 x EP2": (
        4,
        Tiny(
            **EXPERTS,
            tensor_parallel=2,
            sequence_parallel=True,
            expert_parallel=2,
            expert_tensor_parallel=1,
        ),
    ),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["DP2", "EP2", "TP2"])
def test_other_ranks_load_the_same_state(name: str, steps: int, tmp_path: Path):
    world, tiny = ARRANGEMENTS[name]
    path = str(tmp_path / "saved")
    [expected, *_] = run_megatron(world, saved, tiny, {"heads_per_block": 1}, path, steps)
    assert any(tensor.any() for key, tensor in expected.items() if "momentum" in key) == (steps > 0)
    for other, (others, theirs) in ARRANGEMENTS.items():
        options = {"heads_per_block": 2, "placement": "host"}  # neither matters to what is saved
        for found in run_megatron(others, loaded, theirs, options, path):
            assert found.keys() == expected.keys(), other
            for key, tensor in expected.items():
                assert torch.equal(found[key], tensor), (other, key)
