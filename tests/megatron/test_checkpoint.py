"""What a distributed checkpoint has to bear: other ranks, stages and chunks, groups, what is missing."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ParamKey, get_standard_config_overrides
from torch import Tensor

from megatron.models import Tiny
from megatron.pieces import gathered, pieces
from megatron.steps import forward_backward, optimizer_config
from megatron.support import run_megatron
from megatron.test_resume import SETTINGS, Run, loaded, resumed, saved
from muonloom import HostPlacement
from muonloom.integrations.megatron.checkpoint import _pieces

BF16 = torch.bfloat16
SPLIT = HostPlacement(master_layout="split")
HEADS = {"heads_per_block": 1}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (where, name)


# -- the same ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "tiny", "options"),
    [
        (2, Tiny(kind="gated"), {"placement": "host"}),
        (2, Tiny(kind="gated", tensor_parallel=2), {}),
        (2, Tiny(kind="moe", expert_parallel=2), {"placement": "host"}),
    ],
    ids=["DP2, host", "TP2", "EP2, host"],
)
def test_float32_goes_on_bit_for_bit(
    world: int, tiny: Tiny, options: dict[str, Any], tmp_path: Any
):
    run_megatron(world, resumed, tiny, {**options, **HEADS}, str(tmp_path / "saved"))


def test_chunks_of_a_pipeline_go_on_bit_for_bit(tmp_path: Any):
    tiny = Tiny(
        dtype=BF16, pipeline_parallel=2, num_chunks=2, num_layers=4, num_microbatches=2, tied=True
    )
    run_megatron(2, resumed, tiny, {"placement": SPLIT, **HEADS}, str(tmp_path / "saved"))


def plain(rank: int) -> None:
    """Resume one rank's run from `state_dict`, without a distributed checkpoint."""
    whole = Run(Tiny(dtype=BF16), HEADS)
    whole.steps(0, 3)
    weights = deepcopy(whole.model[0].module.state_dict())
    state, schedule = deepcopy(whole.optimizer.state_dict()), whole.scheduler.state_dict()
    expected = whole.steps(3, 2)
    again = Run(Tiny(dtype=BF16), HEADS)
    again.model[0].module.load_state_dict(weights)
    again.optimizer.load_state_dict(state)
    again.scheduler.load_state_dict(schedule)
    assert again.steps(3, 2) == expected
    assert_equal(again.state(), whole.state(), "state_dict")


def test_one_rank_resumes_from_a_plain_state_dict():
    run_megatron(1, plain)


# -- other ranks --------------------------------------------------------------------------------------


def tensors(kind: str, **settings: Any) -> Tiny:
    return Tiny(kind=kind, sequence_parallel=settings.get("tensor_parallel", 1) > 1, **settings)


@pytest.mark.parametrize(
    ("kind", "first", "settings", "options"),
    [
        ("gated", 2, {}, {}),
        ("mla", 1, {"dtype": BF16}, {}),
        ("moe", 2, {"dtype": BF16}, {"placement": SPLIT}),
    ],
    ids=["gated, TP2", "mla, DP2", "moe, TP2, split"],
)
def test_other_ranks_load_the_same_state(
    kind: str, first: int, settings: dict[str, Any], options: dict[str, Any], tmp_path: Any
):
    path, options = str(tmp_path / "saved"), {**options, **HEADS}
    start = tensors(kind, tensor_parallel=first, **settings)
    [expected, *_] = run_megatron(2, saved, start, options, path, 2)
    for world, size in [(1, 1), (2, 3 - first), (4, 2)]:
        other = tensors(kind, tensor_parallel=size, **settings)
        for found in run_megatron(world, loaded, other, options, path):
            assert_equal(found, expected, f"{world} ranks, {size} of them tensor-parallel")


STAGES = {
    "one": (1, {}),
    "two": (2, {"pipeline_parallel": 2}),
    "two of two chunks": (2, {"pipeline_parallel": 2, "num_chunks": 2}),
}


@pytest.mark.parametrize(
    ("start", "tied"), [("one", True), ("two", True), ("two of two chunks", False)]
)
def test_stages_and_chunks_load_the_state_of_others(start: str, tied: bool, tmp_path: Any):
    path = str(tmp_path / "saved")
    common = {"num_layers": 4, "num_microbatches": 2, "tied": tied}
    world, settings = STAGES[start]
    [expected, *_] = run_megatron(world, saved, Tiny(**common, **settings), HEADS, path, 2)
    for name, (others, theirs) in STAGES.items():
        if name == start:
            continue
        for found in run_megatron(others, loaded, Tiny(**common, **theirs), HEADS, path):
            assert_equal(found, expected, name)


