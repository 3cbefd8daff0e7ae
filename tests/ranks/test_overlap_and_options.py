"""What loops do between steps, and streams that run behind the caller, change nothing over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

import muonloom
import muonloom.sharing
from muonloom import HostPlacement
from muonloom.device import Backend, SynchronousBackend, ThreadedBackend, seeded_delays
from muonloom.device.hazards import CheckedBackend
from muonloom.dtensors import is_dtensor, local_part
from ranks.models import (
    OPTIONS,
    SHAPES,
    Case,
    Named,
    Result,
    alone,
    build,
    differences,
    give,
    gradient,
    index_of,
    indices,
    layout,
    like,
    mesh,
    optimizer,
    parts_of,
    remembered,
    train,
    value,
)
from ranks.support import run

BF16 = torch.bfloat16
FEW = {name: SHAPES[name] for name in ("q", "mixed_up", "odd", "experts", "embed", "norm")}
HOST = HostPlacement(slot_bytes=6000)


# -- loops ----------------------------------------------------------------------------------------------


def accumulate(named: Named, opt: muonloom.Muon, case: Case) -> None:
    """Add up ten gradients, in zeros that stay."""
    for step in range(2):
        opt.zero_grad(set_to_none=False)
        for micro in range(10):
            for name, parameter in named.items():
                made = like(gradient(name, case.shapes[name], 10 * step + micro), parameter)
                parameter.grad = made if parameter.grad is None else parameter.grad.add_(made)
        opt.step()


def free(named: Named, opt: muonloom.Muon, case: Case) -> None:
    for step in range(2):
        give(named, case, step)
        opt.step()
        assert not [name for name, parameter in named.items() if parameter.grad is not None]


def close(named: Named, opt: muonloom.Muon, case: Case) -> list[float]:
    """Give a closure, which reads weights that other ranks have updated."""

    def closure() -> float:
        give(named, case, next(numbers))
        return float(local_part(named["norm"]).detach().sum())

    numbers = iter(range(3))
    return [opt.step(closure) is not None for _ in range(3)]


def schedule(named: Named, opt: muonloom.Muon, case: Case) -> list[list[float]]:
    warm = LambdaLR(opt, lambda step: (step + 1) / 3)
    scheduler = SequentialLR(opt, [warm, CosineAnnealingLR(opt, 3)], milestones=[2])
    rates = []
    for step in range(4):
        give(named, case, step)
        opt.step()
        scheduler.step()
        rates.append([float(group["lr"]) for group in opt.param_groups])
    return rates


def main_gradients(named: Named, opt: muonloom.Muon, case: Case) -> None:
    """Give FP32 gradients beside BF16 weights: spread as they are, or this rank's part, plain."""
    for step in range(2):
        for turn, (name, parameter) in enumerate(named.items()):
            parameter.grad = torch.zeros_like(parameter)  # not read
            whole = like(gradient(name, case.shapes[name], step), parameter)
            parameter.main_grad = local_part(whole) if turn % 2 else whole
        opt.step()


def add_later(named: Named, opt: muonloom.Muon, case: Case) -> None:
    """Have two parameters after the first step, and one more after the second."""
    later = [(("again", "conv"), 0.03), (("bias",), 0.04)]
    for step in range(3):
        give(named, case, step)
        opt.step()
        if step < len(later):
            names, rate = later[step]
            opt.add_param_group({"params": [(n, named[n]) for n in names], "lr": rate})


def strided(named: Named, opt: muonloom.Muon, case: Case) -> None:
    """Give gradients whose rows do not follow one another in memory."""
    for step in range(2):
        give(named, case, step)
        for parameter in named.values():
            held = local_part(parameter.grad)
            if held.ndim > 1:
                turned = held.mT.contiguous().mT
                if is_dtensor(parameter):
                    parameter.grad._local_tensor = turned
                else:
                    parameter.grad = turned
        opt.step()


def replan(named: Named, opt: muonloom.Muon, case: Case) -> None:
    """Change the iteration after the first step, and the numbers after the second."""
    for step in range(3):
        give(named, case, step)
        opt.step()
        muon = opt.param_groups[0]
        if step == 0:
            muon["ns_steps"], muon["eps"] = 3, 1e-6
        muon["momentum"], muon["weight_decay"], muon["nesterov"] = 0.5, 0.2, False


