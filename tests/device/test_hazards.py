"""The hazard checker: what it must find, what it must not, and its verdict against brute force."""

from __future__ import annotations

import gc
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from muonloom.device.backend import Backend, Event
from muonloom.device.cpu import SynchronousBackend, ThreadedBackend, seeded_delays
from muonloom.device.hazards import CheckedBackend, Hazard, HazardError

BACKENDS: dict[str, Callable[[], Backend]] = {
    "synchronous": SynchronousBackend,
    "threaded": ThreadedBackend,
    "delayed": lambda: ThreadedBackend(delays=seeded_delays(0, 1e-3)),
}
Work = Callable[[], object]


class LawlessStream:
    """Keeps its work until `settle` and knows no wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.works: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None], label: str) -> None:
        self.works.append(work)

    def record(self) -> Event:
        return SynchronousBackend().caller().record()

    def wait(self, event: Event) -> None:
        pass


class LawlessBackend(SynchronousBackend):
    """Runs stream after stream, in the order of their names, whatever the events say."""

    def __init__(self) -> None:
        super().__init__()
        self._lawless: dict[str, LawlessStream] = {}

    def caller(self) -> LawlessStream:
        return self.stream("caller")

    def stream(self, name: str) -> LawlessStream:
        return self._lawless.setdefault(name, LawlessStream(name))

    def settle(self) -> BaseException | None:
        for _, stream in sorted(self._lawless.items()):
            for work in stream.works:
                work()
            stream.works.clear()
        return None


@pytest.fixture(params=list(BACKENDS))
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedBackend]:
    backend = CheckedBackend(BACKENDS[request.param]())
    yield backend
    backend.close()


def submit(backend: CheckedBackend, stream: str, label: str, work: Work) -> Event:
    """Submit `work` and return the event after it."""
    target = backend.caller() if stream == "caller" else backend.stream(stream)

    def call() -> None:
        work()

    target.submit(call, label)
    return target.record()


def settled(backend: CheckedBackend) -> list[Hazard]:
    failure = backend.settle()
    if failure is not None:
        raise failure
    return backend.hazards


def race(backend: CheckedBackend, first: Work, second: Work) -> list[Hazard]:
    """Run two pieces of work on two streams that nothing orders."""
    submit(backend, "a", "first", first)
    submit(backend, "b", "second", second)
    return settled(backend)


def pairs(hazards: list[Hazard]) -> set[tuple[str, str]]:
    return {(hazard.first.label, hazard.second.label) for hazard in hazards}


def over(memory: mmap.mmap, offset: int, count: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, offset=4 * offset, count=count)


CONFLICTS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], str, str]] = {
    "write-write": (lambda x: x.fill_(1), lambda x: x.mul_(2), "write", "write"),
    "read-write": (lambda x: x.sum(), lambda x: x.zero_(), "read", "write"),
    "write-read": (lambda x: x.add_(1), lambda x: x.clone(), "write", "read"),
}


@pytest.mark.parametrize("kind", CONFLICTS)
def test_conflict_without_an_event_is_found(checked: CheckedBackend, kind: str):
    x = torch.zeros(8)
    first, second, *kinds = CONFLICTS[kind]
    (hazard,) = race(checked, lambda: first(x[2:6]), lambda: second(x))
    assert [hazard.first.kind, hazard.second.kind] == kinds
    assert (hazard.first.label, hazard.second.label) == ("first", "second")
    assert (hazard.first.stream, hazard.second.stream) == ("a", "b")
    assert (hazard.start, hazard.stop) == (8, 24)


@pytest.mark.parametrize("kind", CONFLICTS)
def test_conflict_with_an_event_is_none(checked: CheckedBackend, kind: str):
    x = torch.zeros(8)
    first, second, *_ = CONFLICTS[kind]
    checked.stream("b").wait(submit(checked, "a", "first", lambda: first(x)))
    submit(checked, "b", "second", lambda: second(x))
    assert settled(checked) == []
    checked.check()


def test_reads_of_two_streams_are_none(checked: CheckedBackend):
    x = torch.zeros(8)
    assert race(checked, x.sum, x.clone) == []


def test_error_names_both_accesses(checked: CheckedBackend):
    x = torch.zeros(8)
    race(checked, lambda: x.fill_(1), lambda: torch.empty(8).copy_(x))
    with pytest.raises(HazardError) as caught:
        checked.check()
    for part in ("'first'", "'second'", "'a'", "'b'", "aten.fill_", "aten.copy_", "read", "write"):
        assert part in str(caught.value)


def test_order_passes_through_a_third_stream(checked: CheckedBackend):
    x, y = torch.zeros(8), torch.zeros(8)
    checked.stream("b").wait(submit(checked, "a", "first", lambda: x.fill_(1)))
    checked.stream("c").wait(submit(checked, "b", "middle", lambda: y.fill_(1)))
    submit(checked, "c", "last", lambda: x.fill_(2))
    assert settled(checked) == []


def test_event_covers_only_what_came_before_it(checked: CheckedBackend):
    x = torch.zeros(8)
    event = checked.stream("a").record()
    submit(checked, "a", "first", lambda: x.fill_(1))
    checked.stream("b").wait(event)
    submit(checked, "b", "second", lambda: x.fill_(2))
    assert pairs(settled(checked)) == {("first", "second")}


def test_wait_holds_back_only_what_comes_after_it(checked: CheckedBackend):
    x = torch.zeros(8)
    event = submit(checked, "a", "first", lambda: x.fill_(1))
    submit(checked, "b", "early", lambda: x.fill_(2))
    checked.stream("b").wait(event)
    submit(checked, "b", "late", lambda: x.fill_(3))
    assert pairs(settled(checked)) == {("first", "early")}


def test_order_is_not_taken_from_luck(checked: CheckedBackend):
    """The first is long done when the second runs, but only the clock on the wall says so."""
    x, y = torch.zeros(8), torch.zeros(8)
    done = threading.Event()
    submit(checked, "a", "first", lambda: (x.fill_(1), done.set()))
    submit(checked, "b", "second", lambda: (done.wait(), x.fill_(2), y.fill_(1)))
    assert pairs(settled(checked)) == {("first", "second")}


def test_undeclared_access_is_found(checked: CheckedBackend):
    """A writer for `told` also touches `untold`, which another stream reads."""
    told, untold = torch.zeros(8), torch.zeros(8)

    def writer() -> None:
        told.fill_(1)
        torch.add(told[4:], 1, out=untold[4:])

    submit(checked, "compute", "write told", writer)
    submit(checked, "store", "store untold", lambda: torch.empty(8).copy_(untold))
    (hazard,) = settled(checked)
    assert (hazard.start, hazard.stop) == (16, 32)
    assert "out" in hazard.first.op


DISJOINT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "row blocks": (lambda w: w[:8], lambda w: w[8:]),
    "interleaved rows": (lambda w: w[0::2], lambda w: w[1::2]),
    "interleaved columns": (lambda w: w[:, 0::2], lambda w: w[:, 1::2]),
    "column blocks": (lambda w: w[:, :6], lambda w: w[:, 6:].t()),
    "checkerboard": (lambda w: w[0::2, 0::2], lambda w: w[1::2, 0::2]),
    "heads of a view": (lambda w: w.view(4, 4, 12)[1], lambda w: w.view(4, 4, 12)[2, ::3]),
    "other dtype": (lambda w: w[:8].view(torch.int16), lambda w: w[8:].view(torch.uint8)),
}
OVERLAPPING: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "row blocks": (lambda w: w[:9], lambda w: w[8:]),
    "one column": (lambda w: w[:, 0::2], lambda w: w[:, 4:5]),
    "one element": (lambda w: w[3::4, 5], lambda w: w[7:8, 5::7]),
    "transposed": (lambda w: w.t()[:4], lambda w: w[15, 3:]),
    "expanded": (lambda w: w[:1].expand(16, 12), lambda w: w[0, 11:]),
    "windows": (lambda w: w.as_strided((5, 4), (2, 1), 0), lambda w: w.view(-1)[11:12]),
    "one byte": (lambda w: w.view(torch.uint8)[0, 3:4], lambda w: w[0, :1]),
}


@pytest.mark.parametrize("views", DISJOINT)
def test_disjoint_strided_views_are_none(checked: CheckedBackend, views: str):
    w = torch.zeros(16, 12)
    first, second = DISJOINT[views]
    assert race(checked, lambda: first(w).add_(1), lambda: second(w).add_(1)) == []


@pytest.mark.parametrize("views", OVERLAPPING)
def test_overlapping_strided_views_are_found(checked: CheckedBackend, views: str):
    w = torch.zeros(16, 12)
    first, second = OVERLAPPING[views]
    assert pairs(race(checked, lambda: first(w).sum(), lambda: second(w).zero_())) == {
        ("first", "second")
    }


@pytest.mark.parametrize("shape", [(5000, 4), (3, 2000, 4)])
def test_column_blocks_of_tall_matrices_are_none(checked: CheckedBackend, shape: tuple[int, ...]):
    w = torch.zeros(shape)
    assert race(checked, w[..., :2].zero_, w[..., 2:].zero_) == []
    assert race(checked, w[..., :2].zero_, w[..., 1:].zero_) != []


def test_too_many_runs_count_as_their_hull(checked: CheckedBackend):
    w = torch.zeros(200, 200)
    submit(checked, "c", "beside", w[199, 1:].zero_)
    assert pairs(race(checked, w[:199:2, ::2].zero_, w[1:199:2, 1::2].zero_)) == {
        ("first", "second")
    }


def test_random_strided_views_against_brute_force():
    """Sets of bytes, element by element, say which of two views share one."""
    generator = random.Random(0)
    verdicts = set()
    for _ in range(150):
        base = torch.arange(400, dtype=torch.int32)
        views = []
        for _ in range(2):
            shape = [generator.randint(1, 4) for _ in range(3)]
            strides = [generator.choice((0, 1, 2, 3, 5, 8, 16)) for _ in range(3)]
            views.append(base.as_strided(shape, strides, generator.randint(0, 40)))
        shared = bool(set(views[0].flatten().tolist()) & set(views[1].flatten().tolist()))
        backend = CheckedBackend(SynchronousBackend())
        # An expanded tensor cannot be filled; the random functions can, one element at a time.
        found = race(backend, views[0].sum, lambda target=views[1]: _set_all(target))
        assert bool(found) == shared
        verdicts.add(shared)
    assert verdicts == {True, False}


def _set_all(target: Tensor) -> None:
    for index in torch.cartesian_prod(*(torch.arange(n) for n in target.shape)).tolist():
        target[tuple(index)].zero_()


def test_one_map_under_two_storages(checked: CheckedBackend):
    memory = mmap.mmap(-1, 4096)
    first, second, beside = over(memory, 0, 512), over(memory, 256, 512), over(memory, 768, 256)
    submit(checked, "c", "beside", beside.zero_)
    assert pairs(race(checked, first.zero_, second.sum)) == {("first", "second")}


def test_a_map_outlives_the_storage_it_was_written_through(checked: CheckedBackend):
    memory = mmap.mmap(-1, 4096)
    submit(checked, "a", "first", lambda: over(memory, 0, 1024).zero_())
    gc.collect()
    submit(checked, "b", "second", lambda: over(memory, 1000, 24).sum())
    assert pairs(settled(checked)) == {("first", "second")}


def test_storages_met_apart_and_then_joined(checked: CheckedBackend):
    """The storage that spans both comes last; what was done through each is not lost."""
    memory = mmap.mmap(-1, 4096)
    left, right, whole = over(memory, 0, 256), over(memory, 512, 256), over(memory, 0, 1024)
    submit(checked, "a", "left", left.zero_)
    submit(checked, "b", "right", right.zero_)
    submit(checked, "c", "whole", whole.sum)
    assert pairs(settled(checked)) == {("left", "whole"), ("right", "whole")}


def test_storages_joined_keep_the_order_of_a_stream(checked: CheckedBackend):
    memory = mmap.mmap(-1, 4096)
    left, right, whole = over(memory, 0, 256), over(memory, 512, 256), over(memory, 0, 1024)
    event = submit(checked, "a", "right", right.zero_)
    submit(checked, "a", "left", left.zero_)
    checked.stream("c").wait(event)
    submit(checked, "c", "whole", whole.sum)
    submit(checked, "d", "left again", left.zero_)
    submit(checked, "e", "right again", right.zero_)
    assert pairs(settled(checked)) == {
        ("left", "whole"),
        ("left", "left again"),
        ("right", "right again"),
        ("whole", "left again"),
        ("whole", "right again"),
    }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_storages_that_overlap_in_part(checked: CheckedBackend, order: tuple[int, int]):
    memory = mmap.mmap(-1, 4096)
    parts = [over(memory, 0, 512), over(memory, 256, 512)]
    for i in order:
        submit(checked, "a", f"part {i}", parts[i].zero_)
    submit(checked, "b", "start", over(memory, 0, 8).sum)
    submit(checked, "c", "end", over(memory, 760, 8).sum)
    assert pairs(settled(checked)) == {("part 0", "start"), ("part 1", "end")}


def test_storage_that_moved_is_met_where_it_went(checked: CheckedBackend):
    x = torch.zeros(8)
    submit(checked, "a", "small", x.zero_).synchronize()
    x.resize_(100_000)
    (hazard,) = race(checked, x.zero_, x[4:].sum)
    assert (hazard.start, hazard.stop) == (16, 400_000)


@pytest.mark.parametrize("change", [lambda x: x.resize_(4), lambda x: x[:].set_(torch.ones(2))])
def test_resize_and_set_are_writes(checked: CheckedBackend, change: Callable[[Tensor], object]):
    x = torch.zeros(8)
    hazard, *_ = race(checked, lambda: change(x), x[:].sum)
    assert (hazard.first.kind, hazard.second.kind) == ("write", "read")


def test_view_made_by_set_accesses_nothing(checked: CheckedBackend):
    x = torch.zeros(8)
    assert race(checked, lambda: torch.empty(0).set_(x.untyped_storage()), x.zero_) == []


def test_work_is_named_by_its_first_operation(checked: CheckedBackend):
    x = torch.zeros(8)
    (hazard,) = race(checked, lambda: x.add_(1).mul_(2).add_(3), lambda: (x.sum(), x.clone()))
    assert (hazard.first.op, hazard.second.op) == ("aten.add_.Tensor", "aten.sum.default")


def test_fused_adamw_writes_its_lists(checked: CheckedBackend):
    weights, gradients, first, second = ([torch.ones(4), torch.ones(6)] for _ in range(4))
    steps = [torch.ones(()), torch.ones(())]

    def fused() -> None:
        torch._fused_adamw_(
            weights, gradients, first, second, [], steps, lr=1e-3, beta1=0.9, beta2=0.99,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    submit(checked, "compute", "adamw", fused)
    others = {"weight": weights, "gradient": gradients, "momentum": first, "square": second}
    for name, tensors in others.items():
        submit(checked, name, f"read {name}", tensors[1].clone)
    submit(checked, "zero", "zero gradient", gradients[0].zero_)
    submit(checked, "count", "count", steps[1].add_(0).zero_)
    assert pairs(settled(checked)) == {
        ("adamw", "read weight"),
        ("adamw", "read momentum"),
        ("adamw", "read square"),
        ("adamw", "zero gradient"),
        ("adamw", "count"),
    }


def test_foreach_writes_its_list(checked: CheckedBackend):
    tensors = [torch.ones(4), torch.ones(6)]
    reads, writes = tensors[1].clone, lambda: torch._foreach_mul_(tensors, 2.0)
    assert pairs(race(checked, writes, reads)) == {("first", "second")}


@pytest.mark.parametrize("which", ["out", "batch1", "left out"])
def test_baddbmm_reads_and_writes(checked: CheckedBackend, which: str):
    names = ("out", "input", "batch1", "batch2")
    tensors = {name: torch.ones(2, 3, 3) for name in (*names, "left out")}
    out, *inputs = (tensors[name] for name in names)
    found = race(checked, lambda: torch.baddbmm(*inputs, out=out), tensors[which].zero_)
    assert [hazard.first.kind for hazard in found] == {
        "out": ["write"],
        "batch1": ["read"],
        "left out": [],
    }[which]


def test_views_factories_and_metadata_access_nothing(checked: CheckedBackend):
    x = torch.zeros(4, 4)

    def look() -> None:
        for view in (
            x.view(-1),
            x[1:],
            x.t(),
            x.detach(),
            x.expand(2, 4, 4),
            x.as_strided((2,), (1,)),
        ):
            view.size()
        x.unbind()
        x.split(2)
        x.new_zeros(3)
        torch.zeros_like(x)
        torch.empty_like(x)
        x[0].unsqueeze_(0)
        x.is_pinned()

    assert race(checked, look, x.zero_) == []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_composite_operations_are_seen_in_every_mode(checked: CheckedBackend, guard: type):
    """In inference mode torch would hand `reshape` over whole, and call it a view."""
    x = torch.zeros(4, 4)

    def gather() -> None:
        with guard():
            x.t().reshape(-1)

    assert pairs(race(checked, gather, x.zero_)) == {("first", "second")}


def test_result_handed_over_without_an_event_is_found(checked: CheckedBackend):
    """The temporary has no name before the work runs, so no plan could have declared it."""
    box: list[Tensor] = []
    done = threading.Event()
    submit(checked, "a", "make", lambda: (box.append(torch.zeros(8) + 1), done.set()))
    submit(checked, "b", "take", lambda: (done.wait(), box[0].sum()))
    assert pairs(settled(checked)) == {("make", "take")}


def test_out_that_is_resized_is_seen_where_it_ends(checked: CheckedBackend):
    x, out = torch.ones(64), torch.empty(0)
    done = threading.Event()
    submit(checked, "a", "make", lambda: (torch.add(x, x, out=out), done.set()))
    submit(checked, "b", "take", lambda: (done.wait(), out.sum()))
    assert ("make", "take") in pairs(settled(checked))


def test_caller_that_reads_a_weight_against_the_store(checked: CheckedBackend):
    weight = torch.zeros(8)
    event = submit(checked, "store", "weight out", lambda: weight.fill_(1))
    with checked.watch("forward"):
        weight.sum()
    checked.caller().wait(event)
    with checked.watch("next forward"):
        weight.sum()
    assert pairs(settled(checked)) == {("weight out", "forward")}


def test_backward_writes_gradients_as_the_caller(checked: CheckedBackend):
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)
    with checked.watch("backward"):
        (weight @ torch.ones(4)).sum().backward()
    submit(checked, "compute", "read gradient", weight.grad.clone)
    submit(checked, "store", "write weight", weight.detach().zero_)
    assert pairs(settled(checked)) == {
        ("backward", "read gradient"),
        ("backward", "write weight"),
    }


class Wrapper(Tensor):
    """A tensor that keeps its data in another, as a `DTensor` does."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*plain, **(kwargs or {}))
        return args[0] if result is plain[0] else result