def went_on(rank: int, tiny: Tiny, path: str, is_first: bool) -> tuple[Any, dict[str, Tensor]]:
    run = Run(tiny, HEADS)
    if is_first:
        run.steps(0, 3)
        run.save(path)
    else:
        run.load(path)
    losses = run.steps(3, 3)
    return losses, gathered(run.model)


def test_other_ranks_go_on_along_the_same_way(tmp_path: Any):
    path = str(tmp_path / "saved")
    tiny = Tiny(kind="moe", expert_parallel=2)
    [(losses, expected), *_] = run_megatron(2, went_on, tiny, path, True)
    for world, other in [(1, Tiny(kind="moe")), (2, tensors("moe", tensor_parallel=2))]:
        [(found, weights), *_] = run_megatron(world, went_on, other, path, False)
        # Sums of gradients in another order: 1e-6 of them. A step is 1e-3 to 1e-2 of a weight, and what one
        # without momentum takes is 20 times another.
        assert found == pytest.approx(losses, rel=1e-5)
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-3, atol=1e-4), name


class Singles(Run):
    """A run whose experts are saved each under a key of its own, gate and up too."""

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"singleton_local_shards": True}
        model = self.model[0].module.sharded_state_dict(metadata=metadata)
        state = self.optimizer.sharded_state_dict(model, is_loading, metadata)
        assert len({entry.key for entry in nested_values(state["state"])}) > len(state["state"])
        return {"model0": model, "optimizer": state, "scheduler": self.scheduler.state_dict()}


def singles(rank: int, tiny: Tiny, path: str, is_first: bool) -> dict[str, Tensor]:
    run = Singles(tiny, HEADS)
    if is_first:
        run.steps(0, 2)
        run.save(path)
    else:
        run.load(path)
    return run.state()


def test_experts_under_keys_of_their_own_are_loaded_by_other_ranks(tmp_path: Any):
    path = str(tmp_path / "saved")
    tiny = Tiny(kind="moe", dtype=BF16, expert_parallel=2)
    [expected, *_] = run_megatron(2, singles, tiny, path, True)
    for world in (1, 2):
        for found in run_megatron(world, singles, Tiny(kind="moe", dtype=BF16), path, False):
            assert_equal(found, expected, f"{world} ranks")


# -- groups and the scheduler -------------------------------------------------------------------------


def rates(run: Run) -> dict[str, tuple[float, float, float]]:
    names = {piece.parameter: piece.name for piece in pieces(run.model)}
    return {
        names[param]: (group["lr"], group["weight_decay"], group["min_lr"])
        for group in run.optimizer.param_groups
        for param in group["params"]
    }


def of_groups(tiny: Tiny) -> Run:
    SETTINGS.update(decoupled_lr=0.04, decoupled_min_lr=0.03)  # this process ends with its rank
    config = optimizer_config(tiny, **SETTINGS)
    overrides = {
        **get_standard_config_overrides(config),
        ParamKey(name="*linear_fc2*"): {"min_lr": 0.015},
    }
    return Run(tiny, {**HEADS, "config_overrides": overrides})


def saved_groups(rank: int, tiny: Tiny, path: str) -> None:
    run = of_groups(tiny)
    run.steps(0, 4)
    run.save(path)


def loaded_groups(rank: int, tiny: Tiny, path: str) -> tuple[Any, Any]:
    run = of_groups(tiny)
    assert {rate for rate, *_ in rates(run).values()} == {0.0}
    load_schedule = run.scheduler.load_state_dict
    found = []
    run.scheduler.load_state_dict = lambda state: found.append((rates(run), load_schedule(state)))
    run.load(path)
    [(before, _)] = found
    return before, rates(run)


def expected_rates(name: str) -> tuple[float, float, float]:
    """Return those of the fifth step: two of warm-up and two of eight that decay are over."""
    high, low = 0.02, 0.001
    if "fc2" in name:
        low = 0.015
    if "embedding" in name or "output_layer" in name:
        high, low = 0.04, 0.03
    is_norm = "norm" in name
    return low + (high - low) * 6 / 8, 0.0 if is_norm else 0.1 + 0.1 * 4 / 10, low


