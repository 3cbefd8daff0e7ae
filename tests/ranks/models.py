"""Small models with every kind of cut, spread over ranks in every way, and trained; also on one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import muonloom
from muonloom import BlockSpec, Layout
from muonloom.dtensors import is_dtensor, local_part

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (37, 8),
    "q": (24, 16),
    "kv": (16, 8),
    "latent": (24, 8),
    "qkv": (24, 8),
    "gate_up": (20, 8),
    "mixed_up": (20, 8),
    "halves": (6, 16),
    "experts": (5, 12, 8),
    "oss_up": (3, 8, 12),
    "oss_down": (3, 6, 8),
    "conv": (8, 3, 2, 2),
    "odd": (3, 7),
    "again": (24, 16),
    "norm": (13,),
    "bias": (130,),
    "scalar": (),
}

OVERRIDES: dict[str, Any] = {
    "embed": "adamw",
    "q": BlockSpec.heads(6, heads_per_block=2),
    "kv": BlockSpec.heads(2, heads_per_block=1),
    "latent": BlockSpec.heads(4, heads_per_block=2, components=(4, 2)),
    "qkv": BlockSpec.rows(12, 6, 6),
    "gate_up": BlockSpec.gate_up(),
    "mixed_up": BlockSpec.gate_up(interleaved=True),
    "halves": BlockSpec.columns(10, 6),
    "experts": BlockSpec.stacked(BlockSpec.gate_up()),
    "oss_up": BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True))),
    "oss_down": BlockSpec.stacked(BlockSpec.transposed(BlockSpec.whole())),
    "conv": BlockSpec.conv(),
    "odd": "muon",
    "again": BlockSpec.whole(),
}

# Some rows of these hold matrices of several shapes.
UNEVEN = ("latent", "halves")

# FP32, because fragments in BF16 are rounded twice: before they travel, and when they are normalized.
OPTIONS: dict[str, Any] = {"lr": 2e-2, "adamw_lr": 1e-2, "ns_compute_dtype": torch.float32}

Named = dict[str, nn.Parameter]
Shapes = Mapping[str, tuple[int, ...]]


def layout(shapes: Shapes = SHAPES) -> Layout:
    known = {name: spec for name, spec in OVERRIDES.items() if name in shapes}
    return Layout.from_shapes(shapes, overrides=known)


def value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    return torch.randn(shape, generator=generator)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Some matrices are idle at every second step: an expert, a projection of a fused one."""
    made = value(name, shape, 1000 + step)
    if step % 2:
        if name == "experts":
            made[2] = 0
        if name == "mixed_up":
            made[::2] = 0
        if name == "oss_up":
            made[1, :, 1::2] = 0
        if name == "odd":
            made.zero_()
    return made


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how it is spread over ranks.

    Attributes:
        spread: key of `SPREADS`.
        dtype: of the parameters.
        steps: how many.
        options: of the optimizer.
        shapes: of the parameters.
        absent: names by step that have no gradient on any rank.
    """

    spread: str = "plain"
    dtype: torch.dtype = torch.float32
    steps: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=lambda: SHAPES)
    absent: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def gradient(self, name: str, step: int) -> Tensor | None:
        if name in self.absent.get(step, ()):
            return None
        return gradient(name, self.shapes[name], step).to(self.dtype)


@dataclass(kw_only=True)
class Part:
    """What one rank has of a parameter: values, and which elements of the whole these are.

    Attributes:
        weight_of: flat indices.
        weight: the device weight.
        state_of: flat indices of state.
        state: by key; `step` is whole.
    """

    weight_of: Tensor
    weight: Tensor
    state_of: Tensor
    state: dict[str, Tensor]


@dataclass(kw_only=True)
class Result:
    """What one rank has after training."""

    parts: dict[str, Part]
    reports: list[dict[str, Any]]


# -- spreads ------------------------------------------------------------------------------------------

Spread = Callable[[str, Tensor, int], Tensor]


@cache
def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def mesh_of(ranks: tuple[Any, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", ranks)


def _shard(tensor: Tensor, dim: int) -> Shard:
    return Shard(min(dim, tensor.ndim - 1))


def _distributed(tensor: Tensor, on: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    # All ranks have the same whole tensor: nothing has to be sent.
    return distribute_tensor(tensor, on, placements, src_data_rank=None)


def plain(name: str, tensor: Tensor, world: int) -> Tensor:
    return tensor


def rows(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh(world), [_shard(tensor, 0)])


def columns(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh(world), [_shard(tensor, 1)])


def last(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh(world), [_shard(tensor, 3)])


def replicated(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh(world), [Replicate()])


def hybrid(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh(2, world // 2), [Replicate(), _shard(tensor, 0)])


def turned(name: str, tensor: Tensor, world: int) -> Tensor:
    """Replicas are neighbours: the ranks of the mesh do not ascend."""
    both = mesh_of(tuple(map(tuple, torch.arange(world).view(-1, 2).T.tolist())))
    return _distributed(tensor, both, [Replicate(), _shard(tensor, 0)])


def backwards(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh_of(tuple(reversed(range(world)))), [_shard(tensor, 0)])


def grid(name: str, tensor: Tensor, world: int) -> Tensor:
    both = [_shard(tensor, 0), _shard(tensor, 1) if tensor.ndim > 1 else Replicate()]
    return _distributed(tensor, mesh(world // 2, 2), both)


def crossed(name: str, tensor: Tensor, world: int) -> Tensor:
    both = [_shard(tensor, 1), _shard(tensor, 0)] if tensor.ndim > 1 else [Replicate(), Shard(0)]
    return _distributed(tensor, mesh(world // 2, 2), both)


def twice(name: str, tensor: Tensor, world: int) -> Tensor:
    return _distributed(tensor, mesh(world // 2, 2), [Shard(0), Shard(0)])


def tensor_parallel(name: str, tensor: Tensor, world: int) -> Tensor:
    """As `parallelize_module` leaves a model: norms are plain, and each rank has all of them."""
    if tensor.ndim < 2 or name in ("conv", "odd"):
        return tensor
    dim = 1 if name in ("halves", "oss_up", "again") else 0
    return _distributed(tensor, mesh(world), [_shard(tensor, dim)])


SPREADS: dict[str, Spread] = {
    "plain": plain,
    "rows": rows,
    "columns": columns,
    "last": last,
    "replicated": replicated,
    "hybrid": hybrid,
    "turned": turned,
    "backwards": backwards,
    "grid": grid,
    "crossed": crossed,
    "twice": twice,
    "tensor parallel": tensor_parallel,
}


def spread(case: Case, name: str, tensor: Tensor, world: int) -> Tensor:
    """Return this rank's part; a scalar cannot be a shard."""
    if tensor.ndim == 0:
        return tensor
    return SPREADS[case.spread](name, tensor, world)


