"""A step over any arrangement of ranks is that of one process, and that is Muon's as written out here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.models import Tiny, build, initialize
from megatron.pieces import gathered, pieces, weight
from megatron.steps import optimizer_config, train
from megatron.support import run_megatron
from muonloom import HostPlacement
from muonloom.integrations.megatron import get_optimizer

OPTIONS: dict[str, Any] = {"ns_compute_dtype": torch.float32, "ns_method": "standard"}
SETTINGS = {"muon_extra_scale_factor": 0.2, "adam_beta2": 0.95, "muon_coefficient_type": "simple"}

# What is cut over how many ranks, and how.
ARRANGEMENTS: dict[str, tuple[int, Tiny]] = {
    "DP2": (2, Tiny()),
    "TP2": (2, Tiny(tensor_parallel=2)),
    "TP4, more than query groups": (4, Tiny(tensor_parallel=4)),
    "TP2 x DP2": (4, Tiny(tensor_parallel=2)),
    "TP2 x DP2, scattered": (4, Tiny(tensor_parallel=2, buffers="whole")),
    "PP2 x VPP2": (2, Tiny(pipeline_parallel=2, num_chunks=2, num_layers=4, num_microbatches=2)),
    "gated, TP2": (2, Tiny(kind="gated", tensor_parallel=2)),
    "gated, DP3": (3, Tiny(kind="gated")),
    "MLA, DP2": (2, Tiny(kind="mla")),
    "MLA, TP2": (2, Tiny(kind="mla", tensor_parallel=2, sequence_parallel=True)),
    "MoE, DP2": (2, Tiny(kind="moe")),
    "MoE, EP2": (2, Tiny(kind="moe", expert_parallel=2)),
    "MoE, EP2 x DP2": (4, Tiny(kind="moe", expert_parallel=2)),
    "MoE, TP2 x EP2": (
        4,
        Tiny(
            kind="moe",
            tensor_parallel=2,
            sequence_parallel=True,
            expert_parallel=2,
            expert_tensor_parallel=1,
        ),
    ),
    "MoE, TP2, experts cut": (2, Tiny(kind="moe", tensor_parallel=2, sequence_parallel=True)),
    "MTP, TP2": (2, Tiny(num_mtp_layers=1, tensor_parallel=2)),
}


def alone(tiny: Tiny) -> Tiny:
    """The same model on one process."""
    return Tiny(
        kind=tiny.kind,
        num_layers=tiny.num_layers,
        num_mtp_layers=tiny.num_mtp_layers,
        dtype=tiny.dtype,
    )


# -- given gradients ----------------------------------------------------------------------------------


def updated(
    rank: int, tiny: Tiny, steps: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take steps on gradients that are drawn for whole parameters."""
    initialize(tiny)
    model = build(tiny)
    optimizer = get_optimizer(
        optimizer_config(tiny, **SETTINGS, clip_grad=0.0), model, **{**OPTIONS, **options}
    )
    for step in range(steps):
        for piece in pieces(model):
            drawn = weight(f"gradient of {piece.name}", piece.whole_shape, step)
            piece.parameter.main_grad.copy_(piece.of(drawn))
        taken, *_ = optimizer.step()
        assert taken
    optimizer.muon.drain()
    report = optimizer.muon.last_step
    counts = {tuple(shape): count for shape, count in report["matrices"]}
    return gathered(model), {"matrices": counts, "norm": report["grad_norm"]}


@pytest.mark.parametrize("heads_per_block", [None, 1])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_all_arrangements_take_the_step_of_one_process(name: str, heads_per_block: int | None):
    world, tiny = ARRANGEMENTS[name]
    options = {"heads_per_block": heads_per_block}
    found = run_megatron(world, updated, tiny, 2, options)
    [(whole, counts)] = run_megatron(1, updated, alone(tiny), 2, options)
    for weights, _ in found:
        assert weights.keys() == whole.keys()
        for key, expected in whole.items():
            assert torch.equal(weights[key], expected), key
    total = dict.fromkeys(counts["matrices"], 0)
    for _, own in found:
        for shape, count in own["matrices"].items():
            total[shape] += count
    assert total == counts["matrices"]  # each matrix by one rank


@pytest.mark.parametrize("placement", ["host", "split", "one slot"])
@pytest.mark.parametrize("name", ["TP2 x DP2", "MoE, EP2 x DP2", "MLA, TP2"])
def test_masters_on_the_host_give_the_same_bits(name: str, placement: str):
    world, tiny = ARRANGEMENTS[name]
    tiny = Tiny(**{**vars(tiny), "dtype": torch.bfloat16})
    host = {
        "host": HostPlacement(),
        "split": HostPlacement(master_layout="split"),
        "one slot": HostPlacement(num_slots=1, slot_bytes=60000),
    }[placement]
    options = {"heads_per_block": 1}
    found = run_megatron(world, updated, tiny, 2, {**options, "placement": host})
    expected = run_megatron(world, updated, tiny, 2, options)
    for (weights, _), (others, _) in zip(found, expected, strict=True):
        assert all(torch.equal(weights[key], others[key]) for key in others)


