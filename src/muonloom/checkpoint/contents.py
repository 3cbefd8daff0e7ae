"""What a checkpoint has beside the optimizer's own: the caller's, and the rest of the model."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.by_name import reading
from muonloom.checkpoint.manifest import DTYPE_NAMES
from muonloom.errors import complaint
from muonloom.failures import storage_given_up
from muonloom.hollow import is_hollow, is_released
from muonloom.model_tensors import unwrapped
from muonloom.optimizer import Muon
from muonloom.segments import SnapshotTensor


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
    """Return what the optimizer does not hold; reading a parameter that was changed meanwhile raises."""
    return [
        _other_tensor(name, tensor, optimizer.released_copy(tensor))
        for tensor, name in names.items()
        if tensor not in optimizer._assignments
    ]


def _other_tensor(name: str, tensor: Tensor, copy: Tensor | None) -> SnapshotTensor:
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
    found = (tensor if copy is None else copy).detach()
    if not isinstance(tensor, nn.Parameter):
        found = found.to("cpu", copy=True)  # a forward pass may change it
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
        key=f"model.{name}", dtype=found.dtype, shape=tuple(found.shape), read=read
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def description(model: nn.Module) -> dict[str, Any] | None:
    """Return class and configuration of a model of transformers, so that it can be built again."""
    bare = unwrapped(model)
    to_json = getattr(getattr(bare, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    return {"class": type(bare).__name__, "config": json.loads(to_json(use_diff=False))}
