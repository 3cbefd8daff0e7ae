"""Plain tensors that are pieces of a parameter (tensor parallel), with copies: the step of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import muonloom
from muonloom import HostPlacement, Sharding
from ranks.models import (
    OPTIONS,
    SHAPES,
    Case,
    Named,
    Result,
    alone,
    differences,
    index_of,
    layout,
    norms_agree,
    parts_of,
    remembered,
    report,
    value,
)
from ranks.support import run

BF16 = torch.bfloat16

# The dimension along which each is cut; those that are not here are whole on all ranks.
DIMS = {
    "q": 0,
    "kv": 0,
    "latent": 0,
    "qkv": 0,
    "gate_up": 0,
    "halves": 1,
    "experts": 1,
    "oss_up": 2,
    "oss_down": 2,
    "again": 1,
    "conv": 0,
}
SOME = {name: SHAPES[name] for name in (*DIMS, "odd", "norm", "bias", "embed")}
WAYS = {
    "fp32": Case(shapes=SOME),
    "host": Case(shapes=SOME, dtype=BF16, options={"placement": "host", "idle_matrices": "skip"}),
    "split": Case(
        shapes=SOME,
        dtype=BF16,
        options={
            "placement": HostPlacement(slot_bytes=4000, num_slots=2, master_layout="split"),
            "ns_batch_bytes": 2000,
            "momentum_dtype": BF16,
        },
        absent={1: ("q", "norm", "conv", "latent", "again")},
    ),
}
# World, and how many pieces: the rest are copies.
GRIDS = [(2, 2), (4, 2), (4, 4), (3, 1)]


@cache
def groups(world: int, pieces: int) -> tuple[Any, Any]:
    """Return this rank's group of pieces, and that of its copies; neighbours hold pieces."""
    found: list[Any] = [None, None]
    rank = dist.get_rank()
    for index, lists in enumerate(
        (
            [list(range(start, start + pieces)) for start in range(0, world, pieces)],
            [list(range(start, world, pieces)) for start in range(pieces)],
        )
    ):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks:
                found[index] = group
    return found[0], found[1]


def piece_of(name: str, tensor: Tensor, world: int, pieces: int) -> Tensor:
    if name not in DIMS or tensor.shape[DIMS[name]] % pieces:
        return tensor
    return tensor.chunk(pieces, DIMS[name])[dist.get_rank() % pieces].contiguous()


def build(case: Case, cut: Callable[[str, Tensor], Tensor]) -> Named:
    return {
        name: nn.Parameter(cut(name, value(name, shape, 0).to(case.dtype)))
        for name, shape in case.shapes.items()
    }


def optimizer(named: Named, case: Case, world: int, pieces: int, **options: Any) -> muonloom.Muon:
    of_pieces, of_copies = groups(world, pieces)
    cut = [name for name in named if named[name].shape != case.shapes[name]]
    return muonloom.Muon(
        [
            {"params": [(n, named[n]) for n in named if n in cut], "process_group": of_copies},
            {"params": [(n, named[n]) for n in named if n not in cut]},
        ],
        layout=layout(case.shapes),
        sharding={n: Sharding(process_group=of_pieces, dim=DIMS[n]) for n in cut},
        **{**OPTIONS, **case.options, **options},
    )


def train_all(rank: int, world: int, pieces: int) -> dict[str, Result]:
    return {name: train(case, world, pieces) for name, case in WAYS.items()}


def train(case: Case, world: int, pieces: int) -> Result:

    def cut(name: str, tensor: Tensor) -> Tensor:
        return piece_of(name, tensor, world, pieces)

    named = build(case, cut)
    opt = optimizer(named, case, world, pieces)
    reports = []
    for step in range(case.steps):
        for key, parameter in named.items():
            whole = case.gradient(key, step)
            parameter.grad = None if whole is None else cut(key, whole)
        opt.step()
        reports.append(report(opt))
    numbers = {key: cut(key, index_of(shape)) for key, shape in case.shapes.items()}
    return Result(parts=parts_of(named, opt, numbers), reports=reports)


@remembered
def trained(grid: tuple[int, int]) -> list[dict[str, Result]]:
    return run(grid[0], train_all, *grid)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("grid", GRIDS)
def test_pieces_take_the_step_of_the_whole(name: str, grid: tuple[int, int]):
    results = [found[name] for found in trained(grid)]
    whole = alone(WAYS[name])
    assert not differences(results, whole)
    assert norms_agree(results, whole)
    for key, part in whole.parts.items():  # state is kept once over all ranks
        kept = sum(result.parts[key].state_of.numel() for result in results)
        assert kept == part.weight.numel(), key


# -- ranks with parameters of their own, that step together -------------------------------------------

STAGES = {"first": ("q", "norm", "odd"), "second": ("again", "bias")}


