"""What goes wrong in Megatron-Core's training loop ends in one clear error on all ranks, or in no step."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import warnings
from dataclasses import replace
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron import models
from megatron.models import Tiny, build, initialize
from megatron.pieces import pieces, weight
from megatron.steps import forward_backward, optimizer_config, train
from megatron.support import _server, run_megatron
from muonloom import BlockSpec, LostRanksError, StaleMasterError
from muonloom.integrations.megatron import MegatronMuon, get_optimizer
from ranks.support import spawn

SETTINGS = {"muon_extra_scale_factor": 0.2}
BF16 = torch.bfloat16
TIMEOUT_S = 2.0


def make(tiny: Tiny, settings: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    initialize(tiny)
    model = build(tiny)
    return model, over(tiny, model, settings, **options)


def over(
    tiny: Tiny, model: Any, settings: dict[str, Any] | None = None, **options: Any
) -> MegatronMuon:
    config = optimizer_config(tiny, **{**SETTINGS, **(settings or {})})
    return get_optimizer(config, model, **options)


def give(model: Any, step: int) -> None:
    """Give gradients that do not depend on the model."""
    for piece in pieces(model):
        drawn = weight(f"gradient of {piece.name}", piece.whole_shape, step)
        piece.parameter.main_grad.copy_(piece.of(drawn))


def everything(model: Any, optimizer: MegatronMuon) -> dict[str, Tensor]:
    """Return weights and state of this rank."""
    optimizer.muon.drain()
    found = {piece.name: piece.parameter.detach().clone() for piece in pieces(model)}
    for piece in pieces(model):
        for key, value in optimizer.muon.state[piece.parameter].items():
            found[f"{piece.name}/{key}"] = value.clone()
    return found


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name, value in one.items() if not torch.equal(other[name], value)}


# -- gradients that are not finite -----------------------------------------------------------------


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


Poisoned = tuple[bool, set[str], str]


def poisoned(rank: int, tiny: Tiny, name: str) -> list[Poisoned]:
    """Put what is not finite into the last rank's gradient, between two good steps."""
    found = []
    for clip, value in itertools.product((0.0, 1.0), (float("nan"), float("inf"))):
        model, optimizer = make(tiny, {"clip_grad": clip})
        give(model, 0)
        assert optimizer.step()[0]
        before = everything(model, optimizer)
        give(model, 1)
        if rank == dist.get_world_size() - 1:
            for piece in pieces(model):
                if piece.name == name:
                    piece.parameter.main_grad[0].fill_(value)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            taken, *_ = optimizer.step()
        touched = changed(before, everything(model, optimizer))
        give(model, 1)
        assert optimizer.step()[0]
        assert changed(before, everything(model, optimizer))
        found.append((taken, touched, " ".join(str(one.message) for one in told)))
    return found


POISONED = {
    "alone": (1, Tiny(), FC1),
    "TP2": (2, Tiny(tensor_parallel=2), FC1),
    "EP2": (
        2,
        Tiny(kind="moe", expert_parallel=2),
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
    ),
    "PP2": (
        2,
        Tiny(pipeline_parallel=2),
        "decoder.layers.1.mlp.linear_fc2.weight",
    ),
}


@pytest.mark.parametrize("where", POISONED)
def test_a_gradient_that_is_not_finite_leaves_the_step_out_on_all_ranks(where: str) -> None:
    num_ranks, tiny, name = POISONED[where]
    for found in run_megatron(num_ranks, poisoned, replace(tiny, dtype=BF16), name):
        assert len(found) == 4
        for taken, touched, told in found:
            assert not taken
            assert not touched
            assert told.startswith(f"{name}: ")
            assert f"Step skipped on rank {num_ranks - 1}" in told


# -- what is not trained ---------------------------------------------------------------------------


FROZEN = ("linear_qkv", "local_experts", "layers.1.", "norm")
Frozen = tuple[set[str], set[str], list[float]]


def frozen(rank: int, tiny: Tiny) -> list[Frozen]:
    return [without(tiny, part) for part in FROZEN]


def without(tiny: Tiny, part: str) -> Frozen:
    """Train with parameters frozen before they are wrapped; return which changed, and the frozen."""
    initialize(tiny)
    wrapped = models._wrapped

    def freeze(tiny: Tiny, config: Any, chunk: Any) -> Any:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(part not in name)
        return wrapped(tiny, config, chunk)

    with mock.patch.object(models, "_wrapped", freeze):
        model = build(tiny)
    before = {piece.name: piece.parameter.detach().clone() for piece in pieces(model)}
    optimizer = over(tiny, model)
    losses = train(tiny, model, optimizer, steps=2)
    optimizer.muon.drain()
    after = {piece.name: piece.parameter.detach().clone() for piece in pieces(model)}
    still = {piece.name for piece in pieces(model) if not piece.parameter.requires_grad}
    assert not still & set(optimizer.muon._names().values())
    return changed(before, after), still, losses


