"""Megatron-Core's training loop with what `muonloom.Muon` adds: memory given back, FP8 experts, norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

from megatron import models
from megatron.models import Tiny, build, initialize
from megatron.pieces import gathered, pieces, weight
from megatron.steps import forward_backward, optimizer_config, train
from megatron.support import run_megatron
from muonloom import Float8BlockWriter, HostPlacement
from muonloom.integrations.megatron import MegatronMuon, get_optimizer

SETTINGS = {"muon_extra_scale_factor": 0.2, "adam_beta2": 0.95, "muon_coefficient_type": "simple"}
BF16 = torch.bfloat16
PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": HostPlacement(num_slots=2, slot_bytes=60000),
    "split": HostPlacement(master_layout="split"),
}
Trained = tuple[list[float], dict[str, Tensor]]


def make(tiny: Tiny, settings: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Return model and optimizer; first of all in each rank."""
    initialize(tiny)
    model = build(tiny)
    config = optimizer_config(tiny, **{**SETTINGS, **(settings or {})})
    return model, get_optimizer(config, model, **{"heads_per_block": 1, **options})


def trained(rank: int, tiny: Tiny, clip: float = 1.0) -> Trained:
    model, optimizer = make(tiny, {"clip_grad": clip})
    return train(tiny, model, optimizer, steps=3), gathered(model)


def assert_same(found: Trained, wanted: Trained) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, one in wanted[1].items():
        assert torch.equal(found[1][name], one), name


# -- memory given back -----------------------------------------------------------------------------


@cache
def _undisturbed(num_ranks: int, tiny: Tiny) -> list[Trained]:
    return run_megatron(num_ranks, trained, tiny)


def disturbed(rank: int, tiny: Tiny, placement: str) -> Trained:
    """Give the device back after each step: what is the optimizer's, then the weights too."""
    model, optimizer = make(tiny, placement=PLACEMENTS[placement])
    muon: Any = optimizer.muon
    losses = []
    gradients = {p: p.main_grad.data_ptr() for p in model[0].parameters()}
    for step in range(3):
        losses += train(tiny, model, optimizer, steps=1, first=step)
        muon.drain()
        held = muon.memory()
        assert held["device_workspace"] > 0
        assert (held["device_slots"] > 0) == (placement != "device")
        optimizer.offload_to_cpu()
        assert_gone(muon)
        assert muon.memory()["device_weights"] == held["device_weights"] > 0
        optimizer.restore_from_cpu()
        assert muon.memory()["device_state"] == held["device_state"]
        report = muon.release(model=model[0])
        assert not report.kept_weights
        # Views into Megatron-Core's buffers, which stay.
        assert set(report.kept_gradients) == {piece.name for piece in pieces(model)}
        assert_gone(muon)
        assert muon.memory()["device_weights"] == 0
        assert muon.memory()["gradients"] == held["gradients"]
        with pytest.raises(RuntimeError, match="resume"):
            forward_backward(tiny, model, step)
        muon.resume()
        assert muon.memory()["device_weights"] == held["device_weights"]
    assert all(p.main_grad.data_ptr() == place for p, place in gradients.items())
    return losses, gathered(model)


def assert_gone(muon: Any) -> None:
    left = muon.memory()
    assert left["device_state"] == left["device_slots"] == left["device_workspace"] == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("num_ranks", "kind"), [(1, "mla"), (1, "moe"), (2, "moe")])
def test_memory_given_back_between_steps_changes_no_bit(
    num_ranks: int, kind: str, placement: str
) -> None:
    tiny = Tiny(kind=kind, dtype=BF16)
    wanted = _undisturbed(num_ranks, tiny)
    found = run_megatron(num_ranks, disturbed, tiny, placement)
    for own, other in zip(found, wanted, strict=True):
        assert_same(own, other)


