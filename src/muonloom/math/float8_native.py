"""The compiled forms of `float8` for CPUs: built by the system's C compiler at their first use.

torch has no vectorized casts of e4m3 for every CPU, and each of its operations passes over memory. Where no
compiler is, or it fails, one line in the log says so and torch's operations do the same, byte for byte.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("float8.c")
# No fast-math: its reciprocals and flushed denormals would give other bytes. Without traps a choice between
# two numbers can compute both, which vectorizing needs.
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
_ATTEMPTS: tuple[tuple[str, ...], ...] = (("-march=native", "-fopenmp"), ("-march=native",), ())
_TIMEOUT_S = 60
_LOCK = threading.RLock()  # streams are threads on some backends


class Kernels:
    """Both kernels of one loaded library. All tensors are contiguous, on the CPU, and not empty."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._encode = _address(library.muonloom_encode_float8)
        self._decode = _address(library.muonloom_decode_float8)

    def encode_(
        self,
        master: Tensor,
        data: Tensor,
        scale_inv: Tensor,
        *,
        block: tuple[int, int],
        power_of_two: bool,
    ) -> None:
        """Do what `float8.encode_float8_` does."""
        tensors = (master.detach(), data, scale_inv)
        _operators().encode_float8(self._encode, *tensors, *block, power_of_two)
        torch.autograd.graph.increment_version((data, scale_inv))

    def decode_(
        self, data: Tensor, scale_inv: Tensor, out: Tensor, *, block: tuple[int, int]
    ) -> None:
        """Do what `float8.decode_float8` does; `out` is FP32 or BF16."""
        _operators().decode_float8(self._decode, data, scale_inv, out, *block)
        torch.autograd.graph.increment_version(out)


# Three tensors, five sizes, two flags, and how many threads.
_FUNCTION = ctypes.CFUNCTYPE(
    None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 5, *[ctypes.c_int32] * 2, ctypes.c_int64
)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _operators() -> Any:
    with _LOCK:
        return _defined()


@functools.cache
def _defined() -> Any:
    """Make the kernels operators of torch, so that dispatch modes (staging's checker) see what they touch.

    The address of the kernel is an argument.
    """
    library: Any = torch.library
    for name, arguments, run in (
        ("encode_float8", "Tensor master, Tensor(a!) data, Tensor(b!) scale_inv", _encode),
        ("decode_float8", "Tensor data, Tensor scale_inv, Tensor(a!) out", _decode),
    ):
        flags = ", bool power_of_two" if run is _encode else ""
        schema = f"(int kernel, {arguments}, int rows, int columns{flags}) -> ()"
        library.define(f"muonloom::{name}", schema)
        library.impl(f"muonloom::{name}", "CPU", run)
    return torch.ops.muonloom


def _encode(
    kernel: int,
    master: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    rows: int,
    columns: int,
    power_of_two: bool,
) -> None:
    arguments = _arguments((master, data, scale_inv), (rows, columns))
    _FUNCTION(kernel)(*arguments, power_of_two, *_sizes(scale_inv))


def _decode(
    kernel: int, data: Tensor, scale_inv: Tensor, out: Tensor, rows: int, columns: int
) -> None:
    arguments = _arguments((data, scale_inv, out), (rows, columns))
    _FUNCTION(kernel)(*arguments, out.dtype.itemsize, *_sizes(scale_inv))


def _arguments(tensors: tuple[Tensor, ...], block: tuple[int, int]) -> tuple[int, ...]:
    m, n = tensors[0].shape[-2:]
    places = (tensor.data_ptr() for tensor in tensors)
    return (*places, tensors[0].numel() // (m * n), m, n, *block)


def _sizes(scale_inv: Tensor) -> tuple[int, int]:
    return scale_inv.dtype.itemsize, torch.get_num_threads()


def kernels() -> Kernels | None:
    """Return the compiled kernels, built at the first call of the process; None where that fails."""
    with _LOCK:
        return _kernels()


@functools.cache
def _kernels() -> Kernels | None:
    try:
        return Kernels(_loaded())
    except (OSError, subprocess.SubprocessError) as error:
        _log.info(
            "FP8 weights are converted by torch's operations, without compiled kernels: %s", error
        )
        return None


def _loaded() -> ctypes.CDLL:
    """Compile and load the library; its file is gone again after that.

    Raises:
        OSError: no compiler, or a library that cannot be loaded.
        subprocess.SubprocessError: the compiler failed in every way that was tried.
    """
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"there is no C compiler ({words[0]}, by CC or its default)")
    with tempfile.TemporaryDirectory(prefix="muonloom-") as folder:
        library = Path(folder) / "float8.so"
        for attempt, flags in enumerate(_ATTEMPTS, 1):
            command = [*words, *_FLAGS, *flags, str(_SOURCE), "-o", str(library)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
                return ctypes.CDLL(str(library))
            except (OSError, subprocess.SubprocessError):
                if attempt == len(_ATTEMPTS):
                    raise
    raise AssertionError("unreachable")