@pytest.mark.parametrize(
    ("num_ranks", "tiny"),
    [(1, Tiny(kind="moe")), (2, Tiny(kind="moe")), (2, Tiny(kind="moe", expert_parallel=2))],
    ids=["alone", "DP2", "EP2"],
)
def test_frozen_parameters_stay_and_others_train(num_ranks: int, tiny: Tiny) -> None:
    for moved, still, losses in itertools.chain(*run_megatron(num_ranks, frozen, tiny)):
        assert still
        assert moved
        assert not moved & still
        assert all(loss > 0 for loss in losses)


def without_matrices(rank: int) -> tuple[int, set[str]]:
    """The first stage has a layer of which nothing but norms and the embedding is trained."""
    tiny = Tiny(pipeline_parallel=2, num_microbatches=2)
    initialize(tiny)
    model = build(tiny)
    if rank == 0:
        for name, parameter in model[0].named_parameters():
            parameter.requires_grad_("norm" in name)
    optimizer = over(tiny, model)
    before = {piece.name: piece.parameter.detach().clone() for piece in pieces(model)}
    for step in range(2):
        give(model, step)
        assert optimizer.step()[0]
    optimizer.muon.drain()
    after = {piece.name: piece.parameter.detach().clone() for piece in pieces(model)}
    return len(optimizer.muon.last_step["matrices"]), changed(before, after)


def test_a_stage_without_matrices_steps_with_the_others() -> None:
    (none, norms), (some, _) = run_megatron(2, without_matrices)
    assert none == 0
    assert some > 0
    assert norms
    assert all("norm" in name for name in norms)


def without_anything(rank: int) -> bool:
    tiny = Tiny(pipeline_parallel=2)
    initialize(tiny)
    model = build(tiny)
    if rank == 0:
        model[0].requires_grad_(False)
    optimizer = over(tiny, model)
    give(model, 0)
    return bool(optimizer.step()[0])


def test_a_stage_where_nothing_is_trained_steps_with_the_others() -> None:
    assert run_megatron(2, without_anything) == [True, True]


# -- options ---------------------------------------------------------------------------------------


def attempted(rank: int) -> list[tuple[str, str]]:
    found = []
    for tiny, settings, options, _ in WRONG.values():
        found.append(("", ""))
        try:
            make(tiny, settings, **options)
        except Exception as error:
            found[-1] = type(error).__name__, str(error)
    return found


