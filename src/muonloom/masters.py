"""FP32 masters of parameters that are not FP32: made, checked against their weights, rebuilt, read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from muonloom.errors import StaleMasterError, complaint

State = dict[str, Tensor]

_SAMPLED_WORDS = 64


class MasterBook:
    """Knows for each parameter which version of its weight the master describes.

    Versions and addresses tell of most writes from outside. Edits through ``.data`` leave no trace, so
    some words of every weight are kept on the device, and compared for all weights of it at once.
    """

    def __init__(self) -> None:
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._samples: dict[Tensor, Tensor] = {}

    def ensure(self, parameter: Tensor, state: State) -> None:
        """Make the master from the weight where one is needed and missing."""
        if parameter.dtype != torch.float32 and "master_weight" not in state:
            self.rebuild(parameter, state)

    def rebuild(self, parameter: Tensor, state: State) -> None:
        """Take the master from the weight, in place where it exists; drop it where none is needed."""
        if parameter.dtype == torch.float32:
            state.pop("master_weight", None)
            self._versions.pop(parameter, None)
            self._samples.pop(parameter, None)
            return
        if "master_weight" in state:
            state["master_weight"].copy_(parameter.detach())
        else:
            state["master_weight"] = parameter.detach().to(torch.float32)
        self.note([parameter])

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Remember that these weights agree with their masters now, and sample them."""
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                self._versions[parameter] = _mark(parameter)
                self._samples[parameter] = _sample(parameter).clone()

    def suspicion(self) -> Tensor | None:
        """Return a bool scalar on the device: whether a sampled word of any weight has changed.

        None where there is nothing to compare. It is read together with the guard's other numbers.
        """
        pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for parameter, sample in self._samples.items():
            now = _sample(parameter)
            if now.shape != sample.shape or now.device != sample.device:
                return torch.ones((), dtype=torch.bool, device=parameter.device)
            pairs.setdefault(now.device, []).append((now, sample))
        flags = [
            (torch.cat([now for now, _ in both]) != torch.cat([old for _, old in both])).any()
            for both in pairs.values()
        ]
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else None

    def doubt(self, parameter: Tensor) -> None:
        """Have the next `check` of a parameter compare its values."""
        if self._versions.get(parameter) is not None:
            self._versions[parameter] = (-1, 0)
        self._samples.pop(parameter, None)

    def doubt_all(self) -> None:
        """Have the next `check` of each parameter compare its values, whenever that comes."""
        for parameter in list(self._versions):
            self.doubt(parameter)

    def check(self, name: str, parameter: Tensor, state: State) -> None:
        """Raise where the weight was written from outside since the master was last in step with it.

        A write that left the very bits that the master rounds to (loading both from one checkpoint)
        is none. An edit through ``.data`` that misses every sampled word is not seen: call
        `refresh_masters` after it.
        """
        master = state.get("master_weight")
        if master is None or (
            parameter.dtype != torch.float32 and self._versions.get(parameter) == _mark(parameter)
        ):
            return
        if parameter.dtype != torch.float32 and _same_bits(master, parameter):
            self.note([parameter])
            return
        raise StaleMasterError(
            complaint(
                name,
                got=f"a {parameter.dtype} weight that was written outside the optimizer",
                wanted="the weight that its FP32 master rounds to",
                remedy="Call refresh_masters() after loading weights, before the next step.",
            )
        )

    def replace(self, parameter: Tensor, state: State, values: Tensor) -> None:
        """Give the master new values, and write the weight from them."""
        self.ensure(parameter, state)
        if "master_weight" in state:
            state["master_weight"].copy_(values)
        parameter.detach().copy_(values)
        self.note([parameter])


def edited_master(
    name: str, parameter: Tensor, state: State, fn: Callable[[Tensor], Tensor | None]
) -> Tensor:
    """Return what `fn` makes of a copy of the master; raise a ValueError where that is unusable."""
    values = state.get("master_weight", parameter.detach()).to(torch.float32, copy=True)
    shape = values.shape
    returned = fn(values)
    values = values if returned is None else returned
    usable = values.shape == shape and values.is_floating_point()
    if usable:
        values = values.to(torch.float32)
        usable = bool(torch.isfinite(values).all())
        usable = usable and bool(torch.isfinite(values.to(parameter.dtype)).all())
    if not usable:
        raise ValueError(
            complaint(
                name,
                got=f"{values.dtype} of shape {tuple(values.shape)}, not finite in "
                f"{parameter.dtype} or misshapen",
                wanted=f"finite floats of shape {tuple(shape)}",
                remedy="Nothing was written; mend the function.",
            )
        )
    return values


def _same_bits(master: Tensor, parameter: Tensor) -> bool:
    return torch.equal(_bits(master.to(parameter.dtype)), _bits(parameter.detach()))


def _bits(tensor: Tensor) -> Tensor:
    """The words of a 16-bit tensor, which compare equal exactly where the bits are."""
    return tensor.view(torch.int16) if tensor.element_size() == 2 else tensor


def _sample(parameter: Tensor) -> Tensor:
    """Some words of the weight, spread over its storage; a view where that has no holes."""
    strides = parameter.stride()
    order = sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
    flat = _bits(parameter.detach()).permute(order).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_WORDS)]


def _mark(parameter: Tensor) -> tuple[int, int]:
    """What changes when somebody writes the weight in place, or puts another storage under it."""
    return parameter._version, parameter.data_ptr()