def in_buffers(rank: int, tiny: Tiny) -> tuple[Trained, bool, int]:
    """Release weights that are views into Megatron-Core's buffers."""
    model, optimizer = make(tiny)
    buffers = [*model[0].buffers, *model[0].expert_parallel_buffers]
    places = [(p, p.data_ptr()) for p in model[0].parameters()]
    losses = []
    kept = set()
    for step in range(3):
        losses += train(tiny, model, optimizer, steps=1, first=step)
        kept = set(optimizer.muon.release(model=model[0]).kept_weights)
        released = optimizer.muon.memory()["device_weights"]
        optimizer.muon.resume()
    inside = all(
        any(
            p.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
            for buffer in buffers
        )
        for p, _ in places
    )
    unmoved = all(p.data_ptr() == place for p, place in places)
    assert kept == {piece.name for piece in pieces(model)}
    return (losses, gathered(model)), inside and unmoved, released


def test_weights_in_megatrons_buffers_stay_there() -> None:
    tiny = Tiny(kind="moe", dtype=BF16, buffers="whole")
    wanted = run_megatron(2, trained, tiny)
    for (own, are_views, left), other in zip(
        run_megatron(2, in_buffers, tiny), wanted, strict=True
    ):
        assert are_views
        assert left > 0
        assert_same(own, other)


# -- FP8 experts -----------------------------------------------------------------------------------