def test_what_a_subclass_wraps_is_seen(checked: CheckedBackend):
    inner = torch.zeros(8)
    wrapped = Wrapper(inner)
    found = race(checked, lambda: wrapped.add_(1), inner.sum)
    assert [hazard.first.kind for hazard in found] == ["write"]


def test_submitting_does_not_order_the_caller(checked: CheckedBackend):
    gradient = torch.zeros(8)
    with checked.watch("backward"):
        gradient.fill_(1)
        ready = checked.caller().record()
        gradient.mul_(2)  # after the event
    submit(checked, "compute", "too early", gradient.sum)
    checked.stream("load").wait(ready)
    submit(checked, "load", "half ordered", gradient.sum)
    checked.stream("store").wait(checked.caller().record())
    submit(checked, "store", "ordered", gradient.sum)
    found = settled(checked)
    assert pairs(found) == {("backward", "too early"), ("backward", "half ordered")}
    late = [hazard.first.op for hazard in found if hazard.second.label == "half ordered"]
    assert late == ["aten.mul_.Tensor"]


def test_work_inside_a_watch_belongs_to_its_stream(checked: CheckedBackend):
    x = torch.zeros(8)
    with checked.watch("step"):
        submit(checked, "a", "work", lambda: x.fill_(1))
        event = checked.stream("a").record()
        checked.stream("b").wait(event)
        submit(checked, "b", "later", lambda: x.fill_(2))
    assert settled(checked) == []


