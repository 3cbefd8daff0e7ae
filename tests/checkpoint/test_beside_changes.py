"""Whatever changes the state other than by a step waits for a save to have read it; every kind of state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import muonloom
from checkpoint.disks import saved, stalled, to_save, watched
from checkpoint.support import PLACEMENTS, Bare, Run
from choosing import mostly_slow, pairwise
from muonloom import BlockSpec, HostPlacement, Layout, checkpoint
from muonloom.bfloat16_writer import BFloat16Writer
from muonloom.device.hazards import CheckedBackend
from muonloom.float8_writer import Float8BlockWriter
from staging.support import (
    BACKENDS,
    Named,
    assert_same_bits,
    everything,
    give_gradients,
    on_backend,
)

ALL_BYTES = 10_000_000

# -- changes in between -------------------------------------------------------------------------------


def load_older(run: Run) -> None:
    weights, state = run.older  # type: ignore[attr-defined]
    run.opt.load_state_dict(state)
    run.model.load_state_dict(weights)


def refresh_masters(run: Run) -> None:
    run.opt.refresh_masters()


def apply_to_masters(run: Run) -> None:
    run.opt.apply_to_masters(None, lambda master: master * 1.5)


def release(run: Run) -> None:
    run.opt.release()
    run.opt.resume()


def release_gradients(run: Run) -> None:
    run.opt.release(weights=False)
    run.opt.resume()


def register_writer(run: Run) -> None:
    weight = run.named[0][1]
    run.opt.register_writer(weight, BFloat16Writer())


def add_param_group(run: Run) -> None:
    extra = ("extra.weight", Parameter(torch.ones(16, dtype=torch.bfloat16)))
    run.opt.add_param_group({"params": [extra], "algorithm": "adamw", "lr": 0.01})


def overlap_forward(run: Run) -> None:
    run.opt.overlap_forward(run.model)
    run.go(1)


def other_iteration(run: Run) -> None:
    for group in run.opt.param_groups:
        group["ns_steps"] = 3
    run.go(1)


CHANGES = (
    load_older,
    refresh_masters,
    apply_to_masters,
    release,
    release_gradients,
    register_writer,
    add_param_group,
    overlap_forward,
    other_iteration,
)


def saved_state(path: Path) -> dict[str, Tensor]:
    """Return what was saved, without the buffer."""
    found = saved(path)
    del found["counter"]
    return found


def prepared(placement: str) -> Run:
    run = Run(PLACEMENTS[placement], ns_steps=2).go(1)
    older = (run.model.state_dict(), run.opt.state_dict())
    run.older = copy.deepcopy(older)  # type: ignore[attr-defined]
    return run.go(2)


IN_ALL = list(itertools.product(["device", "host", "split"], CHANGES))
IN_TWO = [case for number, case in enumerate(IN_ALL) if (number + number // len(CHANGES)) % 3]


@pytest.mark.parametrize(
    ("placement", "change"),
    mostly_slow(IN_ALL, but=IN_TWO),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_change_waits_until_the_state_is_read(
    placement: str, change: Callable[[Run], None], tmp_path: Path
):
    run, other = prepared(placement), prepared(placement)
    before = to_save(run.everything())
    with stalled() as disk, watched("wait", disk.open) as waits:
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
        change(run)
        assert waits
        run.go(1)
    handle.result()
    assert_same_bits(before, saved_state(tmp_path / "save"))
    change(other)
    assert_same_bits(other.go(1).everything(), run.everything())


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_changes_after_a_step_that_copied(placement: str, tmp_path: Path):
    """What was copied needs no waiting for; the rest does."""
    run = prepared(placement)
    before = to_save(run.everything())
    with stalled(lazy=True):
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=20_000)
        run.go(1, absent=lambda name, step: "layers.1" in name)
        apply_to_masters(run)
        other_iteration(run)
    assert handle.result().copied_bytes > 0
    assert_same_bits(before, saved_state(tmp_path / "save"))


@pytest.mark.parametrize("again", [Run.save, Run.load], ids=["save", "load"])
@pytest.mark.parametrize("placement", ["device", "split"])
def test_the_next_save_and_a_load_wait_for_the_end(
    placement: str, again: Callable[..., Any], tmp_path: Path
):
    run = prepared(placement)
    run.save(tmp_path / "older")
    before = to_save(run.go(1).everything())
    with stalled() as disk, watched("finish", disk.open) as waits:
        first = run.save(tmp_path / "first", async_=True, extra_host_bytes=ALL_BYTES)
        run.go(1)
        again(run, tmp_path / "older")
        assert waits
        assert first.done()
    assert_same_bits(before, saved_state(tmp_path / "first"))


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_a_save_of_what_is_released_and_its_return_meanwhile(placement: str, tmp_path: Path):
    run, other = prepared(placement), prepared(placement)
    before = to_save(run.everything())
    run.opt.release()
    with stalled() as disk, watched("wait", disk.open) as waits:
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
        run.opt.resume()
        assert waits
        run.go(1)
    handle.result()
    assert_same_bits(before, saved_state(tmp_path / "save"))
    assert_same_bits(other.go(1).everything(), run.everything())


def test_a_copy_of_the_optimizer_needs_not_wait(tmp_path: Path):
    run = prepared("host")
    with stalled(), watched("wait", lambda: None) as waits:
        handle = run.save(tmp_path / "save", async_=True, extra_host_bytes=ALL_BYTES)
        copy.deepcopy(run.opt)
        run.opt.state_dict()
        run.opt.get_full_parameter_master(run.named[0][1])
        run.opt.memory()
        assert not waits
        assert not handle.done()
    handle.result()


# -- every kind of state ------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "columns.weight": (24, 48),
    "experts": (3, 16, 24),
    "table.weight": (300, 16),
    "nothing.weight": (0, 16),
    "narrow": (5, 0),
    "gain": (),
    "norm.weight": (16,),
    "square.weight": (256, 256),
}
LAYOUT = Layout.from_shapes(
    SHAPES,
    overrides={
        "columns.weight": BlockSpec.columns(16, 32),
        "experts": BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up())),
        **dict.fromkeys(["table.weight", "nothing.weight", "narrow", "gain"], "adamw"),
    },
)
KINDS: dict[str, Any] = {
    "device": "device",
    "host": HostPlacement(slot_bytes=300_000, num_slots=2),
    "split": HostPlacement(slot_bytes=300_000, num_slots=2, master_layout="split"),
}
SMALL = {name for name in SHAPES if name != "square.weight"}


class Kinds:
    """A model of all kinds of parameters, or of the small ones, which then pass through small slots."""

    def __init__(
        self,
        placement: Any,
        dtype: torch.dtype = torch.bfloat16,
        *,
        strided: bool = False,
        is_small: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.named: Named = []
        for name in sorted(SMALL if is_small else SHAPES):
            values = torch.randn(SHAPES[name], generator=generator).to(dtype)
            if strided and values.ndim > 1:
                values = values.transpose(0, -1).contiguous().transpose(0, -1)
            self.named.append((name, Parameter(values)))
        self.parameters = dict(self.named)
        self.model = Bare(self.named)
        self.step = 0
        options = {"lr": 0.02, "adamw_lr": 0.01, "ns_steps": 1}
        self.opt = muonloom.Muon(self.named, layout=LAYOUT, placement=placement, **options)

    def go(self, steps: int) -> Kinds:
        for _ in range(steps):
            give_gradients(self.named, self.step)
            self.opt.step()
            self.step += 1
        return self

    def state(self) -> dict[str, Tensor]:
        """Return what is to be saved: weights where they have storage, masters, state."""
        whole = [(n, p) for n, p in self.named if p.untyped_storage().nbytes() >= p.nbytes]
        return to_save(everything(whole, self.opt))

    def save_beside(self, path: Path, extra: int = ALL_BYTES) -> dict[str, Tensor]:
        """Save beside two steps; return what was saved, without the buffer."""
        with stalled(lazy=True):
            handle = checkpoint.save(
                path,
                model=self.model,
                optimizer=self.opt,
                step=self.step,
                async_=True,
                extra_host_bytes=extra,
            )
            self.go(2)
        handle.result()
        return saved_state(path)


def small_slots(placement: str) -> Any:
    full, split = (HostPlacement(slot_bytes=6000, master_layout=k) for k in ("full", "split"))
    return {"device": "device", "host": full, "split": split}[placement]


def cannot_be_half_of_a_master(placement: str, kind: Any, *_: Any) -> bool:
    return placement == "split" and kind in (torch.float16, "fp8")


@pytest.mark.parametrize(
    ("placement", "dtype", "strided", "extra"),
    pairwise(
        KINDS,
        [torch.float32, torch.bfloat16, torch.float16],
        [False, True],
        [0, ALL_BYTES],
        unless=cannot_be_half_of_a_master,
    ),
    ids=str,
)
def test_all_kinds_of_parameters(
    placement: str, dtype: torch.dtype, strided: bool, extra: int, tmp_path: Path
):
    with on_backend(BACKENDS["checked"]) as backends:
        one, other = (Kinds(small_slots(placement), dtype, strided=strided).go(2) for _ in range(2))
        before = other.state()
        found = one.save_beside(tmp_path / "save", extra)
        for backend in backends:
            assert isinstance(backend, CheckedBackend)
            backend.check()
        assert_same_bits(before, found)
        assert_same_bits(other.go(2).state(), one.state())


def square(kinds: Kinds, writer: Any) -> Kinds:
    kinds.opt.register_writer(kinds.parameters["square.weight"], writer)
    return kinds


WRITERS: dict[str, Callable[[], Any]] = {
    "bf16": BFloat16Writer,
    "bf16 elsewhere": lambda: BFloat16Writer(torch.zeros(256, 256, dtype=torch.bfloat16)),
    "fp8": lambda: Float8BlockWriter((128, 128)),
}


@pytest.mark.parametrize(
    ("placement", "writer"), pairwise(KINDS, WRITERS, unless=cannot_be_half_of_a_master)
)
def test_what_a_writer_writes_is_saved_as_its_master(placement: str, writer: str, tmp_path: Path):
    pair = [Kinds(KINDS[placement], is_small=False) for _ in range(2)]
    one, other = (square(kinds, WRITERS[writer]()).go(1) for kinds in pair)
    if writer != "bf16":
        for kinds in (one, other):
            kinds.parameters["square.weight"].untyped_storage().resize_(0)
    before = other.state()
    found = one.save_beside(tmp_path / "save")
    assert found["square.weight"].dtype == torch.float32
    assert_same_bits(before, found)
    assert_same_bits(other.go(2).state(), one.state())


@pytest.mark.parametrize("placement", ["device", "host"])
def test_released_float8_weights(placement: str, tmp_path: Path):
    one, other = (
        square(Kinds(KINDS[placement], is_small=False), Float8BlockWriter()).go(1) for _ in range(2)
    )
    before = other.state()
    one.opt.release()
    with stalled() as disk, watched("wait", disk.open):
        handle = checkpoint.save(
            tmp_path / "save", model=one.model, optimizer=one.opt, step=1, async_=True
        )
        one.opt.resume()
        one.go(1)
    handle.result()
    assert_same_bits(before, saved_state(tmp_path / "save"))
    assert_same_bits(other.go(1).state(), one.state())


# -- what the optimizer does not have -----------------------------------------------------------------


@pytest.fixture(params=["device", "host"])
def model(request: pytest.FixtureRequest) -> tuple[nn.Module, muonloom.Muon]:
    """A matrix, a frozen one, and running averages."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.BatchNorm1d(8))
    for parameter in layers[1:].parameters():
        parameter.requires_grad_(False)
    opt = muonloom.Muon([("0.weight", layers[0].weight)], lr=0.02, placement=request.param)
    return layers, opt


