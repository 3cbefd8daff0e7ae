"""Host arenas: exact, aligned, zero, and alive as long as anything looks at them."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muonloom.host import HostArena, layout_bytes

PAGE = mmap.PAGESIZE
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which is Linux's")


class Log:
    """Stands for a device that pins: keeps what was asked, in order, with addresses."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def pin(self, memory: Tensor) -> None:
        self.calls.append(("pin", memory.data_ptr(), memory.numel()))

    def unpin(self, memory: Tensor) -> None:
        self.calls.append(("unpin", memory.data_ptr(), memory.numel()))


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Weak references to the maps that are made while the test runs."""
    made: list[weakref.ref] = []
    real = mmap.mmap

    def make(*args, **kwargs):
        pages = real(*args, **kwargs)
        made.append(weakref.ref(pages))
        return pages

    monkeypatch.setattr(mmap, "mmap", make)
    return made


@pytest.mark.parametrize(
    ("asked", "got"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (5 * PAGE, 5), (1025 * PAGE - 1, 1025)]
)
def test_whole_pages_and_not_more(asked: int, got: int, maps: list[weakref.ref]) -> None:
    arena = HostArena(asked)

    (pages,) = maps
    assert len(pages()) == got * PAGE
    assert arena.nbytes == arena.memory.numel() == got * PAGE
    assert arena.memory.untyped_storage().nbytes() == got * PAGE


def test_memory_is_flat_bytes_on_a_page_boundary_and_zero() -> None:
    memory = HostArena(3 * PAGE).memory

    assert (memory.dtype, memory.dim(), memory.device.type) == (torch.uint8, 1, "cpu")
    assert memory.data_ptr() % PAGE == 0
    assert not bool(memory.any())


def test_views_of_any_type_share_the_memory_and_the_address_stays() -> None:
    arena = HostArena(PAGE)
    numbers = arena.memory[64:128].view(torch.float32)

    numbers.fill_(1.5)

    assert arena.memory[64:128].view(torch.float32).tolist() == [1.5] * 16
    assert arena.memory[:64].count_nonzero() == arena.memory[128:].count_nonzero() == 0
    assert numbers.data_ptr() == arena.memory.data_ptr() + 64


@on_linux
def test_untouched_pages_cost_nothing() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    gc.collect()
    before = resident_bytes()
    arena = HostArena(256 << 20)
    assert resident_bytes() - before < 32 << 20
    arena.close()


def addresses(line: str) -> range:
    """What a line that starts with ``first-last`` spans; nothing for other lines."""
    first, dash, last = line.split()[0].partition("-")
    return range(int(first, 16), int(last, 16)) if dash else range(0)


@on_linux
def test_the_map_is_private_and_not_for_forked_children() -> None:
    arena = HostArena(16 << 20)
    address = arena.memory.data_ptr()
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    head = next(line for line in lines if address in addresses(line))
    flags = next((line.split()[1:] for line in lines if line.startswith("VmFlags:")), None)

    assert head.split()[1] == "rw-p"
    if flags is None:
        pytest.skip("this kernel does not show flags of maps")
    assert "dc" in flags  # do not copy


def test_advice_that_the_kernel_refuses_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        asked = 0

        def madvise(self, *args: int) -> None:
            Refusing.asked += 1
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)

    assert HostArena(PAGE).nbytes == PAGE
    assert Refusing.asked > 0


def test_a_view_keeps_the_map_alive_and_the_last_one_frees_it(maps: list[weakref.ref]) -> None:
    arena = HostArena(4 * PAGE)
    arena.memory.fill_(7)
    view = arena.memory[PAGE : PAGE + 16].view(torch.int16)[::2]

    arena.close()
    del arena
    gc.collect()
    (pages,) = maps
    assert pages() is not None
    assert view.tolist() == [0x0707] * 4
    view.fill_(1)

    del view
    gc.collect()
    assert pages() is None


def test_the_map_is_freed_without_the_collector(maps: list[weakref.ref]) -> None:
    gc.disable()
    try:
        closed, dropped = HostArena(PAGE), HostArena(PAGE)
        closed.close()
        del dropped
        assert [pages() for pages in maps] == [None, None]
    finally:
        gc.enable()


def test_close_unpins_what_was_pinned_once() -> None:
    log = Log()
    arena = HostArena(PAGE + 1, pin=log.pin, unpin=log.unpin)
    address = arena.memory.data_ptr()
    assert log.calls == [("pin", address, 2 * PAGE)]

    arena.close()
    arena.close()

    assert log.calls == [("pin", address, 2 * PAGE), ("unpin", address, 2 * PAGE)]
    with pytest.raises(AssertionError, match="closed"):
        arena.memory  # noqa: B018


def test_unpinned_while_still_mapped_when_the_arena_is_dropped(maps: list[weakref.ref]) -> None:
    seen: list[bool] = []
    arena = HostArena(PAGE, pin=lambda memory: None, unpin=lambda m: seen.append(bool(maps[0]())))

    del arena
    gc.collect()

    assert seen == [True]
    assert maps[0]() is None


def test_a_failed_pin_comes_out_and_leaves_nothing(maps: list[weakref.ref]) -> None:
    log = Log()

    def refuse(memory: Tensor) -> None:
        raise RuntimeError("cannot pin")

    with pytest.raises(RuntimeError, match="cannot pin"):
        HostArena(PAGE, pin=refuse, unpin=log.unpin)
    gc.collect()

    assert log.calls == []
    assert maps[0]() is None


def test_unpin_is_left_alone_where_nothing_was_pinned() -> None:
    log = Log()
    HostArena(PAGE, unpin=log.unpin).close()
    assert log.calls == []


def test_an_empty_arena_maps_and_pins_nothing(maps: list[weakref.ref]) -> None:
    log = Log()
    arena = HostArena(0, pin=log.pin, unpin=log.unpin)

    assert arena.memory.shape == (0,)
    assert arena.memory.dtype == torch.uint8
    assert arena.nbytes == 0
    arena.close()
    assert log.calls == []
    assert maps == []


def test_repr_tells_size_and_state() -> None:
    log = Log()
    arena = HostArena(PAGE, pin=log.pin, unpin=log.unpin)
    assert repr(arena) == f"HostArena({PAGE} bytes, pinned, at {arena.memory.data_ptr():#x})"
    arena.close()
    assert repr(arena) == f"HostArena({PAGE} bytes, closed)"
    assert "pageable" in repr(HostArena(PAGE))


def test_layout_of_known_sizes() -> None:
    assert layout_bytes([1, 64, 0, 65, 10]) == ((0, 64, 128, 128, 256), 320)
    assert layout_bytes([3, 5], alignment=4) == ((0, 4), 12)
    assert layout_bytes([]) == ((), 0)


@given(st.lists(st.integers(0, 1000)), st.sampled_from([1, 2, 64, 256, 4096]))
def test_layout_is_aligned_without_overlap_and_without_waste(
    sizes: list[int], alignment: int
) -> None:
    offsets, total = layout_bytes(sizes, alignment=alignment)

    ends = (*offsets, total)
    assert all(end % alignment == 0 for end in ends)
    gaps = [
        after - before - size for (before, after), size in zip(pairwise(ends), sizes, strict=True)
    ]
    assert all(0 <= gap < alignment for gap in gaps)