def test_host_writes_come_before_what_is_submitted_later(checked: CheckedBackend):
    slab = torch.zeros(8)
    with checked.watch("fill slab", host=True):
        slab.fill_(1)
    event = submit(checked, "load", "load", slab.clone)
    with checked.watch("refill slab", host=True):
        slab.fill_(2)
    checked.caller().wait(event)
    with checked.watch("refill after a wait of the caller", host=True):
        slab.fill_(2)
    event.synchronize()
    with checked.watch("refill after synchronize", host=True):
        slab.fill_(3)
    assert pairs(settled(checked)) == {
        ("load", "refill slab"),
        ("load", "refill after a wait of the caller"),
    }


def test_host_that_goes_on_is_not_before_what_it_submitted(checked: CheckedBackend):
    slab = torch.zeros(8)
    with checked.watch("fill slab", host=True):
        slab.fill_(1)
        event = submit(checked, "load", "load", slab.clone)
        slab.mul_(2)
        event.synchronize()
        slab.add_(3)
    (hazard,) = settled(checked)
    assert hazard.first.op == "aten.mul_.Tensor" or hazard.second.op == "aten.mul_.Tensor"


def test_host_comes_before_the_caller_that_follows(checked: CheckedBackend):
    x, y = torch.zeros(8), torch.zeros(8)
    with checked.watch("host", host=True):
        x.fill_(1)
    with checked.watch("caller"):
        x.sum()
        submit(checked, "a", "work", lambda: y.fill_(1)).synchronize()
        y.sum()
    assert settled(checked) == []


