"""Writers: what turns a finished FP32 master into the weight that forward and backward read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Parameter


@runtime_checkable
class Writer(Protocol):
    """Writes one parameter's device weight, and reads it back.

    A writer may say more than this; what it leaves out is taken as told:

    * ``tensors() -> tuple[Tensor, ...]``: the tensors that it fills, by which memory is counted and given
      back and, together with `agrees`, writes from outside are noticed (none);
    * ``rows_per_block(param) -> int``: how many rows of dimension 0 share something, as a scale (1);
    * ``prepare(param)``: called once when it is registered, to allocate and fill what is missing (nothing);
    * ``agrees(param, master) -> bool``: whether it holds the very bytes that `master` gives (unknown);
    * ``take_source(param) -> Tensor | None``: hands out, once, what its weight was made from, so that the
      master starts from that, shaped as `param` in any float dtype (None: the master starts from the
      parameter where it has storage, else from `read`);
    * ``set_source(tensor)``: takes it back, where no master came of it.
    """

    @property
    def storage(self) -> object:
        """Identity: what may stand in for released parameter storage; None: nothing does."""

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        """Write ``param[rows]``, on the compute stream of the rank that owns it.

        Args:
            param: whose weight it is. Its own storage may have been given up.
            master: FP32, shaped as ``param[rows]``, contiguous, on the parameter's device; read only, and
                gone after the call (on the stream).
            rows: of dimension 0, whole write atoms. A 0-D parameter is written as ``slice(0, 1)``.
        """

    def read(self, param: Tensor) -> Tensor:
        """Return the device weight as FP32, shaped as `param`."""


class ExpertEngine(Protocol):
    """Owns device weights of some parameters, and plugs in by `Muon.bind` or `install_expert_engine`."""

    def named_writers(self) -> Iterable[tuple[Parameter, Writer]]:
        """Yield each parameter that it holds, with its writer: the same objects every time."""

    def before_step(self, optimizer: Any) -> None:
        """Called as a step begins, before gradients are looked at."""

    def after_step(self, optimizer: Any, skipped: bool) -> None:
        """Called when `step` returns; not where it raises.

        Under `Muon.overlap_forward` late weights may still be on their way; ``optimizer.drain()`` waits.
        """

    def release(self, params: Iterable[Parameter]) -> None:
        """Give back the device memory of these weights."""

    def resume(self, params: Iterable[Parameter]) -> None:
        """Allocate it again, of any content: the optimizer writes all of it then."""
