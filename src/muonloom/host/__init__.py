"""Host memory of exact size, and the limits that it has to keep."""

from muonloom.host.arena import PIECE_ALIGNMENT, HostArena, layout_bytes, padded
from muonloom.host.limits import Limit, check_host_bytes, read_limits
from muonloom.host.slab import Reservation, SlabStore

__all__ = [
    "PIECE_ALIGNMENT",
    "HostArena",
    "Limit",
    "Reservation",
    "SlabStore",
    "check_host_bytes",
    "layout_bytes",
    "padded",
    "read_limits",
]
