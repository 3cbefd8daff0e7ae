"""Other implementations, each behind the same small interface; a missing one says so and no more.

All run eagerly. Looped ones return a list: nothing is stacked at their cost.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import typing_extensions
from torch import Tensor
from torch.optim import Optimizer

from muonloom.bench.timing import failure

Triple = tuple[float, float, float]
JORDAN: Triple = (3.4445, -4.7750, 2.0315)
"""https://kellerjordan.github.io/posts/muon/"""

REFERENCE = "torch.optim.Muon"
LOOPED_FP32 = "looped FP32"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An implementation of orthogonalization, and of an optimizer with it.

    Attributes:
        name: shown and stored.
        dtype: what its products run in.
        coefficients: (a, b, c) of its five steps.
        orthogonalize: (x, steps) -> result; x is FP32, (count, m, n) if ``batched`` else (m, n).
        batched: whether it takes batches; if not, it is looped.
        any_steps: whether steps other than five can be asked for.
        optimizer: 2-D parameters -> its Muon, with Nesterov momentum 0.95 and decay 0.1; or None.
        note: shown with its results.
    """

    name: str
    dtype: str
    coefficients: tuple[Triple, ...]
    orthogonalize: Callable[[Tensor, int], Tensor]
    batched: bool
    any_steps: bool = True
    optimizer: Callable[[Sequence[Tensor]], Optimizer] | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A peer that cannot be run here, and why."""

    name: str
    status: str


def torch_muon() -> Peer:
    """``torch.optim.Muon``: its BF16 iteration on one matrix at a time.

    The function is the one that its step calls; it has no public name.
    """
    module = importlib.import_module("torch.optim._muon")
    iterate = module._zeropower_via_newtonschulz
    return Peer(
        name=REFERENCE,
        dtype="bfloat16",
        coefficients=(JORDAN,) * 5,
        orthogonalize=lambda x, steps: iterate(x, JORDAN, steps, 1e-7),
        batched=False,
        note="one matrix at a time",
        optimizer=lambda params: torch.optim.Muon(params, lr=1e-3, weight_decay=0.1),
    )


def looped_float32() -> Peer:
    """The standard iteration in FP32 on one matrix at a time: what the dtype alone is worth."""
    return Peer(
        name=LOOPED_FP32,
        dtype="float32",
        coefficients=(JORDAN,) * 5,
        orthogonalize=lambda x, steps: standard_iteration(x, steps, torch.float32),
        batched=False,
        note="the standard iteration, one matrix at a time",
    )


def batched_bfloat16() -> Peer:
    """Keller Jordan's iteration as published, on batches, in BF16."""
    return _batched(torch.bfloat16, "BF16")


def batched_float32() -> Peer:
    """The same in FP32."""
    return _batched(torch.float32, "FP32")


def _batched(dtype: torch.dtype, label: str) -> Peer:
    return Peer(
        name=f"Keller Jordan {label}",
        dtype=str(dtype).removeprefix("torch."),
        coefficients=(JORDAN,) * 5,
        orthogonalize=lambda x, steps: standard_iteration(x, steps, dtype),
        batched=True,
        note="the published iteration, batched",
    )


def standard_iteration(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Normalize by the Frobenius norm, then ``steps`` times X <- aX + (bA + cA²)X with A = XXᵀ.

    Written from the description at https://kellerjordan.github.io/posts/muon/, plainly.

    Args:
        x: (..., m, n), FP32; unchanged.
        steps: iterations.
        dtype: of the iteration and of the result.
    """
    a, b, c = JORDAN
    tall = x.shape[-2] > x.shape[-1]
    y: Tensor = x.mT.to(dtype) if tall else x.to(dtype)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y


def heavyball() -> Peer:
    """HeavyBall, eager: https://github.com/HomebrewML/HeavyBall."""
    package = importlib.import_module("heavyball")
    utils = importlib.import_module("heavyball.utils")
    # Compilation costs some 20 s for every shape on a CPU, and its products are the same calls.
    setattr(utils, "compile_mode", None)  # noqa: B010 - mypy knows no attribute of a module in Any
    return Peer(
        name="HeavyBall",
        dtype="bfloat16",
        coefficients=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        orthogonalize=lambda x, steps: utils.zeropower_via_newtonschulz5(x, steps),
        batched=True,
        any_steps=False,
        optimizer=lambda params: package.Muon(
            params, lr=1e-3, betas=(0.95, 0.99), weight_decay=0.1
        ),
        note="eager (heavyball.utils.compile_mode = None); its own coefficients",
    )


def emerging_bfloat16() -> Peer:
    """NVIDIA Emerging-Optimizers at its default matmul precision, ``"medium"``: BF16."""
    return _emerging("medium", "BF16", "bfloat16")


def emerging_float32() -> Peer:
    """NVIDIA Emerging-Optimizers at matmul precision ``"highest"``: FP32."""
    return _emerging("highest", "FP32", "float32")


def _emerging(precision: str, label: str, dtype: str) -> Peer:
    with _typing_override():
        package = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
        utils = importlib.import_module("emerging_optimizers.utils")
    newton_schulz = package.muon.muon_utils.newton_schulz

    def orthogonalize(x: Tensor, steps: int) -> Tensor:
        with utils.fp32_matmul_precision(precision):
            result: Tensor = newton_schulz(x, steps, coefficient_type="simple")
        return result

    return Peer(
        name=f"Emerging-Opt. {label}",
        dtype=dtype,
        coefficients=(JORDAN,) * 5,
        orthogonalize=orthogonalize,
        batched=True,
        optimizer=lambda params: package.Muon(
            params,
            lr=1e-3,
            weight_decay=0.1,
            nesterov=True,
            fp32_matmul_prec=precision,
            coefficient_type="simple",
        ),
        note=f'fp32_matmul_prec="{precision}"',
    )


@contextlib.contextmanager
def _typing_override() -> Iterator[None]:
    """Offer ``typing.override`` to an import on Python 3.11, where the standard library lacks it."""
    if hasattr(typing, "override"):
        yield
        return
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del typing.override  # type: ignore[attr-defined]


PEERS: dict[str, tuple[str | None, Callable[[], Peer]]] = {
    REFERENCE: (None, torch_muon),
    LOOPED_FP32: (None, looped_float32),
    "Keller Jordan BF16": (None, batched_bfloat16),
    "Keller Jordan FP32": (None, batched_float32),
    "HeavyBall": ("heavyball", heavyball),
    "Emerging-Opt. BF16": ("emerging_optimizers", emerging_bfloat16),
    "Emerging-Opt. FP32": ("emerging_optimizers", emerging_float32),
}
"""Name -> the module that it needs beside torch, and its loader. The first is the reference."""


def load_peers() -> list[Peer | Missing]:
    """Load every peer; one that is absent or broken comes back as `Missing`."""
    return [_load(name, needs, loader) for name, (needs, loader) in PEERS.items()]


def _load(name: str, needs: str | None, loader: Callable[[], Peer]) -> Peer | Missing:
    if needs is not None and importlib.util.find_spec(needs) is None:
        return Missing(name=name, status="not installed")
    # Third-party imports may fail in any way; the rest of the benchmark must not go with them.
    try:
        return loader()
    except Exception as error:
        return Missing(name=name, status=failure(error))
