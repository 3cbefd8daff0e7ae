"""One contract for every backend, and what is promised of the threaded and the CUDA one alone."""

from __future__ import annotations

import gc
import mmap
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fresh import Fresh
from muonloom.device import (
    AcceleratorBackend,
    Backend,
    Stream,
    SynchronousBackend,
    ThreadedBackend,
    backend_for,
    cpu,
    seeded_delays,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
# Long enough for work that nothing orders to overtake.
HEAD_START_S = 0.05
PATIENCE_S = 20.0

MAKERS: dict[str, tuple[torch.device, Callable[[], Backend]]] = {
    "synchronous": (CPU, SynchronousBackend),
    "threaded": (CPU, ThreadedBackend),
    "delayed-0": (CPU, lambda: ThreadedBackend(delays=seeded_delays(0, 2e-3))),
    "delayed-1": (CPU, lambda: ThreadedBackend(delays=seeded_delays(1, 2e-3))),
    "cuda": (CUDA, lambda: AcceleratorBackend(CUDA)),
}
NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Case:
    """A backend, where its memory is, and how to keep one of its streams busy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device, make = MAKERS[kind]
        self.backend = make()

    def dawdle(self, overtaken: threading.Event) -> None:
        """Keep this stream busy, until other work has overtaken or had the time to."""
        if self.kind == "cuda":
            torch.cuda._sleep(int(1e8))
        else:
            overtaken.wait(HEAD_START_S)


@pytest.fixture(params=[pytest.param(k, marks=NEEDS_CUDA if k == "cuda" else ()) for k in MAKERS])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = Case(request.param)
    yield case
    case.backend.close()


@pytest.fixture
def threaded() -> Iterator[ThreadedBackend]:
    backend = ThreadedBackend()
    yield backend
    backend.close()


class Boom(Exception):
    pass


def boom() -> None:
    raise Boom


def blocked(stream: Stream, gate: threading.Event) -> threading.Event:
    """Block a worker until `gate`; return the event that says that it has begun."""
    begun = threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    stream.submit(work, "blocked")
    return begun


# The contract


def test_work_of_one_stream_is_in_order(case):
    total = torch.zeros((), dtype=torch.int64, device=case.device)
    stream = case.backend.stream("compute")
    stream.wait(case.backend.caller().record())
    for digit in range(1, 8):
        stream.submit(lambda digit=digit: total.mul_(10).add_(digit), "digit")
    assert case.backend.settle() is None
    assert int(total) == 1234567


def test_a_store_is_done_before_its_source_is_overwritten(case):
    backend, overwritten = case.backend, threading.Event()
    compute, store = backend.stream("compute"), backend.stream("store")
    slot, slab = torch.zeros(1001, device=case.device), torch.zeros(1001)
    if case.kind == "cuda":
        slab = slab.pin_memory()

    def late_copy() -> None:
        case.dawdle(overwritten)
        backend.copy(slab, slot)

    compute.wait(backend.caller().record())
    compute.submit(lambda: slot.fill_(1), "compute")
    store.wait(compute.record())
    store.submit(late_copy, "store")
    compute.wait(store.record())
    compute.submit(lambda: slot.fill_(2), "overwrite")
    compute.submit(overwritten.set, "tell")
    assert backend.settle() is None
    assert bool((slab == 1).all())
    assert bool((slot == 2).all())


def test_the_caller_waits_for_a_stream_and_a_stream_for_the_caller(case):
    backend = case.backend
    caller, load = backend.caller(), backend.stream("load")
    seen, value = (torch.zeros(3, device=case.device) for _ in range(2))

    def late_fill() -> None:
        case.dawdle(threading.Event())
        value.fill_(7)

    load.wait(caller.record())
    load.submit(late_fill, "load")
    caller.wait(load.record())
    caller.submit(lambda: seen.copy_(value), "read")
    value.zero_()
    assert backend.settle() is None
    assert seen.tolist() == [7, 7, 7]


def test_an_event_does_not_wait_for_later_work(case):
    stream, gate = case.backend.stream("load"), threading.Event()
    stream.submit(lambda: None, "before")
    event = stream.record()
    if case.kind == "cuda":
        stream.submit(lambda: torch.cuda._sleep(int(1e9)), "after")
    elif case.kind != "synchronous":
        blocked(stream, gate)
    after = stream.record()
    event.synchronize()
    assert event.query()
    assert after.query() == (case.kind == "synchronous")
    gate.set()
    after.synchronize()
    assert after.query()


def test_streams_are_made_once(case):
    backend = case.backend
    assert backend.stream("load") is backend.stream("load")
    assert backend.stream("load") is not backend.stream("store")
    assert backend.stream("load").name == "load"
    assert backend.caller() is backend.caller()


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4097, 1_000_003])
def test_copies_of_odd_sizes_and_starts(case, nbytes):
    backend = case.backend
    source = torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8)
    there = torch.zeros(nbytes + 3, dtype=torch.uint8, device=case.device)
    back = torch.zeros(nbytes, dtype=torch.uint8)
    load, store = backend.stream("load"), backend.stream("store")
    load.wait(backend.caller().record())
    load.submit(lambda: backend.copy(there[3:], source[1:]), "load")
    store.wait(load.record())
    store.submit(lambda: backend.copy(back, there[3:]), "store")
    assert backend.settle() is None
    assert torch.equal(back, source[1:])
    assert there[:3].tolist() == [0, 0, 0]


def test_a_failure_is_told_once_and_the_backend_goes_on(case):
    backend, stream = case.backend, case.backend.stream("compute")
    asynchronous = isinstance(backend, ThreadedBackend)
    with nullcontext() if asynchronous else pytest.raises(Boom):
        stream.submit(boom, "boom")
    stream.record().synchronize()
    failure = backend.settle()
    assert isinstance(failure, Boom) if asynchronous else failure is None
    assert backend.settle() is None
    done = threading.Event()
    stream.submit(done.set, "after")
    assert backend.settle() is None
    assert done.is_set()


def test_closing_twice(case):
    case.backend.stream("load").submit(lambda: None, "work")
    case.backend.close()
    case.backend.close()


def test_pinned_maps(case):
    memory = torch.frombuffer(mmap.mmap(-1, 3 * mmap.PAGESIZE), dtype=torch.uint8)
    case.backend.pin(memory)
    if case.kind == "cuda":
        assert memory.is_pinned()
    memory.fill_(3)
    case.backend.unpin(memory)
    if case.kind == "cuda":
        assert not memory.is_pinned()
    assert int(memory.sum()) == 3 * memory.numel()


def test_the_device_chooses_the_backend():
    assert isinstance(backend_for(CPU), SynchronousBackend)


# Threads


def test_submitting_does_not_wait(threaded):
    gate, stream = threading.Event(), threaded.stream("load")
    source, target = torch.ones(5), torch.zeros(5)
    blocked(stream, gate)
    stream.submit(lambda: threaded.copy(target, source), "copy")
    event = stream.record()
    assert not event.query()
    assert target.tolist() == [0] * 5
    gate.set()
    event.synchronize()
    assert target.tolist() == [1] * 5


def test_streams_run_beside_each_other(threaded):
    both = threading.Barrier(2, timeout=PATIENCE_S)
    for name in ("load", "store"):
        threaded.stream(name).submit(lambda: both.wait() and None, "meet")
    assert threaded.settle() is None


def test_without_an_event_the_overwrite_wins(threaded):
    """The race that the contract's test of stores arms: shows that it can be lost."""
    overwritten = threading.Event()
    slot, slab = torch.ones(1001), torch.zeros(1001)

    def late_copy() -> None:
        assert overwritten.wait(PATIENCE_S)
        threaded.copy(slab, slot)

    threaded.stream("store").submit(late_copy, "store")
    threaded.stream("compute").submit(lambda: slot.fill_(2), "overwrite")
    threaded.stream("compute").submit(overwritten.set, "tell")
    assert threaded.settle() is None
    assert bool((slab == 2).all())


def test_after_a_failure_all_streams_drop_work_and_events_complete(threaded):
    gate, ran = threading.Event(), []
    load, store, caller = threaded.stream("load"), threaded.stream("store"), threaded.caller()
    blocked(load, gate)
    load.submit(boom, "boom")
    failed = load.record()
    load.submit(lambda: ran.append("load"), "later")
    store.wait(failed)
    store.submit(lambda: ran.append("store"), "later")
    last = store.record()
    gate.set()
    caller.wait(last)
    caller.submit(lambda: ran.append("caller"), "later")
    assert isinstance(threaded.settle(), Boom)
    assert ran == []
    caller.submit(lambda: ran.append("again"), "again")
    assert ran == ["again"]


def test_only_the_first_failure_is_kept(threaded):
    load, store, begun = threaded.stream("load"), threaded.stream("store"), threading.Event()

    def first() -> None:
        assert begun.wait(PATIENCE_S)
        raise Boom

    load.submit(first, "first")
    failed = load.record()

    def second() -> None:
        begun.set()
        failed.synchronize()
        raise ZeroDivisionError

    store.submit(second, "second")
    assert isinstance(threaded.settle(), Boom)
    assert threaded.settle() is None


def test_a_failure_of_the_caller_stops_the_workers(threaded):
    gate, ran = threading.Event(), []
    blocked(threaded.stream("load"), gate)
    threaded.stream("load").submit(lambda: ran.append("load"), "later")
    with pytest.raises(Boom):
        threaded.caller().submit(boom, "boom")
    gate.set()
    assert isinstance(threaded.settle(), Boom)
    assert ran == []


def test_workers_record_no_gradients(threaded):
    modes: list[bool] = []
    threaded.stream("load").submit(lambda: modes.append(torch.is_grad_enabled()), "look")
    assert threaded.settle() is None
    assert modes == [False]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_settle_can_be_interrupted(threaded):
    gate, main = threading.Event(), threading.get_ident()
    stream = threaded.stream("load")

    def interrupt_while_settling() -> None:
        stream.submit(lambda: signal.pthread_kill(main, signal.SIGINT), "interrupt")
        blocked(stream, gate)
        threaded.settle()

    # A shell's background job is born with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_while_settling()
    finally:
        signal.signal(signal.SIGINT, before)
    gate.set()
    assert threaded.settle() is None


def test_threads_end_with_close():
    backend = ThreadedBackend()
    threads = [backend.stream(name).thread for name in ("load", "store")]
    assert set(threads) <= set(threading.enumerate())
    backend.close()
    assert not set(threads) & set(threading.enumerate())


def test_close_drops_work_that_has_not_begun():
    backend, gate, ran = ThreadedBackend(), threading.Event(), []
    begun = blocked(backend.stream("load"), gate)
    assert begun.wait(PATIENCE_S)
    backend.stream("load").submit(lambda: ran.append("load"), "later")
    closer = threading.Thread(target=backend.close)
    closer.start()
    # The caller drops work from the moment that closing begins; before it, this appends to a list.
    noise: list[int] = []
    while True:
        before = len(noise)
        backend.caller().submit(lambda: noise.append(0), "probe")
        if len(noise) == before:
            break
    gate.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert ran == []
    assert backend.settle() is None


def test_threads_end_with_the_backend():
    backend, done, target = ThreadedBackend(), threading.Event(), torch.zeros(3)

    def work(backend: Backend = backend) -> None:
        backend.copy(target, torch.ones(3))
        done.set()

    # This work holds the backend: a worker that kept its last work would keep both for ever.
    backend.stream("load").submit(work, "copy")
    thread = backend.stream("load").thread
    assert done.wait(PATIENCE_S)
    del backend, work
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert target.tolist() == [1, 1, 1]


def test_a_process_ends_quietly_with_work_in_flight(fresh: Fresh):
    program = """
import torch
from muonloom.device import ThreadedBackend
backend = ThreadedBackend()
x = torch.randn(300, 300)
for _ in range(5000):
    backend.stream("compute").submit(lambda: torch.mm(x, x) and None, "work")
backend.stream("store").wait(backend.stream("compute").record())
"""
    done = fresh.run(program, strict=True)
    assert (done.returncode, done.stderr) == (0, "")


# Rates and delays


def test_the_rate_holds():
    backend = ThreadedBackend(copy_bytes_per_s=1e6)
    source, target = (torch.zeros(10_000, dtype=torch.uint8) for _ in range(2))
    begin = time.perf_counter()
    for _ in range(8):
        backend.stream("load").submit(lambda: backend.copy(target, source), "copy")
    backend.settle()
    # 80,000 bytes; the clock's own grain is all that 0.9 forgives.
    assert time.perf_counter() - begin >= 0.9 * 0.08
    backend.close()


def test_both_directions_have_the_whole_rate():
    backend = ThreadedBackend(copy_bytes_per_s=1e6)
    both = threading.Barrier(2, timeout=PATIENCE_S)
    starts: dict[str, float] = {}

    def work(name: str) -> None:
        both.wait()
        starts[name] = time.perf_counter()
        both.wait()
        backend.copy(
            torch.zeros(200_000, dtype=torch.uint8), torch.zeros(200_000, dtype=torch.uint8)
        )

    for name in ("load", "store"):
        backend.stream(name).submit(lambda name=name: work(name), "copy")
    assert backend.settle() is None
    # Both began before either ended. On one link, the second would be done 0.4 s after its start.
    for name, start in starts.items():
        assert 0.2 <= backend.stream(name).link.free_at_s - start < 0.35
    backend.close()


def test_the_pace_does_not_drift_and_idle_time_is_not_made_up(monkeypatch):
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds + 1e-4  # as late as a real one

    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    link = cpu.Link(1e6)
    source, target = (torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
    for _ in range(100):
        link.copy(target, source)
    assert clock.now == pytest.approx(100 + 0.1 + 1e-4)
    clock.now = 200.0
    link.copy(target, source)
    assert clock.now == pytest.approx(200 + 1e-3 + 1e-4)


def test_seeded_delays_can_be_had_again():
    def draw(seed: int, names: list[str]) -> dict[str, list[float]]:
        delays, drawn = seeded_delays(seed, 0.5), {name: [] for name in names}
        for name in names:
            drawn[name].append(delays(name, "any"))
        return drawn

    turns = ["load", "store"] * 50
    first = draw(3, turns)
    # Threads take turns in any order; a stream's own delays stay.
    assert draw(3, sorted(turns)) == first
    assert draw(4, turns) != first
    assert first["load"] != first["store"]
    every = first["load"] + first["store"]
    assert all(0 <= delay < 0.5 for delay in every)
    assert 20 < every.count(0.0) < 80


def test_delays_see_stream_and_label():
    seen: list[tuple[str, str]] = []

    def delays(stream: str, label: str) -> float:
        seen.append((stream, label))
        return 0.0

    backend = ThreadedBackend(delays=delays)
    backend.stream("load").submit(lambda: None, "first")
    backend.settle()
    backend.caller().submit(lambda: None, "second")
    assert seen == [("load", "first"), ("caller", "second")]
    backend.close()


# Accelerators


class Runtime:
    """A CUDA runtime that has no memory to lock."""

    def cudaHostRegister(self, *arguments: int) -> int:
        return 2

    cudaHostUnregister = cudaHostRegister

    def cudaGetErrorString(self, status: int) -> str:
        return "out of memory"


def test_a_refused_pin_says_how_much_and_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch, "ones", lambda *size, device: None)
    backend = AcceleratorBackend(CUDA)
    memory = torch.empty(12_288, dtype=torch.uint8)
    with pytest.raises(
        RuntimeError, match=r'^placement: got "out of memory".*12,288 bytes.*ulimit'
    ):
        backend.pin(memory)
    with pytest.raises(RuntimeError, match="12,288 bytes"):
        backend.unpin(memory)
    assert waited == [CUDA]  # copies on the caller's stream may read that memory


def test_other_accelerators_do_not_pin():
    with pytest.raises(ValueError, match=r"^placement: .*xpu"):
        AcceleratorBackend(torch.device("xpu", 0)).pin(torch.empty(1))


class RawEvent:
    """A device's event that says what was done with it."""

    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        RawEvent.made += 1
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


def test_device_events_are_used_again_only_when_nobody_holds_them(monkeypatch):
    from muonloom.device.accelerator import _Points

    monkeypatch.setattr(torch, "Event", RawEvent)
    monkeypatch.setattr(RawEvent, "made", 0)
    points = _Points(CUDA)
    held = points.record("first")
    raw = held.raw
    for _ in range(50):
        points.record("short-lived")
    assert RawEvent.made == 2
    assert raw.recorded == ["first"]
    del held
    again = points.record("second")
    assert again.raw is raw
    assert raw.recorded == ["first", "second"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_streams_and_the_current_stream():
    backend, own = AcceleratorBackend(CUDA), torch.cuda.Stream(CUDA)
    seen: list[int] = []

    def look() -> None:
        seen.append(torch.cuda.current_stream(CUDA).cuda_stream)

    before = torch.cuda.current_stream(CUDA).cuda_stream
    with torch.cuda.stream(own):
        backend.caller().submit(look, "caller")
        backend.stream("load").submit(look, "load")
        backend.stream("store").submit(look, "store")
        look()
    assert seen[0] == seen[3] == own.cuda_stream
    assert len({before, *seen}) == 4
    assert torch.cuda.current_stream(CUDA).cuda_stream == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_refused_pin_leaves_cuda_usable():
    backend = AcceleratorBackend(CUDA)
    memory = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    backend.pin(memory)
    with pytest.raises(RuntimeError, match=r"^placement"):
        backend.pin(memory)
    backend.unpin(memory)
    assert float(torch.ones(3, device=CUDA).sum()) == 3