def train(layers: nn.Module, opt: muonloom.Muon) -> None:
    opt.zero_grad()
    layers(torch.randn(4, 8)).square().sum().backward()
    opt.step()


def test_buffers_are_those_of_the_moment_of_the_save(
    model: tuple[nn.Module, muonloom.Muon], tmp_path: Path
):
    layers, opt = model
    train(layers, opt)
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    with stalled():
        handle = checkpoint.save(tmp_path, model=layers, optimizer=opt, step=1, async_=True)
        for _ in range(3):
            train(layers, opt)
    handle.result()
    found = saved(tmp_path)
    del found["0.weight/momentum_buffer"]
    assert_same_bits(before, found)
    assert int(found["2.num_batches_tracked"]) == 1


def test_a_frozen_parameter_that_is_written_meanwhile_fails_the_save_by_its_name(
    model: tuple[nn.Module, muonloom.Muon], tmp_path: Path
):
    layers, opt = model
    train(layers, opt)
    with stalled():
        handle = checkpoint.save(
            tmp_path / "save", model=layers, optimizer=opt, step=1, async_=True
        )
        with torch.no_grad():
            layers[1].bias.add_(1)  # type: ignore[index]
        train(layers, opt)
    with pytest.raises(RuntimeError, match=r"^1\.bias: got a parameter, not of the optimizer"):
        handle.result()
    assert not (tmp_path / "save").exists()
    train(layers, opt)
    checkpoint.save(tmp_path / "save", model=layers, optimizer=opt, step=2)


def test_releasing_a_frozen_parameter_meanwhile_does_no_harm(
    model: tuple[nn.Module, muonloom.Muon], tmp_path: Path
):
    layers, opt = model
    train(layers, opt)
    before = layers[1].weight.clone()  # type: ignore[index]
    # Reading is over when the thread is at the last tensor's write.
    with stalled(lazy=True):
        handle = checkpoint.save(tmp_path, model=layers, optimizer=opt, step=1, async_=True)
        opt.release(model=layers)
        opt.resume()
        assert not handle.done()
    handle.result()
    assert torch.equal(saved(tmp_path)["1.weight"], before)
