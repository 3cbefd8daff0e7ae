"""What ranks send one another: nothing that need not travel, and no more messages than planned."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import muonloom
import muonloom.sharing
from muonloom import BlockSpec, HostPlacement
from muonloom.dtensors import local_part
from ranks.models import (
    OPTIONS,
    SHAPES,
    Case,
    Result,
    alone,
    build,
    differences,
    give,
    gradient,
    indices,
    layout,
    mesh,
    optimizer,
    remembered,
    report,
    train,
    value,
)
from ranks.support import run

Job = Callable[[int], dict[str, Any]]


@remembered
def outcomes(job_and_world: tuple[Job, int]) -> list[dict[str, Any]]:
    job, world = job_and_world
    return run(world, job, limit_s=120)


def outcome(job: Job, world: int, name: str) -> list[Any]:
    return [found[name] for found in outcomes((job, world))]


# -- whole blocks -------------------------------------------------------------------------------------

# ceil(rows / 4) is a multiple of the rows of a block; the last ranks have less, or nothing.
WHOLE: dict[str, tuple[tuple[int, ...], Any]] = {
    "q": ((32, 16), BlockSpec.heads(8, heads_per_block=1)),
    "kv": ((16, 16), BlockSpec.heads(4, heads_per_block=1)),
    "gate_up": ((24, 8), BlockSpec.rows(6, 6, 6, 6)),
    "experts": ((7, 12, 8), BlockSpec.stacked(BlockSpec.gate_up())),
    "few": ((2, 6, 8), BlockSpec.stacked(BlockSpec.transposed(BlockSpec.whole()))),
    "embed": ((37, 8), "adamw"),
    "norm": ((5,), None),
}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (shape, _) in WHOLE.items():
            self.register_parameter(name, nn.Parameter(value(name, shape, 0)))

    def forward(self, x: Tensor) -> Tensor:
        squares = [p.square().sum() for p in self.parameters()]
        return torch.stack(squares).sum() * x.sum()


def whole_blocks(rank: int) -> dict[str, Any]:
    shapes = {name: shape for name, (shape, _) in WHOLE.items()}
    overrides = {name: spec for name, (_, spec) in WHOLE.items() if spec is not None}
    model = Whole()
    fully_shard(model, mesh=mesh(4))
    opt = muonloom.Muon(
        model.named_parameters(),
        layout=muonloom.Layout.from_shapes(shapes, overrides=overrides),
        **OPTIONS,
    )
    reports = []
    for step in range(3):
        opt.zero_grad()
        model(value("data", (3,), step)).backward()
        opt.step()
        reports.append(report(opt))
    return {
        "reports": reports,
        "empty": [local_part(p).numel() for p in model.parameters()].count(0),
    }


def test_blocks_that_lie_whole_on_a_rank_send_nothing():
    found = run(4, whole_blocks)
    assert [here["empty"] > 0 for here in found] == [False, False, True, True]
    for here in found:
        for step in here["reports"]:
            assert (step["collectives"], step["payload_bytes"], step["control_bytes"]) == (0, 0, 64)


# -- matrices that straddle ranks ---------------------------------------------------------------------


def straddling(shape: tuple[int, int], depth: int, spread: str, **options: Any) -> Case:
    return Case(
        spread=spread,
        shapes={f"layers.{i}.w": shape for i in range(depth)},
        steps=1,
        options=options,
    )


BF16 = torch.bfloat16
STRADDLING = {
    "rows": straddling((64, 64), 1, "rows", ns_compute_dtype=BF16),
    "columns": straddling((64, 64), 1, "columns", ns_compute_dtype=BF16),
    "fp32": straddling((64, 64), 1, "columns"),
    "grid": straddling((64, 64), 3, "grid", ns_compute_dtype=BF16),
    "hybrid": straddling((64, 64), 2, "hybrid", ns_compute_dtype=BF16),
    "replicated": straddling((64, 64), 2, "replicated", ns_compute_dtype=BF16),
    "deep": straddling((64, 64), 12, "columns", ns_compute_dtype=BF16),
    # Two matrices of 8 KiB for each of four ranks: eight go together.
    "deep, cut": straddling((64, 64), 12, "columns", ns_compute_dtype=BF16, ns_batch_bytes=1 << 14),
    "deep, single": straddling(
        (64, 64), 12, "columns", ns_compute_dtype=BF16, ns_batch_bytes=1 << 13
    ),
}
COPIES = {"hybrid": 2, "replicated": 4}
EXCHANGES = {"deep, cut": 2, "deep, single": 3}


def straddle(rank: int) -> dict[str, Result]:
    return {name: train(case, 4) for name, case in STRADDLING.items()}


@pytest.mark.parametrize("name", STRADDLING)
def test_a_matrix_in_pieces_travels_once_to_its_owner_and_once_back(name: str):
    case = STRADDLING[name]
    results = outcome(straddle, 4, name)
    reports = [result.reports[0] for result in results]
    itemsize = case.options.get("ns_compute_dtype", torch.float32).itemsize
    nbytes = itemsize * sum(math.prod(shape) for shape in case.shapes.values())
    headers = 8 * 4 * len(case.shapes)  # two numbers before each piece
    copies = COPIES.get(name, 1)
    sent = sum(r["payload_bytes"] for r in reports)
    assert sent <= (1 + copies) * nbytes + headers
    assert sent >= nbytes
    # To the owner and back, however deep the model is, until ranks have a batch each.
    assert {r["collectives"] for r in reports} == {2 * EXCHANGES.get(name, 1)}
    assert {r["control_bytes"] for r in reports} == {64}


@pytest.mark.parametrize("name", STRADDLING)
def test_work_on_matrices_in_pieces_is_shared_out(name: str):
    counts = [
        sum(n for _, n in result.reports[0]["matrices"]) for result in outcome(straddle, 4, name)
    ]
    depth = len(STRADDLING[name].shapes)
    assert sum(counts) == depth
    assert max(counts) == -(-depth // 4)


@pytest.mark.parametrize("name", STRADDLING)
def test_pieces_in_16_bits_give_the_update_of_one_process(name: str):
    """In FP32 its bits; in BF16 values are rounded once more: as they travel, and when normalized."""
    case = STRADDLING[name]
    results, whole = outcome(straddle, 4, name), alone(case)
    if name == "fp32":
        assert not differences(results, whole)
        return
    for result in results:
        for parameter, part in result.parts.items():
            known = whole.parts[parameter]
            old = value(parameter, case.shapes[parameter], 0).flatten()[part.weight_of]
            theirs, ours = known.weight[part.weight_of] - old, part.weight - old
            error = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)
            assert error < 2e-2
            # The momentum has not travelled.
            momentum = known.state["momentum_buffer"][part.state_of]
            assert torch.equal(part.state["momentum_buffer"], momentum)


# -- weights that all ranks have ----------------------------------------------------------------------

BUCKET_BYTES = 1000


def buckets(rank: int) -> dict[str, Any]:
    """Share through buckets that hold a few rows, so that many are on their way."""
    world = dist.get_world_size()
    muonloom.sharing._BUCKET_BYTES["cpu"] = BUCKET_BYTES
    found: dict[str, Any] = {}
    for name, case in BUCKETS.items():
        found[name] = train(case, world)
    return found


BUCKETS = {
    "device": Case(steps=2, absent={1: ("q", "embed", "conv")}),
    "host": Case(
        steps=3,
        dtype=BF16,
        options={
            "placement": HostPlacement(slot_bytes=4000, num_slots=2),
            "adjust_lr_fn": "match_rms_adamw",
        },
        absent={1: ("q", "embed", "conv")},
    ),
    # Exchanges of some weights and buckets of others, over the same ranks.
    "both": Case(steps=2, spread="tensor parallel"),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", BUCKETS)
def test_weights_of_all_ranks_go_in_buckets(name: str, world: int):
    case, results = BUCKETS[name], outcome(buckets, world, name)
    assert not differences(results, alone(case))
    if name == "both":
        return
    nbytes = case.dtype.itemsize * sum(math.prod(shape) for shape in SHAPES.values() if shape)
    for step in range(case.steps):
        reports = [result.reports[step] for result in results]
        # A weight without gradient costs its bytes too, so that buckets are the same at each step.
        assert {r["collectives"] for r in reports} == {-(-nbytes // BUCKET_BYTES)}
        assert sum(r["payload_bytes"] for r in reports) == nbytes * (world - 1)
        assert {r["control_bytes"] for r in reports} == {64}


def two_groups(rank: int) -> dict[str, Any]:
    """Experts that pairs of ranks share, and two matrices that all do: two ranks have no part of these.

    So they are ready for the buckets of all before those of their pair, and the others after.
    """
    muonloom.sharing._BUCKET_BYTES["cpu"] = 600
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shapes = {"experts": (6, 12, 8), "again": (24, 16), "wide": (16, 24)}
    named = {name: nn.Parameter(value(name, shape, 0)) for name, shape in shapes.items()}
    with torch.no_grad():
        named["experts"].copy_(value("experts", shapes["experts"], rank % 2))
    opt = muonloom.Muon(
        [
            {"params": [("experts", named["experts"])], "process_group": pairs[rank % 2]},
            {"params": [(n, p) for n, p in named.items() if n != "experts"]},
        ],
        layout=layout(shapes),
        **OPTIONS,
    )
    digests = []
    for step in range(3):
        for name, parameter in named.items():
            parameter.grad = gradient(name, shapes[name], step)
        opt.step()
        digests.append({name: digest(parameter) for name, parameter in named.items()})
    return {"digests": digests, "collectives": opt.last_step.collectives}


def digest(parameter: Tensor) -> str:
    return hashlib.sha256(local_part(parameter).detach().numpy().tobytes()).hexdigest()


def test_buckets_of_several_groups_do_not_wait_for_one_another():
    found = run(4, two_groups)
    nbytes = {"experts": 6 * 12 * 8 * 4, "rest": 4 * 2 * 24 * 16}
    for here in found:
        assert here["collectives"] == sum(-(-size // 600) for size in nbytes.values())
    for first, second, third, fourth in zip(*(here["digests"] for here in found), strict=True):
        assert first == third
        assert second == fourth
        for name in first:
            assert (first[name] == second[name]) == (name != "experts")


# -- what ranks keep ----------------------------------------------------------------------------------


def hosted(spread: str) -> Case:
    options = {"placement": "host", "adjust_lr_fn": "match_rms_adamw"}
    return Case(spread=spread, dtype=BF16, options=options)


def keep(rank: int) -> dict[str, Any]:
    """Return after each step which elements a rank has, and a digest of their weights."""
    world = dist.get_world_size()
    found: dict[str, Any] = {}
    for spread in ("plain", "hybrid", "replicated", "tensor parallel"):
        case = hosted(spread)
        named = build(case, world)
        opt = optimizer(named, case)
        held = {name: digest(local_part(which)) for name, which in indices(case, world).items()}
        digests = []
        for step in range(2):
            give(named, case, step)
            opt.step()
            digests.append({n: (held[n], digest(local_part(p).float())) for n, p in named.items()})
        opt.drain()
        found[spread] = {"digests": digests, "host_bytes": opt.memory()["host_state"]}
    return found


@pytest.mark.parametrize("spread", ["plain", "hybrid", "replicated", "tensor parallel"])
def test_who_has_the_same_part_has_the_same_weights_after_each_step(spread: str):
    found = outcome(keep, 4, spread)
    for step in range(2):
        for name in SHAPES:
            pairs = {here["digests"][step][name] for here in found}
            assert len(pairs) == len({held for held, _ in pairs})


def test_state_of_plain_parameters_is_kept_once_over_all_ranks():
    case = hosted("plain")
    opt = optimizer(named := build(case, 1), case)
    give(named, case, 0)
    opt.step()
    alone = opt.memory()["host_state"]
    by_rank = [here["host_bytes"] for here in outcome(keep, 4, "plain")]
    assert max(by_rank) < 0.45 * alone
    assert sum(by_rank) < alone + 4 * 4096  # whole pages