def test_synchronize_orders_all_that_is_submitted_later(checked: CheckedBackend):
    x = torch.zeros(8)
    submit(checked, "a", "first", lambda: x.fill_(1)).synchronize()
    submit(checked, "b", "second", lambda: x.fill_(2))
    with checked.watch("host"):
        x.sum()
    assert pairs(settled(checked)) == {("second", "host")}


def test_query_orders_nothing(checked: CheckedBackend):
    x = torch.zeros(8)
    event = submit(checked, "a", "first", lambda: x.fill_(1))
    while not event.query():
        pass
    submit(checked, "b", "second", lambda: x.fill_(2))
    assert pairs(settled(checked)) == {("first", "second")}


def test_settle_orders_everything(checked: CheckedBackend):
    x = torch.zeros(8)
    submit(checked, "a", "first", lambda: x.fill_(1))
    assert checked.settle() is None
    submit(checked, "b", "second", lambda: x.fill_(2))
    assert settled(checked) == []


def test_copy_of_the_backend_is_seen(checked: CheckedBackend):
    slot, slab = torch.zeros(8), torch.zeros(8)
    found = race(checked, lambda: checked.copy(slot, slab), slot.sum)
    assert [hazard.first.op for hazard in found] == ["aten.copy_.default"]


def test_failure_of_work_comes_out(checked: CheckedBackend):
    def fail() -> None:
        raise ArithmeticError("planted")

    failure: BaseException | None = None
    try:
        submit(checked, "a", "fail", fail)
    except ArithmeticError as raised:
        failure = raised
    failure = failure or checked.settle()
    assert isinstance(failure, ArithmeticError)
    x = torch.zeros(8)
    assert pairs(race(checked, x.zero_, x.sum)) == {("first", "second")}


