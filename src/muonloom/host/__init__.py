"""Host memory of exact size, and the limits that it has to keep."""

from muonloom.host.arena import HostArena, layout_bytes
from muonloom.host.limits import Limit, check_host_bytes, read_limits
from muonloom.host.slab import Reservation, SlabStore

__all__ = [
    "HostArena",
    "Limit",
    "Reservation",
    "SlabStore",
    "check_host_bytes",
    "layout_bytes",
    "read_limits",
]