# -- the step, written out ----------------------------------------------------------------------------


@pytest.mark.parametrize("heads_per_block", [None, 1, 2])
@pytest.mark.parametrize("kind", ["dense", "gated", "mla", "moe"])
def test_the_step_is_that_of_the_formula(kind: str, heads_per_block: int | None):
    tiny = Tiny(kind=kind)
    options = {"heads_per_block": heads_per_block}
    [(weights, _)] = run_megatron(1, updated, tiny, 2, options)
    for name, found in weights.items():
        expected = weight(name, tuple(found.shape), tiny.seed).double()
        momentum = torch.zeros_like(expected)
        is_matrix = found.ndim == 2 and not name.startswith(("embedding", "output_layer"))
        if not is_matrix:
            continue
        for step in range(2):
            drawn = weight(f"gradient of {name}", tuple(found.shape), step).double()
            momentum.lerp_(drawn, 1 - 0.95)
            expected *= 1 - 0.02 * 0.1
            for rows in matrices(name, len(found), kind, heads_per_block):
                scale = 0.2 * max(len(rows), found.shape[1]) ** 0.5
                expected[rows] -= 0.02 * scale * orthogonalized(momentum[rows])
        moved = (expected - weight(name, tuple(found.shape), tiny.seed)).norm()
        # FP32 against FP64, through ten products of matrices.
        assert (found.double() - expected).norm() < 1e-4 * moved, name


def orthogonalized(x: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def matrices(name: str, num_rows: int, kind: str, k: int | None) -> Iterator[list[int]]:
    """Yield the rows of each matrix, counted by hand."""
    if "linear_qkv" in name:
        heads, groups, size = 4, 2, 8
        order = ["q"] * 2 + ["gate"] * 2 * (kind == "gated") + ["k", "v"]
        places = [(part, at) for at, part in enumerate(order * groups)]
        for part in ("q", "gate", "k", "v"):
            starts = [at * size for found, at in places if found == part]
            yield from _blocks(starts, size, k)
        assert len(places) * size == num_rows
        assert heads == 2 * groups
    elif "linear_q_up_proj" in name or "linear_kv_up_proj" in name:
        size = num_rows // 4
        yield from _blocks(range(0, num_rows, size), size, k)
    elif "linear_fc1" in name:
        yield from (list(range(at, at + num_rows // 2)) for at in (0, num_rows // 2))
    else:
        yield list(range(num_rows))


def _blocks(starts: Sequence[int], size: int, k: int | None) -> Iterator[list[int]]:
    k = max(1, min(k or len(starts), len(starts)))
    for first in range(0, len(starts), k):
        block = starts[first : first + k]
        yield list(itertools.chain.from_iterable(range(at, at + size) for at in block))


# -- whole steps --------------------------------------------------------------------------------------


def trained(
    rank: int, tiny: Tiny, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    initialize(tiny)
    model = build(tiny)
    optimizer = get_optimizer(optimizer_config(tiny, **SETTINGS), model, **{**OPTIONS, **options})
    return train(tiny, model, optimizer, steps=3), gathered(model)


@pytest.mark.parametrize(
    "name", ["TP2 x DP2", "PP2 x VPP2", "MLA, TP2", "MoE, TP2 x EP2", "MTP, TP2"]
)
def test_training_goes_as_on_one_process(name: str):
    world, tiny = ARRANGEMENTS[name]
    options = {"heads_per_block": 1}
    found = run_megatron(world, trained, tiny, options)
    [(losses, whole)] = run_megatron(1, trained, alone(tiny), options)
    for own, weights in found:
        # Sums of gradients are taken in another order on several ranks.
        assert own == pytest.approx(losses, rel=1e-4)
        for key, expected in whole.items():
            moved = (expected - weight(key, tuple(expected.shape), tiny.seed)).norm()
            assert (weights[key] - expected).norm() < 2e-2 * moved, key


def shares(rank: int, tiny: Tiny) -> dict[str, Any]:
    initialize(tiny)
    model = build(tiny)
    optimizer = get_optimizer(optimizer_config(tiny, **SETTINGS), model, heads_per_block=1)
    state = {
        piece.name: int(piece.parameter[optimizer.muon.updated_rows(piece.parameter)].numel())
        for piece in pieces(model)
    }
    return {"state": state, "ranks": dist.get_world_size()}


@pytest.mark.parametrize(
    "name", ["DP2", "TP2 x DP2", "MoE, EP2 x DP2", "MoE, TP2 x EP2", "MLA, TP2"]
)
def test_state_is_kept_once_over_all_ranks(name: str):
    world, tiny = ARRANGEMENTS[name]
    found = run_megatron(world, shares, tiny)
    [whole] = run_megatron(1, shares, alone(tiny))
    for key, numel in whole["state"].items():
        assert sum(own["state"].get(key, 0) for own in found) == numel, key
