"""Claims of the library, shown live on the model that was just trained.

Each proof is a function from a `Bench` to an `Outcome` and takes seconds. A proof leaves the
model's weights and the optimizer's state as it found them, also where it fails.
"""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import muonloom
from muonloom.dtensors import local_part
from muonloom.errors import LostRanksError
from muonloom.train.team import Team


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What proofs work with.

    Attributes:
        model: as trained.
        optimizer: of `model`.
        backward: leaves a gradient in `.grad`, returns the loss.
        rebuild: makes an optimizer with the same options for a copy of the model, placed otherwise.
        host: the run's host placement; the default one where the run had none.
        team: the run's ranks, which all go through the same proofs.
        num_parts: over how many ranks one copy of the weights is spread.
    """

    model: nn.Module
    optimizer: muonloom.Muon
    backward: Callable[[], float]
    rebuild: Callable[[nn.Module, str | muonloom.HostPlacement], muonloom.Muon]
    host: muonloom.HostPlacement
    team: Team = field(default_factory=Team)
    num_parts: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a proof found; None where there was no memory to try."""

    holds: bool | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class ProofRecord:
    """One line of the report."""

    claim: str
    holds: bool | None
    detail: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A claim, and what shows it."""

    claim: str
    show: Callable[[Bench], Outcome]


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of every parameter and buffer on this rank: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        tensor = local_part(tensor)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_raw_bytes(tensor))
    return digest.hexdigest()


def state_sha256(optimizer: muonloom.Muon) -> str:
    """Return the SHA-256 of all state: name, key, dtype, shape and bytes; split masters count whole."""
    saved = optimizer.state_dict()
    digest = hashlib.sha256()
    for group in saved["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            for key, tensor in sorted(saved["state"].get(index, {}).items()):
                digest.update(f"{name} {key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(_raw_bytes(tensor))
    return digest.hexdigest()


def _raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def nan_gradient_is_skipped(bench: Bench) -> Outcome:
    """Plant one NaN among the gradients of one matrix, step, and compare every weight's bytes.

    Where ranks hold parts of the weights, those with the last part have it alone, and all must skip.
    """
    team = bench.team
    before = _all_weights_sha256(bench)
    bench.backward()
    name, gradient = max(
        ((n, local_part(p.grad)) for n, p in bench.model.named_parameters() if p.grad is not None),
        key=lambda item: item[1].numel(),
    )
    # What several ranks hold has one gradient on all of them.
    if team.rank % bench.num_parts == bench.num_parts - 1:
        gradient[(0,) * gradient.ndim] = float("nan")
    reaction = _step(bench.optimizer)
    bench.optimizer.zero_grad(set_to_none=True)
    same = _all_weights_sha256(bench) == before
    planted = team.gather(name)[-1] + (f" on rank {team.size - 1}" if bench.num_parts > 1 else "")
    return Outcome(
        holds=team.all(reaction != "taken") and same,
        detail=f"NaN planted in {planted}: step {reaction}, SHA-256 of all weights {before[:12]}… "
        f"{'unchanged' if same else 'CHANGED'}",
    )


def _all_weights_sha256(bench: Bench) -> str:
    """Return the SHA-256 of the weights, over what all ranks hold."""
    found = bench.team.gather(weights_sha256(bench.model))
    return found[0] if len(found) == 1 else hashlib.sha256("\n".join(found).encode()).hexdigest()


def _step(optimizer: muonloom.Muon) -> str:
    """Return what became of a step: taken, skipped, or (without `skip_nonfinite`) refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer's own warning of the skip
            optimizer.step()
    except FloatingPointError:
        return "refused"
    return "skipped" if optimizer.last_step["skipped"] else "taken"


# Three steps on one gradient of the model; the last turns against the momentum.
_FACTORS = (1.0, 0.5, -1.0)


@dataclass(frozen=True, kw_only=True)
class _Reached:
    """Where a copy of the model got to."""

    weights: str  # SHA-256
    state: str  # SHA-256


def placements_agree(bench: Bench) -> Outcome:
    """Take the same steps on two copies, one in each placement, and compare every byte.

    One copy is there at a time: beside the run's own memory it takes a model, its state and a gradient.
    """
    bench.backward()
    gradients = {n: p.grad for n, p in bench.model.named_parameters() if p.grad is not None}
    bench.optimizer.zero_grad(set_to_none=True)
    before = state_sha256(bench.optimizer)
    device, host = (_reached(bench, gradients, where) for where in ("device", bench.host))
    if before in (device.state, host.state):
        return Outcome(
            holds=False, detail="the steps changed nothing, so there is nothing to compare"
        )
    same = device == host
    return Outcome(
        holds=same,
        detail=f"{len(_FACTORS)} steps on a copy each: SHA-256 of weights {host.weights[:12]}… and state "
        f"{host.state[:12]}… {'in both' if same else 'on the host, OTHERS on the device'}",
    )


def _reached(
    bench: Bench, gradients: Mapping[str, Tensor], placement: str | muonloom.HostPlacement
) -> _Reached:
    model = copy.deepcopy(bench.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user was warned when the run's own optimizer was made
        optimizer = bench.rebuild(model, placement)
    optimizer.load_state_dict(bench.optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])  # a schedule may end at 0
    for factor in _FACTORS:
        for name, parameter in model.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient * factor
        optimizer.step()
    optimizer.drain()
    return _Reached(weights=weights_sha256(model), state=state_sha256(optimizer))


PROOFS: tuple[Proof, ...] = (
    Proof(claim="A NaN gradient changes nothing", show=nan_gradient_is_skipped),
    Proof(claim="Host and device placement give the same bits", show=placements_agree),
)


def replicas_agree(bench: Bench) -> Outcome:
    """Compare the bytes of weights that several ranks hold."""
    found = bench.team.gather(weights_sha256(bench.model))
    same = all(found[rank] == found[rank % bench.num_parts] for rank in range(len(found)))
    copies = len(found) // bench.num_parts
    return Outcome(
        holds=same,
        detail=f"SHA-256 of the weights {found[0][:12]}… on rank 0, "
        f"{'the same' if same else 'OTHERS'} in all {copies} copies",
    )


REPLICAS = Proof(claim="All ranks hold the same bits", show=replicas_agree)


def choose_proofs(*, can_copy: bool, team: Team, num_parts: int) -> tuple[Proof, ...]:
    """Return those that can be shown.

    Args:
        can_copy: whether model and state can be copied: an engine's experts cannot, nor what ranks share.
        team: the run's ranks.
        num_parts: over how many ranks one copy of the weights is spread.
    """
    nan, placements = PROOFS
    if can_copy:
        return (nan, placements)
    return (nan, REPLICAS) if team.size > num_parts else (nan,)


def run_proofs(bench: Bench, proofs: tuple[Proof, ...] = PROOFS) -> list[ProofRecord]:
    """Run each proof; an exception is a claim that does not hold, unless memory is what it lacks."""
    records = []
    for proof in proofs:
        begin = time.perf_counter()
        try:
            outcome = proof.show(bench)
        except LostRanksError:
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            outcome = Outcome(holds=None, detail=f"not shown, for lack of memory: {error}")
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
