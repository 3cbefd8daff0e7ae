"""Coefficient tables of the quintic iteration X <- aX + (bA + cA^2)X with A = X X^T.

Each table stands with its source, how its numbers were made, and the safety factor that is folded
into them. Three public tables are called "Polar Express" and differ: here each has a name of its
own, so that a run can be compared with the project it is compared to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from muonloom.errors import complaint

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

MAX_NS_STEPS = 99
"""``torch.optim.Muon`` refuses 100 steps and more; so do we."""


@dataclass(frozen=True, kw_only=True)
class CoefficientTable:
    """One published table: a triple for each step (the last repeats) and where it is from."""

    triples: tuple[Triple, ...]
    safety_factor: float
    source: str
    generator: str


# Minimax quintics for singular values in [1e-3, 1], before any safety factor: Algorithm 1 of
# https://arxiv.org/abs/2505.16932. The eighth equals (15, -10, 3)/8 to double precision.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def _shrunk(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """Return the triples of p(x / factor): room for singular values up to ``factor``."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in triples)


COEFFICIENT_TABLES: dict[str, CoefficientTable] = {
    "quintic": CoefficientTable(
        triples=((3.4445, -4.7750, 2.0315),),
        safety_factor=1.0,
        source="https://kellerjordan.github.io/posts/muon/",
        generator="searched by hand for the steepest slope at 0 that still stays near 1",
    ),
    "polar_express_1.01": CoefficientTable(
        triples=_shrunk(_POLAR_EXPRESS[:-1], 1.01) + _POLAR_EXPRESS[-1:],
        safety_factor=1.01,
        source="https://arxiv.org/abs/2505.16932 (Algorithm 1)",
        generator="minimax quintics from l=1e-3, cushion 0.02407; all but the last divided",
    ),
    "polar_express_1.02": CoefficientTable(
        triples=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety_factor=1.02,
        source="https://github.com/KellerJordan/modded-nanogpt (train_gpt.py)",
        generator="the paper's generator with num_iters=5, safety_factor=2e-2, cushion=2; quoted",
    ),
    "polar_express_1.05": CoefficientTable(
        triples=_shrunk(_POLAR_EXPRESS[:5], 1.05),
        safety_factor=1.05,
        source="https://github.com/Dao-AILab/gram-newton-schulz",
        generator="the first five of the paper's undivided quintics, all divided",
    ),
}

DEFAULT_COEFFICIENTS: Triple = COEFFICIENT_TABLES["quintic"].triples[0]


def ns_coefficient_names() -> tuple[str, ...]:
    """Return the names that ``ns_coefficients`` accepts."""
    return tuple(COEFFICIENT_TABLES)


def _bad_coefficients(got: object) -> ValueError:
    names = ", ".join(map(repr, COEFFICIENT_TABLES))
    return ValueError(
        complaint(
            "ns_coefficients",
            got=repr(got),
            wanted=f"a triple of finite numbers, a sequence of triples, or one of {names}",
            remedy="Pass (a, b, c), one such triple a step, or a name.",
        )
    )


def _triple(values: object, given: object) -> Triple:
    try:
        a, b, c = (float(v) for v in cast("Sequence[float]", values))
    except (TypeError, ValueError):
        raise _bad_coefficients(given) from None
    if isinstance(values, str) or not all(map(math.isfinite, (a, b, c))):
        raise _bad_coefficients(given)
    return a, b, c


def _triples(ns_coefficients: Coefficients) -> tuple[Triple, ...]:
    if isinstance(ns_coefficients, str):
        if ns_coefficients not in COEFFICIENT_TABLES:
            raise _bad_coefficients(ns_coefficients)
        return COEFFICIENT_TABLES[ns_coefficients].triples
    try:
        items = list(ns_coefficients)
    except TypeError:
        raise _bad_coefficients(ns_coefficients) from None
    if not items:
        raise _bad_coefficients(ns_coefficients)
    if all(isinstance(item, int | float) for item in items):
        return (_triple(items, ns_coefficients),)
    return tuple(_triple(item, ns_coefficients) for item in items)


def expand_coefficients(ns_coefficients: Coefficients, ns_steps: int) -> tuple[Triple, ...]:
    """Return one triple a step: ``ns_steps`` of them, the last given one repeated.

    Raises:
        ValueError: coefficients that are no triples of finite numbers or an unknown name;
            ``ns_steps`` that is no integer from 0 to 99.
    """
    if (
        isinstance(ns_steps, bool)
        or not isinstance(ns_steps, int)
        or not 0 <= ns_steps <= MAX_NS_STEPS
    ):
        raise ValueError(
            complaint(
                "ns_steps",
                got=repr(ns_steps),
                wanted=f"an integer from 0 to {MAX_NS_STEPS}",
                remedy="Five is usual.",
            )
        )
    triples = _triples(ns_coefficients)
    repeated = triples + triples[-1:] * max(0, ns_steps - len(triples))
    return repeated[:ns_steps]
