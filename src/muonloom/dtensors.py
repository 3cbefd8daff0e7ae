"""DTensors: what each rank of their mesh holds, and the tensor that this one does."""

from __future__ import annotations

import itertools
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from muonloom.errors import complaint
from muonloom.sharding import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over a mesh."""
    # Importing takes as long as all of this library; who has a DTensor has done so.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's tensor: of a DTensor the very one that it wraps."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def mesh_ranks(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks of a DTensor's mesh, ascending, as in a process group."""
    return tuple(sorted(_in_mesh_order(tensor)))


def _in_mesh_order(tensor: DTensor) -> list[int]:
    return [int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist()]


def boxes(tensor: DTensor, name: str) -> tuple[Box, ...]:
    """Return what each rank of the mesh holds, in the order of `mesh_ranks`.

    Raises:
        ValueError: a placement that does not cut it into boxes.
    """
    mesh = tensor.device_mesh
    for placement in tensor.placements:
        if placement.is_partial():
            raise _unusable(name, tensor)
    found = _boxes(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements))
    distinct = {box for box in found if box.numel}
    if sum(box.numel for box in distinct) != tensor.numel():
        raise _unusable(name, tensor)
    order = _in_mesh_order(tensor)
    return tuple(found[index] for index in sorted(range(len(order)), key=order.__getitem__))


@lru_cache(maxsize=4096)
def _boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Box, ...]:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    found = []
    for place in itertools.product(*map(range, mesh_shape)):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(place), placements
        )
        # What is empty begins where the tensor ends.
        starts = (min(offset, size) for offset, size in zip(offsets, shape, strict=True))
        found.append(Box(tuple(starts), tuple(sizes)))
    return tuple(found)


def _unusable(name: str, tensor: DTensor) -> ValueError:
    return ValueError(
        complaint(
            name,
            got=f"a DTensor placed as {tuple(tensor.placements)} on a mesh of {tensor.device_mesh.shape}",
            wanted="placements that cut it into one box a rank",
            remedy="Use Shard and Replicate, as fully_shard and parallelize_module do.",
        )
    )


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, placed as the parameter is."""
    if not is_dtensor(gradient):
        return gradient
    if is_dtensor(parameter) and tuple(gradient.placements) != tuple(parameter.placements):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_part(gradient)


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a rank's part as a DTensor, placed as the parameter is; it stays on its own device."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `from_local` would move state from the host to the mesh's device.
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(parameter.placements), tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