def stages(rank: int, trouble: str) -> dict[str, Any]:
    """Two pipeline stages of two ranks each, and one more rank with nothing at all."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = ["first", "first", "second", "second", None][rank]
    names = () if stage is None else STAGES[stage]
    named = {name: nn.Parameter(value(name, SHAPES[name], 0)) for name in names}
    groups = [{"params": [*named.items()], "process_group": pairs[rank // 2]}] if named else []
    shapes = {name: SHAPES[name] for name in names}
    opt = muonloom.Muon(
        groups,
        layout=layout(shapes) if named else None,
        step_group=dist.group.WORLD,
        lr=0.05 if trouble == "options" and rank == 3 else 0.02,
        adamw_lr=0.01,
    )
    for name, parameter in named.items():
        parameter.grad = value(name, SHAPES[name], 1)
    if trouble == "nan" and rank == 2:
        named["again"].grad[0, 0] = torch.nan
    if trouble == "absent" and rank == 1:
        named["norm"].grad = None
    if trouble == "absent":
        for parameter in named.values():
            if parameter.grad is not None and rank == 1:
                parameter.grad = value("other", tuple(parameter.shape), 2)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    told = [str(warning.message) for warning in caught]
    same = {name: torch.equal(before[name], parameter) for name, parameter in named.items()}
    return {
        "skipped": opt.skipped,
        "norm": opt.last_step["grad_norm"],
        "same": same,
        "control": opt.last_step["control_bytes"],
        "told": told,
    }


def test_ranks_with_parameters_of_their_own_step_together():
    found = run(5, stages, "")
    squares = sum(
        float(value(name, SHAPES[name], 1).double().square().sum())
        for names in STAGES.values()
        for name in names
    )
    for rank, result in enumerate(found):
        assert not result["skipped"]
        assert result["control"] == 64
        assert result["norm"] == pytest.approx(squares**0.5, rel=1e-6)
        assert not any(result["same"].values()), rank


def test_one_stage_with_a_bad_gradient_skips_the_step_of_all():
    for result in run(5, stages, "nan"):
        assert result["skipped"]
        assert all(result["same"].values())
        assert "again" in result["told"][0]
        assert "rank 2" in result["told"][0]


def test_a_gradient_that_one_rank_of_a_stage_lacks_is_zero_there():
    found = run(5, stages, "absent")
    assert not found[0]["same"]["norm"]
    assert not found[1]["same"]["norm"]


def test_other_options_on_one_rank_of_a_stage_are_an_error_everywhere():
    found = run(5, stages, "options")
    assert all("error" in result for result in found)
    assert "lr=0.05" in found[2]["error"]
    assert "lr=0.05" in found[3]["error"]
    assert "ranks [2, 3]" in found[0]["error"]
    assert found[4]["error"] == found[0]["error"]


# -- state of one's own rows --------------------------------------------------------------------------


def resumed(rank: int, way: str) -> None:
    case, grid = WAYS[way], (4, 2)

    def cut(name: str, tensor: Tensor) -> Tensor:
        return piece_of(name, tensor, *grid)

    def steps(opt: muonloom.Muon, named: Named, numbers: range) -> None:
        for step in numbers:
            for key, parameter in named.items():
                whole = case.gradient(key, step)
                parameter.grad = None if whole is None else cut(key, whole)
            opt.step()
        opt.drain()

    named, again = build(case, cut), build(case, cut)
    opt, other = optimizer(named, case, *grid), optimizer(again, case, *grid)
    steps(opt, named, range(2))
    states = {}
    for name, parameter in named.items():
        rows, state = opt.own_state(parameter)
        assert rows == opt.updated_rows(parameter)
        assert all(
            tensor.shape[:1] == (rows.stop - rows.start,)
            for key, tensor in state.items()
            if key != "step"
        )
        states[again[name]] = {key: tensor.clone() for key, tensor in state.items()}
        again[name].data.copy_(parameter)
    other.load_own_state(states)
    steps(opt, named, range(2, 3))
    steps(other, again, range(2, 3))
    for name in named:
        assert torch.equal(named[name], again[name]), name
        for key, tensor in opt.own_state(named[name])[1].items():
            assert torch.equal(tensor, other.own_state(again[name])[1][key]), (name, key)
    with pytest.raises(ValueError, match=r"^q: got momentum_buffer of shape \(1, 1\)"):
        other.load_own_state({again["q"]: {"momentum_buffer": torch.zeros(1, 1)}})


@pytest.mark.parametrize("way", WAYS)
def test_state_of_own_rows_comes_back(way: str):
    run(4, resumed, way)


def refused(rank: int, directory: str) -> list[str]:
    case = WAYS["fp32"]
    named = build(case, lambda name, tensor: piece_of(name, tensor, 2, 2))
    opt = optimizer(named, case, 2, 2)
    model = nn.ParameterDict(named)
    found = []
    for call in (
        lambda: opt.gathered_master(named["again"]),
        lambda: opt.apply_to_masters([named["q"]], lambda master: None),
        lambda: muonloom.checkpoint.save(directory, model=model, optimizer=opt, step=0),
        lambda: muonloom.Muon(
            [("q", named["q"])],
            layout=layout({"q": SHAPES["q"]}),
            sharding={"q": Sharding(process_group=dist.group.WORLD, dim=2)},
        ),
        lambda: muonloom.Muon(
            [("q", named["q"])], sharding={"k": Sharding(process_group=dist.group.WORLD)}
        ),
    ):
        with pytest.raises(ValueError, match=r"^[a-z]+: got") as error:
            call()
        found.append(str(error.value))
    assert opt.get_full_parameter_master(named["again"]) is None
    return found


def test_what_needs_whole_parameters_is_refused_by_name(tmp_path: Any):
    told = run(2, refused, str(tmp_path / "checkpoint"))[0]
    assert [text.partition(":")[0] for text in told] == ["again", "q", "again", "q", "sharding"]
