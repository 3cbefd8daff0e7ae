"""What is to be saved: checked on each rank, and agreed on by all before anything is written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.checkpoint.contents import description, extra_bytes, other_tensors
from muonloom.checkpoint.division import Claim, claims_of, digest, holders_of, own_parts
from muonloom.checkpoint.files import new_nonce
from muonloom.checkpoint.manifest import SavedParameter
from muonloom.checkpoint.options import plain_groups, refuse_other_optimizer, saved_parameters
from muonloom.checkpoint.sharded import gather_back
from muonloom.checkpoint.together import ask
from muonloom.errors import complaint
from muonloom.model_tensors import names_by_tensor
from muonloom.optimizer import Muon
from muonloom.ranks import this_rank
from muonloom.roll_call import named
from muonloom.segments import SnapshotTensor
from muonloom.version import __version__


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank wants to save.

    Attributes:
        path: of the checkpoint.
        step: see `save`.
        keep_last: see `save`.
        nonce: of the files, if it is the first rank.
        digest: of the tensors that it has parts of.
    """

    path: str
    step: int
    keep_last: int | None
    nonce: str
    digest: str


@dataclass(kw_only=True)
class Draft:
    """A save of which nothing is written yet.

    Attributes:
        path: of the checkpoint.
        step: see `save`.
        keep_last: see `save`.
        extra: content of this rank's file for what the caller gave.
        tensors: this rank's parts.
        facts: fields of the manifest that are known from the start.
        parameters: of the optimizer, by name.
    """

    path: Path
    step: int
    keep_last: int | None
    extra: bytes
    tensors: list[SnapshotTensor]
    facts: Mapping[str, Any]
    parameters: Mapping[str, SavedParameter]

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Muon,
        step: int,
        extra: Any,
        keep_last: int | None,
    ) -> Draft:
        """Look at all there is; see `save`. The optimizer is drained."""
        gather_back(model)
        names = names_by_tensor(model)
        _check_names(optimizer, names)
        first = {tensor: found[0] for tensor, found in names.items()}
        return cls(
            path=Path(os.path.abspath(path)),  # the thread may meet another working directory
            step=int(step),
            keep_last=keep_last,
            extra=extra_bytes(extra),
            tensors=[*optimizer._parts_by_name(first), *other_tensors(optimizer, first)],
            parameters=saved_parameters(optimizer, first),
            facts={
                "step": int(step),
                "created_s": time.time(),
                "versions": {"muonloom": __version__, "torch": torch.__version__},
                "aliases": {name: found[0] for found in names.values() for name in found[1:]},
                "options": plain_groups(optimizer),
                "ns_batch_bytes": optimizer._ns_batch_bytes(),
                "model": description(model),
            },
        )

    @cached_property
    def _claims(self) -> dict[str, Claim]:
        return claims_of(self.tensors)

    def proposal(self) -> Proposal:
        """Return what the other ranks are told."""
        return Proposal(
            path=str(self.path),
            step=self.step,
            keep_last=self.keep_last,
            nonce=new_nonce(),
            digest=digest(self._claims),
        )

    def divide(self, proposals: Sequence[Proposal]) -> list[SnapshotTensor]:
        """Return what this rank writes.

        Raises:
            ValueError: ranks have different tensors of one name; on all of them.
        """
        everybody = tuple(range(len(proposals)))
        holders = dict.fromkeys(self._claims, everybody)
        if len({proposal.digest for proposal in proposals}) > 1:
            _, claims = ask(lambda: self._claims, lambda own: own)
            holders = holders_of(claims)
        return own_parts(self.tensors, rank=this_rank(), holders=holders)

    def parameters_of(self, parts: Sequence[SnapshotTensor]) -> dict[str, SavedParameter]:
        """Return what is saved of the parameters whose first element is in one of these parts."""
        names = {part.key.removeprefix("model.") for part in parts if not any(part.home.offsets)}
        return {name: entry for name, entry in self.parameters.items() if name in names}


def agreed(proposals: Sequence[Proposal]) -> Proposal:
    """Return the first rank's proposal.

    Raises:
        ValueError: another rank wants something else; the same on all ranks.
    """
    for field in ("path", "step", "keep_last"):
        found: dict[str, list[int]] = {}
        for rank, proposal in enumerate(proposals):
            found.setdefault(str(getattr(proposal, field)), []).append(rank)
        if len(found) > 1:
            raise ValueError(
                complaint(
                    field,
                    got="; ".join(f"{value} on {named(ranks)}" for value, ranks in found.items()),
                    wanted="the same on all ranks",
                    remedy="All ranks save one checkpoint together.",
                )
            )
    return proposals[0]


# -- what is refused ----------------------------------------------------------------------------------


def check_options(
    optimizer: object, step: object, extra_host_bytes: object, keep_last: object
) -> None:
    """Raise a TypeError or a ValueError for a bad argument of `save`."""
    refuse_other_optimizer(optimizer)
    for name, value, least in (
        ("step", step, 0),
        ("extra_host_bytes", extra_host_bytes, 0),
        ("keep_last", keep_last, 1),
    ):
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_number and (value is not None or name == "step"):
            raise ValueError(
                complaint(
                    name,
                    got=repr(value),
                    wanted=f"a whole number of {least} or more",
                    remedy="" if name == "step" else "Leave it out for the default.",
                )
            )


def _check_names(optimizer: Muon, names: Mapping[Tensor, Sequence[str]]) -> None:
    for param, known in optimizer._assignments.items():
        if param not in names:
            raise ValueError(
                complaint(
                    known.name,
                    got="a parameter of the optimizer that is not in the model",
                    wanted="the model that the optimizer was built for",
                    remedy="Pass that very model.",
                )
            )