WRONG: dict[str, tuple[Tiny, dict[str, Any], dict[str, Any], str]] = {
    "heads that do not divide": (
        Tiny(),
        {},
        {"heads_per_block": 3},
        r"decoder\.layers\.0\.self_attention\.linear_qkv\.weight: got heads_per_block=3",
    ),
    "an override of nothing": (
        Tiny(),
        {},
        {"overrides": {"decoder.layers.*.nothing.weight": BlockSpec.whole()}},
        r"overrides\[.decoder\.layers\.\*\.nothing\.weight.\]: ",
    ),
    "no learning rate": (Tiny(), {"lr": None}, {}, r"config\.lr"),
    "half precision": (Tiny(), {"fp16": True, "bf16": False}, {}, r"config\.fp16"),
    "a distributed optimizer": (
        Tiny(),
        {"use_distributed_optimizer": True},
        {},
        r"config\.use_distributed_optimizer",
    ),
    "an option that there is not": (Tiny(), {}, {"no_such_option": 1}, r".*no_such_option.*"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_options_that_do_not_fit_are_refused(num_ranks: int) -> None:
    for found in run_megatron(num_ranks, attempted):
        for (kind, text), (name, wrong) in zip(found, WRONG.items(), strict=True):
            assert kind in ("ValueError", "TypeError"), f"{name}: {kind}: {text}"
            assert re.match(wrong[-1], text), text


def given_wrongly(rank: int, how: str) -> tuple[str, str]:
    tiny = Tiny()
    initialize(tiny)
    model = build(tiny)
    chunks: Any = {
        "not wrapped": [model[0].module],
        "one module": model[0],
        "no chunks": [],
    }[how]
    try:
        over(tiny, chunks)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("how", ["not wrapped", "one module", "no chunks"])
def test_chunks_that_are_none_are_refused(how: str) -> None:
    [(kind, text)] = run_megatron(1, given_wrongly, how)
    assert kind == "ValueError", f"{kind}: {text}"
    assert text.startswith("model_chunks: "), text


# -- ranks that differ -----------------------------------------------------------------------------


def differing(rank: int, what: str) -> tuple[str, str, float]:
    tiny = Tiny(tensor_parallel=2) if what == "lr, TP2" else Tiny()
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if rank == 1:
        if what.startswith("lr"):
            settings["lr"] = 0.03
        elif what == "heads_per_block":
            options["heads_per_block"] = 1
        elif what == "momentum":
            settings["muon_momentum"] = 0.8
    began = time.monotonic()
    try:
        model, optimizer = make(tiny, settings, **options)
        give(model, 0)
        optimizer.step()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


@pytest.mark.parametrize("what", ["lr", "lr, TP2", "heads_per_block", "momentum"])
def test_ranks_with_other_options_raise_on_all(what: str) -> None:
    for kind, text, seconds in run_megatron(2, differing, what, timeout_s=20.0):
        assert kind == "ValueError", f"{kind}: {text}"
        assert "rank 1" in text
        assert seconds < 10


def scheduled_apart(rank: int) -> tuple[str, str]:
    """A scheduler that has another rate on one rank."""
    model, optimizer = make(Tiny())
    give(model, 0)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 + 0.001 * rank
    give(model, 1)
    try:
        optimizer.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_whose_rates_come_apart_raise_on_all() -> None:
    for kind, text in run_megatron(2, scheduled_apart, timeout_s=20.0):
        assert kind == "ValueError", f"{kind}: {text}"
        assert "lr" in text


def killed(rank: int) -> tuple[tuple[int, ...], float]:
    model, optimizer = make(Tiny(), {"clip_grad": 0.0})
    give(model, 0)
    assert optimizer.step()[0]
    give(model, 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(LostRanksError) as caught:
        optimizer.step()
    return caught.value.ranks, time.monotonic() - began


def test_a_killed_rank_is_named_in_time() -> None:
    start = _server().connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", start):
        survivor, lost = spawn(2, killed, timeout_s=TIMEOUT_S, lost=(1,))
    assert lost.exitcode == -signal.SIGKILL
    assert survivor.error is None, survivor.error
    ranks, seconds = survivor.value
    assert ranks == (1,)
    assert seconds < TIMEOUT_S + 5


# -- weights and state from outside ----------------------------------------------------------------


def stepped_twice(rank: int) -> tuple[list[bool], set[str]]:
    """A second step without a backward pass takes the gradients that are still there."""
    model, optimizer = make(Tiny(dtype=BF16))
    give(model, 0)
    first = optimizer.step()[0]
    once = everything(model, optimizer)
    second = optimizer.step()[0]
    moved = changed(once, everything(model, optimizer))
    for chunk in model:
        chunk.zero_grad_buffer()
    third = optimizer.step()[0]
    assert all(torch.isfinite(p).all() for p in model[0].parameters())
    return [first, second, third], moved


def test_steps_without_new_gradients() -> None:
    for taken, moved in run_megatron(2, stepped_twice):
        assert taken == [True] * 3
        assert moved


def loaded(rank: int, tiny: Tiny, placement: str) -> tuple[bool, bool]:
    model, optimizer = make(tiny, placement=placement)
    give(model, 0)
    optimizer.step()
    optimizer.muon.drain()
    state = {key: one for key, one in model[0].state_dict().items() if one is not None}
    with torch.no_grad():
        model[0].load_state_dict({key: one / 2 for key, one in state.items()}, strict=False)
    give(model, 1)
    with pytest.raises(StaleMasterError):
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model[0].parameters()]
    optimizer.reload_model_params()
    kept = all(
        torch.equal(one, other) for one, other in zip(weights, model[0].parameters(), strict=True)
    )
    # A rate of nothing writes the weights anew from the masters.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    give(model, 1)
    assert optimizer.step()[0]
    optimizer.muon.drain()
    after = [parameter.detach().clone() for parameter in model[0].parameters()]
    same = all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))
    return kept, same


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize(
    ("num_ranks", "tiny"),
    [(1, Tiny()), (2, Tiny()), (2, Tiny(tensor_parallel=2))],
    ids=["alone", "DP2", "TP2"],
)
def test_weights_loaded_from_outside_need_new_masters(
    num_ranks: int, tiny: Tiny, placement: str
) -> None:
    tiny = replace(tiny, dtype=BF16)
    found = run_megatron(num_ranks, loaded, tiny, placement)
    assert found == [(True, True)] * num_ranks


def calls(rank: int, tiny: Tiny, call: str) -> tuple[str, str]:
    model, optimizer = make(tiny)
    give(model, 0)
    optimizer.step()
    try:
        if call == "reload":
            optimizer.reload_model_params(state_dict=model[0].state_dict())
        else:
            optimizer.state_dict()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_masters_from_a_state_dictionary_are_refused() -> None:
    [(kind, text)] = run_megatron(1, calls, Tiny(), "reload")
    assert kind == "ValueError"
    assert text.startswith("state_dict: ")
    assert "apply_to_masters" in text


def test_a_state_dictionary_of_a_part_is_refused() -> None:
    for kind, text in run_megatron(2, calls, Tiny(), "state"):
        assert kind in ("ValueError", "RuntimeError"), text
        assert "checkpoint" in text or "sharded_state_dict" in text
    assert run_megatron(1, calls, Tiny(), "state") == [("", "")]


def hollow_loop(rank: int) -> str:
    """A forward pass while the weights are released."""
    tiny = Tiny(dtype=BF16)
    model, optimizer = make(tiny)
    optimizer.muon.release()
    with pytest.raises(RuntimeError) as caught:
        forward_backward(tiny, model, 0)
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.muon.resume()
    train(tiny, model, optimizer, steps=1)
    return str(caught.value)


def test_a_forward_pass_of_released_weights_names_one() -> None:
    [text] = run_megatron(1, hollow_loop)
    assert ".weight" in text
    assert "resume" in text
