"""Writers that record what they are told, engines that hold them, and models of every kind of parameter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from muonloom import BlockSpec, HostPlacement, Layout
from muonloom.cuts import write_atoms
from staging.support import Named, give_gradients

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (300, 16),
    "q.weight": (48, 16),
    "kv.weight": (24, 16),
    "qkv.weight": (32, 16),
    "gate_up": (3, 16, 24),
    "down": (3, 12, 16),
    "conv.weight": (8, 3, 2, 2),
    "norm.weight": (16,),
    "gain": (),
}

OVERRIDES: dict[str, Any] = {
    "embed.weight": "adamw",
    "gain": "adamw",
    "q.weight": BlockSpec.heads(6, heads_per_block=1),
    "kv.weight": BlockSpec.heads(4, heads_per_block=1, components=(4, 2)),
    "qkv.weight": BlockSpec.rows(16, 8, 8),
    "gate_up": BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True))),
    "down": BlockSpec.stacked(),
    "conv.weight": BlockSpec.conv(),
}

STRIDED = ("q.weight", "embed.weight", "down")

OPTIONS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1, "ns_steps": 2}

PLACEMENTS: dict[str, str | HostPlacement] = {
    "device": "device",
    "host": "host",
    "tiny": HostPlacement(slot_bytes=8000, num_slots=3),
    "one slot": HostPlacement(slot_bytes=8000, num_slots=1),
}
SPLIT = HostPlacement(slot_bytes=8000, num_slots=3, master_layout="split")


def model(dtype: torch.dtype = torch.bfloat16, *, strided: bool = False) -> Named:
    """Return the parameters; with `strided` some of them lie transposed in their storage."""
    generator = torch.Generator().manual_seed(0)
    named = []
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator).to(dtype)
        if strided and name in STRIDED:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        named.append((name, Parameter(values)))
    return named


def layout() -> Layout:
    return Layout.from_shapes(SHAPES, overrides=OVERRIDES)


def build(
    placement: str | HostPlacement = "device", *, named: Named | None = None, **options: Any
) -> tuple[Named, muonloom.Muon]:
    named = model() if named is None else named
    whole = {**OPTIONS, **options}
    return named, muonloom.Muon(named, layout=layout(), placement=placement, **whole)


class Recorder:
    """Keeps FP32 weights of its own, and every write.

    Attributes:
        writes: rows of each call, as pairs.
        order: ``"name"`` of each call, shared by recorders that are to be compared.
        fails: raises at calls of these numbers, after half of the rows are written.
        pause_s: what each write takes.
    """

    def __init__(
        self,
        name: str,
        param: Tensor,
        *,
        source: Tensor | None = None,
        block_rows: int = 1,
        order: list[str] | None = None,
        fails: Sequence[int] = (),
        pause_s: float = 0.0,
    ) -> None:
        self.name = name
        self.data = param.detach().to(torch.float32, copy=True).contiguous()
        self.holder: object = self.data
        self.block_rows = block_rows
        self.source = source
        self.order = [] if order is None else order
        self.fails = set(fails)
        self.pause_s = pause_s
        self.writes: list[tuple[int, int]] = []
        self.prepared = 0
        self.problems: list[str] = []

    @property
    def storage(self) -> object:
        return self.holder

    def prepare(self, param: Tensor) -> None:
        self.prepared += 1

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def rows_per_block(self, param: Tensor) -> int:
        return self.block_rows

    def take_source(self, param: Tensor) -> Tensor | None:
        source, self.source = self.source, None
        return source

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        number = len(self.writes)
        self.writes.append((rows.start, rows.stop))
        self.order.append(self.name)
        self._look_at(param, master, rows)
        if self.pause_s:
            time.sleep(self.pause_s)
        target = self.data if self.data.ndim == 0 else self.data[rows]
        if number in self.fails:
            flat = target.view(-1)
            flat[: flat.numel() // 2].copy_(master.view(-1)[: flat.numel() // 2])
            raise Broken(self.name)
        target.copy_(master)

    def _look_at(self, param: Tensor, master: Tensor, rows: slice) -> None:
        shape = (rows.stop - rows.start, *param.shape[1:]) if param.ndim else ()
        if master.dtype != torch.float32 or not master.is_contiguous() or master.shape != shape:
            self.problems.append(f"{master.dtype} {tuple(master.shape)} {master.stride()}")
        if master.device != param.device or rows.step is not None:
            self.problems.append(f"{master.device} {rows}")
        if torch.is_grad_enabled():
            self.problems.append("gradients are recorded")

    def read(self, param: Tensor) -> Tensor:
        return self.data.clone()

    def agrees(self, param: Tensor, master: Tensor) -> bool:
        return torch.equal(self.data.view(torch.int32), master.contiguous().view(torch.int32))


class Blind:
    """A writer that says no more than it has to, over a tensor of its own."""

    def __init__(self, param: Tensor) -> None:
        self.data = param.detach().to(torch.float32, copy=True).contiguous()

    @property
    def storage(self) -> object:
        return self.data

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        (self.data if self.data.ndim == 0 else self.data[rows]).copy_(master)

    def read(self, param: Tensor) -> Tensor:
        return self.data.clone()


class Broken(RuntimeError):
    """What a recorder that fails raises."""


class Engine:
    """Holds writers, and keeps what it was told.

    Attributes:
        log: ``"before"``, ``"after"`` or ``"skipped"`` for each call; shared by engines that are compared.
        before: called in `before_step`.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Parameter, Any]],
        *,
        name: str = "",
        log: list[str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.held = list(pairs)
        self.name = name
        self.log = [] if log is None else log
        self.before = before

    def named_writers(self) -> Iterator[tuple[Parameter, Any]]:
        yield from self.held

    def before_step(self, optimizer: Any) -> None:
        self.log.append(f"{self.name}before")
        if self.before is not None:
            self.before()

    def after_step(self, optimizer: Any, skipped: bool) -> None:
        self.log.append(f"{self.name}{'skipped' if skipped else 'after'}")

    def release(self, params: Iterable[Parameter]) -> None:
        raise AssertionError("nobody releases here")

    def resume(self, params: Iterable[Parameter]) -> None:
        raise AssertionError("nobody resumes here")


def recorders(named: Named, **options: Any) -> dict[str, Recorder]:
    """Return a recorder for each parameter; kv and qkv parameters are cut into unequal neighbours."""
    return {name: Recorder(name, parameter, **options) for name, parameter in named}


def register(opt: muonloom.Muon, named: Named, writers: dict[str, Any]) -> None:
    for name, parameter in named:
        if name in writers:
            opt.register_writer(parameter, writers[name])


def release(parameter: Tensor) -> None:
    """Give a parameter's storage up, behind everybody's back."""
    parameter.untyped_storage().resize_(0)


def run(
    placement: str | HostPlacement,
    *,
    steps: int = 3,
    named: Named | None = None,
    writers: bool = True,
    absent: Callable[[str, int], bool] | None = None,
    recorder: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Named, muonloom.Muon, dict[str, Recorder]]:
    """Train, with a recorder for each parameter or with none."""
    named, opt = build(placement, named=named, **options)
    found = recorders(named, **(recorder or {})) if writers else {}
    register(opt, named, found)
    for writer in found.values():
        writer.writes.clear()  # a master that was there already is written at once
        writer.order.clear()
    for step in range(steps):
        give_gradients(named, step, absent=absent)
        opt.step()
    opt.drain()
    return named, opt, found


def masters(opt: muonloom.Muon, named: Named) -> dict[str, Tensor]:
    """Return copies of all FP32 masters."""
    opt.drain()
    found = {}
    for name, parameter in named:
        master = opt.get_full_parameter_master(parameter)
        assert master is not None
        found[name] = master.clone()
    return found


def held(writers: dict[str, Recorder]) -> dict[str, Tensor]:
    return {name: writer.data.clone() for name, writer in writers.items()}


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in its logical order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(bits_of(one[name]), bits_of(other[name]))]
    assert not different, f"not the same bits: {different}"


def row_ends(name: str, block_rows: int) -> set[int]:
    """Return the rows at which a write of a parameter may begin or end."""
    shape, spec = SHAPES[name], OVERRIDES.get(name)
    if not isinstance(spec, BlockSpec):
        length = shape[0] if shape else 1
        return {*range(0, length, block_rows), length}
    atoms = write_atoms(spec, shape, block_rows, name=name)
    return {row for own in atoms for atom in own for row in atom.rows}


# -- engines of experts alone ---------------------------------------------------------------------

EXPERTS = ("gate_up", "down")
TRIED = {key: PLACEMENTS[key] for key in ("device", "tiny")}


def engine_for(
    named: Named, names: tuple[str, ...] = EXPERTS, **options: Any
) -> tuple[Engine, dict[str, Recorder]]:
    writers = {name: Recorder(name, p) for name, p in named if name in names}
    return Engine([(p, writers[n]) for n, p in named if n in names], **options), writers


def train(named: Named, opt: muonloom.Muon, *steps: int) -> None:
    for step in steps:
        give_gradients(named, step)
        opt.step()
    opt.drain()


def bound_names(named: Named, opt: muonloom.Muon) -> set[str]:
    return {name for name, p in named if opt._weights.writer(p) is not None}