class Experts:
    """Keeps experts in FP8 between steps; their parameters have values from a forward pass to its step.

    A `muonloom.ExpertEngine`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.held = {
            parameter: Float8BlockWriter()
            for name, parameter in model.named_parameters()
            if ".local_experts." in name
        }
        self.told: list[str] = []
        model.register_forward_pre_hook(self._fill)

    def named_writers(self) -> Iterator[tuple[nn.Parameter, Float8BlockWriter]]:
        yield from self.held.items()

    def before_step(self, optimizer: Any) -> None:
        self.told.append("before")
        self.empty()

    def after_step(self, optimizer: Any, skipped: bool) -> None:
        self.told.append("skipped" if skipped else "after")

    def release(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            for tensor in self.held[param].tensors():
                tensor.untyped_storage().resize_(0)

    def resume(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            for tensor in self.held[param].tensors():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def empty(self) -> None:
        for parameter in self.held:
            parameter.untyped_storage().resize_(0)

    def _fill(self, *_: Any) -> None:
        for parameter, writer in self.held.items():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            parameter.data.copy_(writer.read(parameter))


def masters_of(model: Any, optimizer: MegatronMuon) -> dict[str, Tensor | None]:
    optimizer.muon.drain()
    found = {
        piece.name: optimizer.muon.get_full_parameter_master(piece.parameter)
        for piece in pieces(model)
        if ".local_experts." in piece.name
    }
    # On the host they are the optimizer's own.
    return {name: None if one is None else one.clone() for name, one in found.items()}


def with_engine(rank: int, tiny: Tiny, placement: str, how: str) -> dict[str, Any]:
    """Take steps on given gradients, then one of training, with experts in FP8."""
    initialize(tiny)
    model = build(tiny)
    engine = Experts(model[0])
    options = {"placement": PLACEMENTS[placement]}
    config = optimizer_config(tiny, **SETTINGS, clip_grad=0.0)
    if how == "engine=":
        options["engine"] = engine
    optimizer = get_optimizer(config, model, **options)
    if how == "bind":
        optimizer.muon.bind(engine)
    if how != "without":
        engine.empty()
    for step in range(2):
        for piece in pieces(model):
            drawn = weight(f"gradient of {piece.name}", piece.whole_shape, step)
            piece.parameter.main_grad.copy_(piece.of(drawn))
        assert optimizer.step()[0]
    found: dict[str, Any] = {"masters": masters_of(model, optimizer), "told": list(engine.told)}
    found["collectives"] = optimizer.muon.last_step["collectives"]
    for piece in pieces(model):
        if piece.parameter in engine.held and how != "without":
            master = found["masters"][piece.name]
            assert master is not None
            fresh = Float8BlockWriter()
            fresh.prepare(nn.Parameter(master))
            own = engine.held[piece.parameter].tensors()
            for one, other in zip(own, fresh.tensors(), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), piece.name
    if how != "without":
        optimizer.muon.release()
        assert optimizer.muon.memory()["device_weights"] == 0
        optimizer.muon.resume()
        found["losses"] = train(tiny, model, optimizer, steps=3)
    return found


FLOAT8 = Tiny(kind="moe", dtype=BF16)


@cache
def _masters_without_engine() -> dict[str, Tensor]:
    [found] = run_megatron(1, with_engine, FLOAT8, "device", "without")
    return found["masters"]


@pytest.mark.parametrize(
    ("num_ranks", "how", "placement", "tiny"),
    [
        (1, "bind", "host", FLOAT8),
        (1, "engine=", "device", FLOAT8),
        (2, "bind", "device", replace(FLOAT8, expert_parallel=2)),
        (2, "bind", "host", replace(FLOAT8, expert_parallel=2)),
        (2, "engine=", "host", FLOAT8),
    ],
    ids=["alone", "alone, from the start", "EP2", "EP2, on the host", "DP2, on the host"],
)
def test_experts_in_float8_have_the_masters_of_others(
    num_ranks: int, how: str, placement: str, tiny: Tiny
) -> None:
    wanted = _masters_without_engine()
    assert len(wanted) == 8
    found = run_megatron(num_ranks, with_engine, tiny, placement, how)
    masters = {name: one for own in found for name, one in own["masters"].items()}
    assert masters.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(masters[name], one), name
    for own in found:
        assert own["told"] == ["before", "after"] * 2
        assert len(own["masters"]) == 8 // tiny.expert_parallel
        assert own["losses"] == found[0]["losses"]
        assert all(4 < loss < 6 for loss in own["losses"])


def sent(rank: int, tiny: Tiny) -> dict[str, Any]:
    """Tell what a step sends between ranks."""
    model, optimizer = make(tiny)
    train(tiny, model, optimizer, steps=1)
    return dict(optimizer.muon.last_step)


def test_experts_of_one_rank_alone_are_not_sent_round() -> None:
    tiny = replace(FLOAT8, expert_parallel=2)
    spread, whole = run_megatron(2, sent, tiny), run_megatron(2, sent, FLOAT8)
    experts = 4 * (48 * 32 + 32 * 24) * 2  # bytes in BF16
    for own, other in zip(spread, whole, strict=True):
        assert own["payload_bytes"] <= other["payload_bytes"] - experts // 2
    assert all(own["collectives"] > 0 for own in spread)


def too_late(rank: int) -> str:
    model, optimizer = make(FLOAT8)
    with pytest.raises(ValueError, match="several ranks") as caught:
        optimizer.muon.bind(Experts(model[0]))
    return str(caught.value)


def test_an_engine_that_comes_after_experts_were_divided_is_refused() -> None:
    for text in run_megatron(2, too_late):
        assert "local_experts" in text.partition(":")[0]
        assert "engine=" in text


# -- forms of training -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moe", "mla"])
def test_recomputation_trains_bit_for_bit(kind: str) -> None:
    tiny = Tiny(kind=kind, dtype=BF16)
    [wanted] = _undisturbed(1, tiny)
    [found] = run_megatron(1, trained, replace(tiny, recompute=True))
    assert_same(found, wanted)


def test_microbatches_train_as_one_batch() -> None:
    [(wanted, weights)] = run_megatron(1, trained, Tiny(kind="moe"))
    [(found, others)] = run_megatron(1, trained, Tiny(kind="moe", num_microbatches=4))
    assert found == pytest.approx(wanted, rel=1e-5)
    for name, one in weights.items():
        change = (one - weight(name, tuple(one.shape), 0)).norm()
        assert (others[name] - one).norm() < 1e-2 * change, name


SPREAD: dict[str, tuple[int, Tiny]] = {
    "chunks, MTP": (
        2,
        Tiny(
            kind="moe",
            num_layers=4,
            num_mtp_layers=1,
            pipeline_parallel=2,
            num_chunks=2,
            num_microbatches=2,
        ),
    ),
    "tied, PP2": (2, Tiny(tied=True, pipeline_parallel=2, num_microbatches=2)),
    "tied, DP2": (2, Tiny(tied=True)),
    "tied, TP2": (2, Tiny(tied=True, tensor_parallel=2)),
}


@pytest.mark.parametrize("name", SPREAD)
def test_chunks_further_predictions_and_tied_embeddings(name: str) -> None:
    num_ranks, tiny = SPREAD[name]
    alone = replace(tiny, pipeline_parallel=1, num_chunks=1, tensor_parallel=1, num_microbatches=1)
    [(wanted, weights)] = run_megatron(1, trained, alone)
    for found, others in run_megatron(num_ranks, trained, tiny):
        assert found == pytest.approx(wanted, rel=1e-4)
        assert others.keys() == weights.keys()
        for key, one in weights.items():
            change = (one - weight(key, tuple(one.shape), 0)).norm()
            assert (others[key] - one).norm() < 2e-2 * change, key


# -- norms -----------------------------------------------------------------------------------------


def in_both(rank: int, tiny: Tiny, clip: float, detached: bool) -> list[dict[str, Any]]:
    found = [replace(tiny, dtype=dtype) for dtype in (torch.float32, BF16)]
    return [norms(rank, one, clip, detached) for one in found]


def norms(rank: int, tiny: Tiny, clip: float, detached: bool = False) -> dict[str, Any]:
    """Take one step; return what it says of gradients, and what these were, in the weights' dtype."""

    def ddp_config(**settings: Any) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**{**settings, "grad_reduce_in_fp32": False})

    def model_config(tiny: Tiny) -> Any:
        config = configured(tiny)
        config.mtp_detach_heads = detached
        return config

    configured = models.model_config
    with (
        mock.patch.object(models, "DistributedDataParallelConfig", ddp_config),
        mock.patch.object(models, "model_config", model_config),
    ):
        model, optimizer = make(tiny, {"clip_grad": clip, "log_num_zeros_in_grad": True})
    forward_backward(tiny, model, 0)
    assert {parameter.main_grad.dtype for parameter in model[0].parameters()} == {tiny.dtype}
    gradients = gathered(model, "main_grad")
    own = {piece.name: piece.parameter.main_grad.float().clone() for piece in pieces(model)}
    taken, norm, zeros = optimizer.step()
    optimizer.muon.drain()
    momentum = {}
    for piece in pieces(model):
        rows = optimizer.muon.updated_rows(piece.parameter)
        if rows.start == rows.stop:
            continue
        _, state = optimizer.muon.own_state(piece.parameter)
        if "momentum_buffer" in state:
            momentum[piece.name] = own[piece.name][rows], state["momentum_buffer"].clone()
    return {
        "taken": taken,
        "norm": norm,
        "zeros": zeros,
        "groups": dict(optimizer.grad_norms_by_group),
        "gradients": gradients,
        "momentum": momentum,
    }