def test_temporaries_at_reused_addresses_are_none(checked: CheckedBackend):
    for i in range(40):
        submit(checked, "ab"[i % 2], f"churn {i}", lambda: [_churn() for _ in range(10)])
    assert settled(checked) == []


def test_threads_leave_no_flag_of_torch_behind():
    """Two workers that enter and leave in turn must not make torch.compile think a mode is on."""
    checked = CheckedBackend(ThreadedBackend())
    inside, entered, left = threading.Event(), threading.Event(), threading.Event()
    submit(checked, "a", "outer", lambda: (inside.set(), entered.wait()))
    inside.wait()
    submit(checked, "b", "crossing", lambda: (entered.set(), left.wait()))
    checked.stream("a").record().synchronize()
    left.set()
    assert settled(checked) == []
    assert not is_in_torch_dispatch_mode()
    checked.close()


def test_reused_address_is_none_when_it_surely_is_reused():
    checked = CheckedBackend(SynchronousBackend())
    seen: list[set[int]] = [set(), set()]
    for i in range(40):
        submit(checked, "ab"[i % 2], "churn", lambda i=i: seen[i % 2].add(_churn()))
    assert seen[0] & seen[1]
    assert settled(checked) == []


def _churn() -> int:
    return torch.empty(5000).fill_(1).data_ptr()


