"""Tensors whose storage was given up: they keep shape, gradient and hooks, and refuse to be read.

Reading a tensor whose storage has size 0 ends the process (CPU) or reads foreign memory. So a hollow
tensor's class is swapped, in place, for a subclass that lets only what needs no data through: the tensor
stays the same object, with its `.grad`, its hooks and its place in the graph. The precedent is
`torch.nn.parameter.UninitializedTensorMixin`.

What reaches a tensor's memory without asking Python cannot be refused here: `torch.tensor(hollow)`, DLPack,
an extension in C++, and a collective of `torch.distributed` that is given the tensor itself. DDP, FSDP and
FSDP2 ask Python first when they take a model over, and are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from muonloom.dtensors import local_part
from muonloom.errors import complaint


@dataclass(frozen=True, kw_only=True)
class _Hollow:
    """What a hollow tensor has to know: its name, the remedy, and what its storage held.

    Attributes:
        nbytes: of the whole storage, when it was given up.
    """

    name: str
    why: str
    nbytes: int


def hollow_(tensor: Tensor, name: str, why: str) -> Tensor:
    """Give up the storage of `tensor` and refuse all reading and writing of it from now on.

    It stays the same object, with the same `.grad`, hooks and gradient accumulator. Tensors that share the
    storage (tied weights, views) lose it as well, so each of them has to be made hollow; the storage is
    resized once. A storage that cannot be resized (of a mapped file) is replaced by an empty one.

    Args:
        tensor: a parameter or a buffer, of any shape, dtype and device; hollow already: only name and
            remedy change.
        name: what errors call it.
        why: a sentence for errors: where the values are now, or how they come back.
    """
    if is_hollow(tensor):
        tensor.__dict__["_hollow"] = _Hollow(name=name, why=why, nbytes=_record(tensor).nbytes)
        return tensor
    if not tensor.untyped_storage().resizable():
        # Never touched, and so without pages behind it on a CPU.
        tensor.data = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes() or _extent_bytes(tensor)
    tensor.__dict__["_hollow"] = _Hollow(name=name, why=why, nbytes=nbytes)
    tensor.__class__ = _guarded(type(tensor))
    storage.resize_(0)  # last: nothing unguarded is without storage, whenever this is interrupted
    return tensor


def whole_(tensor: Tensor) -> Tensor:
    """Give a hollow `tensor` its storage and class back, with undefined content; no-op on others.

    Of several that share the storage, the first call allocates it, and each has to be called on.
    """
    if not is_hollow(tensor):
        return tensor
    nbytes = _record(tensor).nbytes
    storage = tensor.untyped_storage()
    if storage.nbytes() < nbytes:
        storage.resize_(nbytes)  # first: it may find no memory, and then the tensor stays hollow
    tensor.__class__ = _original(type(tensor))
    del tensor.__dict__["_hollow"]
    return tensor


def is_hollow(tensor: object) -> bool:
    """Return whether `hollow_` was called on it, and `whole_` not since."""
    return isinstance(tensor, _Guard)


def hollow_reason(tensor: Tensor) -> str:
    """Return the sentence that `hollow_` was given."""
    return _record(tensor).why


def is_released(tensor: Tensor) -> bool:
    """Whether a tensor that has elements has no storage: reading it would crash the process."""
    held = local_part(tensor)
    return held.numel() > 0 and held.untyped_storage().nbytes() == 0


def recast_(tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Change dtype and device of a hollow `tensor`, which stays hollow and the same object.

    Its gradient is the caller's to move: torch refuses one of another dtype or device afterwards.
    The device holds the tensor's bytes for a moment: there is no other way to a storage of another kind.

    Raises:
        RuntimeError: the meta device, which torch gives a tensor only by making another.
    """
    record = _record(tensor)
    if dtype == tensor.dtype and device == tensor.device:
        return tensor
    if (device.type == "meta") != tensor.is_meta:
        raise _refusal(tensor, f"a move from {tensor.device} to {device}")
    with torch._C.DisableTorchFunctionSubclass():
        fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        nbytes = fresh.untyped_storage().nbytes()
        fresh.untyped_storage().resize_(0)
        tensor.data = fresh
    tensor.__dict__["_hollow"] = _Hollow(name=record.name, why=record.why, nbytes=nbytes)
    return tensor