Loop = Callable[[Named, muonloom.Muon, Case], Any]
LOOPS: dict[str, tuple[Loop, Case]] = {
    "accumulated": (accumulate, Case(shapes=FEW)),
    "freed": (free, Case(shapes=FEW, options={"free_gradients": True})),
    "freed, host": (
        free,
        Case(
            shapes=FEW,
            dtype=BF16,
            options={
                "free_gradients": True,
                "placement": HOST,
                "adjust_lr_fn": "match_rms_adamw",
            },
        ),
    ),
    "closure": (close, Case(shapes=FEW)),
    "scheduled": (schedule, Case(shapes=FEW)),
    "a tensor's rate": (schedule, Case(shapes=FEW, options={"lr": torch.tensor(0.02)})),
    "main gradients": (main_gradients, Case(shapes=FEW, dtype=BF16)),
    "added": (add_later, Case(shapes={n: SHAPES[n] for n in (*FEW, "again", "conv", "bias")})),
}
LOOPS["replanned"] = (replan, Case(shapes=FEW))
LOOPS["strided"] = (strided, Case(shapes=SHAPES))
LATE = ("again", "conv", "bias")
LOOP_SPREADS = ("plain", "rows", "tensor parallel")


def loop_through(name: str, spread: str, world: int) -> tuple[Result, Any]:
    loop, known = LOOPS[name]
    case = Case(**{**vars(known), "spread": spread})
    named = build(case, world)
    first = {n: p for n, p in named.items() if not (name == "added" and n in LATE)}
    chosen = {**OPTIONS, **case.options}
    opt = muonloom.Muon(first.items(), layout=layout(case.shapes), **chosen)
    told = loop(named, opt, case)
    return Result(parts=parts_of(named, opt, indices(case, world)), reports=[]), told


def loops(rank: int) -> dict[str, Any]:
    return {f"{name}, {s}": loop_through(name, s, 3) for name in LOOPS for s in LOOP_SPREADS}


@remembered
def outcomes(job_and_world: tuple[Callable[[int], dict[str, Any]], int]) -> list[dict[str, Any]]:
    job, world = job_and_world
    return run(world, job, limit_s=200)