def test_storage_that_gave_its_memory_up_is_none():
    """`resize_(0)` frees the bytes and keeps the storage; others get the addresses."""
    checked = CheckedBackend(SynchronousBackend())
    seen: list[set[int]] = [set(), set()]
    given_up = []
    for i in range(40):
        tensor = torch.empty(5000)
        seen[i % 2].add(tensor.data_ptr())
        submit(checked, "ab"[i % 2], "churn", lambda t=tensor: t.fill_(1))
        tensor.untyped_storage().resize_(0)
        given_up.append(tensor)
    assert seen[0] & seen[1]
    assert settled(checked) == []


def test_entries_are_bounded_and_no_verdict_is_lost():
    checked = CheckedBackend(SynchronousBackend())
    x, other = torch.zeros(8), torch.zeros(8)
    checked.stream("b").wait(submit(checked, "a", "write", lambda: x.fill_(1)))
    submit(checked, "a", "read once", x[7:].sum)
    for i in range(1000):
        submit(checked, "a", f"read {i}", lambda: (x[:4].sum(), other.sum()))
    entries = [len(t.entries) for region in checked._history._map for t in region.tracks.values()]
    assert 3 < sum(entries) < 1000
    submit(checked, "b", "half ordered", lambda: x.fill_(2))
    submit(checked, "c", "not ordered", lambda: x.fill_(2))
    found = pairs(settled(checked))
    for label in ("half ordered", "not ordered"):
        assert {("read once", label), ("read 999", label)} <= found
    assert {("write", "not ordered"), ("half ordered", "not ordered")} <= found
    assert ("write", "half ordered") not in found


