"""Host placement gives the bits of device placement: all settings, and tensors of any form."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from choosing import mostly_slow, pairwise
from muonloom import BlockSpec, HostPlacement, Layout
from muonloom.plan import Plan
from staging.support import (
    BACKENDS,
    OPTIONS,
    PLACEMENTS,
    TINY,
    Named,
    assert_same_bits,
    built,
    engine_of,
    everything,
    give_gradients,
    mixed,
    on_backend,
    outcome,
    steps,
)

# -- settings -----------------------------------------------------------------------------------------

CHOICES: dict[str, list[Any]] = {
    "dtype": [torch.bfloat16, torch.float32, mixed],
    "momentum_dtype": [torch.float32, torch.bfloat16],
    "num_slots": [1, 2, 3, 5],
    "slot_bytes": [6000, TINY, "auto"],
    "master_layout": ["full", "split"],
    "ns_batch_bytes": [1600, 5000, "auto"],
    "backend": ["synchronous", "threaded", "hostile", "checked"],
    "nesterov": [True, False],
    "idle_matrices": ["update", "skip"],
    "weight_decay": [0.1, 0.0],
    "absent": ["none", "some"],
}
EACH_TIME = 12


def combinations(count: int) -> Iterator[dict[str, Any]]:
    """Draw each choice about equally often: a shuffled deck each, dealt again when it is empty."""
    generator = random.Random(0)
    decks: dict[str, list[Any]] = {name: [] for name in CHOICES}
    for _ in range(count):
        drawn = {}
        for name, deck in decks.items():
            if not deck:
                deck += generator.sample(CHOICES[name], len(CHOICES[name]))
            drawn[name] = deck.pop()
        yield drawn


def spelled(values: dict[str, Any]) -> str:
    return "-".join(str(getattr(v, "__name__", v)).removeprefix("torch.") for v in values.values())


def sometimes_absent(name: str, step: int) -> bool:
    """Single parameters; all matrices of a batch ("q"); everything of one pack."""
    if step == 1:
        return ".q." in name or name == "embed.weight"
    if step == 2:
        return "layers.1" in name or name == "conv.weight"
    return step == 3 and "norm" in name


@pytest.mark.parametrize(
    "drawn", mostly_slow(combinations(24), but=list(combinations(EACH_TIME))), ids=spelled
)
def test_settings(drawn: dict[str, Any]):
    rest = dict(drawn)
    placement = HostPlacement(
        num_slots=rest.pop("num_slots"),
        slot_bytes=rest.pop("slot_bytes"),
        master_layout=rest.pop("master_layout"),
    )
    backend = BACKENDS[rest.pop("backend")]
    absent = sometimes_absent if rest.pop("absent") == "some" else None

    def scenario(named: Named, opt: muonloom.Muon) -> None:
        for step in range(5):
            give_gradients(named, step, absent=absent)
            idle_experts(named, step)
            opt.step()

    wanted = outcome(scenario, "device", **rest)
    with on_backend(backend) as made:
        assert_same_bits(wanted, outcome(scenario, placement, **rest))
    assert not getattr(made[0], "hazards", [])


def idle_experts(named: Named, step: int) -> None:
    gradient = dict(named)["layers.0.gate_up"].grad
    if gradient is not None:
        gradient[step % 3].zero_()


def test_each_choice_is_drawn():
    for name, choices in CHOICES.items():
        assert {str(drawn[name]) for drawn in combinations(EACH_TIME)} == {str(c) for c in choices}


def partition(plan: Plan) -> list[Any]:
    """Return for each batch what it is, and its matrices by parameter, view and place."""
    return [
        (batch.rows, batch.columns, batch.recipe, batch.eps, batch.device, matrices)
        for batch in plan.batches
        for matrices in [
            [
                (run.parameter, run.view, run.first + i, run.offset + i)
                for run in batch.runs
                for i in range(run.count)
            ]
        ]
    ]


@pytest.mark.parametrize("slot_bytes", [6000, "auto"])
@pytest.mark.parametrize("ns_batch_bytes", [1600, 5000, "auto"])
def test_the_partition_is_that_of_device_placement(slot_bytes: Any, ns_batch_bytes: Any):
    """On a CPU another partition would give the same bits; elsewhere not."""
    plans = []
    for placement in ("device", HostPlacement(slot_bytes=slot_bytes), *PLACEMENTS.values()):
        _, opt = built(placement, ns_batch_bytes=ns_batch_bytes)
        plans.append(opt._assembly.plan)
    assert len({plan.digest() for plan in plans}) == 1
    assert all(partition(plan) == partition(plans[0]) for plan in plans)


# -- odd tensors --------------------------------------------------------------------------------------


def odd_model(
    empty: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[Named, Layout]:
    """Transposed storage, and many short runs."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {
        "flipped.weight": randn(24, 16).t(),
        "flipped.experts": randn(3, 24, 16).transpose(1, 2),
        "flipped.table": randn(16, 70).t(),
        "many.weight": randn(40 * 8, 16),
        "plain.weight": randn(16, 24),
        **{name: randn(*shape) for name, shape in empty.items()},
    }
    overrides: dict[str, Any] = {
        "flipped.experts": BlockSpec.stacked(BlockSpec.whole()),
        "flipped.table": "adamw",
        "many.weight": BlockSpec.heads(40, heads_per_block=1, components=(5, 3)),
        **{name: "adamw" for name, shape in empty.items() if len(shape) == 1},
    }
    named = [(name, Parameter(tensor)) for name, tensor in tensors.items()]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return named, Layout.from_shapes(shapes, overrides=overrides)


@pytest.mark.parametrize(
    ("slot_bytes", "master_layout", "backend"),
    pairwise([6000, "auto"], ["full", "split"], ["synchronous", "checked hostile"]),
)
def test_odd_tensors(slot_bytes: Any, master_layout: str, backend: str):
    results = []
    host = HostPlacement(slot_bytes=slot_bytes, master_layout=master_layout)
    with on_backend(BACKENDS[backend]) as made:
        for placement in ("device", host):
            named, whole = odd_model()
            opt = muonloom.Muon(named, layout=whole, placement=placement, **OPTIONS)
            for step in range(4):
                give_gradients(named, step)
                for _, p in named[step % 2 :: 2]:
                    if p.grad is not None and p.ndim == 2:
                        p.grad = p.grad.t().contiguous().t()
                opt.step()
            results.append(everything(named, opt))
    assert_same_bits(*results)
    assert not getattr(made[0], "hazards", [])


def test_loads_stay_ahead_where_pieces_are_copied_element_by_element():
    """Such stores write through the slab's own tensors, and are no write from outside for that."""
    named, whole = odd_model()
    opt = muonloom.Muon(named, layout=whole, placement=PLACEMENTS["full"], **OPTIONS)
    steps(named, opt, 0, 1)
    forgotten = []
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(opt)
        patch.setattr(engine, "forget", lambda: forgotten.append(True))
        steps(named, opt, 2, 3)
    assert not forgotten


@pytest.mark.parametrize("master_layout", PLACEMENTS)
def test_empty_parameters(master_layout: str):
    results = []
    for placement in ("device", PLACEMENTS[master_layout]):
        named, whole = odd_model(empty={"empty.weight": (0, 16), "empty.bias": (0,)})
        opt = muonloom.Muon(named, layout=whole, placement=placement, **OPTIONS)
        steps(named, opt, 0, 1, 2)
        results.append(everything(named, opt))
    assert_same_bits(*results)