class _Guard:
    """Refuses every function of torch that needs data; mixed into the tensor's own class."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let `func` through where it needs metadata only.

        Raises:
            RuntimeError: it would read or write a storage that was given up.
        """
        given = kwargs or {}
        if func in _allowed() or (func is torch.Tensor.type and len(args) == 1 and not given):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if func in (torch.Tensor.view_as, torch.Tensor.expand_as) and args[0] is args[1]:
            return _alias(args[0])
        raise _refusal(next(_hollow_in((args, given))), _called(func))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        tensor: Any = self
        record, parameter = _record(tensor), isinstance(tensor, torch.nn.Parameter)
        return (
            f"<hollow {'parameter' if parameter else 'tensor'} {record.name}: "
            f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}; {record.why}>"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: object) -> NoReturn:
        tensor: Any = self
        raise _refusal(tensor, "a deep copy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        tensor: Any = self
        raise _refusal(tensor, "pickling")


def _record(tensor: Tensor) -> _Hollow:
    record: _Hollow = tensor.__dict__["_hollow"]
    return record


@functools.cache
def _guarded(cls: type) -> type:
    return type(f"Hollow{cls.__name__}", (_Guard, cls), {"__module__": cls.__module__})


def _original(cls: type) -> type:
    return cls.__mro__[2]


def _extent_bytes(tensor: Tensor) -> int:
    """The bytes from the storage's start to the tensor's last element."""
    if tensor.numel() == 0:
        return 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + reach + 1) * tensor.element_size()


def _alias(tensor: Tensor) -> Tensor:
    """A view of all of `tensor`, as wrappers take it to find the gradient accumulator; hollow too."""
    with torch._C.DisableTorchFunctionSubclass():
        view = tensor.view_as(tensor)
    view.__dict__["_hollow"] = _record(tensor)
    view.__class__ = _guarded(type(view))
    return view


def _hollow_in(value: Any) -> Iterator[Tensor]:
    if is_hollow(value):
        yield value
    elif isinstance(value, dict):
        yield from _hollow_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _hollow_in(item)


def _called(func: Callable[..., Any]) -> str:
    descriptor = getattr(func, "__self__", None)
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(descriptor, "__name__", name)
    return f"`{name}`"


def _refusal(tensor: Tensor, what: str) -> RuntimeError:
    record = _record(tensor)
    return RuntimeError(
        complaint(
            record.name,
            got=f"{what} of a weight whose storage was given up",
            wanted="only its shape, dtype, device, gradient and hooks",
            remedy=" ".join([record.why, *_wrapping_remedies(record.name)]),
        )
    )


# By module and function of torch that take a model's parameters over: how to have them leave one alone.
_WRAPPING = {
    (
        "torch.nn.parallel.distributed",
        "__init__",
    ): "DistributedDataParallel(model, init_sync=False), "
    "which still reduces its gradient; or, before, "
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [{name!r}])",
    ("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard"): "fully_shard(module, "
    "ignored_params={{model.get_parameter({name!r})}})",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel("
    "module, ignored_states=[model.get_parameter({name!r})])",
}


def _wrapping_remedies(name: str) -> Iterator[str]:
    """Yield what else helps, where the caller is a wrapper's constructor."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        key = (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        if key in _WRAPPING:
            yield f"Or have the wrapper leave it alone: {_WRAPPING[key].format(name=name)}."
            return


# fmt: off
# Attributes that need no data, to read and (where torch allows) to set.
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "requires_grad",
    "is_leaf", "grad", "_grad", "grad_fn", "grad_dtype", "retains_grad", "output_nr", "_version",
    "_base", "_cdata", "_backward_hooks", "_post_accumulate_grad_hooks", "volatile", "is_cpu",
    "is_cuda", "is_xpu", "is_mps", "is_mtia", "is_ipu", "is_vulkan", "is_maia", "is_xla", "is_meta",
    "is_sparse", "is_sparse_csr", "is_mkldnn", "is_nested", "is_quantized",
)

_METHODS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "is_contiguous", "get_device", "is_floating_point", "is_complex", "is_signed", "is_inference",
    "is_pinned", "is_shared", "is_same_size", "is_set_to", "is_conj", "is_neg", "is_distributed",
    "has_names", "dense_dim", "sparse_dim", "data_ptr", "untyped_storage", "requires_grad_",
    "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__",
    "__dir__", "dim_order", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "_is_view",
)

_FUNCTIONS = (
    "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like",
    "is_floating_point", "is_complex", "is_same_size", "is_signed", "is_conj", "is_neg",
    "is_inference", "is_distributed", "numel", "result_type", "can_cast",
    "_has_compatible_shallow_copy_type",
)
# fmt: on


@functools.cache
def _allowed() -> frozenset[object]:
    """What may be called on a hollow tensor; names that this version of torch lacks are left out."""
    functions: set[object] = {torch.autograd.grad, torch.autograd.backward}
    functions.update(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name))
    functions.update(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name))
    for name in _ATTRIBUTES:
        descriptor = getattr(Tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, access):
                functions.add(getattr(descriptor, access))
    return frozenset(functions)