def test_regions_of_dead_storages_go():
    checked = CheckedBackend(SynchronousBackend())
    fillers, alive = [], []
    for _ in range(4):
        alive = [torch.empty(50) for _ in range(1000)]
        submit(checked, "a", "fill", lambda tensors=alive: [t.fill_(1) for t in tensors])
        count = len(alive)
        alive.clear()
        # They take the addresses and are never touched, so that the next ones lie elsewhere.
        fillers.append([torch.empty(50) for _ in range(count)])
    assert len(list(checked._history._map)) < 3000


class Program:
    """A random program: tasks with real accesses, and random events, waits and synchronizations."""

    STREAMS = ("caller", "load", "compute", "store")

    def __init__(self, seed: int, *, tasks: int = 30, buffers: int = 5, ops: int = 3) -> None:
        self._random = random.Random(seed)
        self._buffers = [torch.zeros(6, 8) for _ in range(buffers)]
        self.accesses: dict[str, list[tuple[int, frozenset[int], bool]]] = {}
        self.before: dict[str, set[str]] = {}
        self._tasks = tasks
        self._ops = ops

    def run(self, backend: CheckedBackend) -> None:
        """Run it, and keep in `before` all tasks that come before each, found by closure over sets."""
        done: dict[str, set[str]] = {stream: set() for stream in self.STREAMS}
        host: set[str] = set()
        events: list[tuple[Event, set[str]]] = []
        for i in range(self._tasks):
            name = self._random.choice(self.STREAMS)
            stream = backend.caller() if name == "caller" else backend.stream(name)
            label = f"task {i}"
            if events and self._random.random() < 0.6:
                event, tasks = self._random.choice(events[-4:])
                stream.wait(event)
                done[name] |= tasks
            if events and self._random.random() < 0.05:
                event, tasks = self._random.choice(events)
                event.synchronize()
                host |= tasks
            done[name] |= host
            self.before[label] = set(done[name])
            stream.submit(self._task(label), label)
            done[name].add(label)
            if self._random.random() < 0.7:
                events.append((stream.record(), set(done[name])))

    def oracle(self) -> set[tuple[str, str]]:
        """Return the pairs of tasks that share an element, one writing, without an order."""
        closed = {label: set(before) for label, before in self.before.items()}
        for label in closed:  # in the order of submission: those before are closed already
            for earlier in list(closed[label]):
                closed[label] |= closed[earlier]
        return {
            (a, b)
            for a, b in combinations(self.accesses, 2)
            if a not in closed[b] and self._conflict(a, b)
        }

    def _conflict(self, a: str, b: str) -> bool:
        return any(
            buffer == other and (write or written) and elements & others
            for buffer, elements, write in self.accesses[a]
            for other, others, written in self.accesses[b]
        )

    def _task(self, label: str) -> Callable[[], None]:
        steps: list[tuple[Tensor, bool]] = []
        self.accesses[label] = []
        for _ in range(self._random.randint(1, self._ops)):
            which = self._random.randrange(len(self._buffers))
            start, step = self._random.randint(0, 5), self._random.choice((1, 1, 2))
            index = (
                (slice(start, start + 2), slice(None, None, step))
                if self._random.random() < 0.5
                else (slice(None), slice(start, 8, 2 * step))
            )
            write = self._random.random() < 0.4
            elements = torch.arange(48).view(6, 8)[index].flatten().tolist()
            self.accesses[label].append((which, frozenset(elements), write))
            steps.append((self._buffers[which][index], write))

        def work() -> None:
            for tensor, write in steps:
                if write:
                    tensor.add_(1)
                else:
                    tensor.mul(2).sum()

        return work


@pytest.mark.parametrize("block", range(4))
def test_random_programs_against_the_oracle(block: int):
    """Every pair is found, none is made up, and the order in which work really ran changes nothing."""
    clean = 0
    for seed in range(10 * block, 10 * block + 10):
        sets = []
        for make in (*BACKENDS.values(), LawlessBackend):
            backend = CheckedBackend(make())
            program = Program(seed, tasks=(2, 10, 40)[seed % 3])
            program.run(backend)
            sets.append(settled(backend))
            backend.close()
            assert pairs(sets[-1]) == program.oracle()
        assert all(found == sets[0] for found in sets)
        clean += not sets[0]
    assert 0 < clean < 10
