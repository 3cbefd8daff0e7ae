"""Validity: how far a result is from exact arithmetic, on inputs that break careless iterations.

Inputs are made as U diag(s) Vᵀ with known factors, so that the exact result of the polynomial is
U diag(p(s / ||s||)) Vᵀ: the reference costs one product, and shares no code with what it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

SPECTRA = ("gaussian", "condition 1e3", "condition 1e6", "one dominant", "rank-deficient")

MOST_ERROR_RATIO = 1.2
MOST_SINGULAR_VALUE = 1.2
EXACT_MARGIN = 1.005
"""Where the exact result passes 1.2 by itself (1.2023 with the usual coefficients), this times its own."""

Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The worst over matrices of one spectrum.

    Attributes:
        spectrum: one of `SPECTRA`.
        error: ||Y - exact|| / ||exact||, Frobenius.
        bfloat16_error: the same of the standard iteration in BF16.
        largest_singular_value: of Y.
        exact_largest_singular_value: of the exact result.
    """

    spectrum: str
    error: float
    bfloat16_error: float
    largest_singular_value: float
    exact_largest_singular_value: float

    @property
    def error_ratio(self) -> float:
        """The error in units of the standard BF16 iteration's."""
        return self.error / self.bfloat16_error

    @property
    def passed(self) -> bool:
        """Whether both limits hold; False for anything that is not finite."""
        most = max(MOST_SINGULAR_VALUE, EXACT_MARGIN * self.exact_largest_singular_value)
        return self.error_ratio <= MOST_ERROR_RATIO and self.largest_singular_value <= most


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Matrices with one spectrum.

    Attributes:
        spectrum: one of `SPECTRA`.
        x: (count, m, n), FP32.
        exact: (count, m, n), FP64: the polynomial of x.
        largest: singular value of ``exact``.
    """

    spectrum: str
    x: Tensor
    exact: Tensor
    largest: float


def polynomial(s: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """Return what the iteration makes of singular values ``s`` (any shape, FP64)."""
    for a, b, c in coefficients:
        square = s.square()
        s = torch.mul(s, a + b * square + c * square.square())
    return s


def samples(
    count: int, m: int, n: int, coefficients: Sequence[Triple], *, device: torch.device, seed: int
) -> list[Sample]:
    """Return one sample a spectrum; all share their singular vectors.

    Args:
        count: matrices of each.
        m: rows.
        n: columns.
        coefficients: (a, b, c) of each step.
        device: where the samples are put; they are made on the CPU.
        seed: of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left, right = (
        torch.linalg.qr(torch.randn(count, side, k, generator=generator, dtype=torch.float64)).Q
        for side in (m, n)
    )
    gaussian = _gaussian_spectrum(m, n, generator)
    made = []
    for spectrum in SPECTRA:
        s = _singular_values(spectrum, gaussian)
        exact = polynomial(s / s.norm(), coefficients)
        made.append(
            Sample(
                spectrum=spectrum,
                x=((left * s) @ right.mT).float().to(device),
                exact=((left * exact) @ right.mT).to(device),
                largest=float(exact.max()),
            )
        )
    return made


def _gaussian_spectrum(m: int, n: int, generator: torch.Generator) -> Tensor:
    g = torch.randn(min(m, n), max(m, n), generator=generator, dtype=torch.float64)
    eigenvalues: Tensor = torch.linalg.eigvalsh(g @ g.mT)
    return eigenvalues.clamp_min(0).sqrt().flip(0)


def _singular_values(spectrum: str, gaussian: Tensor) -> Tensor:
    """Return (k,) singular values, descending."""
    k = gaussian.numel()
    if spectrum == "gaussian":
        return gaussian
    if spectrum.startswith("condition"):
        return torch.logspace(
            0, -torch.tensor(float(spectrum.split()[1])).log10().item(), k
        ).double()
    if spectrum == "one dominant":
        return torch.cat([gaussian[:1], 1e-3 * gaussian[1:]])
    return torch.where(torch.arange(k) < (k + 1) // 2, gaussian, 0.0)


def standard_bfloat16(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """Return the standard iteration in BF16: products summed in FP32, every result rounded to BF16.

    Made of FP32 products of BF16 values, which gives the same on CPUs without BF16 instructions in a
    fraction of the time.

    Args:
        x: (count, m, n), FP32.
        coefficients: (a, b, c) of each step.
    """

    def rounded(t: Tensor) -> Tensor:
        return t.bfloat16().float()

    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = rounded(y / y.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-7))
    for a, b, c in coefficients:
        gram = rounded(y @ y.mT)
        update = rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        y = rounded(torch.baddbmm(y, update, y, beta=a))
    return y.mT if tall else y


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return the largest relative Frobenius distance of a batch; inf where y is not finite."""
    distance = (y.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    worst = float(distance.max())
    return worst if worst == worst else float("inf")


def largest_singular_value(y: Tensor) -> float:
    """Return the largest singular value of a batch; inf where y is not finite."""
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    y = y.float()
    gram = y.mT @ y if y.shape[-2] > y.shape[-1] else y @ y.mT
    return float(torch.linalg.eigvalsh(gram).max().clamp_min(0).sqrt())


class Gate:
    """Judges implementations of one shape; samples and the yardstick are made once a polynomial."""

    def __init__(self, count: int, m: int, n: int, *, device: torch.device, seed: int = 0) -> None:
        self._made = cache(
            lambda coefficients: samples(count, m, n, coefficients, device=device, seed=seed)
        )
        self._yardstick = cache(
            lambda coefficients: [
                relative_error(standard_bfloat16(sample.x, coefficients), sample.exact)
                for sample in self._made(coefficients)
            ]
        )

    def judge(
        self, orthogonalize: Callable[[Tensor], Tensor], coefficients: tuple[Triple, ...]
    ) -> list[GateResult]:
        """Run ``orthogonalize`` ((count, m, n) -> the same shape) on every spectrum."""
        results = []
        made, yardstick = self._made(coefficients), self._yardstick(coefficients)
        for sample, bfloat16_error in zip(made, yardstick, strict=True):
            y = orthogonalize(sample.x.clone())
            results.append(
                GateResult(
                    spectrum=sample.spectrum,
                    error=relative_error(y, sample.exact),
                    bfloat16_error=bfloat16_error,
                    largest_singular_value=largest_singular_value(y),
                    exact_largest_singular_value=sample.largest,
                )
            )
        return results


def summary(results: Sequence[GateResult]) -> dict[str, object]:
    """Return the worst of each measure, the verdict, and all results, as plain values."""
    return {
        "passed": all(result.passed for result in results),
        "error": max(result.error for result in results),
        "error_ratio": max(result.error_ratio for result in results),
        "largest_singular_value": max(result.largest_singular_value for result in results),
        "spectra": [asdict(result) for result in results],
    }
