"""Several ranks together take the very step that one process takes: however parameters are spread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import muonloom
from muonloom import HostPlacement
from muonloom.dtensors import is_dtensor, local_part
from ranks.models import (
    OPTIONS,
    SHAPES,
    SPREADS,
    Case,
    Named,
    Result,
    alone,
    counts,
    differences,
    gradient,
    index_of,
    layout,
    mesh,
    norms_agree,
    optimizer,
    parts_of,
    remembered,
    report,
    train_all,
    value,
)
from ranks.support import run

BF16 = torch.bfloat16

WAYS: dict[str, Case] = {
    "fp32": Case(),
    "bf16 on the host": Case(
        dtype=BF16, options={"placement": "host", "adjust_lr_fn": "match_rms_adamw"}
    ),
    "split, in small pieces": Case(
        dtype=BF16,
        options={
            "placement": HostPlacement(slot_bytes=4000, num_slots=2, master_layout="split"),
            "momentum_dtype": BF16,
            "ns_batch_bytes": 2000,
            "idle_matrices": "skip",
            "adjust_lr_fn": "original",
        },
        absent={1: ("q", "norm", "conv", "latent")},
    ),
    "gram": Case(
        options={
            "ns_method": "gram",
            "adjust_lr_fn": "spectral",
            "nesterov": False,
            "weight_decay": 0.0,
            "placement": HostPlacement(num_slots=1),
        },
        absent={0: ("q", "norm", "conv"), 1: ("experts", "embed")},
    ),
    "fp16": Case(
        dtype=torch.float16,
        options={"ns_method": "standard", "adjust_lr_fn": "none", "idle_matrices": "skip"},
    ),
}

WAYS["fp64"] = Case(options={"ns_compute_dtype": torch.float64})

# Every spread in FP32, and every way where matrices are whole, in pieces, and both.
PAIRS: dict[int, list[tuple[str, str]]] = {
    1: [("plain", "fp32"), ("rows", "split, in small pieces"), ("replicated", "bf16 on the host")],
    2: [
        *((s, "fp32") for s in ("plain", "rows", "columns", "last", "replicated")),
        *((s, way) for s in ("plain", "columns") for way in [*WAYS][1:]),
        ("rows", "fp64"),
    ],
    3: [
        *((s, "fp32") for s in ("plain", "rows", "columns", "last", "tensor parallel")),
        *((s, way) for s in ("rows", "last") for way in [*WAYS][2:4]),
    ],
    4: [
        *((s, "fp32") for s in SPREADS),
        *((s, way) for s in ("hybrid", "tensor parallel", "plain") for way in [*WAYS][1:3]),
    ],
}
# More ranks than atoms, and than rows; ranks without anything at all.
SMALL: dict[str, Case] = {
    "tiny": Case(
        shapes={n: SHAPES[n] for n in ("odd", "kv", "norm", "scalar", "halves", "oss_up")},
        steps=2,
        options={"ns_batch_bytes": 256, "ns_compute_dtype": torch.float32},
    ),
    "single": Case(shapes={"odd": (3, 7)}, steps=2, options={"placement": "host"}, dtype=BF16),
    "empty": Case(shapes={"none": (0, 8), "thin": (4, 0), "odd": (3, 7), "norm": (2,)}, steps=2),
}


def case(spread: str, way: str) -> Case:
    known = SMALL[way] if way in SMALL else WAYS[way]
    return Case(**{**vars(known), "spread": spread, "steps": 2})


def cases(world: int) -> dict[str, Case]:
    pairs = PAIRS[world]
    if world == 4:
        pairs = [*pairs, *((s, way) for s in ("plain", "rows", "last") for way in SMALL)]
    return {f"{spread}, {way}": case(spread, way) for spread, way in pairs}


@remembered
def trained(world: int) -> list[dict[str, Result]]:
    return run(world, train_all, cases(world), world, limit_s=240)


@cache
def expected(way: str) -> Result:
    return alone(case("plain", way))


def check(results: list[Result], whole: Result, *, once: bool = True) -> None:
    assert not differences(results, whole)
    assert norms_agree(results, whole)
    for step in range(len(whole.reports) if once else 0):
        assert counts(results, step) == counts([whole], step)  # whoever has copies


@pytest.mark.parametrize(("world", "name"), [(n, name) for n in PAIRS for name in cases(n)])
def test_ranks_take_the_step_of_one_process(world: int, name: str):
    results = [found[name] for found in trained(world)]
    whole = expected(name.partition(", ")[2])
    check(results, whole)
    if name.startswith("plain"):  # state is kept once over all ranks; a scalar's by each of them
        for key, part in whole.parts.items():
            kept = sum(result.parts[key].state_of.numel() for result in results)
            assert kept == part.weight.numel() * (world if key == "scalar" else 1)


# -- modules that torch spreads -----------------------------------------------------------------------

SHARDED = {name: shape for name, shape in SHAPES.items() if shape}


class Zoo(nn.Module):
    """Every kind of parameter; experts in a module of their own."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name in SHARDED:
            holder = self.inner if name in ("experts", "oss_up", "oss_down") else self
            holder.register_parameter(name, nn.Parameter(make(name)))

    def named(self) -> Named:
        return {name.removeprefix("inner."): p for name, p in self.named_parameters()}


