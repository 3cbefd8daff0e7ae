"""Streams, events, copies and pinned memory of one device, behind one protocol."""

from __future__ import annotations

import torch

from muonloom.device.accelerator import AcceleratorBackend
from muonloom.device.backend import Backend, Event, HostWorker, Stream
from muonloom.device.cpu import SynchronousBackend, ThreadedBackend, seeded_delays

__all__ = [
    "AcceleratorBackend",
    "Backend",
    "Event",
    "HostWorker",
    "Stream",
    "SynchronousBackend",
    "ThreadedBackend",
    "backend_for",
    "seeded_delays",
]


def backend_for(device: torch.device) -> Backend:
    """Return a new backend for `device`, which the caller closes."""
    return SynchronousBackend() if device.type == "cpu" else AcceleratorBackend(device)
