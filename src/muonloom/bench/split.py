"""Muon Split: what blocks of heads cost, against our own best time for whole matrices.

Everything goes the way that users' parameters go: a layout of the model family, its block specs' views,
batches in the workspace, the iteration, and the update: `muonloom.Muon.step`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muonloom.bench.flops import recipe_flops
from muonloom.bench.orthogonalization import ceilings
from muonloom.bench.shapes import COUNTED_SPLIT, BatchShape, MoeSize
from muonloom.bench.step import PhaseLog, our_step
from muonloom.bench.timing import Contender, Timing, interleave
from muonloom.layout import Layout
from muonloom.math import (
    Recipe,
    has_fast_bfloat16,
    iterate,
    make_recipe,
    normalize_,
    workspace_numel,
)
from muonloom.plan import Plan
from muonloom.planning import MatrixEntry, build_plan

WHOLE = "whole"
BLOCKS = (1, 4, 16)
QUERY, QUERY_AND_KEY_VALUE = ("q_b",), ("q_b", "kv_b")
BATCHED, ONE_AT_A_TIME = "batched", "one at a time"
COUNTED_LAYERS = (2, 48)

Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to orthogonalize the same parameters.

    Attributes:
        name: shown and stored.
        heads_per_block: None for whole matrices.
        mla_components: whether a head's components are cut apart too.
        options: of `muonloom.Muon`, beside its defaults.
    """

    name: str
    heads_per_block: int | None = None
    mla_components: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def layout(self, size: MoeSize) -> Layout:
        """Return the layout that a user of this model gets."""
        return Layout.from_shapes(
            size.parameters(),
            config=size.config(),
            heads_per_block=self.heads_per_block,
            mla_components=self.mla_components,
        )


SPLIT_VARIANTS = (
    *(Variant(name=f"k = {k}", heads_per_block=k) for k in BLOCKS),
    Variant(name="k = 1, components", heads_per_block=1, mla_components=True),
)


@dataclass(kw_only=True)
class VariantTiming:
    """What was measured of one variant.

    Attributes:
        variant: which.
        step: the whole optimizer step; FLOPs are counted from its products.
        phases_s: of each call, as `Muon.last_step` tells.
        matrices: shape -> how many.
        ns_calls: batched Newton–Schulz calls a step.
        bound_s: what the iteration would take if its products ran at the GEMM's own speed at these
            shapes; None where that was not measured.
    """

    variant: Variant
    step: Timing
    phases_s: list[dict[str, float]]
    matrices: Counter[Shape]
    ns_calls: int
    bound_s: float | None = None

    @property
    def orthogonalize_s(self) -> float:
        """Median seconds from gradient and momentum to the result in the workspace.

        Nesterov's direction, gathering of strided blocks, normalization, iteration. Left out: the
        guard, and the update of momentum and weights.
        """
        return statistics.median(
            phases["direction"] + phases["orthogonalize"] for phases in self.phases_s
        )

    @property
    def iterate_s(self) -> float:
        """Median seconds of the iteration alone."""
        return statistics.median(phases["orthogonalize"] for phases in self.phases_s)


@dataclass(kw_only=True)
class SplitWork:
    """All variants on the same parameters; the first is whole matrices with our defaults."""

    name: str
    size: MoeSize
    shapes: dict[str, tuple[int, ...]]
    rows: list[VariantTiming]

    def whole(self) -> list[VariantTiming]:
        """Return the variants without a cut."""
        return [row for row in self.rows if row.variant.heads_per_block is None]