def grid(*names: str) -> DeviceMesh:
    return mesh(2, 2, names=names)


def replace(module: nn.Module, name: str, on: DeviceMesh, placement: Placement) -> None:
    whole = module.get_parameter(name).detach()
    spread = distribute_tensor(whole, on, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(spread))


def shard_rows(zoo: Zoo) -> None:
    fully_shard(zoo.inner, mesh=mesh(4))
    fully_shard(zoo, mesh=mesh(4))


def shard_and_replicate(zoo: Zoo) -> None:
    fully_shard(zoo, mesh=grid("replicate", "shard"))


def shard_columns(zoo: Zoo) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        even = parameter.ndim > 1 and parameter.shape[1] % 4 == 0
        return Shard(1) if even else None

    fully_shard(zoo, mesh=mesh(4), shard_placement_fn=placement)


def tensor_parallel(zoo: Zoo) -> None:
    """As `parallelize_module` does it; what is left is FSDP's alone."""
    both = grid("dp", "tp")
    for name in ("embed", "q", "kv", "latent", "qkv", "gate_up", "mixed_up", "again"):
        replace(zoo, name, both["tp"], Shard(0))
    for name in ("halves", "odd", "conv"):
        replace(zoo, name, both["tp"], Shard(1))
    replace(zoo, "norm", both["tp"], Replicate())
    fully_shard(zoo, mesh=both["dp"])


def expert_parallel(zoo: Zoo) -> None:
    """Experts on pairs of ranks, of which there are two that do the same; all else over all ranks."""
    both = grid("edp", "ep")
    for name in ("experts", "oss_up", "oss_down"):
        replace(zoo.inner, name, both["ep"], Shard(0))
    fully_shard(zoo, mesh=mesh(4), ignored_params=set(zoo.inner.parameters()))


