"""A model with a parameter of every kind, its writers, and what is in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import muonloom
from muonloom import BFloat16Writer, BlockSpec, Float8BlockWriter, HostPlacement, Layout

OPTIONS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1, "ns_steps": 2}

PLACEMENTS: dict[str, str | HostPlacement] = {
    "device": "device",
    "host": HostPlacement(slot_bytes=12000),
    "host, large slots": HostPlacement(slot_bytes=50000),
    "host, one slot": HostPlacement(slot_bytes=12000, num_slots=1),
    "split": HostPlacement(slot_bytes=12000, master_layout="split"),
    "split, one slot": HostPlacement(slot_bytes=20000, num_slots=1, master_layout="split"),
}

# Storage layouts: dense but not contiguous ones too.
_SHAPES: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "up": lambda draw: draw(24, 16),
    "transposed": lambda draw: draw(16, 24).T,
    "stack": lambda draw: draw(3, 16, 24),
    "permuted": lambda draw: draw(16, 3, 24).permute(1, 0, 2),
    "conv": lambda draw: draw(8, 3, 2, 2).to(memory_format=torch.channels_last),
    "table": lambda draw: draw(40, 8),
    "norm": lambda draw: draw(16),
    "scale": lambda draw: draw(),
    "idle": lambda draw: draw(8, 8),
}
NAMES = tuple(_SHAPES)
NAMED = rf"\b({'|'.join(NAMES)})\b"

OVERRIDES: dict[str, Any] = {
    "up": "muon",
    "transposed": "muon",
    "idle": "muon",
    "stack": BlockSpec.stacked(BlockSpec.whole()),
    "permuted": BlockSpec.stacked(BlockSpec.whole()),
    "conv": BlockSpec.conv(),
    "table": "adamw",
}

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
DTYPES: dict[str, Callable[[str], torch.dtype]] = {
    "bf16": lambda _: torch.bfloat16,
    "fp16": lambda _: torch.float16,
    "fp32": lambda _: torch.float32,
    "bf16 and fp32": lambda name: _DTYPES[NAMES.index(name) % 2],
    "all three": lambda name: _DTYPES[NAMES.index(name) % 3],
}

# What master_layout="split" takes.
SPLITTABLE = ("bf16", "fp32", "bf16 and fp32")


class Model(nn.Module):
    """Trainable parameters of all kinds, a frozen one, and buffers of several dtypes."""

    def __init__(self, dtypes: str, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        for name, make in _SHAPES.items():
            values = make(draw).to(DTYPES[dtypes](name))
            self.register_parameter(name, Parameter(values))
        self.register_parameter("frozen", Parameter(draw(4, 6), requires_grad=False))
        self.register_buffer("running", draw(5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", draw(2, 2).bfloat16(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Read one weight that is large, and one that is small."""
        return x @ self.up.float() * self.scale.float()


class MinimalWriter:
    """Only what every writer has; what it fills is BF16."""

    def __init__(self, param: Tensor) -> None:
        self.held = param.detach().to(torch.bfloat16).contiguous().clone()

    @property
    def storage(self) -> object:
        return self.held

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        held = self.held if self.held.ndim else self.held.view(1)
        held[rows].copy_(master)

    def read(self, param: Tensor) -> Tensor:
        return self.held.float()


class EngineDouble:
    """An expert engine that records its calls; memory that it allocates again holds other numbers."""

    def __init__(self, pairs: Iterable[tuple[Parameter, Any]]) -> None:
        self.pairs = list(pairs)
        self.calls: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()

    def named_writers(self) -> list[tuple[Parameter, Any]]:
        return self.pairs

    def before_step(self, optimizer: object) -> None:
        self.calls.append(("before_step",))

    def after_step(self, optimizer: object, skipped: bool) -> None:
        self.calls.append(("after_step", skipped))

    def release(self, params: Iterable[Parameter]) -> None:
        for tensor in self._called("release", params):
            tensor.untyped_storage().resize_(0)

    def resume(self, params: Iterable[Parameter]) -> None:
        for tensor in self._called("resume", params):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.untyped_storage().fill_(77)

    def _called(self, what: str, params: Iterable[Parameter]) -> list[Tensor]:
        chosen = list(params)
        self.calls.append((what, *chosen))
        if what in self.fails:
            raise RuntimeError(f"the engine's {what} failed")
        return [t for param in chosen for t in dict(self.pairs)[param].tensors()]


def _float8(param: Parameter) -> Float8BlockWriter:
    return Float8BlockWriter((8, 8))


