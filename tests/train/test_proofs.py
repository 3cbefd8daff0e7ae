from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import muonloom
from muonloom.train.proofs import (
    PROOFS,
    Bench,
    Outcome,
    Proof,
    run_proofs,
    state_sha256,
    weights_sha256,
)

NAN, PLACEMENTS = ((proof,) for proof in PROOFS)


def make_bench(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)).to(dtype)

    def build(model, placement):
        named = list(model.named_parameters())
        groups = [{"params": named[:1]}, {"params": named[1:], "algorithm": "adamw", "lr": 0.1}]
        return muonloom.Muon(groups, **{**options, "placement": placement})

    optimizer = build(model, options.get("placement", "device"))

    def backward() -> float:
        loss = model(torch.ones(2, 8, dtype=dtype)).square().sum()
        loss.backward()
        return float(loss.detach())

    return Bench(
        model=model,
        optimizer=optimizer,
        backward=backward,
        rebuild=build,
        host=muonloom.HostPlacement(slot_bytes=768, num_slots=2),
    )


def trained(bench: Bench, steps: int = 2) -> Bench:
    for _ in range(steps):
        bench.backward()
        bench.optimizer.step()
        bench.optimizer.zero_grad(set_to_none=True)
    return bench


def test_a_nan_gradient_is_skipped_and_the_weights_stay():
    bench = make_bench()
    before = weights_sha256(bench.model)
    (record,) = run_proofs(bench, NAN)
    assert record.holds
    assert "skipped" in record.detail
    assert weights_sha256(bench.model) == before
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_a_refused_step_holds_too():
    (record,) = run_proofs(make_bench(skip_nonfinite=False), NAN)
    assert record.holds
    assert "refused" in record.detail


def test_an_optimizer_that_takes_the_nan_is_found_out(monkeypatch):
    bench = make_bench()

    def plain_step():
        with torch.no_grad():
            for parameter in bench.model.parameters():
                parameter -= 0.1 * parameter.grad

    monkeypatch.setattr(bench.optimizer, "step", plain_step)
    monkeypatch.setattr(type(bench.optimizer), "last_step", {"skipped": True})
    (record,) = run_proofs(bench, NAN)
    assert not record.holds
    assert "CHANGED" in record.detail


def test_a_proof_that_raises_does_not_hold_and_others_still_run():
    def fails(bench: Bench) -> Outcome:
        raise RuntimeError("broken")

    def holds(bench: Bench) -> Outcome:
        return Outcome(holds=True, detail="fine")

    records = run_proofs(
        make_bench(), (Proof(claim="one", show=fails), Proof(claim="two", show=holds))
    )
    assert [record.holds for record in records] == [False, True]
    assert records[0].detail == "RuntimeError: broken"


def test_the_hash_sees_one_bit_a_name_and_a_dtype():
    model = nn.Linear(3, 2)
    hashes = {weights_sha256(model)}
    with torch.no_grad():
        model.weight[0, 0] = torch.nextafter(model.weight[0, 0], torch.tensor(9.0))
    hashes.add(weights_sha256(model))
    hashes.add(weights_sha256(nn.Sequential(model)))
    hashes.add(weights_sha256(model.to(torch.float64)))
    assert len(hashes) == 4


@pytest.mark.parametrize(
    "placement", ["device", "host", muonloom.HostPlacement(master_layout="split")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
def test_both_placements_agree_and_leave_model_and_state_as_they_were(placement, dtype, steps):
    bench = trained(make_bench(dtype, placement=placement), steps)
    before = weights_sha256(bench.model), state_sha256(bench.optimizer)
    (record,) = run_proofs(bench, PLACEMENTS)
    assert record.holds, record.detail
    assert "in both" in record.detail
    assert (weights_sha256(bench.model), state_sha256(bench.optimizer)) == before
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_the_steps_of_the_proof_are_taken_where_the_schedule_has_ended_at_zero():
    bench = trained(make_bench())
    for group in bench.optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], 0.0
    trail: list[str] = []
    watched = replace(bench, rebuild=lambda *a: watch(bench.rebuild(*a), trail))
    (record,) = run_proofs(watched, PLACEMENTS)
    assert record.holds, record.detail
    assert len(trail) == 6
    assert trail[:3] == trail[3:]
    assert len(set(trail[:3])) == 3


def watch(optimizer: muonloom.Muon, trail: list[str]) -> muonloom.Muon:
    """Have each step of `optimizer` note the sum of all weights in `trail`."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_post_hook(
        lambda *_: trail.append(str([float(p.detach().double().sum()) for p in weights]))
    )
    return optimizer


@pytest.mark.parametrize("spoils", ["weights", "state"])
def test_placements_that_differ_in_one_element_are_found_out(spoils):
    bench = trained(make_bench())

    def spoil(optimizer, *_):
        weight = optimizer.param_groups[0]["params"][0]
        state = optimizer.state[weight]["momentum_buffer"]
        (weight.detach() if spoils == "weights" else state).view(-1)[0] += 1e-3

    def rebuild(model, placement):
        optimizer = bench.rebuild(model, placement)
        if placement != "device":
            optimizer.register_step_post_hook(spoil)
        return optimizer

    (record,) = run_proofs(replace(bench, rebuild=rebuild), PLACEMENTS)
    assert record.holds is False
    assert "OTHERS on the device" in record.detail


def test_steps_that_change_nothing_prove_nothing(monkeypatch):
    monkeypatch.setattr(muonloom.Muon, "step", lambda self: None)
    (record,) = run_proofs(make_bench(), PLACEMENTS)
    assert record.holds is False
    assert "nothing to compare" in record.detail


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room")])
def test_for_lack_of_memory_a_claim_is_neither_held_nor_refuted(error):
    def lacks(*_):
        raise error

    bench = trained(make_bench())
    before = weights_sha256(bench.model), state_sha256(bench.optimizer)
    (record,) = run_proofs(replace(bench, rebuild=lacks), PLACEMENTS)
    assert record.holds is None
    assert "no room" in record.detail
    assert (weights_sha256(bench.model), state_sha256(bench.optimizer)) == before
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_the_hash_of_state_sees_a_value_and_which_parameter_has_it():
    bench = trained(make_bench())
    hashes = {state_sha256(bench.optimizer)}
    first, _ = (group["params"][0] for group in bench.optimizer.param_groups)
    momentum = bench.optimizer.state[first]["momentum_buffer"]
    momentum[0, 0] = torch.nextafter(momentum[0, 0], torch.tensor(9.0))
    hashes.add(state_sha256(bench.optimizer))
    bench.optimizer.param_groups[0]["param_names"] = ["other"]
    hashes.add(state_sha256(bench.optimizer))
    assert len(hashes) == 3