# -- training -----------------------------------------------------------------------------------------


def build(case: Case, world: int) -> Named:
    return {
        name: nn.Parameter(spread(case, name, value(name, shape, 0).to(case.dtype), world))
        for name, shape in case.shapes.items()
    }


def optimizer(named: Named, case: Case, **options: Any) -> muonloom.Muon:
    chosen = {**OPTIONS, **case.options, **options}
    return muonloom.Muon(named.items(), layout=layout(case.shapes), **chosen)


def give(named: Named, case: Case, step: int) -> None:
    """Have all gradients of a step, each spread as its parameter is."""
    for name, parameter in named.items():
        whole = case.gradient(name, step)
        parameter.grad = None if whole is None else like(whole, parameter)


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    if not is_dtensor(parameter):
        return whole
    return _distributed(whole, parameter.device_mesh, parameter.placements)


def index_of(shape: tuple[int, ...]) -> Tensor:
    """Number all elements; spread as the parameter is, the numbers tell what a rank has."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def parts_of(
    named: Named, opt: muonloom.Muon, numbers: Mapping[str, Tensor], *, drain: bool = True
) -> dict[str, Part]:
    """Return what this rank has, once all of it is home."""
    if drain:
        opt.drain()
    parts = {}
    for name, parameter in named.items():
        state = opt.state.get(parameter, {})
        held = local_part(numbers[name])
        parts[name] = Part(
            weight_of=held.flatten(),
            weight=local_part(parameter).detach().flatten().clone(),
            state_of=opt._weights.own_rows(parameter, held).flatten(),
            state={key: tensor.flatten().clone() for key, tensor in state.items() if key != "step"},
        )
    return parts


REPORTED = (
    "grad_norm",
    "skipped",
    "matrices",
    "idle",
    "ns_calls",
    "payload_bytes",
    "control_bytes",
)


def report(opt: muonloom.Muon) -> dict[str, Any]:
    return {key: opt.last_step[key] for key in (*REPORTED, "collectives")}


def train(case: Case, world: int) -> Result:
    named = build(case, world)
    opt = optimizer(named, case)
    reports = []
    for step in range(case.steps):
        give(named, case, step)
        opt.step()
        reports.append(report(opt))
    return Result(parts=parts_of(named, opt, indices(case, world)), reports=reports)


def indices(case: Case, world: int) -> dict[str, Tensor]:
    return {name: spread(case, name, index_of(shape), world) for name, shape in case.shapes.items()}


def train_all(rank: int, cases: Mapping[str, Case], world: int) -> dict[str, Result]:
    """Be one rank of a job that trains one case after the other."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = train(case, world)
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


