"""A writer of FP8 weights with one scale a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from muonloom.errors import complaint
from muonloom.hollow import is_released
from muonloom.math.float8 import decode_float8, encode_float8_, scale_shape

ScaleFormat = Literal["float32", "ue8m0"]
SCALE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float32": (torch.float32,),
    "ue8m0": (torch.float8_e8m0fnu, torch.float32),
}
"""What the scales of a format may be stored as; the first is what is allocated."""

_PIECE_NUMEL = (
    1 << 22
)  # elements that are converted at a time when a parameter is taken up or compared


class Float8Storage:
    """The tensors that stand in for a parameter's storage; who owns their memory may move them.

    Attributes:
        data: float8_e4m3fn, shaped as the parameter.
        scale_inv: FP32 or float8_e8m0fnu, shaped as `muonloom.math.float8.scale_shape` says.
    """

    def __init__(self, data: Tensor, scale_inv: Tensor) -> None:
        self.data = data
        self.scale_inv = scale_inv


class Float8BlockWriter:
    """Writes e4m3 weights and the scale of every block, as `muonloom.math.float8` defines them.

    Attributes:
        block: rows and columns that share a scale.
        scale_format: ``"float32"``, or ``"ue8m0"``: powers of two.
        storage: the `Float8Storage`, the same object for life. Both tensors are empty until `prepare`
            where none were given.
    """

    def __init__(
        self,
        block: tuple[int, int] = (128, 128),
        *,
        scale_format: ScaleFormat = "float32",
        data: Tensor | None = None,
        scale_inv: Tensor | None = None,
    ) -> None:
        """Take the tensors to fill, or none: then `prepare` allocates them.

        Args:
            block: rows and columns that share a scale, as (128, 128) or (1, 128).
            scale_format: ``"float32"`` or ``"ue8m0"``.
            data: float8_e4m3fn, shaped as the parameter, contiguous.
            scale_inv: of that shape in blocks, contiguous: FP32, or float8_e8m0fnu with ``"ue8m0"``.

        Raises:
            ValueError: one of the tensors without the other, or a dtype, shape, stride or device that does
                not fit.
        """
        if scale_format not in SCALE_DTYPES:
            raise ValueError(
                complaint(
                    "scale_format",
                    got=repr(scale_format),
                    wanted=" or ".join(map(repr, SCALE_DTYPES)),
                    remedy="ue8m0 scales are powers of two.",
                )
            )
        if not isinstance(block, tuple | list):
            raise ValueError(
                complaint("block", got=block, wanted="(rows, columns)", remedy="Use (128, 128).")
            )
        scale_shape((1, 1), block)
        self.block = (int(block[0]), int(block[1]))
        self.scale_format = scale_format
        self._allocated = data is not None or scale_inv is not None
        if self._allocated:
            _check_tensors(data, scale_inv, block=self.block, scale_format=scale_format)
        self.storage = Float8Storage(
            torch.empty(0, dtype=torch.float8_e4m3fn) if data is None else data,
            torch.empty(0, dtype=SCALE_DTYPES[scale_format][0]) if scale_inv is None else scale_inv,
        )
        self._source: Tensor | None = None

    def prepare(self, param: Tensor) -> None:
        """Check that `param` fits; allocate on its device and fill from its values where nothing was given.

        Raises:
            ValueError: less than two dimensions, another shape or device than the tensors have, or nothing
                to fill from because the parameter's storage was released.
        """
        scales = scale_shape(param.shape, self.block)
        if self._allocated:
            self._check_param(param)
            return
        if is_released(param):
            raise ValueError(
                complaint(
                    "Float8BlockWriter",
                    got="no tensors, for a parameter whose storage was released",
                    wanted="data and scale_inv, or a parameter with values",
                    remedy="Pass data= and scale_inv=, or register before the storage is released.",
                )
            )
        device = param.device
        self.storage.data = torch.empty(param.shape, dtype=torch.float8_e4m3fn, device=device)
        self.storage.scale_inv = torch.empty(
            scales, dtype=SCALE_DTYPES[self.scale_format][0], device=device
        )
        self._allocated = True
        with torch.no_grad():
            for matrix, rows in self._pieces(param):
                data, scale_inv = self._part(matrix, rows)
                self._encode(_matrix(param, matrix)[rows].to(torch.float32), data, scale_inv)

    def write(self, param: Tensor, master: Tensor, rows: slice) -> None:
        """Encode `master`, FP32 shaped as ``param[rows]``, into these rows: whole write atoms.

        Args:
            param: is not read.
            master: FP32, contiguous, on the device of the tensors.
            rows: of dimension 0; of a matrix they begin at a block and end at one, or with the matrix.
        """
        data, scale_inv = self.storage.data, self.storage.scale_inv
        scale_rows = rows if data.ndim > 2 else self._in_blocks(rows, data.shape[0])
        self._encode(master, data[rows], scale_inv[scale_rows])

    def read(self, param: Tensor) -> Tensor:
        """Return the weight as FP32, shaped as `param`, which is not read."""
        return decode_float8(self.storage.data, self.storage.scale_inv, block=self.block)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the e4m3 numbers and the scales."""
        return (self.storage.data, self.storage.scale_inv) if self._allocated else ()

    def rows_per_block(self, param: Tensor) -> int:
        """Return how many rows of dimension 0 share a scale: 1 for stacks of matrices."""
        return self.block[0] if param.ndim == 2 else 1

    def agrees(self, param: Tensor, master: Tensor) -> bool:
        """Return whether the tensors hold the very bytes that `master` gives.

        It works on pieces of 4 Mi elements, or a row of blocks where that is more; it waits for the device.

        Args:
            param: is not read.
            master: FP32, shaped as `param`, on any device.
        """
        device = self.storage.data.device
        same = torch.ones((), dtype=torch.bool, device=device)
        with torch.no_grad():
            for matrix, rows in self._pieces(master):
                held = self._part(matrix, rows)
                data, scale_inv = (torch.empty_like(tensor) for tensor in held)
                self._encode(_matrix(master, matrix)[rows].to(device), data, scale_inv)
                for fresh, present in zip((data, scale_inv), held, strict=True):
                    same &= (fresh.view(torch.uint8) == present.view(torch.uint8)).all()
        return bool(same)

    @property
    def source(self) -> Tensor | None:
        """What the weight was made from, until it is taken."""
        return self._source

    def set_source(self, source: Tensor | None) -> None:
        """Keep what the weight was made from, shaped as the parameter, for `take_source`; None: nothing."""
        self._source = source

    def take_source(self, param: Tensor) -> Tensor | None:
        """Return what `set_source` was given, once; then None."""
        source, self._source = self._source, None
        return source

    def _encode(self, master: Tensor, data: Tensor, scale_inv: Tensor) -> None:
        power_of_two = self.scale_format == "ue8m0"
        encode_float8_(master, data, scale_inv, block=self.block, power_of_two=power_of_two)

    def _pieces(self, weight: Tensor) -> Iterator[tuple[int, slice]]:
        """Yield (matrix, rows), whole blocks, that together are all of `weight` (..., m, n)."""
        if weight.numel() == 0:
            return
        m, n = weight.shape[-2:]
        step = max(1, _PIECE_NUMEL // (n * self.block[0])) * self.block[0]
        for matrix in range(weight.numel() // (m * n)):
            for start in range(0, m, step):
                yield matrix, slice(start, min(start + step, m))

    def _part(self, matrix: int, rows: slice) -> tuple[Tensor, Tensor]:
        data = _matrix(self.storage.data, matrix)
        scale_rows = self._in_blocks(rows, data.shape[0])
        return data[rows], _matrix(self.storage.scale_inv, matrix)[scale_rows]

    def _in_blocks(self, rows: slice, length: int) -> slice:
        start, stop, _ = rows.indices(length)
        assert start % self.block[0] == 0
        assert stop % self.block[0] == 0 or stop == length
        return slice(start // self.block[0], -(-stop // self.block[0]))

    def _check_param(self, param: Tensor) -> None:
        data = self.storage.data
        if data.shape != param.shape or data.device != param.device:
            raise ValueError(
                complaint(
                    "Float8BlockWriter.data",
                    got=f"{tuple(data.shape)} on {data.device}",
                    wanted=f"the parameter's {tuple(param.shape)} on {param.device}",
                    remedy="Give each parameter a writer with tensors of its own.",
                )
            )


def _matrix(weight: Tensor, index: int) -> Tensor:
    """Return matrix `index` of `weight` (..., m, n), detached."""
    weight = weight.detach()
    return weight if weight.ndim == 2 else weight.flatten(0, -3)[index]


def _check_tensors(
    data: Tensor | None, scale_inv: Tensor | None, *, block: tuple[int, int], scale_format: str
) -> None:
    if data is None or scale_inv is None:
        raise ValueError(
            complaint(
                "Float8BlockWriter",
                got="scale_inv without data" if data is None else "data without scale_inv",
                wanted="both or neither",
                remedy="FP8 weights are meaningless without their own scales.",
            )
        )
    _check("data", data, dtypes=(torch.float8_e4m3fn,), shape=data.shape)
    _check(
        "scale_inv",
        scale_inv,
        dtypes=SCALE_DTYPES[scale_format],
        shape=scale_shape(data.shape, block),
        why=f" for data {tuple(data.shape)} in blocks of {block}",
    )
    if data.device != scale_inv.device:
        raise ValueError(
            complaint(
                "scale_inv",
                got=scale_inv.device,
                wanted=f"{data.device}, where data is",
                remedy="Move one of them.",
            )
        )


def _check(
    name: str,
    tensor: Tensor,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    why: str = "",
) -> None:
    if tensor.dtype not in dtypes:
        wanted: object = " or ".join(map(str, dtypes))
        got: object = tensor.dtype
        remedy = "Other formats need a writer of their own."
    elif tuple(tensor.shape) != tuple(shape):
        got, wanted = tuple(tensor.shape), f"{tuple(shape)}{why}"
        remedy = "Pass the scales that belong to this data, or set block."
    elif not tensor.is_contiguous():
        got, wanted = f"strides {tensor.stride()}", "a contiguous tensor"
        remedy = "Pass tensor.contiguous(), and keep that one."
    else:
        return
    raise ValueError(complaint(name, got=got, wanted=wanted, remedy=remedy))