def projections(size: MoeSize, kinds: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of one layer's projections: ``kinds`` of ``"q_b"``, ``"kv_b"``."""
    return {
        name: shape
        for name, shape in size.parameters().items()
        if name.startswith("model.layers.0.") and any(f".{kind}_proj." in name for kind in kinds)
    }


def whole_variants(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> list[Variant]:
    """Return our defaults on whole matrices, and each forced method that differs from them here."""
    dtypes = [torch.float32]
    if has_fast_bfloat16(device.type):
        dtypes.insert(0, torch.bfloat16)
    seen = [_recipes(shapes, device, "auto", None)]
    variants = [Variant(name=WHOLE)]
    for method in ("gram", "standard"):
        for dtype in dtypes:
            recipes = _recipes(shapes, device, method, dtype)
            if recipes not in seen:
                seen.append(recipes)
                label = "FP32" if dtype == torch.float32 else "BF16"
                options = {"ns_method": method, "ns_compute_dtype": dtype}
                variants.append(Variant(name=f"{WHOLE}, {method} {label}", options=options))
    return variants


def _recipes(
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    method: str,
    dtype: torch.dtype | None,
) -> list[Recipe]:
    return [
        make_recipe(m, n, device_type=device.type, method=method, compute_dtype=dtype)
        for m, n in shapes.values()
    ]


def one_block_a_call(size: MoeSize, device: torch.device) -> Variant:
    """Return q_b at k = 1 with batches of one block, through the optimizer like all others."""
    numel = (size.nope + size.rope) * size.q_lora
    dtype = make_recipe(1, 1, device_type=device.type).compute_dtype
    return Variant(
        name="k = 1, a block a call",
        heads_per_block=1,
        options={"ns_batch_bytes": numel * dtype.itemsize},
    )


def measure_variants(
    name: str,
    size: MoeSize,
    shapes: Mapping[str, tuple[int, ...]],
    variants: Sequence[Variant],
    *,
    rounds: int,
    device: torch.device,
    bounds: bool,
) -> SplitWork:
    """Time optimizer steps of all variants on the same weights and gradients, interleaved.

    Args:
        name: of the work.
        size: the model, for its layout.
        shapes: name -> shape of the parameters that take part.
        variants: the first is `WHOLE`.
        rounds: samples of each.
        device: where.
        bounds: also time the bare products at the shapes of blocks of one head.
    """
    generator = torch.Generator().manual_seed(0)

    def random() -> dict[str, Tensor]:
        return {
            key: (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(device)
            for key, shape in shapes.items()
        }

    weights, gradients = random(), random()
    contenders, logs, matrices = [], [], []
    for variant in variants:
        layout = variant.layout(size)
        contender, log = our_step(
            weights, gradients, layout, name=variant.name, options=variant.options
        )
        contenders.append(contender)
        logs.append(log)
        matrices.append(Counter(shape for key in shapes for shape in layout[key].matrices))
    small = [variant.heads_per_block == 1 and bounds for variant in variants]
    products = _products(
        [shapes for shapes, is_small in zip(matrices, small, strict=True) if is_small], device
    )
    timings = interleave(
        [*contenders, *(c for group in products.values() for c in group)],
        rounds=rounds,
        device=device,
    )
    rates = _rates(products, timings[len(contenders) :])
    rows = [
        _row(variant, timing, log, counts, rates if is_small else None, device)
        for variant, timing, log, counts, is_small in zip(
            variants, timings, logs, matrices, small, strict=False
        )
    ]
    return SplitWork(name=name, size=size, shapes=dict(shapes), rows=rows)


def _products(
    matrices: Sequence[Counter[Shape]], device: torch.device
) -> dict[Shape, list[Contender]]:
    """Return the iteration's bare products at each shape, in the dtype that it would use."""
    made: dict[Shape, list[Contender]] = {}
    for counts in matrices:
        for (m, n), count in counts.items():
            if (m, n) not in made:
                recipe = make_recipe(m, n, device_type=device.type)
                shape = BatchShape(count=count, rows=m, columns=n)
                made[m, n] = ceilings(shape, recipe, recipe.compute_dtype, device)
    return made


def _rates(
    products: Mapping[Shape, Sequence[Contender]], timings: Sequence[Timing]
) -> dict[Shape, float]:
    """Return the FLOP/s of the fastest product at each shape; ``timings`` are in their order."""
    rest = iter(timings)
    return {shape: max(next(rest).flops_per_s for _ in group) for shape, group in products.items()}


def _row(
    variant: Variant,
    timing: Timing,
    log: PhaseLog,
    matrices: Counter[Shape],
    rates: Mapping[Shape, float] | None,
    device: torch.device,
) -> VariantTiming:
    bound = None
    if rates is not None:
        bound = sum(
            count * recipe_flops(make_recipe(m, n, device_type=device.type), m, n) / rates[m, n]
            for (m, n), count in matrices.items()
        )
    return VariantTiming(
        variant=variant,
        step=timing,
        phases_s=log.seconds(),
        matrices=matrices,
        ns_calls=log.ns_calls,
        bound_s=bound,
    )


@dataclass(kw_only=True)
class LoopWork:
    """The same iteration on a batch and matrix by matrix.

    Attributes:
        shape: the batch.
        batched: normalization and iteration of the whole batch.
        looped: the same of one matrix after the other.
        bound_s: what the batch would take if its products ran at the GEMM's own speed.
    """

    shape: BatchShape
    batched: Timing
    looped: Timing
    bound_s: float


def measure_loop(shape: BatchShape, *, rounds: int, device: torch.device) -> LoopWork:
    """Time one batch against its matrices one at a time: same recipe, memory given, nothing else."""
    count, m, n = shape.count, shape.rows, shape.columns
    source = torch.randn(count, m, n, generator=torch.Generator().manual_seed(0)).to(device)
    recipe = make_recipe(m, n, device_type=device.type)
    u, x = torch.empty_like(source), torch.empty_like(source, dtype=recipe.compute_dtype)
    scratch = x.new_empty(workspace_numel(count, m, n, recipe))

    def prepare() -> None:
        u.copy_(source)

    def run(size: int) -> None:
        for low in range(0, count, size):
            part = slice(low, low + size)
            normalize_(u[part], out=x[part])
            iterate(x[part], recipe, scratch)

    contenders = [
        Contender(
            name=name,
            role="ours",
            dtype=str(recipe.compute_dtype).removeprefix("torch."),
            flops=count * recipe_flops(recipe, m, n),
            run=partial(run, size),
            prepare=prepare,
        )
        for name, size in ((BATCHED, count), (ONE_AT_A_TIME, 1))
    ]
    products = ceilings(shape, recipe, recipe.compute_dtype, device)
    batched, looped, *bare = interleave([*contenders, *products], rounds=rounds, device=device)
    best = max(timing.flops_per_s for timing in bare)
    return LoopWork(shape=shape, batched=batched, looped=looped, bound_s=batched.flops / best)


def plan_of(size: MoeSize, variant: Variant) -> Plan:
    """Return the plan of a step of all of the model's matrices on a CPU, made from shapes alone."""
    rules = variant.layout(size).values()
    return build_plan(
        [
            MatrixEntry(
                index=index,
                turn=index,
                name=rule.name,
                kind=rule.kind,
                shape=tuple(rule.shape),
                spec=rule.spec,
                device=torch.device("cpu"),
                eps=1e-7,
                recipe_options=(),
            )
            for index, rule in enumerate(rules)
            if rule.spec is not None
        ],
        [],
    )


def count_calls(size: MoeSize = COUNTED_SPLIT) -> list[dict[str, Any]]:
    """Return the batched Newton–Schulz calls of a step for each k, at 2 and 48 layers."""
    counted = []
    for variant in (Variant(name=WHOLE), *SPLIT_VARIANTS):
        plans = {layers: plan_of(size.with_layers(layers), variant) for layers in COUNTED_LAYERS}
        counted.append(
            {
                "name": variant.name,
                "calls": {str(layers): plan.ns_calls for layers, plan in plans.items()},
                "matrices": {str(layers): plan.num_matrices for layers, plan in plans.items()},
            }
        )
    return counted
