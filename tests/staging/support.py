"""Models with every kind of staged tensor, and what runs them on each backend."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from muonloom import BlockSpec, HostPlacement, Layout
from muonloom.device import Backend, SynchronousBackend, ThreadedBackend, seeded_delays
from muonloom.device.hazards import CheckedBackend
from muonloom.engine import Engine
from muonloom.staging import Staging

Named = list[tuple[str, Parameter]]

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (300, 16),
    "layers.0.q.weight": (24, 16),
    "layers.0.gate_up": (3, 16, 24),
    "layers.0.down.weight": (16, 24),
    "layers.0.norm.weight": (16,),
    "layers.1.q.weight": (24, 16),
    "layers.1.gate_up": (3, 16, 24),
    "layers.1.down.weight": (16, 24),
    "layers.1.norm.weight": (16,),
    "conv.weight": (8, 3, 2, 2),
    "head.weight": (300, 16),
}

OVERRIDES: dict[str, Any] = {
    "embed.weight": "adamw",
    "head.weight": "adamw",
    "*.q.weight": BlockSpec.heads(4, heads_per_block=1, components=(4, 2)),
    "*.gate_up": BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True))),
    "conv.weight": BlockSpec.conv(),
}

OPTIONS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1}


def model(
    dtype: torch.dtype | Callable[[str], torch.dtype] = torch.bfloat16, seed: int = 0
) -> Named:
    generator = torch.Generator().manual_seed(seed)
    named = []
    for name, shape in SHAPES.items():
        own = dtype if isinstance(dtype, torch.dtype) else dtype(name)
        named.append((name, Parameter(torch.randn(shape, generator=generator).to(own))))
    return named


def layout() -> Layout:
    return Layout.from_shapes(SHAPES, overrides=OVERRIDES)


def mixed(name: str) -> torch.dtype:
    return torch.float32 if "norm" in name or "layers.1" in name else torch.bfloat16


def give_gradients(
    named: Named, step: int, *, absent: Callable[[str, int], bool] | None = None
) -> None:
    for index, (name, parameter) in enumerate(named):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if absent is not None and absent(name, step) else gradient


@contextlib.contextmanager
def on_backend(make: Callable[[], Backend] | None) -> Iterator[list[Backend]]:
    """Have optimizers built inside use the backends that `make` gives; close them at the end."""
    made: list[Backend] = []

    def make_backend(device: torch.device) -> Backend:
        made.append(make())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muonloom.Muon, "_make_backend", staticmethod(make_backend))
        yield made
    for backend in made:
        backend.settle()
        backend.close()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "synchronous": SynchronousBackend,
    "threaded": ThreadedBackend,
    "hostile": lambda: ThreadedBackend(delays=seeded_delays(3, 2e-3)),
    "checked": lambda: CheckedBackend(SynchronousBackend()),
    "checked hostile": lambda: CheckedBackend(ThreadedBackend(delays=seeded_delays(5, 1e-3))),
}


def everything(named: Named, opt: muonloom.Muon) -> dict[str, Tensor]:
    """Return weights and all state by name, masters whole."""
    opt.drain()
    saved = opt.state_dict()
    tensors = {name: parameter.detach().clone() for name, parameter in named}
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    ids = [index for group in saved["param_groups"] for index in group["params"]]
    for index, name in zip(ids, names, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            tensors[f"{name}/{key}"] = value.clone()
    return tensors


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not _same(one[name], other[name])]
    assert not different, f"not the same bits: {different}"


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare bits, dtypes and shapes: to `torch.equal` alone both zeros are one number."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return alike and torch.equal(*flat)


def train(
    placement: str | HostPlacement,
    *,
    steps: int = 4,
    dtype: Any = torch.bfloat16,
    absent: Callable[[str, int], bool] | None = None,
    between: Callable[[Named, muonloom.Muon, int], None] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    named = model(dtype)
    opt = muonloom.Muon(named, layout=layout(), placement=placement, **{**OPTIONS, **options})
    for step in range(steps):
        give_gradients(named, step, absent=absent)
        opt.step()
        if between is not None:
            between(named, opt, step)
    return everything(named, opt)


class Injected(RuntimeError):
    """What `FailingBackend` raises."""


class FailingBackend:
    """Another backend whose `index`-th piece of work fails: before it, after it, or in its first copy."""

    def __init__(self, inner: Backend, when: str) -> None:
        self._inner = inner
        self._when = when
        self._index: int | None = None
        self.count = 0
        self._fails_in_copy = False

    def submitted(self, work: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        if self.count - 1 != self._index:
            return work

        def failing() -> None:
            if self._when == "before":
                raise Injected(self._when)
            self._fails_in_copy = self._when == "copy"
            try:
                work()
            finally:
                self._fails_in_copy = False
            raise Injected(self._when)

        return failing

    def arm(self, index: int | None) -> None:
        self._index, self.count = index, 0

    def caller(self) -> _FailingStream:
        return _FailingStream(self._inner.caller(), self)

    def stream(self, name: str) -> _FailingStream:
        return _FailingStream(self._inner.stream(name), self)

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._fails_in_copy:
            half = target.numel() // 2
            target.view(-1)[:half].copy_(source.view(-1)[:half])
            raise Injected("in the middle of a copy")
        self._inner.copy(target, source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FailingStream:
    def __init__(self, inner: Any, backend: FailingBackend) -> None:
        self._inner = inner
        self._backend = backend
        self.name = inner.name

    def submit(self, work: Callable[[], None], label: str) -> None:
        self._inner.submit(self._backend.submitted(work), label)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# -- random models ----------------------------------------------------------------------------------

_MATRICES: dict[str, tuple[tuple[int, ...], Any]] = {
    "a.weight": ((16, 8), None),
    "b.weight": ((8, 16), None),
    "q.weight": ((24, 8), BlockSpec.heads(6, heads_per_block=2)),
    "k.weight": ((24, 16), BlockSpec.heads(4, heads_per_block=1, components=(4, 2))),
    "experts": ((3, 8, 16), BlockSpec.stacked(BlockSpec.whole())),
    "gate_up": ((2, 8, 24), BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up()))),
    "mixed_up": (
        (2, 8, 24),
        BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(interleaved=True))),
    ),
    "conv.weight": ((8, 3, 2, 2), BlockSpec.conv()),
}
_SCALARS: dict[str, tuple[int, ...]] = {
    "norm.weight": (16,),
    "bias": (5,),
    "table.weight": (40, 8),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, the optimizer's options, and a host placement, all drawn from one seed."""

    seed: int
    shapes: dict[str, tuple[int, ...]]
    overrides: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    options: dict[str, Any]
    placement: HostPlacement
    absent_share: float

    def model(self) -> Named:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            (name, Parameter(torch.randn(shape, generator=generator).to(self.dtypes[name])))
            for name, shape in self.shapes.items()
        ]

    def build(self, placement: str | HostPlacement) -> tuple[Named, muonloom.Muon]:
        named = self.model()
        whole = Layout.from_shapes(self.shapes, overrides=self.overrides)
        return named, muonloom.Muon(named, layout=whole, placement=placement, **self.options)

    def train(self, placement: str | HostPlacement, steps: int = 3) -> dict[str, Tensor]:
        named, opt = self.build(placement)
        for step in range(steps):
            give_gradients(named, step, absent=self.absent)
            opt.step()
        return everything(named, opt)

    def absent(self, name: str, step: int) -> bool:
        return random.Random(f"{self.seed} {name} {step}").random() < self.absent_share


