"""Models that are spread over ranks: which part of a tensor this rank has."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from muonloom.dtensors import boxes, is_dtensor, mesh_ranks
from muonloom.ranks import this_rank
from muonloom.sharding import Box, whole_box


def gather_back(model: nn.Module) -> None:
    """Have the modules of FSDP2 hold their parts again, that a forward pass has put together.

    Until then their parameters are others than the optimizer's, and copies that a load would not reach.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has such a module has imported it
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def held_box(tensor: Tensor, name: str) -> Box:
    """Return which part of a tensor of a model this rank has."""
    if not is_dtensor(tensor):
        return whole_box(tuple(tensor.shape))
    return boxes(tensor, name)[mesh_ranks(tensor).index(this_rank())]
