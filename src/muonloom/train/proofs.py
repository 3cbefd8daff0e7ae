"""Claims of the library, shown live on the model that was just trained.

Each proof is a function from a `Bench` to an `Outcome` and takes seconds. A proof leaves the
model's weights as it found them, also where it fails.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import muonloom


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What proofs work with."""

    model: nn.Module
    optimizer: muonloom.Muon
    backward: Callable[[], float]  # leaves a gradient in `.grad`, returns the loss


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a proof found."""

    holds: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class ProofRecord:
    """One line of the report."""

    claim: str
    holds: bool
    detail: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A claim, and what shows it."""

    claim: str
    show: Callable[[Bench], Outcome]


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of every parameter and buffer: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_raw_bytes(tensor))
    return digest.hexdigest()


def _raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def nan_gradient_is_skipped(bench: Bench) -> Outcome:
    """Plant one NaN among the gradients of one matrix, step, and compare every weight's bytes."""
    before = weights_sha256(bench.model)
    bench.backward()
    name, gradient = max(
        ((n, p.grad) for n, p in bench.model.named_parameters() if p.grad is not None),
        key=lambda item: item[1].numel(),
    )
    gradient[(0,) * gradient.ndim] = float("nan")
    reaction = _step(bench.optimizer)
    bench.optimizer.zero_grad(set_to_none=True)
    same = weights_sha256(bench.model) == before
    return Outcome(
        holds=reaction != "taken" and same,
        detail=f"NaN planted in {name}: step {reaction}, SHA-256 of all weights {before[:12]}… "
        f"{'unchanged' if same else 'CHANGED'}",
    )


def _step(optimizer: muonloom.Muon) -> str:
    """Return what became of a step: taken, skipped, or (without `skip_nonfinite`) refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer's own warning of the skip
            optimizer.step()
    except FloatingPointError:
        return "refused"
    return "skipped" if optimizer.last_step["skipped"] else "taken"


PROOFS: tuple[Proof, ...] = (
    Proof(claim="A NaN gradient changes nothing", show=nan_gradient_is_skipped),
)


def run_proofs(bench: Bench, proofs: tuple[Proof, ...] = PROOFS) -> list[ProofRecord]:
    """Run each proof; an exception is a claim that does not hold."""
    records = []
    for proof in proofs:
        begin = time.perf_counter()
        try:
            outcome = proof.show(bench)
        except Exception as error:  # the report must be written whatever a proof meets
            outcome = Outcome(holds=False, detail=f"{type(error).__name__}: {error}")
        records.append(
            ProofRecord(
                claim=proof.claim,
                holds=outcome.holds,
                detail=outcome.detail,
                seconds=time.perf_counter() - begin,
            )
        )
    return records