@pytest.mark.parametrize("spread", LOOP_SPREADS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_does_over_ranks_what_it_does_on_one_process(name: str, spread: str):
    found = [here[f"{name}, {spread}"] for here in outcomes((loops, 3))]
    whole, told = loop_through(name, "plain", 1)
    assert not differences([result for result, _ in found], whole)
    assert all(theirs == told for _, theirs in found)


SUMS = Case(shapes={name: SHAPES[name] for name in ("again", "norm", "odd")}, steps=3)


def partial_sums(rank: int) -> dict[str, Any]:
    """Have gradients that are sums over ranks, as norms have of which each sees a part of a sequence.

    In the second step the last rank lacks the gradient of another parameter.
    """
    named = {
        name: nn.Parameter(
            distribute_tensor(
                value(name, shape, 0),
                mesh(2),
                [Shard(0) if name == "odd" else Replicate()],
                src_data_rank=None,
            )
        )
        for name, shape in SUMS.shapes.items()
    }
    opt = optimizer(named, SUMS)
    for step in range(SUMS.steps):
        give(named, SUMS, step)
        for name in ("again", "norm"):
            whole = gradient(name, SUMS.shapes[name], step)
            term = whole if rank == 0 else torch.zeros_like(whole)
            named[name].grad = DTensor.from_local(term, mesh(2), [Partial()], run_check=False)
        if (rank, step) == (1, 1):
            named["odd"].grad = None
        opt.step()
    held = {name: like(index_of(shape), named[name]) for name, shape in SUMS.shapes.items()}
    return {"sums": Result(parts=parts_of(named, opt, held), reports=[])}


def test_gradients_that_are_sums_over_ranks_are_added_up_once():
    found = [here["sums"] for here in run(2, partial_sums, timeout_s=20)]
    whole = alone(SUMS)  # in the second step the gradient of `odd` is zero anyway
    assert not differences(found, whole)


def in_other_formats(world: int, placement: Any) -> Result:
    """Train weights that are not contiguous, each rank as it likes its memory to be used."""
    case = Case(steps=2)
    named = build(case, world)
    with torch.no_grad():
        for name in ("q", "experts", "embed", "odd"):
            named[name] = nn.Parameter(named[name].mT.contiguous().mT)
        named["conv"] = nn.Parameter(named["conv"].to(memory_format=torch.channels_last))
    assert not any(named[name].is_contiguous() for name in ("q", "experts", "embed", "conv"))
    opt = optimizer(named, case, placement=placement)
    for step in range(case.steps):
        give(named, case, step)
        opt.step()
    return Result(parts=parts_of(named, opt, indices(case, world)), reports=[])


PLACEMENTS = ("device", "host", HostPlacement(slot_bytes=4000, num_slots=1))


def formats(rank: int) -> dict[str, Any]:
    muonloom.sharing._BUCKET_BYTES["cpu"] = 700
    return {"plain": in_other_formats(3, PLACEMENTS[rank])}


def test_weights_of_any_strides_are_shared_by_ranks_of_any_placement():
    found = [here["plain"] for here in outcomes((formats, 3))]
    assert not differences(found, in_other_formats(1, "device"))


def placed(rank: int) -> dict[str, Any]:
    found = {}
    for spread in ("plain", "columns", "tensor parallel"):
        case = Case(spread=spread, steps=2, options={"placement": PLACEMENTS[rank]})
        found[spread] = train(case, 3)
    return found


@pytest.mark.parametrize("spread", ["plain", "columns", "tensor parallel"])
def test_each_rank_may_place_its_state_as_it_likes(spread: str):
    found = [here[spread] for here in outcomes((placed, 3))]
    assert not differences(found, alone(Case(steps=2)))


# -- streams behind the caller ---------------------------------------------------------------------------

BACKENDS: dict[str, Callable[[], Backend]] = {
    "threaded, hostile": lambda: ThreadedBackend(delays=seeded_delays(3, 1e-3)),
    "checked": lambda: CheckedBackend(SynchronousBackend()),
    "checked, hostile": lambda: CheckedBackend(ThreadedBackend(delays=seeded_delays(5, 5e-4))),
}
STAGED = Case(
    shapes={n: SHAPES[n] for n in (*FEW, "again", "bias", "scalar")},
    dtype=BF16,
    steps=2,
    options={
        "placement": HostPlacement(slot_bytes=4000, num_slots=2),
        "adjust_lr_fn": "match_rms_adamw",
        "ns_batch_bytes": 2000,
        "ns_steps": 2,
    },
    absent={1: ("q", "norm")},
)
STAGED_SPREADS = ("plain", "rows", "columns", "tensor parallel")


class On:
    """Have optimizers that are built inside use other streams, and small buckets."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._made: list[Backend] = []

    def __enter__(self) -> None:
        self._usual = muonloom.Muon.__dict__["_make_backend"]
        self._bucket_bytes = muonloom.sharing._BUCKET_BYTES["cpu"]
        muonloom.Muon._make_backend = staticmethod(self._make)  # type: ignore[method-assign]
        muonloom.sharing._BUCKET_BYTES["cpu"] = 700

    def _make(self, device: torch.device) -> Backend:
        self._made.append(BACKENDS[self._backend]())
        return self._made[-1]

    def __exit__(self, *_: object) -> None:
        muonloom.Muon._make_backend = self._usual  # type: ignore[method-assign]
        muonloom.sharing._BUCKET_BYTES["cpu"] = self._bucket_bytes
        for backend in self._made:
            failure = backend.settle()
            backend.close()
            if failure is not None:
                raise failure


def stage(rank: int, backend: str) -> dict[str, Result]:
    found = {}
    with On(backend):
        for spread in STAGED_SPREADS:
            found[spread] = train(Case(**{**vars(STAGED), "spread": spread}), dist.get_world_size())
    return found


@remembered
def staged(backend: str) -> list[dict[str, Result]]:
    return run(3, stage, backend, limit_s=200)


@cache
def staged_alone() -> Result:
    return alone(STAGED)


@pytest.mark.parametrize("spread", STAGED_SPREADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_exchanges_and_shared_weights_are_ordered_by_events_alone(backend: str, spread: str):
    """Delays of any kind change no bit, and no two accesses that may meet are left without order."""
    assert not differences([found[spread] for found in staged(backend)], staged_alone())


# -- models that run -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def bare(model: nn.Module) -> nn.Module:
    return model.to(BF16)


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.to(BF16))


def sharded(model: nn.Module) -> nn.Module:
    model = model.to(BF16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh(2))
    return fully_shard(model, mesh=mesh(2))


WRAPS = {"replicated": replicated, "sharded": sharded}


def optimizer_of(model: nn.Module, **options: Any) -> muonloom.Muon:
    shapes = {name: tuple(p.shape) for name, p in Deep().named_parameters()}
    overrides = {"*.up.weight": muonloom.BlockSpec.gate_up(), "out.weight": "muon"}
    known = muonloom.Layout.from_shapes(shapes, overrides=overrides)
    chosen = {**OPTIONS, "placement": HostPlacement(slot_bytes=3000, num_slots=2), **options}
    return muonloom.Muon(model.named_parameters(), layout=known, **chosen)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(value("data", (4, 8), step).to(BF16)).float().square().mean()


def overlap(model: nn.Module, opt: muonloom.Muon) -> list[float]:
    """Let the next forward pass begin before a step has ended; between them save, and stop for a while."""
    losses = []
    handle = opt.overlap_forward(model)
    for step in range(5):
        if step == 3:
            handle.remove()
        loss = loss_of(model, step)
        losses.append(float(loss.detach()))
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        if step == 1:
            losses.append(
                float(sum(local_part(t).float().sum() for t in model.state_dict().values())) * 0
            )
    return losses


def sync_last(model: nn.Module, opt: muonloom.Muon) -> list[float]:
    """Accumulate three gradients before ranks average them."""
    losses = []
    for step in range(2):
        for micro in range(3):
            is_last = micro == 2
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            elif hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = is_last
            loss = loss_of(model, 3 * step + micro)
            losses.append(float(loss.detach()))
            loss.backward()
        opt.step()
        opt.zero_grad()
    return losses


def clip(model: nn.Module, opt: muonloom.Muon) -> list[float]:
    norms = []
    for step in range(3):
        loss_of(model, step).backward()
        norm = clip_grad_norm_(model.parameters(), 0.25)
        norms.append(float(norm.full_tensor() if is_dtensor(norm) else norm))
        opt.step()
        norms.append(opt.last_step.grad_norm)
        opt.zero_grad()
    return norms


TRAINERS = {"overlap": overlap, "sync last": sync_last, "clip": clip}


def train_model(model: nn.Module, trainer: str, **options: Any) -> tuple[list[float], list[Tensor]]:
    opt = optimizer_of(model, **options)
    told = TRAINERS[trainer](model, opt)
    opt.drain()
    whole = [p.full_tensor() if is_dtensor(p) else p for p in model.parameters()]
    return told, [tensor.detach().clone() for tensor in whole]


def train_models(rank: int) -> dict[str, Any]:
    found = {}
    for name, wrap in WRAPS.items():
        found[f"{name}, sync last"] = train_model(wrap(Deep()), "sync last")
        found[f"{name}, clip"] = train_model(wrap(Deep()), "clip")
        for backend in BACKENDS:
            with On(backend):
                found[f"{name}, {backend}"] = train_model(wrap(Deep()), "overlap")
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRAPS)
def test_a_forward_pass_beside_a_step_sees_the_weights_of_all_ranks(name: str, backend: str):
    losses, weights = train_model(bare(Deep()), "overlap")
    for here in outcomes((train_models, 2)):
        theirs, found = here[f"{name}, {backend}"]
        assert theirs == losses
        assert all(map(torch.equal, found, weights))


@pytest.mark.parametrize("name", WRAPS)
def test_gradients_that_are_averaged_late_are_those_of_one_process(name: str):
    losses, weights = train_model(bare(Deep()), "sync last")
    for here in outcomes((train_models, 2)):
        theirs, found = here[f"{name}, sync last"]
        assert theirs == losses
        assert all(map(torch.equal, found, weights))


@pytest.mark.parametrize("name", WRAPS)
def test_the_norm_after_clipping_is_seen_by_the_step(name: str):
    norms, weights = train_model(bare(Deep()), "clip")
    for here in outcomes((train_models, 2)):
        theirs, found = here[f"{name}, clip"]
        assert theirs == pytest.approx(norms, rel=5e-3)  # gradients are BF16
        for one, other in zip(found, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
        assert all(norm <= 0.25 * (1 + 5e-3) for norm in theirs[1::2])
