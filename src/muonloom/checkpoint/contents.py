"""What a checkpoint has beside the optimizer's own: the caller's, and the rest of the model."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.by_name import reading
from muonloom.checkpoint.manifest import DTYPE_NAMES
from muonloom.dtensors import boxes, is_dtensor, local_part, mesh_ranks
from muonloom.errors import complaint
from muonloom.failures import storage_given_up
from muonloom.hollow import is_hollow, is_released
from muonloom.model_tensors import unwrapped
from muonloom.optimizer import Muon
from muonloom.ranks import num_ranks, this_rank
from muonloom.segments import Place, SnapshotTensor
from muonloom.transfers import storage_order

_SAMPLED = 32


def extra_bytes(extra: Any) -> bytes:
    """Return the content of the file for what the caller gives.

    Raises:
        TypeError: it could not be loaded again.
    """
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TypeError(
            complaint(
                "extra",
                got=f"a value that cannot be loaded again safely ({reason[0]})",
                wanted="numbers, strings, tensors, and lists and dictionaries of them",
                remedy="Save state_dict()s instead of objects.",
            )
        ) from None
    return buffer.getvalue()


def other_tensors(optimizer: Muon, names: Mapping[Tensor, str]) -> list[SnapshotTensor]:
    """Return what the optimizer does not hold, or this rank's parts of it.

    Reading a parameter that was changed meanwhile raises. What all ranks seem to hold alike is sampled: it
    is saved once.
    """
    others = {t: name for t, name in names.items() if t not in optimizer._assignments}
    found = {t: _readable(t, name, optimizer.released_copy(t)) for t, name in others.items()}
    alike = [t for t in others if isinstance(t, nn.Parameter) and not is_dtensor(t)]
    samples = _samples([found[t] for t in alike]) if num_ranks() > 1 else [""] * len(alike)
    sample_of: dict[Tensor, str] = dict(zip(alike, samples, strict=True))
    return [
        _other_tensor(name, found[t], _place(t, name, sample_of.get(t, "")))
        for t, name in others.items()
    ]


def _readable(tensor: Tensor, name: str, copy: Tensor | None) -> Tensor:
    """Return what is read in place of a tensor: this rank's part, a copy of it on the host."""
    if copy is None and (is_hollow(tensor) or is_released(tensor)):
        raise storage_given_up(name, wanted="a weight to save")
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(
            complaint(
                name,
                got=f"a tensor of {tensor.dtype}",
                wanted=f"one of {', '.join(DTYPE_NAMES.values())}",
                remedy="Register it with persistent=False, or save it in `extra`.",
            )
        )
    found = local_part(tensor if copy is None else copy).detach()
    is_fixed = isinstance(tensor, nn.Parameter)  # a forward pass may change a buffer
    return found if is_fixed else found.to("cpu", copy=True)


def _place(tensor: Tensor, name: str, sample: str) -> Place:
    whole = tuple(tensor.shape)
    if not is_dtensor(tensor):
        is_equal = isinstance(tensor, nn.Parameter)
        start = (0,) * len(whole)
        return Place(whole=whole, offsets=start, is_equal=is_equal, sample=sample)
    ranks, held = mesh_ranks(tensor), boxes(tensor, name)
    own = held[ranks.index(this_rank())]
    holders = tuple(r for r, box in zip(ranks, held, strict=True) if box == own)
    return Place(whole=whole, offsets=own.offsets, ranks=ranks, holders=holders)


def _other_tensor(name: str, found: Tensor, place: Place) -> SnapshotTensor:
    version, plain = _version(found), reading(found)

    def read(rows: slice, out: Tensor) -> None:
        plain(rows, out)
        if _version(found) != version:
            raise RuntimeError(
                complaint(
                    name,
                    got="a parameter, not of the optimizer, that was written while it was saved",
                    wanted="one that nobody writes before the save is finished",
                    remedy="Call the handle's result() first.",
                )
            )

    return SnapshotTensor(
        key=f"model.{name}", dtype=found.dtype, shape=tuple(found.shape), read=read, place=place
    )


def _samples(tensors: Sequence[Tensor]) -> list[str]:
    """Return what tells tensors apart, as far as a few elements do; a device is asked once."""
    words = [_some_bytes(tensor) for tensor in tensors]
    if not words:
        return []
    near = torch.cat([word.to(words[0].device) for word in words]).cpu()
    parts = torch.split(near, [word.numel() for word in words])
    return [hashlib.sha256(bytes(part.tolist())).hexdigest() for part in parts]


def _some_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.permute(storage_order(tensor)).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone().view(torch.uint8)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def description(model: nn.Module) -> dict[str, Any] | None:
    """Return class and configuration of a model of transformers, so that it can be built again."""
    bare = unwrapped(model)
    to_json = getattr(getattr(bare, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    return {"class": type(bare).__name__, "config": json.loads(to_json(use_diff=False))}
