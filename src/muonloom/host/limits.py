"""How much host memory this process may still take, and a refusal before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from muonloom.errors import complaint

# Version 1 writes "no limit" as the largest whole number of pages in 63 bits.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One bound on host memory.

    Attributes:
        source: what says so: the file, with its full path.
        free_bytes: bytes that may still be taken, 0 or more.
    """

    source: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Controller:
    """Where a version of control groups keeps its numbers, in the folder of each group."""

    mount: str
    limit: str
    used: str
    reclaimable: str


_VERSION_1 = _Controller(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_VERSION_2 = _Controller(
    mount="sys/fs/cgroup",
    limit="memory.max",
    used="memory.current",
    reclaimable="inactive_file",
)


def read_limits(*, root: Path = Path("/")) -> tuple[Limit, ...]:
    """Read every bound that this system knows of; none where it is not Linux.

    These are the machine's available memory, and the limits of this process's control group and of all
    groups above it. Page cache that the kernel would drop counts as free. A file that is missing or
    malformed sets no bound.

    Args:
        root: folder that holds ``proc`` and ``sys``.
    """
    available = _keyed(root / "proc/meminfo", "MemAvailable:")
    machine = () if available is None else (_machine_limit(root, available),)
    groups = (
        limit
        for controller, path in _memberships(root)
        for folder in _folders(root / controller.mount, path)
        if (limit := _group_limit(controller, folder)) is not None
    )
    return (*machine, *groups)


def check_host_bytes(nbytes: int, *, what: str, limits: Sequence[Limit]) -> None:
    """Refuse what does not fit. All ranks of one machine draw on the same limits: pass their sum.

    Args:
        nbytes: bytes to be allocated.
        what: their contents, for the message.
        limits: from `read_limits`; the tightest decides.

    Raises:
        MemoryError: `nbytes` exceeds a limit.
    """
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is None or nbytes <= tightest.free_bytes:
        return
    raise MemoryError(
        complaint(
            "placement",
            got=f"{nbytes} bytes of {what} for the host",
            wanted=f"at most {tightest.free_bytes} bytes, by {tightest.source}",
            remedy="Give the container or machine more memory, or keep less on it: "
            'master_layout="split", momentum_dtype=torch.bfloat16, or more ranks on more machines.',
        )
    )


def _machine_limit(root: Path, kibibytes: int) -> Limit:
    return Limit(
        source=f"MemAvailable in {root / 'proc/meminfo'}", free_bytes=max(0, kibibytes << 10)
    )


def _memberships(root: Path) -> Iterator[tuple[_Controller, str]]:
    """Yield the memory groups of this process, from lines of ``id:controllers:path``."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield _VERSION_2, path
        elif "memory" in controllers.split(","):
            yield _VERSION_1, path


def _folders(mount: Path, path: str) -> list[Path]:
    """Return the group's folder and those above it, up to the mount."""
    inside = PurePosixPath(path.lstrip("/"))
    # A group outside of what this container sees: its folders cannot be read, but the mount can.
    if ".." in inside.parts:
        inside = PurePosixPath()
    return [mount / group for group in (inside, *inside.parents)]


def _group_limit(controller: _Controller, folder: Path) -> Limit | None:
    limit = _number(_text(folder / controller.limit))
    if limit is None or limit >= _NO_LIMIT_BYTES:
        return None
    used = _number(_text(folder / controller.used)) or 0
    reclaimable = _keyed(folder / "memory.stat", controller.reclaimable) or 0
    held = max(0, used - reclaimable)
    return Limit(source=str(folder / controller.limit), free_bytes=max(0, limit - held))


def _keyed(path: Path, key: str) -> int | None:
    """Return the number after `key` in a file of lines ``key number …``."""
    for line in (_text(path) or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == key:
            return _number(words[1])
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):  # ValueError: no file can have such a name
        return None


def _number(text: str | None) -> int | None:
    """Return a whole number of 0 or more; None for "max" and whatever else is none."""
    try:
        number = int(text or "")
    except ValueError:
        return None
    return number if number >= 0 else None