def sharded_experts(zoo: Zoo) -> None:
    """The same, and each expert's rows over the ranks that would do the same."""
    both = grid("edp", "ep")
    for name in ("experts", "oss_up", "oss_down"):
        replace(zoo.inner, name, both["ep"], Shard(0))
    fully_shard(zoo.inner, mesh=both["edp"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(zoo, mesh=mesh(4))


MODULES: dict[str, Callable[[Zoo], None]] = {
    "rows": shard_rows,
    "rows and replicas": shard_and_replicate,
    "columns": shard_columns,
    "tensor parallel": tensor_parallel,
    "expert parallel": expert_parallel,
    "sharded experts": sharded_experts,
}
HOSTED = Case(
    shapes=SHARDED,
    steps=2,
    dtype=BF16,
    options={"placement": "host", "adjust_lr_fn": "match_rms_adamw"},
)
MODULE_WAYS = {"device": Case(shapes=SHARDED, steps=2), "host": HOSTED}


def like(whole: Tensor, held: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a gradient that a rank has: the elements `held`."""
    own = whole.flatten()[local_part(held).flatten().long()].view(local_part(held).shape)
    if not is_dtensor(parameter):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def train_module(way: Case, shard: Callable[[Zoo], None]) -> Result:
    zoo = Zoo(lambda name: value(name, SHARDED[name], 0).to(way.dtype))
    indices = Zoo(lambda name: index_of(SHARDED[name]).float())
    for module in (zoo, indices):
        shard(module)
    named, held = zoo.named(), indices.named()
    opt = optimizer(named, way)
    reports = []
    for step in range(way.steps):
        for name, parameter in named.items():
            whole = way.gradient(name, step)
            assert whole is not None
            parameter.grad = like(whole, held[name], parameter)
        opt.step()
        reports.append(report(opt))
    return Result(
        parts=parts_of(named, opt, {n: local_part(p).detach().long() for n, p in held.items()}),
        reports=reports,
    )


def train_modules(rank: int) -> dict[str, Result]:
    return {
        f"{name}, {way}": train_module(MODULE_WAYS[way], shard)
        for name, shard in MODULES.items()
        for way in MODULE_WAYS
    }


@remembered
def modules(_: None) -> list[dict[str, Result]]:
    return run(4, train_modules, limit_s=240)


@cache
def expected_of(way: str) -> Result:
    return alone(MODULE_WAYS[way])


@pytest.mark.parametrize("way", MODULE_WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_sharded_modules_take_the_step_of_one_process(name: str, way: str):
    results = [found[f"{name}, {way}"] for found in modules(None)]
    # What is on one dimension of a mesh alone is done for each index of the other.
    check(results, expected_of(way), once=name not in ("tensor parallel", "expert parallel"))


# -- groups of ranks that the caller names ------------------------------------------------------------

EXPERTS = ("experts", "oss_up", "oss_down")


def local_experts(shape: tuple[int, ...], rank: int, num_parts: int) -> slice:
    parts = torch.arange(shape[0]).tensor_split(num_parts)[rank % num_parts]
    return slice(int(parts[0]), int(parts[-1]) + 1) if len(parts) else slice(0, 0)


def train_named(way: Case, rank: int, num_parts: int) -> Result:
    """Have plain tensors: experts in common with those that have the same, the rest with all."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[rank % 2] if num_parts == 2 else False

    def own(name: str, whole: Tensor) -> Tensor:
        return whole[local_experts(SHAPES[name], rank, num_parts)] if name in EXPERTS else whole

    named = {
        name: nn.Parameter(own(name, value(name, shape, 0).to(way.dtype)).clone())
        for name, shape in SHAPES.items()
    }
    experts = [(name, named[name]) for name in EXPERTS]
    others = [(name, p) for name, p in named.items() if name not in EXPERTS]
    opt = muonloom.Muon(
        [{"params": experts, "process_group": group}, {"params": others}],
        layout=layout({name: tuple(p.shape) for name, p in named.items()}),
        **{**OPTIONS, **way.options},
    )
    assert all("process_group" not in group for group in opt.param_groups)
    reports = []
    for step in range(way.steps):
        for name, parameter in named.items():
            parameter.grad = own(name, gradient(name, SHAPES[name], step).to(way.dtype))
        opt.step()
        reports.append(report(opt))
    indices = {name: own(name, index_of(shape)) for name, shape in SHAPES.items()}
    return Result(parts=parts_of(named, opt, indices), reports=reports)


def train_groups(rank: int) -> dict[str, Result]:
    return {
        f"{num_parts}, {way}": train_named(MODULE_WAYS[way], rank, num_parts)
        for num_parts in (2, 4)
        for way in MODULE_WAYS
    }


@remembered
def groups(_: None) -> list[dict[str, Result]]:
    return run(4, train_groups, limit_s=240)


@pytest.mark.parametrize("way", MODULE_WAYS)
@pytest.mark.parametrize("num_parts", [2, 4])
def test_experts_of_a_group_take_the_step_of_one_process(num_parts: int, way: str):
    """With four parts of three experts, one rank has none of them."""
    results = [found[f"{num_parts}, {way}"] for found in groups(None)]
    check(results, alone(Case(**{**vars(MODULE_WAYS[way]), "shapes": SHAPES})))


# -- a model that runs --------------------------------------------------------------------------------


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train_feed(model: nn.Module) -> list[float]:
    shapes = {name: tuple(p.shape) for name, p in Feed().named_parameters()}
    overrides = {"up.weight": muonloom.BlockSpec.gate_up()}
    opt = muonloom.Muon(
        model.named_parameters(),
        layout=muonloom.Layout.from_shapes(shapes, overrides=overrides),
        **OPTIONS,
    )
    norms = []
    for step in range(3):
        opt.zero_grad()
        model(value("data", (6, 8), step)).square().sum().backward()
        opt.step()
        norms.append(opt.last_step.grad_norm)
    return norms


def run_feed(rank: int) -> tuple[dict[str, Tensor], list[float], list[str]]:
    both = grid("dp", "tp")
    model = Feed()
    parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=both["dp"])
    norms = train_feed(model)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return weights, norms, [str(p.placements) for p in model.parameters()]


def test_a_parallelized_and_sharded_model_learns_as_on_one_process():
    model = Feed()
    norms = train_feed(model)
    for weights, theirs, placements in run(4, run_feed):
        assert any("_StridedShard" in text for text in placements)
        assert theirs == pytest.approx(norms, rel=1e-5)
        for name, parameter in model.named_parameters():
            # Products of half the columns are added up in another order, and gradients with them.
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)
