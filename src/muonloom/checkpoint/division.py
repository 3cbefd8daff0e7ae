"""Which rank writes which part of which tensor: each part once, spread over the ranks that hold it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from muonloom.errors import complaint
from muonloom.roll_call import named
from muonloom.segments import SnapshotTensor

Claims = Mapping[str, "Claim"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one rank says of a tensor that it has a part of; all of them have to say the same.

    Attributes:
        dtype: of the values saved.
        whole: shape of all of the tensor.
        ranks: that hold parts of it; None: whoever names it has all of it.
        sample: of the values, where copies should be equal.
    """

    dtype: str
    whole: tuple[int, ...]
    ranks: tuple[int, ...] | None
    sample: str

    def __str__(self) -> str:
        held = "" if self.ranks is None else f", shared by {named(self.ranks)} alone"
        sample = f", other values ({self.sample[:8]})" if self.sample else ""
        return f"{self.dtype} {self.whole}{held}{sample}"


def claims_of(tensors: Iterable[SnapshotTensor]) -> dict[str, Claim]:
    """Return what this rank claims, by key."""
    return {
        tensor.key: Claim(
            dtype=str(tensor.dtype).removeprefix("torch."),
            whole=tensor.home.whole,
            ranks=tensor.home.ranks,
            sample=tensor.home.sample,
        )
        for tensor in tensors
    }


def digest(claims: Claims) -> str:
    """Return what is the same where claims are."""
    text = "\n".join(f"{key} {claims[key]!r}" for key in sorted(claims))
    return hashlib.sha256(text.encode()).hexdigest()


def holders_of(by_rank: Sequence[Claims]) -> dict[str, tuple[int, ...]]:
    """Return for each tensor which ranks have it, or a part of it.

    Args:
        by_rank: what each rank claims.

    Raises:
        ValueError: they contradict each other: one would be saved in place of the other, or not all of it.
    """
    found: dict[str, dict[Claim, list[int]]] = {}
    for rank, claims in enumerate(by_rank):
        for key, claim in claims.items():
            found.setdefault(key, {}).setdefault(claim, []).append(rank)
    holders: dict[str, tuple[int, ...]] = {}
    for key, versions in found.items():
        if len(versions) > 1:
            raise _contradiction(key, versions)
        ((claim, ranks),) = versions.items()
        holders[key] = tuple(ranks)
        absent = set(claim.ranks or ranks) - set(ranks)
        if absent:
            raise _incomplete(key, ranks, sorted(absent))
    return holders


def own_parts(
    tensors: Iterable[SnapshotTensor], *, rank: int, holders: Mapping[str, tuple[int, ...]]
) -> list[SnapshotTensor]:
    """Return what of its parts a rank is to write.

    All ranks that hold the same parts decide alike, and each on its own: what they have in common is shared
    out by size.

    Args:
        tensors: this rank's parts.
        rank: this one.
        holders: by key, who has a tensor whose place names no ranks.
    """
    parts = list(tensors)
    common: dict[tuple[int, ...], list[SnapshotTensor]] = {}
    for tensor in parts:
        place = tensor.home
        if math.prod(tensor.shape) or not math.prod(place.whole):
            held = place.holders or place.ranks or holders[tensor.key]
            held = held if place.is_equal else held[:1]
            common.setdefault(held, []).append(tensor)
    own = {tensor for held, found in common.items() for tensor in _share(found, held, rank)}
    return [tensor for tensor in parts if tensor in own]


def _share(
    tensors: Sequence[SnapshotTensor], holders: Sequence[int], rank: int
) -> Iterator[SnapshotTensor]:
    """Yield a rank's share of what the same ranks hold; the largest are given away first."""
    loads = dict.fromkeys(holders, 0)
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.key)):
        chosen = min(holders, key=loads.__getitem__)
        loads[chosen] += tensor.nbytes
        if chosen == rank:
            yield tensor


def _contradiction(key: str, versions: Mapping[Claim, Sequence[int]]) -> ValueError:
    told = "; ".join(f"{claim} on {named(ranks)}" for claim, ranks in versions.items())
    return ValueError(
        complaint(
            key.removeprefix("model."),
            got=told,
            wanted="one tensor of this name",
            remedy="What ranks hold different parts of has to be a DTensor over the mesh of all of them "
            "(Shard(0) for experts); what they hold alike needs one process_group.",
        )
    )


def _incomplete(key: str, ranks: Sequence[int], absent: Sequence[int]) -> ValueError:
    return ValueError(
        complaint(
            key,
            got=f"parts on {named(ranks)}, and none on {named(absent)}",
            wanted="one on each rank that shares it",
            remedy="Load a checkpoint on all ranks, or take a step.",
        )
    )
