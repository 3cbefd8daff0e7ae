"""How one batched orthogonalization is carried out, as data, and the rules that choose it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.math import gram, newton_schulz
from muonloom.math.coefficients import (
    DEFAULT_COEFFICIENTS,
    Coefficients,
    Triple,
    expand_coefficients,
)
from muonloom.math.products import Arena

METHODS = ("standard", "gram", "auto")
COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

GRAM_GROWTH_LIMIT = 1.0e6
"""A segment of FP32 Gram steps ends before the product of its a² (but the last) passes this."""

GRAM_LEAST_SAVING = 0.1
"""``"auto"`` takes Gram where it saves at least this share of the standard iteration's FLOPs."""

GRAM_BFLOAT16_LEAST_SHORT = 16
"""BF16 Gram is left to short sides from here on: below, rounding errors do not average out."""

GRAM_BFLOAT16_STEPS = (4, 5)
"""BF16 Gram is left to these step counts: the gate fails at 2, 3, 6 and from 10 on."""

CPU_CHUNK_BYTES = 1 << 23
"""On a CPU, matrices are iterated in groups whose working set is about this large."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one batched call does; hashable data, a function of shape, options and device kind."""

    method: str
    compute_dtype: torch.dtype
    coefficients: tuple[Triple, ...]
    restarts: tuple[int, ...] = ()
    chunk_bytes: int | None = None
    """Iterate groups of matrices of about this working set; None: the whole batch at once."""
    like_torch: bool = False
    """Normalize with ``torch.optim.Muon``'s rounding: where its very method and dtype are asked for.

    That start is 1.3 times as far from exact arithmetic as one rounded once, so that ``"auto"`` never
    takes it; but two BF16 iterations from starts that differ in the last bit end 1.5 % apart.
    """

    def square_buffers(self) -> int:
        """Return how many short-side squares of scratch a matrix needs."""
        return gram.SQUARE_BUFFERS if self.method == "gram" else newton_schulz.SQUARE_BUFFERS

    def chunk(self, count: int, rows: int, columns: int) -> int:
        """Return how many of ``count`` matrices are iterated at once."""
        if self.chunk_bytes is None:
            return count
        numel = 2 * rows * columns + self.square_buffers() * min(rows, columns) ** 2
        return max(1, min(count, self.chunk_bytes // max(1, numel * self.compute_dtype.itemsize)))


@cache
def has_fast_bfloat16(device_type: str) -> bool:
    """Tell whether BF16 products are faster than FP32 ones on this kind of device.

    Accelerators: yes. CPUs: where the processor has BF16 instructions; elsewhere torch multiplies
    BF16 matrices 20 to 50 times slower than FP32 ones.
    """
    if device_type != "cpu":
        return True
    # absent from older versions of torch: FP32 is right everywhere, if not the fastest
    capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    found = capabilities()
    return any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _is_constant(coefficients: tuple[Triple, ...]) -> bool:
    return all(triple == coefficients[0] for triple in coefficients)


def gram_restarts(coefficients: tuple[Triple, ...], compute_dtype: torch.dtype) -> tuple[int, ...]:
    """Return after which steps the Gram iteration has to form G anew.

    FP32 and FP64: an error in G at a small singular value grows by a² a step, and a segment lasts
    as long as the product of a² over its steps but the last stays within a limit; five steps of
    every table are one segment.

    BF16: two steps a segment while the coefficients stay the same. Tables that change from step to
    step bear errors above their intervals badly: of those only the first two steps share a segment.
    """
    steps = len(coefficients)
    if compute_dtype == torch.bfloat16:
        return tuple(range(2, steps, 2 if _is_constant(coefficients) else 1))
    restarts: list[int] = []
    growth = 1.0
    for index, (a, _, _) in enumerate(coefficients):
        if growth > GRAM_GROWTH_LIMIT:
            restarts.append(index)
            growth = 1.0
        growth *= a * a
    return tuple(restarts)


def _passes_in_bfloat16(m: int, n: int, coefficients: tuple[Triple, ...]) -> bool:
    """Tell where BF16 Gram was measured to pass the accuracy gate: nowhere else is it chosen."""
    usual = all(triple == DEFAULT_COEFFICIENTS for triple in coefficients)
    steps = len(coefficients)
    return usual and steps in GRAM_BFLOAT16_STEPS and min(m, n) >= GRAM_BFLOAT16_LEAST_SHORT


def _gram_saves(m: int, n: int, ns_steps: int, restarts: tuple[int, ...]) -> bool:
    short, long = sorted((m, n))
    standard_cost = newton_schulz.flops(short, long, ns_steps)
    gram_cost = gram.flops(short, long, ns_steps, len(restarts) + 1)
    return gram_cost < standard_cost * (1.0 - GRAM_LEAST_SAVING)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(
            complaint(
                name,
                got=repr(value),
                wanted=f"one of {', '.join(map(repr, choices))}",
                remedy="Leave it out for the measured choice.",
            )
        )


def make_recipe(
    m: int,
    n: int,
    *,
    device_type: str,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = DEFAULT_COEFFICIENTS,
    method: str = "auto",
    compute_dtype: torch.dtype | None = None,
    fast_bfloat16: bool | None = None,
) -> Recipe:
    """Return how matrices of ``m`` x ``n`` are orthogonalized. Pure; allocates nothing.

    The rules of ``"auto"`` stand in ``docs/accuracy.md`` with the measurements behind them.

    Args:
        m: rows; ``m`` and ``n`` may be exchanged.
        n: columns.
        device_type: ``"cpu"``, ``"cuda"``, ...
        ns_steps: iterations, 0 to 99.
        ns_coefficients: a triple, a sequence of triples (the last repeats), or a name.
        method: ``"standard"``, ``"gram"`` or ``"auto"``.
        compute_dtype: BF16, FP32, FP64, or None for the fastest that keeps the accuracy.
        fast_bfloat16: whether BF16 products are fast; None asks `has_fast_bfloat16`.

    Raises:
        ValueError: an option is none of these; the message leads with its name.
    """
    _check_choice("method", method, METHODS)
    _check_choice("compute_dtype", compute_dtype, (None, *COMPUTE_DTYPES))
    coefficients = expand_coefficients(ns_coefficients, ns_steps)
    like_torch = method == "standard" and compute_dtype == torch.bfloat16
    if fast_bfloat16 is None:
        fast_bfloat16 = has_fast_bfloat16(device_type)
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if fast_bfloat16 else torch.float32
    restarts = gram_restarts(coefficients, compute_dtype)
    if method == "auto":
        valid = compute_dtype != torch.bfloat16 or _passes_in_bfloat16(m, n, coefficients)
        method = "gram" if valid and _gram_saves(m, n, ns_steps, restarts) else "standard"
    if method == "standard":
        restarts = ()
    return Recipe(
        method=method,
        compute_dtype=compute_dtype,
        coefficients=coefficients,
        restarts=restarts,
        chunk_bytes=CPU_CHUNK_BYTES if device_type == "cpu" else None,
        like_torch=like_torch,
    )


def workspace_numel(count: int, rows: int, columns: int, recipe: Recipe) -> int:
    """Return the scratch elements (of the compute dtype) that `iterate` needs beside x."""
    if not recipe.coefficients or count * rows * columns == 0:
        return 0
    chunk, itemsize = recipe.chunk(count, rows, columns), recipe.compute_dtype.itemsize
    square = Arena.padded_numel(chunk * min(rows, columns) ** 2, itemsize)
    return recipe.square_buffers() * square + Arena.padded_numel(chunk * rows * columns, itemsize)


def iterate(x: Tensor, recipe: Recipe, scratch: Tensor) -> Tensor:
    """Run the recipe's polynomial on every matrix of ``x``.

    Args:
        x: (count, rows, columns), contiguous, normalized, the recipe's compute dtype; clobbered.
        recipe: from `make_recipe`, for these rows and columns in either order.
        scratch: 1-D, the compute dtype, at least `workspace_numel` elements.

    Returns:
        (count, rows, columns), contiguous: ``x`` itself, or a piece of ``scratch``.
    """
    count, rows, columns = x.shape
    if not recipe.coefficients or x.numel() == 0:
        return x
    chunk = recipe.chunk(count, rows, columns)
    if chunk == count:
        return _iterate_chunk(x, recipe, scratch)
    for low in range(0, count, chunk):
        part = x[low : low + chunk]
        result = _iterate_chunk(part, recipe, scratch)
        if result.data_ptr() != part.data_ptr():
            part.copy_(result)
    return x


def _iterate_chunk(x: Tensor, recipe: Recipe, scratch: Tensor) -> Tensor:
    arena = Arena(scratch)
    if recipe.method == "gram":
        return gram.gram_iteration(x, recipe.coefficients, recipe.restarts, arena)
    return newton_schulz.newton_schulz(x, recipe.coefficients, arena)