def random_case(seed: int) -> Case:
    """Draw tensors of a few hundred elements: what matters is how they are cut and where they lie."""
    choose = random.Random(seed)
    names = choose.sample([*_MATRICES, *_SCALARS], choose.randint(1, 4))
    names = names if any(name in _MATRICES for name in names) else [*names, "a.weight"]
    shapes: dict[str, tuple[int, ...]] = {}
    overrides: dict[str, Any] = {}
    for layer in range(choose.choice([1, 1, 1, 2, 3])):
        for name in names:
            shape, spec = _MATRICES.get(name) or (_SCALARS[name], "adamw")
            shapes[f"{layer}.{name}"] = shape
            if spec is not None:
                overrides[f"{layer}.{name}"] = spec
    kind = choose.choice(["bf16", "bf16", "fp32", "both"])
    both = [torch.bfloat16, torch.float32]
    dtypes = {"bf16": both[:1], "fp32": both[1:], "both": both}[kind]
    return Case(
        seed=seed,
        shapes=shapes,
        overrides=overrides,
        dtypes={name: choose.choice(dtypes) for name in shapes},
        options={
            **OPTIONS,
            "ns_steps": 2,  # the checker pays for each operation, and all iterations are alike
            "momentum_dtype": choose.choice(both),
            "nesterov": choose.random() < 0.7,
            "idle_matrices": choose.choice(["update", "skip"]),
            "weight_decay": choose.choice([0.0, 0.1]),
            "ns_batch_bytes": choose.choice([1600, 4000, "auto"]),
        },
        placement=HostPlacement(
            num_slots=choose.choice([1, 2, 3, 3, 5]),
            slot_bytes=choose.choice([1600, 3200, 8000, "auto"]),
            master_layout=choose.choice(["full", "split"]),
        ),
        absent_share=choose.choice([0.0, 0.0, 0.3]),
    )


def engine_of(opt: muonloom.Muon) -> Engine:
    return opt._assembly.engine


def staging_of(opt: muonloom.Muon) -> Staging:
    staging = engine_of(opt)._staging
    assert staging is not None
    return staging


# -- outcomes of two placements -----------------------------------------------------------------------

TINY = 20000
PLACEMENTS = {
    "full": HostPlacement(slot_bytes=TINY),
    "split": HostPlacement(slot_bytes=TINY, master_layout="split"),
}

Scenario = Callable[[Named, muonloom.Muon], tuple[Named, muonloom.Muon] | None]


def built(
    placement: str | HostPlacement, dtype: Any = torch.bfloat16, **options: Any
) -> tuple[Named, muonloom.Muon]:
    named = model(dtype)
    whole = {**OPTIONS, **options}
    return named, muonloom.Muon(named, layout=layout(), placement=placement, **whole)


def outcome(
    scenario: Scenario, placement: str | HostPlacement, **options: Any
) -> dict[str, Tensor]:
    named, opt = built(placement, **options)
    named, opt = scenario(named, opt) or (named, opt)
    return everything(named, opt)


def steps(named: Named, opt: muonloom.Muon, *numbers: int, **options: Any) -> None:
    for number in numbers:
        give_gradients(named, number, **options)
        opt.step()
