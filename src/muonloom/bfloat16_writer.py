"""A writer of plain BF16 weights, in a tensor of its own or in the parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from muonloom.bits import rounds_to, rows_of
from muonloom.errors import complaint
from muonloom.hollow import is_released


class BFloat16Writer:
    """Writes the master rounded to nearest even: to `data`, or to the parameter itself in its own dtype.

    Attributes:
        data: BF16, shaped as the parameter, or None.
        storage: `data`.
    """

    def __init__(self, data: Tensor | None = None) -> None:
        """Take the tensor to fill.

        Args:
            data: BF16, shaped as the parameter, on its device. None: the parameter is filled.

        Raises:
            ValueError: `data` is not BF16.
        """
        if data is not None and data.dtype != torch.bfloat16:
            raise ValueError(
                complaint(
                    "data",
                    got=data.dtype,
                    wanted=torch.bfloat16,
                    remedy="Pass a BF16 tensor; without one the parameter itself is filled.",
                )
            )
        self.data = data
        self._param: Tensor | None = None

    @property
    def storage(self) -> object:
        """`data`: what stands in for the parameter's storage."""
        return self.data

    def prepare(self, param: Tensor) -> None:
        """Check that `param` can be written here.

        Raises:
            ValueError: `data` has another shape or device than `param`, or there is none and the
                parameter's own storage was released.
        """
        if self.data is None:
            _require_storage(param)
        elif self.data.shape != param.shape or self.data.device != param.device:
            raise ValueError(
                complaint(
                    "BFloat16Writer.data",
                    got=f"{tuple(self.data.shape)} on {self.data.device}",
                    wanted=f"the parameter's {tuple(param.shape)} on {param.device}",
                    remedy="Give each parameter a writer with a tensor of its own.",
                )
            )
        self._param = param

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        """Round `master`, FP32 shaped as ``param[rows]``, into these rows."""
        rows_of(self._target(param), rows).copy_(master)

    def read(self, param: Tensor) -> Tensor:
        """Return the weight as a new FP32 tensor, shaped as `param`."""
        return self._target(param).to(torch.float32, copy=True)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensor that it fills: `data`, or the parameter for which it was prepared."""
        target = self._param if self.data is None else self.data
        return () if target is None else (target,)

    def rows_per_block(self, param: Tensor) -> int:
        """Return 1: rows share nothing."""
        return 1

    def agrees(self, param: Tensor, master: Tensor) -> bool:
        """Return whether the weight is `master` (FP32, shaped as `param`) rounded, bit for bit."""
        return rounds_to(master, self._target(param))

    def _target(self, param: Tensor) -> Tensor:
        return (param if self.data is None else self.data).detach()


def _require_storage(param: Tensor) -> None:
    if is_released(param):
        raise ValueError(
            complaint(
                "BFloat16Writer.data",
                got="None, for a parameter whose storage was released",
                wanted="a BF16 tensor shaped as the parameter",
                remedy="Pass data=, or give the parameter its storage back.",
            )
        )
