"""The independent reference: one Muon or AdamW step in FP64, as plain loops over plain indices.

Nothing here imports the package. A parameter is cut by *index tables*: one 2-D tensor of flat
positions for each matrix, in the logical (out, in) orientation, written as loops so that they can
be read against the specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),)
Triples = Sequence[tuple[float, float, float]]


def newton_schulz(x: Tensor, steps: int, triples: Triples = KELLER_JORDAN) -> Tensor:
    """Return the polynomial of one normalized (m, n) matrix; the last triple repeats."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for i in range(steps):
        a, b, c = triples[min(i, len(triples) - 1)]
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def direction(
    u: Tensor, *, eps: float = 1e-7, steps: int = 5, triples: Triples = KELLER_JORDAN
) -> Tensor:
    """Return X for one (m, n) matrix U: safe normalization, then the iteration."""
    u = u.double()
    s = float(u.abs().max()) if u.numel() else 0.0
    if s == 0.0:
        return torch.zeros_like(u)
    v = u / s
    return newton_schulz(v / max(float(v.norm()), eps), steps, triples)


def scale(m: int, n: int, rule: str | None) -> float:
    """Return the factor of the learning rate for one m x n matrix."""
    if min(m, n) == 0 or rule == "none":
        return 1.0
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if rule == "spectral":
        return math.sqrt(m / n)
    return math.sqrt(max(1.0, m / n))


def muon_matrix(
    weight: Tensor,
    moment: Tensor,
    grad: Tensor | None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    eps: float = 1e-7,
    ns_steps: int = 5,
    triples: Triples = KELLER_JORDAN,
    rule: str | None = None,
    idle: str = "update",
) -> tuple[Tensor, Tensor]:
    """Return the new (weight, momentum) of one (m, n) matrix, both FP64."""
    w, moment = weight.double(), moment.double()
    if grad is None or (idle == "skip" and not bool((grad != 0).any())):
        return w, moment
    g = grad.double()
    moment = momentum * moment + (1 - momentum) * g
    u = (1 - momentum) * g + momentum * moment if nesterov else moment
    x = direction(u, eps=eps, steps=ns_steps, triples=triples)
    w = w - lr * weight_decay * w
    return w - lr * scale(*w.shape, rule) * x, moment


def muon_parameter(
    weight: Tensor, moment: Tensor, grad: Tensor | None, tables: Sequence[Tensor], **options: object
) -> tuple[Tensor, Tensor]:
    """Step every matrix of one parameter alone; ``tables`` are flat indices, one 2-D each."""
    w, m = weight.double().reshape(-1).clone(), moment.double().reshape(-1).clone()
    g = None if grad is None else grad.double().reshape(-1)
    for table in tables:
        block = None if g is None else g[table]
        w[table], m[table] = muon_matrix(w[table], m[table], block, **options)  # type: ignore[arg-type]
    return w.reshape(weight.shape), m.reshape(weight.shape)


def adamw(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    grad: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the new (weight, exp_avg, exp_avg_sq, step) of one scalar parameter, FP64."""
    w, first, second = weight.double(), exp_avg.double(), exp_avg_sq.double()
    if grad is None:
        return w, first, second, step
    g, step = grad.double(), step + 1
    w = w - lr * weight_decay * w
    first = betas[0] * first + (1 - betas[0]) * g
    second = betas[1] * second + (1 - betas[1]) * g * g
    mean, square = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
    return w - lr * mean / (square.sqrt() + eps), first, second, step


def _table(rows: Sequence[int], columns: Sequence[int], at: int, stride: int, step: int) -> Tensor:
    out = torch.empty(len(rows), len(columns), dtype=torch.long)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            out[i, j] = at + r * stride + c * step
    return out


def whole(m: int, n: int, at: int = 0) -> list[Tensor]:
    """One matrix: all of a contiguous (m, n) parameter that starts at flat position ``at``."""
    return [_table(range(m), range(n), at, n, 1)]


def transposed(rows: int, columns: int, at: int = 0) -> list[Tensor]:
    """One matrix stored as its transpose: storage (in, out), matrix (out, in)."""
    return [_table(range(columns), range(rows), at, 1, columns)]


def row_blocks(sizes: Sequence[int], n: int, at: int = 0) -> list[Tensor]:
    """Consecutive rows, ``sizes`` of them a matrix."""
    tables, first = [], 0
    for size in sizes:
        tables.append(_table(range(first, first + size), range(n), at, n, 1))
        first += size
    return tables


def column_blocks(m: int, sizes: Sequence[int], at: int = 0) -> list[Tensor]:
    """Consecutive columns, ``sizes`` of them a matrix."""
    tables, first = [], 0
    for size in sizes:
        tables.append(_table(range(m), range(first, first + size), at, sum(sizes), 1))
        first += size
    return tables


def interleaved_rows(m: int, n: int, at: int = 0) -> list[Tensor]:
    """Gate in the even rows, up in the odd rows."""
    return [_table(range(part, m, 2), range(n), at, n, 1) for part in (0, 1)]


def stacked(experts: int, m: int, n: int, inner: object = whole) -> list[Tensor]:
    """``inner(m, n, at)`` once for every expert of an (experts, m, n) parameter."""
    return [table for e in range(experts) for table in inner(m, n, e * m * n)]  # type: ignore[operator]
