from __future__ import annotations

import torch
from torch import nn

import muonloom
from muonloom.train.proofs import Bench, Outcome, Proof, run_proofs, weights_sha256


def make_bench(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    optimizer = muonloom.Muon(model.named_parameters(), **options)

    def backward() -> float:
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return float(loss.detach())

    return Bench(model=model, optimizer=optimizer, backward=backward)


def test_a_nan_gradient_is_skipped_and_the_weights_stay():
    bench = make_bench()
    before = weights_sha256(bench.model)
    (record,) = run_proofs(bench)
    assert record.holds
    assert "skipped" in record.detail
    assert weights_sha256(bench.model) == before
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_a_refused_step_holds_too():
    (record,) = run_proofs(make_bench(skip_nonfinite=False))
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
    (record,) = run_proofs(bench)
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