def norm_of(gradients: Iterable[Tensor]) -> float:
    return float(sum(one.double().square().sum() for one in gradients)) ** 0.5


ARRANGED: dict[str, tuple[int, Tiny]] = {
    "alone": (1, Tiny(kind="moe")),
    "DP2": (2, Tiny(kind="moe")),
    "TP2": (2, Tiny(kind="gated", tensor_parallel=2)),
    "TP2, MLA": (2, Tiny(kind="mla", tensor_parallel=2, sequence_parallel=True)),
    "EP2": (2, Tiny(kind="moe", expert_parallel=2)),
    "tied, PP2": (2, Tiny(tied=True, pipeline_parallel=2, num_microbatches=2)),
    "tied, DP2": (2, Tiny(tied=True)),
    "tied, TP2": (2, Tiny(tied=True, tensor_parallel=2)),
    "MTP, DP2": (2, Tiny(num_mtp_layers=1)),
    "detached MTP": (1, Tiny(num_mtp_layers=1)),
    "detached MTP, DP2": (2, Tiny(num_mtp_layers=1)),
    "detached MTP, PP2": (2, Tiny(num_mtp_layers=1, pipeline_parallel=2, num_microbatches=2)),
    "EP2, TP2, experts whole": (
        2,
        Tiny(
            kind="moe",
            tensor_parallel=2,
            sequence_parallel=True,
            expert_parallel=2,
            expert_tensor_parallel=1,
        ),
    ),
    "DP2 x TP2, MTP, experts cut": (
        4,
        Tiny(kind="mla_moe", num_mtp_layers=1, tensor_parallel=2, sequence_parallel=True),
    ),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_norm_and_zeros_are_those_of_the_whole_gradients(name: str) -> None:
    num_ranks, tiny = ARRANGED[name]
    detached = name.startswith("detached")
    clip = 0.02
    ranks = run_megatron(num_ranks, in_both, tiny, clip, detached)
    # What is scaled in BF16 buffers is rounded once more.
    for found, tolerance in zip(zip(*ranks, strict=True), (1e-4, 4e-3), strict=True):
        for own in found:
            check_norms(own, clip, detached, tolerance)
        whole = {key for key, one in found[0]["gradients"].items() if one.ndim == 2}
        updated = {key for own in found for key in own["momentum"]}
        assert updated == {key for key in whole if not key.startswith(("embedding", "output"))}
        assert tiny.tied or found[0]["zeros"] > 0  # rows of tokens that do not occur


def check_norms(own: dict[str, Any], clip: float, detached: bool, tolerance: float) -> None:
    gradients = own["gradients"]
    apart = {key for key in gradients if detached and key.startswith("mtp.")}
    norm = norm_of(one for key, one in gradients.items() if key not in apart)
    norm_apart = norm_of(gradients[key] for key in apart)
    assert own["taken"]
    assert own["norm"] == pytest.approx(norm, rel=1e-5)
    assert own["groups"] == ({"mtp": pytest.approx(norm_apart, rel=1e-5)} if detached else {})
    assert own["zeros"] == sum(int((one == 0).sum()) for one in gradients.values())
    for key, (gradient, momentum) in own["momentum"].items():
        scale = clip / (norm_apart if key in apart else norm)
        assert scale < 0.5
        wanted = 0.05 * scale * gradient
        assert (momentum - wanted).norm() <= tolerance * wanted.norm(), key


def test_without_a_limit_nothing_is_scaled() -> None:
    [own] = run_megatron(1, norms, Tiny(kind="moe"), 0.0)
    assert own["norm"] is None
    for key, (gradient, momentum) in own["momentum"].items():
        assert torch.allclose(momentum, 0.05 * gradient, rtol=1e-5), key


# -- buffers ---------------------------------------------------------------------------------------


def owners(rank: int, tiny: Tiny) -> tuple[Trained, dict[str, bool]]:
    """Return what this rank updates, which has to be that of which it gets gradients."""
    model, optimizer = make(tiny, {"clip_grad": 0.0})
    owned = {}
    for buffer in [*model[0].buffers, *model[0].expert_parallel_buffers]:
        ranks = buffer.data_parallel_group
        for parameter, (start, _, index) in buffer.param_index_map.items():
            bucket = buffer.buckets[index]
            length = len(bucket.grad_data) // ranks.size()
            owned[parameter] = (start - bucket.offset) // length == ranks.rank()
    updated = {}
    for piece in pieces(model):
        rows = optimizer.muon.updated_rows(piece.parameter)
        updated[piece.name] = rows.start < rows.stop
        # A matrix that is cut is updated by one of those that have a piece of it.
        if piece.dim is None:
            assert updated[piece.name] == owned[piece.parameter], piece.name
    return (train(tiny, model, optimizer, steps=3), gathered(model)), updated


@pytest.mark.parametrize(
    ("num_ranks", "tiny"),
    [(2, Tiny(kind="moe")), (4, Tiny(tensor_parallel=2)), (2, Tiny(kind="mla", dtype=BF16))],
    ids=["DP2", "TP2 x DP2", "DP2, BF16"],
)
def test_scattered_gradients_give_the_same_weights(num_ranks: int, tiny: Tiny) -> None:
    wanted = run_megatron(num_ranks, trained, tiny, 0.0)
    found = run_megatron(num_ranks, owners, replace(tiny, buffers="whole"))
    for (own, _), other in zip(found, wanted, strict=True):
        assert_same(own, other)
    assert all(any(updated.values()) for _, updated in found)


def refused(rank: int, tiny: Tiny) -> tuple[str, set[str]]:
    with pytest.raises(ValueError, match="scattered") as caught:
        make(tiny)
    return str(caught.value), {piece.name for piece in pieces(build(tiny))}


def test_scattered_parts_of_parameters_are_refused() -> None:
    for text, names in run_megatron(2, refused, Tiny(kind="moe", buffers="layer_wise")):
        assert text.partition(":")[0] in names
        assert "use_distributed_optimizer=False" in text