def alone(case: Case) -> Result:
    """Train on this process alone."""
    return train(Case(**{**vars(case), "spread": "plain"}), 1)


# -- comparisons --------------------------------------------------------------------------------------


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits and dtypes: to `torch.equal` alone both zeros are one number."""
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def differences(results: list[Result], whole: Result) -> list[str]:
    """Name what is not on all ranks as on one process, or is kept nowhere.

    AdamW's kernel rounds the last few elements of what it gets otherwise: a shard that begins elsewhere
    than at multiples of 64 elements may differ in the last bit. So may the weights of `UNEVEN` that lie
    in pieces: rates of several factors are multiplied in two roundings. All else has the same bits.
    """
    found = []
    for name, known in whole.parts.items():
        parts = [result.parts[name] for result in results]
        numel = known.weight.numel()
        exact = "exp_avg" not in known.state or all(_is_aligned(p.state_of, numel) for p in parts)
        in_pieces = name in UNEVEN and any(part.weight.numel() < numel for part in parts)
        loose = {"weight", "master_weight", "master_low"} if in_pieces else set[str]()
        loose |= set() if exact else {"weight", *known.state}
        for rank, part in enumerate(parts):
            pairs = {
                key: (tensor, known.state[key][part.state_of]) for key, tensor in part.state.items()
            }
            pairs["weight"] = (part.weight, known.weight[part.weight_of])
            found += [
                f"{name} {key} on rank {rank}"
                for key, pair in pairs.items()
                if not (_nearly_same if key in loose else same_bits)(*pair)
            ]
            if part.state.keys() != known.state.keys():
                found.append(f"{name} on rank {rank} has {part.state.keys()}")
        kept = torch.cat([part.state_of for part in parts])
        if kept.unique().numel() != numel:
            found.append(f"{name}: not all of its state is kept")
    return found


def _is_aligned(indices: Tensor, numel: int) -> bool:
    if not indices.numel():
        return True
    start, stop = int(indices[0]), int(indices[-1]) + 1
    whole = stop - start == indices.numel() and bool((indices.diff() == 1).all())
    return whole and start % 64 == 0 and (stop % 64 == 0 or stop == numel)


def _nearly_same(one: Tensor, other: Tensor) -> bool:
    if one.dtype == torch.int16:  # what a BF16 weight lacks of its master
        return one.shape == other.shape
    rtol = 2 * torch.finfo(one.dtype).eps
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=rtol, atol=0)


def norms_agree(results: list[Result], whole: Result) -> bool:
    """The norm is added up in another order, of FP32 norms of parts."""
    return all(
        abs(ours["grad_norm"] - theirs["grad_norm"]) <= 1e-6 * theirs["grad_norm"]
        for result in results
        for ours, theirs in zip(result.reports, whole.reports, strict=True)
    )


def counts(results: list[Result], step: int) -> tuple[dict[tuple[int, int], int], int]:
    """Return the matrices that ranks orthogonalized in a step, and how many were idle."""
    found: dict[tuple[int, int], int] = {}
    for result in results:
        for shape, count in result.reports[step]["matrices"]:
            found[tuple(shape)] = found.get(tuple(shape), 0) + count
    return found, sum(result.reports[step]["idle"] for result in results)


def remembered(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Call once for each argument, as `functools.cache` does, but keep failures too."""
    known: dict[Any, tuple[Any, BaseException | None]] = {}

    def caller(argument: Any) -> Any:
        if argument not in known:
            try:
                known[argument] = call(argument), None
            except BaseException as error:
                known[argument] = None, error
        value, failure = known[argument]
        if failure is not None:
            raise failure
        return value

    return caller
