"""What other tests here stand on: any number of ranks has the model of one, and the same gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from megatron import shim
from megatron.models import Tiny, build, initialize
from megatron.pieces import gathered, pieces, weight
from megatron.steps import forward_backward, megatron_muon, train
from megatron.support import run_megatron

# Of each gradient's largest entry. Sums in another order of float32 differ by 2e-6; a rank left out by 0.1.
TOLERANCE = 1e-5


def _gradients(rank: int, tiny: Tiny) -> tuple[float, dict[str, Tensor]]:
    initialize(tiny)
    model = build(tiny)
    return forward_backward(tiny, model, 0), gathered(model, "main_grad")


@cache
def _of_one_process(tiny: Tiny) -> tuple[float, dict[str, Tensor]]:
    [found] = run_megatron(1, _gradients, tiny)
    return found


def _apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each is off, as part of its largest entry."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name] - one).abs().max() / one.abs().max())
        for name, one in wanted.items()
    }


SPREAD = [
    (2, Tiny(), {}),
    (1, Tiny(), {"num_microbatches": 2}),
    (2, Tiny(), {"tensor_parallel": 2}),
    (4, Tiny(), {"tensor_parallel": 4}),  # more ranks than groups of queries
    (4, Tiny(tied=True), {"tensor_parallel": 2}),
    (2, Tiny(tied=True), {"pipeline_parallel": 2}),
    (2, Tiny(kind="gated"), {"tensor_parallel": 2}),
    (4, Tiny(kind="gated"), {"tensor_parallel": 4, "sequence_parallel": True}),
    (2, Tiny(kind="mla"), {}),
    (2, Tiny(kind="mla"), {"tensor_parallel": 2, "sequence_parallel": True}),
    (2, Tiny(kind="moe"), {}),
    (2, Tiny(kind="moe"), {"expert_parallel": 2}),
    (2, Tiny(kind="moe"), {"tensor_parallel": 2, "sequence_parallel": True}),
    (
        4,
        Tiny(kind="mla_moe", num_mtp_layers=1),
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    ),
    (
        2,
        Tiny(kind="mla_moe", num_mtp_layers=1),
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ),
    (
        2,
        Tiny(kind="moe", num_layers=4, num_mtp_layers=1),
        {"pipeline_parallel": 2, "num_chunks": 2, "num_microbatches": 2},
    ),
]


@pytest.mark.parametrize(
    ("num_ranks", "alone", "spread"),
    [
        pytest.param(*case, id=f"{case[1].kind}-{case[0]}-{'-'.join(case[2]) or 'data_parallel'}")
        for case in SPREAD
    ],
)
def test_ranks_have_the_loss_and_gradients_of_one_process(
    num_ranks: int, alone: Tiny, spread: dict[str, Any]
) -> None:
    loss, gradients = _of_one_process(alone)

    [(spread_loss, found), *_] = run_megatron(num_ranks, _gradients, replace(alone, **spread))

    assert spread_loss == pytest.approx(loss, rel=1e-6)
    apart = _apart(found, gradients)
    assert max(apart.values()) < TOLERANCE, apart
    assert all(gradient.abs().max() > 0 for gradient in found.values())


@pytest.mark.parametrize("kind", ["dense", "gated", "mla", "moe"])
def test_recomputation_changes_no_bit(kind: str) -> None:
    loss, gradients = _of_one_process(Tiny(kind=kind))

    [(again, found)] = run_megatron(1, _gradients, Tiny(kind=kind, recompute=True))

    assert again == loss
    assert all(torch.equal(found[name], one) for name, one in gradients.items())


def test_another_seed_gives_another_model() -> None:
    loss, _ = _of_one_process(Tiny())
    other, _ = _of_one_process(Tiny(seed=1))

    assert abs(other - loss) > 1e-3


def _weights_and_shapes(rank: int, tiny: Tiny) -> tuple[dict[str, Tensor], set[tuple[int, ...]]]:
    initialize(tiny)
    model = build(tiny)
    return gathered(model), {tuple(piece.shape) for piece in model[0].parameters()}


def test_gathered_weights_are_whole_and_what_they_were_made_from() -> None:
    tiny = Tiny(kind="moe", tensor_parallel=2, sequence_parallel=True)

    [(weights, shapes), _] = run_megatron(2, _weights_and_shapes, tiny)

    assert weights["decoder.layers.0.mlp.linear_fc1.weight"].shape == (96, 32)
    assert (48, 32) in shapes
    assert (96, 32) not in shapes
    for name, found in weights.items():
        assert torch.equal(found, weight(name, tuple(found.shape), tiny.seed)), name


def _own_gradients(rank: int, tiny: Tiny) -> dict[str, Tensor]:
    initialize(tiny)
    model = build(tiny)
    forward_backward(tiny, model, 0)
    return {piece.name: piece.parameter.main_grad.clone() for piece in pieces(model)}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_whole_gradients_can_be_scattered(kind: str) -> None:
    _, wanted = _of_one_process(Tiny(kind=kind))

    ranks = run_megatron(2, _own_gradients, Tiny(kind=kind, buffers="whole"))

    right = [
        {name for name, off in _apart(found, wanted).items() if off < TOLERANCE} for found in ranks
    ]
    assert right[0] | right[1] == wanted.keys()
    assert not right[0] & right[1]
    assert all(right)


def _saved_and_loaded(rank: int, directory: str, saved: Tiny, loaded: Tiny) -> tuple[Any, Any]:
    initialize(saved)
    model = build(saved)
    before = gathered(model)
    dist_checkpointing.save(model[0].module.sharded_state_dict(), directory)
    initialize(loaded)
    model = build(loaded)
    inner = model[0].module
    inner.load_state_dict(dist_checkpointing.load(inner.sharded_state_dict(), directory))
    return before, gathered(model)


def test_distributed_checkpoints_work(tmp_path: Path) -> None:
    saved = Tiny(kind="moe", tensor_parallel=2, sequence_parallel=True)
    loaded = Tiny(kind="moe", expert_parallel=2, seed=1)

    [(before, after), _] = run_megatron(2, _saved_and_loaded, str(tmp_path), saved, loaded)

    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_this_process_keeps_its_own_cuda() -> None:
    run_megatron(1, _gradients, Tiny())

    assert torch.cuda.Stream is not shim.Stream
    assert torch.zeros(1).type() == "torch.FloatTensor"


# -- Megatron-Core's own Muon -----------------------------------------------------------------------------


EXACT = {"muon_fp32_matmul_prec": "highest", "muon_tp_mode": "duplicated"}


def _trained(rank: int, tiny: Tiny, steps: int) -> tuple[dict[str, Tensor], int]:
    initialize(tiny)
    model = build(tiny)
    optimizer = megatron_muon(tiny, model, **EXACT)
    train(tiny, model, optimizer, steps=steps)
    return gathered(model), len(optimizer.get_parameters())


@pytest.mark.parametrize(
    "spread",
    [{}, {"expert_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}],
    ids=lambda spread: "-".join(spread) or "data_parallel",
)
def test_megatrons_muon_does_the_same_over_ranks(spread: dict[str, Any]) -> None:
    [(alone, _)] = run_megatron(1, _trained, Tiny(kind="moe"), 2)
    [(found, _), _] = run_megatron(2, _trained, Tiny(kind="moe", **spread), 2)

    changes = {name: one - weight(name, tuple(one.shape), 0) for name, one in alone.items()}
    apart = {
        name: float((found[name] - one).abs().max() / changes[name].abs().max())
        for name, one in alone.items()
    }
    # The first steps of AdamW divide gradients near zero by their own size: 6e-5 seen.
    assert max(apart.values()) < 1e-3, apart


def test_megatrons_muon_orthogonalizes() -> None:
    tiny = Tiny(kind="moe", dtype=torch.bfloat16)
    [(weights, _)] = run_megatron(1, _trained, tiny, 1)

    name = "decoder.layers.0.mlp.linear_fc2.weight"
    before = weight(name, (32, 48), 0).bfloat16().float()
    update = (before - weights[name].float()) / 0.02
    sizes = torch.linalg.svdvals(update) / 48**0.5  # the scale it gives to a matrix of these sides
    assert 0.5 < sizes.min() < sizes.max() < 1.5


def test_megatrons_layer_wise_muon_divides_its_work() -> None:
    tiny = Tiny(kind="moe", dtype=torch.bfloat16)
    [(alone, num_all)] = run_megatron(1, _trained, tiny, 2)
    spread = replace(tiny, buffers="layer_wise")
    [(found, first), (_, second)] = run_megatron(2, _trained, spread, 2)

    assert max(first, second) < num_all <= first + second
    for name, one in alone.items():
        change = (one.float() - weight(name, tuple(one.shape), 0)).norm()
        # Orthogonalization makes much of what rounding makes of small gradients: a third of it seen.
        assert (found[name].float() - one.float()).norm() < change / 2, name
