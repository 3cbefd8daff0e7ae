"""How large the AdamW update is that the present state stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muonloom.bound import Bound
from muonloom.config import AdamWOptions
from muonloom.telemetry import Squares

_RMS_CHUNK = 1 << 22


def adamw_squares(bounds: Sequence[tuple[str, Bound]]) -> Squares:
    """Return the size of the AdamW update that the present state stands for, by kind.

    Computed only when somebody asks, in bounded pieces: it would cost a pass over the state each step.
    """
    squares: Squares = {}
    for kind, bound in bounds:
        options, state = bound.options, bound.state
        assert isinstance(options, AdamWOptions)
        count = float(state["step"])
        if count == 0:
            continue  # state was made, and no step taken
        first, second = (1 - beta**count for beta in options.betas)
        total, numel = squares.get(kind, (0.0, 0))
        averages = (state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1))
        for average, square in zip(*(torch.split(t, _RMS_CHUNK) for t in averages), strict=True):
            update = (average / first) / ((square / second).sqrt() + options.eps)
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            total += (options.lr * norm) ** 2
        squares[kind] = (total, numel + bound.weight.numel())
    return squares