def _bfloat16(param: Parameter) -> BFloat16Writer:
    return BFloat16Writer(param.detach().to(torch.bfloat16).contiguous().clone())


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Which parameters have writers, of what kind, and whether these stand in for their storage."""

    names: tuple[str, ...]
    make: Callable[[Parameter], Any]
    alone: bool
    in_engine: bool = False


_FLOAT8 = ("up", "stack", "permuted", "table")
_ALL = ("up", "transposed", "stack", "conv", "table", "norm", "scale")
ARRANGEMENTS: dict[str, Arrangement] = {
    "fp8 alone": Arrangement(names=_FLOAT8, make=_float8, alone=True),
    "fp8 beside": Arrangement(names=_FLOAT8, make=_float8, alone=False),
    "bf16 in place": Arrangement(names=_ALL, make=lambda _: BFloat16Writer(), alone=False),
    "bf16 alone": Arrangement(names=_ALL, make=_bfloat16, alone=True),
    "bf16 beside": Arrangement(names=_ALL, make=_bfloat16, alone=False),
    "minimal alone": Arrangement(names=_ALL, make=MinimalWriter, alone=True),
    "minimal beside": Arrangement(names=_ALL, make=MinimalWriter, alone=False),
    "engine, fp8 alone": Arrangement(names=_FLOAT8, make=_float8, alone=True, in_engine=True),
    "engine, fp8 beside": Arrangement(names=_FLOAT8, make=_float8, alone=False, in_engine=True),
    "engine, bf16 alone": Arrangement(names=_ALL, make=_bfloat16, alone=True, in_engine=True),
}


@dataclass(kw_only=True)
class Run:
    """A model in training."""

    model: Model
    opt: muonloom.Muon
    writers: dict[str, Any] = field(default_factory=dict)
    engine: EngineDouble | None = None

    def __getitem__(self, name: str) -> Parameter:
        return self.model.get_parameter(name)

    @property
    def params(self) -> dict[str, Parameter]:
        return {name: self[name] for name in NAMES}

    def give_gradients(self, seed: int, *, without: Iterable[str] = ("idle",)) -> None:
        for index, (name, param) in enumerate(self.params.items()):
            generator = torch.Generator().manual_seed(100 * seed + index)
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if name in without else gradient

    def step(self, *seeds: int, without: Iterable[str] = ("idle",)) -> Run:
        for seed in seeds:
            self.give_gradients(seed, without=without)
            self.opt.step()
        self.opt.drain()
        return self

    def state(self) -> dict[str, Tensor]:
        """Copies of all state, by parameter and key."""
        saved = self.opt.state_dict()
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        ids = [index for group in saved["param_groups"] for index in group["params"]]
        return {
            f"{name}/{key}": value.clone()
            for index, name in zip(ids, names, strict=True)
            for key, value in saved["state"].get(index, {}).items()
        }

    def contents(self) -> dict[str, Tensor]:
        """Copies of all weights that there are, buffers, what writers fill, and state."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, writer in self.writers.items():
            filled = (writer.held,) if isinstance(writer, MinimalWriter) else writer.tensors()
            tensors += [(f"{name}: {index}", tensor) for index, tensor in enumerate(filled)]
        here = {name: t.detach().clone() for name, t in tensors if has_storage(t)}
        return here | self.state()


def build(
    dtypes: str = "bf16",
    placement: str = "device",
    arrangement: str | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Run:
    model = Model(dtypes, seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    layout = Layout.from_shapes({n: tuple(p.shape) for n, p in named}, overrides=OVERRIDES)
    settings = {"placement": PLACEMENTS[placement], **OPTIONS, **options}
    opt = muonloom.Muon(named, layout=layout, **settings)
    run = Run(model=model, opt=opt)
    if arrangement is not None:
        _arrange(run, ARRANGEMENTS[arrangement])
    return run


def _arrange(run: Run, arrangement: Arrangement) -> None:
    run.writers = {name: arrangement.make(run[name]) for name in arrangement.names}
    pairs = [(run[name], writer) for name, writer in run.writers.items()]
    if arrangement.in_engine:
        run.engine = EngineDouble(pairs)
        run.opt.bind(run.engine)
    else:
        for param, writer in pairs:
            run.opt.register_writer(param, writer)
    if arrangement.alone:
        for param, _ in pairs:
            param.untyped_storage().resize_(0)


def has_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def everything_but_state(run: Run) -> Iterator[Tensor]:
    yield from run.model.parameters()
    yield from run.model.buffers()
    for writer in run.writers.values():
        yield from writer.tensors() if hasattr(writer, "tensors") else ()


class Injected(RuntimeError):
    """What `FailingCopies` raises."""


class FailingCopies(TorchDispatchMode):
    """Has the `index`-th copy inside fail, after half of it was written; counts them all."""

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        self.index, self.count, self.nbytes = index, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += 1
            self.nbytes += args[0].nbytes
            if self.count - 1 == self.index:
                if args[0].is_contiguous() and args[0].numel():
                    args[0].view(-1)[: max(1, args[0].numel() // 2)] = 1
                raise Injected("a copy failed")
        return func(*args, **(kwargs or {}))
