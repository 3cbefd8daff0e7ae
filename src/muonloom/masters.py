"""FP32 masters of parameters that are not FP32: made, checked against their weights, rebuilt, read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonloom.errors import StaleMasterError, complaint

State = dict[str, Tensor]


class MasterBook:
    """Knows for each parameter which version of its weight the master describes."""

    def __init__(self) -> None:
        self._versions: dict[Tensor, int] = {}

    def ensure(self, parameter: Tensor, state: State) -> None:
        """Make the master from the weight where one is needed and missing."""
        if parameter.dtype == torch.float32 or "master_weight" in state:
            return
        self.rebuild(parameter, state)

    def rebuild(self, parameter: Tensor, state: State) -> None:
        """Take the master from the weight, in place where it exists."""
        if parameter.dtype == torch.float32:
            return
        if "master_weight" in state:
            state["master_weight"].copy_(parameter.detach())
        else:
            state["master_weight"] = parameter.detach().to(torch.float32)
        self.note(parameter)

    def note(self, parameter: Tensor) -> None:
        """Remember that weight and master agree now."""
        if parameter.dtype != torch.float32:
            self._versions[parameter] = parameter._version

    def doubt(self, parameter: Tensor) -> None:
        """Have the next `check` compare the values."""
        self._versions.pop(parameter, None)

    def check(self, name: str, parameter: Tensor, state: State) -> None:
        """Raise where the weight was written from outside since the master was last in step with it.

        A write that left the very bits that the master rounds to (loading both from one checkpoint)
        is none. An edit through ``.data`` is not seen: call `refresh_masters` after it.
        """
        master = state.get("master_weight")
        if master is None or self._versions.get(parameter) == parameter._version:
            return
        if torch.equal(master.to(parameter.dtype), parameter.detach()):
            self.note(parameter)
            return
        raise StaleMasterError(
            complaint(
                name,
                got="a weight that was written outside the optimizer",
                wanted="the weight that its FP32 master rounds to",
                remedy="Call refresh_masters() after loading weights, before the next step.",
            )
        )

    def edit(
        self, name: str, parameter: Tensor, state: State, fn: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Change the master by `fn` and write the weight again; a non-finite result changes nothing."""
        self.ensure(parameter, state)
        master = state.get("master_weight", parameter.detach())
        edited = master.clone()
        returned = fn(edited)
        if returned is not None:
            edited = returned.to(master)
        if edited.shape != master.shape or not bool(torch.isfinite(edited).all()):
            raise ValueError(
                complaint(
                    name,
                    got=f"a master of shape {tuple(edited.shape)}, non-finite or misshapen",
                    wanted=f"finite values of shape {tuple(master.shape)}",
                    remedy="This parameter was not changed; mend the function.",
                )
            )
        master.copy_(edited)
        parameter.detach().copy_(master)
        self.note(parameter)