def test_groups_that_differ_come_back_to_their_own(tmp_path: Any):
    path = str(tmp_path / "saved")
    run_megatron(2, saved_groups, tensors("moe", tensor_parallel=2), path)
    arrangements = [
        (1, Tiny(kind="moe")),
        (2, Tiny(kind="moe", expert_parallel=2)),
        (2, Tiny(kind="moe", pipeline_parallel=2, num_microbatches=2)),
    ]
    for world, tiny in arrangements:
        for before, after in run_megatron(world, loaded_groups, tiny, path):
            assert before
            for name, values in before.items():
                assert values == pytest.approx(expected_rates(name)), name  # without a scheduler
            assert before == after


# -- what is not there --------------------------------------------------------------------------------


class Partial(Run):
    """A run in which one parameter never has a gradient."""

    name = "decoder.layers.1.mlp.linear_fc1.weight"

    def partial_steps(self, first: int, count: int) -> None:
        [param] = [p.parameter for p in pieces(self.model) if p.name == self.name]
        for step in range(first, first + count):
            forward_backward(self.tiny, self.model, step)
            gradient, param.main_grad = param.main_grad, None
            assert self.optimizer.step()[0]
            param.main_grad = gradient
            self.scheduler.step(1)


def without_a_gradient(rank: int, path: str) -> None:
    tiny = Tiny(dtype=BF16)
    whole = Partial(tiny, HEADS)
    start = whole.state()
    whole.partial_steps(0, 2)
    state = whole.state()
    assert torch.equal(state[f"{whole.name}.master_weight"], start[f"{whole.name}.master_weight"])
    assert not state[f"{whole.name}.momentum_buffer"].any()
    assert state["decoder.layers.0.mlp.linear_fc1.weight.momentum_buffer"].any()
    whole.save(path)
    again = Partial(tiny, HEADS)
    again.load(path)
    assert_equal(again.state(), state, "loaded")
    for run in (whole, again):
        run.partial_steps(2, 1)
        run.steps(3, 1)  # and now it has one
    assert_equal(again.state(), whole.state(), "went on")


def test_a_parameter_without_gradients_has_state_all_the_same(tmp_path: Any):
    run_megatron(2, without_a_gradient, str(tmp_path / "saved"))


def missing_entry(rank: int) -> None:
    run = Run(Tiny(kind="moe"), HEADS)
    for is_loading in (False, True):
        for name in (
            "decoder.final_layernorm.weight",
            "decoder.layers.0.mlp.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
        ):
            model = run.model[0].module.sharded_state_dict()
            del model[name]
            with pytest.raises(ValueError, match=rf"^{re.escape(name)}: .*sharded_state_dict"):
                run.optimizer.sharded_state_dict(model, is_loading=is_loading)
    model = run.model[0].module.sharded_state_dict()
    for entry in model.values():
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            entry.data = entry.data.clone()
    with pytest.raises(ValueError, match=r"^(decoder|embedding|output_layer)\..*very parameter"):
        run.optimizer.sharded_state_dict(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_that_the_model_does_not_save_is_named(world: int):
    run_megatron(world, missing_entry, limit_s=15)


# -- factories ----------------------------------------------------------------------------------------


def factory(cut: Any, rows: int = 6) -> ShardedTensorFactory:
    """Return what saves a tensor of (rows, 4) as the tensors that `cut` makes of it."""

    def build(key: str, tensor: Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{i}", part, replica_id=replica_id)
            for i, part in enumerate(cut(tensor))
        ]

    return ShardedTensorFactory("w", torch.zeros(rows, 4), build, lambda parts: torch.cat(parts))


def test_pieces_begin_where_the_model_cuts():
    found = _pieces(factory(lambda tensor: tensor.split([1, 3, 2])), "w")
    assert [(piece.key, row) for piece, row in found] == [("w.0", 0), ("w.1", 1), ("w.2", 4)]


@pytest.mark.parametrize(
    "cut",
    [
        lambda tensor: [tensor[:4]],
        lambda tensor: tensor.split(2, dim=1),
        lambda tensor: [tensor.clone()],
        lambda tensor: [tensor[::2], tensor[1::2]],
        lambda tensor: [tensor.T],
    ],
    ids=["not all", "columns", "a copy", "every second row", "transposed"],
)
def test_pieces_that_are_no_runs_of_rows_are_refused(cut: Any):
    with pytest.raises(ValueError, match=r"^layers\.0\.w: .*runs of its rows"):
        list(_pieces(factory(cut), "layers.0.w"))
