"""Learning-rate factors that depend on a matrix's shape.

The names ``original`` and ``match_rms_adamw`` mean what they mean in ``torch.optim.Muon``. Other
libraries use the same words for other formulas: ``docs/accuracy.md`` maps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from muonloom.errors import complaint

ADJUST_LR_FNS: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "none": lambda m, n: 1.0,
}


def muon_scale(m: int, n: int, adjust_lr_fn: str | None = None) -> float:
    """Return the factor that multiplies the learning rate of one ``m`` x ``n`` matrix.

    ``m`` and ``n`` are the matrix's own logical rows (out) and columns (in): those of a head
    block, one expert, the gate half of a fused weight, never those of the whole parameter.

    Args:
        m: rows, at least 0.
        n: columns, at least 0. A matrix without elements has factor 1.
        adjust_lr_fn: ``None`` or ``"original"``: sqrt(max(1, m/n)); ``"match_rms_adamw"``:
            0.2 sqrt(max(m, n)); ``"spectral"``: sqrt(m/n); ``"none"``: 1.

    Raises:
        ValueError: ``adjust_lr_fn`` is not one of these, or a size is negative.
    """
    name = "original" if adjust_lr_fn is None else adjust_lr_fn
    if name not in ADJUST_LR_FNS:
        raise ValueError(
            complaint(
                "adjust_lr_fn",
                got=repr(adjust_lr_fn),
                wanted=f"None or one of {', '.join(map(repr, ADJUST_LR_FNS))}",
                remedy="Pass one of these names.",
            )
        )
    if m < 0 or n < 0:
        raise ValueError(
            complaint("m, n", got=f"{m}, {n}", wanted="sizes >= 0", remedy="Pass (rows, columns).")
        )
    if m == 0 or n == 0:
        return 1.0
    return ADJUST_LR_FNS[name](m, n)
