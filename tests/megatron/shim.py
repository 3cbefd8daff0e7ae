"""What lets Megatron-Core run on a CPU: stand-ins for the CUDA calls that it makes unasked.

Importing this module imports Megatron-Core, without the warnings that it gives for what is not installed.
`apply` is for processes of ranks alone: it changes `torch.cuda` until the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import typing_extensions
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Warnings of Megatron-Core itself are not ours: left out here and in conftest.py.
MODULES = r"megatron\.core\."
# And those of torch over what Megatron-Core calls.
OVER_CALLS = (
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    r"torch\.distributed is disabled, unavailable or uninitialized",
    r"The argument order of load has been changed",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)

if not hasattr(typing, "override"):  # Python 3.11, where emerging-optimizers wants it
    typing.override = typing_extensions.override

# Megatron-Core puts its own in place of this; whoever unpickled a tensor of ours would have to import it.
_load_from_bytes = torch.storage._load_from_bytes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import optimizer  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models import gpt  # noqa: F401
    from megatron.core.tensor_parallel import random
torch.storage._load_from_bytes = _load_from_bytes


class Stream:
    """A stream or event of a device that does all in the order in which it is told."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> Stream:
        return self

    def wait(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class _OnCPU(TorchFunctionMode):
    """Has the CPU take the place of CUDA where calls name a device, and where types are told."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is Tensor.to:
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def apply() -> None:
    """Change `torch.cuda` and Megatron-Core in this process, for good."""
    if torch.cuda.Stream is Stream:
        return
    stream = Stream()
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.compiler.set_stance("force_eager")  # what is compiled takes tens of seconds on a CPU
    filesystem_async._results_queue = queue.Queue()  # else a process, which ranks cannot start
    warnings.filterwarnings("ignore", module=MODULES)
    for message in OVER_CALLS:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    _OnCPU().__enter__()
