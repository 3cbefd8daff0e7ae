"""One stacked expert weight in FP8, and the workspace in which runs of experts become plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from muonloom.errors import complaint
from muonloom.float8_writer import Float8BlockWriter
from muonloom.hollow import hollow_, is_hollow, recast_, whole_
from muonloom.math.float8 import decode_float8

HOLLOW_REMEDY = (
    "Its weight is FP8, in the expert engine: read it by model.state_dict() or engine.dequantize(), "
    "or bring the parameters back by engine.detach()."
)
RELEASED_REMEDY = "It was released: call resume first."
_ALIGNMENT = 256  # of GEMM inputs: libraries choose kernels by it


class Workspace:
    """One reusable buffer for each device and dtype, of a size that no number of experts changes."""

    def __init__(self, nbytes: int, largest_numel: int) -> None:
        """Allocate nothing yet.

        Args:
            nbytes: of each buffer, unless one expert needs more.
            largest_numel: elements of the largest expert.
        """
        self._nbytes = nbytes
        self._largest_numel = largest_numel
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes that are really allocated."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())

    def capacity(self, numel: int, dtype: torch.dtype) -> int:
        """Return how many experts of `numel` elements fit: one at least."""
        return self._numel(dtype) // numel if numel else 1

    def take(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous view of the buffer, of undefined content, valid until the next call."""
        key = (device, dtype)
        if key not in self._buffers:
            self._buffers[key] = self._allocate(dtype, device)
        flat = self._buffers[key]
        return flat[: torch.Size(shape).numel()].view(*shape)

    def drop(self) -> None:
        """Give the buffers back; they come again when they are asked for."""
        self._buffers.clear()

    def _numel(self, dtype: torch.dtype) -> int:
        return max(self._nbytes // dtype.itemsize, self._largest_numel)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = self._numel(dtype) * dtype.itemsize
        raw = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        offset = -raw.data_ptr() % _ALIGNMENT
        return raw[offset : offset + nbytes].view(dtype)


class ExpertWeight:
    """A stacked weight (experts, rows, columns): the hollow parameter, and its writer with the FP8 tensors.

    Attributes:
        name: of the parameter, in the model.
        parameter: hollow; shape, dtype, gradient and hooks are its own.
        writer: holds e4m3 numbers and scales, and until an optimizer takes it the source on the host.
    """

    def __init__(self, name: str, parameter: Parameter, writer: Float8BlockWriter) -> None:
        self.name = name
        self.parameter = parameter
        self.writer = writer

    def restore(self) -> None:
        """Bring the parameter back: what it was, while that is kept, or else the dequantized weight."""
        source, dtype = self.writer.source, self.parameter.dtype
        values = self.dequantized() if source is None else source.to(self.device, dtype)
        whole_(self.parameter).data = values

    @property
    def device(self) -> torch.device:
        """Where the FP8 tensors are."""
        return self.writer.storage.data.device

    @property
    def version(self) -> int:
        """Changes with each write."""
        return self.writer.storage.data._version

    def check_present(self) -> None:
        """Raise where the FP8 tensors were released.

        Raises:
            RuntimeError: naming the parameter.
        """
        if is_hollow(self.writer.storage.data):
            raise RuntimeError(
                complaint(
                    self.name,
                    got="a weight whose device memory was given back",
                    wanted="its FP8 tensors",
                    remedy=RELEASED_REMEDY,
                )
            )

    def decode_(self, experts: Sequence[int], out: Tensor) -> Tensor:
        """Write the dequantized weights of `experts` to `out` (len(experts), rows, columns), any float.

        Raises:
            RuntimeError: the weight is released.
        """
        self.check_present()
        storage = self.writer.storage
        with torch.no_grad():
            for place, span in _spans(experts):
                decode_float8(
                    storage.data[span],
                    storage.scale_inv[span],
                    block=self.writer.block,
                    out=out[place : place + span.stop - span.start],
                )
        return out

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole weight on its device, in `dtype` (None: the parameter's)."""
        shape = self.parameter.shape
        out = torch.empty(shape, dtype=dtype or self.parameter.dtype, device=self.device)
        return self.decode_(range(shape[0]), out)

    def quantize_(self, values: Tensor, *, unless_held: bool = False) -> None:
        """Write `values`, shaped as the parameter, of any float dtype and device; an expert at a time.

        Args:
            values: of the weight.
            unless_held: leave an expert as it is that dequantizes to these very values.
        """
        self.check_present()
        with torch.no_grad():
            for expert in range(values.shape[0]):
                rows = slice(expert, expert + 1)
                near = values[rows].detach().to(self.device).contiguous()
                if unless_held and torch.equal(
                    near, self.decode_([expert], torch.empty_like(near))
                ):
                    continue
                self.writer.write(self.parameter, near.to(torch.float32), rows)

    def load_(self, values: Tensor) -> None:
        """Write `values`, and keep them as the source where no optimizer has taken one yet.

        What `state_dict` gave is rounded to the parameter's dtype, and quantizing that anew would change
        scales: loading it where it came from, or after an optimizer wrote the weight, changes nothing.
        """
        self.quantize_(values, unless_held=True)
        if self.writer.source is not None:
            self.writer.set_source(values.detach().to("cpu", copy=True))

    def move_(self, *, dtype: torch.dtype, device: torch.device) -> None:
        """Move the FP8 tensors and the hollow parameter to `device`; only the parameter takes `dtype`."""
        recast_(self.parameter, dtype=dtype, device=device)
        storage = self.writer.storage
        if storage.data.device == device:
            return
        if is_hollow(storage.data):
            for tensor in self.writer.tensors():
                recast_(tensor, dtype=tensor.dtype, device=device)
            return
        storage.data = storage.data.to(device)
        storage.scale_inv = storage.scale_inv.to(device)

    def release(self) -> None:
        """Give back the memory of the FP8 tensors; no-op where that was done."""
        for tensor in self.writer.tensors():
            if not is_hollow(tensor):
                hollow_(tensor, self.name, RELEASED_REMEDY)

    def resume(self) -> None:
        """Allocate it again, with undefined content; no-op where it is there."""
        for tensor in self.writer.tensors():
            whole_(tensor)

    def give_up_parameter(self, device: torch.device) -> None:
        """Give up the parameter's own storage, and let it say `device`; a neighbour's memory stays."""
        parameter = self.parameter
        alone = parameter.untyped_storage().nbytes() == parameter.nbytes
        if parameter.device.type == "cpu" or not alone:
            # On the host the source goes on living in that storage; a view must not take others along.
            parameter.data = torch.empty_like(parameter.detach(), device=device)
        hollow_(parameter, self.name, HOLLOW_REMEDY)
        recast_(parameter, dtype=parameter.dtype, device=device)


def _spans(experts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (place in `experts`, slice of expert numbers) for each run of consecutive numbers."""
    start = 0
    for place in range(1, len(experts) + 1):
        if place == len(experts) or experts[place] != experts[place - 1] + 1:
            yield start, slice(experts[start], experts[place - 1] + 1)
            start = place
