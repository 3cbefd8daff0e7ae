"""This process among others, where `torch.distributed` is initialized."""

from __future__ import annotations

import torch.distributed as dist


def this_rank() -> int:
    """Return this process's rank; 0 where it is alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def num_ranks() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(data: bytes) -> list[bytes]:
    """Return what all ranks gave, on each of them."""
    if num_ranks() == 1:
        return [data]
    found: list[bytes] = [b""] * num_ranks()
    dist.all_gather_object(found, data)
    return found
