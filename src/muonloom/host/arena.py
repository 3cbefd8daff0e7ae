"""Host memory of exact size: anonymous page maps, outside of every allocator that rounds up or keeps."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pin = Callable[[Tensor], None]

PIECE_ALIGNMENT = 64
"""Where pieces of state begin, in slabs, rooms and slots alike, so that neighbours move in one copy."""

# Huge pages make the first touch, pinning and address translation cheaper. A forked child (a data loader's
# worker) would otherwise make every page that the parent writes afterwards a second one.
_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")


class HostArena:
    """Zero-filled, page-aligned host memory that never moves.

    The kernel gives each page at its first touch. The map lives as long as the arena or any tensor over
    it. Where the arena is dropped without `close`, its memory is unpinned then: whoever copies
    asynchronously keeps the arena, not just views of it. A forked child does not have the memory.
    """

    def __init__(self, nbytes: int, *, pin: Pin | None = None, unpin: Pin | None = None) -> None:
        """Map the memory, and pin it.

        Args:
            nbytes: size in bytes, rounded up to whole pages; 0 maps nothing and pins nothing.
            pin: called once with `memory`; what it raises comes out here, and the map is dropped.
            unpin: called once with `memory`, by `close` or when the arena is dropped.

        Raises:
            OSError: the system refuses the map.
        """
        self._pages = _mapped(padded(nbytes, mmap.PAGESIZE))
        memory = _view(self._pages, 0, -1, torch.uint8)
        self._memory: Tensor | None = memory
        self._nbytes = memory.numel()
        self._pinned = pin is not None and self._nbytes > 0
        if pin is not None and self._pinned:
            pin(memory)
        self._undo = weakref.finalize(self, _undo, unpin if self._pinned else None, memory)
        # At exit the system takes everything back; the device may be gone by then.
        self._undo.atexit = False

    @property
    def memory(self) -> Tensor:
        """The whole arena, 1-D UINT8; its address is a multiple of the page size and stays."""
        assert self._memory is not None, "a closed arena has no memory"
        return self._memory

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the bytes from `offset` on, with a storage of just its own bytes.

        Views of one storage are saved all or none, and only where all have one dtype.
        """
        assert self._memory is not None, "a closed arena has no memory"
        return _view(self._pages, offset, math.prod(shape), dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes mapped: whole pages."""
        return self._nbytes

    def close(self) -> None:
        """Unpin and let go; a second call does nothing. Views stay readable, but are no longer pinned."""
        self._memory = self._pages = None
        self._undo()

    def __repr__(self) -> str:
        if self._memory is None:
            return f"HostArena({self._nbytes} bytes, closed)"
        pinned = "pinned" if self._pinned else "pageable"
        return f"HostArena({self._nbytes} bytes, {pinned}, at {self._memory.data_ptr():#x})"


def padded(nbytes: int, alignment: int = PIECE_ALIGNMENT) -> int:
    """Return the distance from a piece of `nbytes` to the next one."""
    return -(-nbytes // alignment) * alignment


def layout_bytes(
    sizes: Sequence[int], *, alignment: int = PIECE_ALIGNMENT
) -> tuple[tuple[int, ...], int]:
    """Place pieces one after another.

    Args:
        sizes: bytes of each piece; 0 is legal and takes no room.
        alignment: every piece starts at a multiple of it, and the total is one.

    Returns:
        The offset of each piece in bytes, and the total bytes.
    """
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += padded(size, alignment)
    return tuple(offsets), end


def _mapped(nbytes: int) -> mmap.mmap | None:
    if nbytes == 0:  # mmap refuses it
        return None
    # Private: Linux rarely gives huge pages to shared maps.
    kind = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, nbytes, **kind)
    for name in _ADVICE:
        advice = getattr(mmap, name, None)
        if advice is not None:
            with contextlib.suppress(OSError):
                pages.madvise(advice)
    return pages


def _view(pages: mmap.mmap | None, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    if pages is None or count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    # The tensor's storage owns `pages` from here on. Never close() them: torch holds no lock on the map.
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset)


def _undo(unpin: Pin | None, memory: Tensor) -> None:
    if unpin is not None:
        unpin(memory)
