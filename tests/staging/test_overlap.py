"""Late units of a step beside the next forward pass: every weight is waited for, and no other."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonloom
from choosing import mostly_slow
from muonloom import HostPlacement
from muonloom.device import SynchronousBackend, ThreadedBackend, seeded_delays
from muonloom.device.hazards import CheckedBackend
from staging.support import on_backend

OPTIONS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.01, "ns_batch_bytes": 16 * 16 * 4}
SLOTS = HostPlacement(slot_bytes=4096, num_slots=3)


class Net(nn.Module):
    """Blocks in a list, and modules beside it, one weight of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build(placement: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Net, muonloom.Muon]:
    torch.manual_seed(0)
    net = Net().to(dtype)
    opt = muonloom.Muon(net.named_parameters(), placement=placement, **OPTIONS)
    return net, opt


def train(net: nn.Module, opt: muonloom.Muon, steps: int = 5) -> None:
    for step in range(steps):
        tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(step))
        net(tokens).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def bits(net: nn.Module, opt: muonloom.Muon) -> list[Tensor]:
    opt.drain()
    return [tensor.clone() for tensor in net.state_dict().values()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", mostly_slow(range(4), but=[0, 1]))
def test_training_gives_the_same_bits(seed: int, dtype: torch.dtype):
    net, opt = build("device", dtype)
    train(net, opt)
    expected = bits(net, opt)
    with on_backend(lambda: ThreadedBackend(delays=seeded_delays(seed, 2e-3))):
        net, opt = build(SLOTS, dtype)
        with opt.overlap_forward(net):
            train(net, opt)
            overlapped = [tensor.clone() for tensor in net.state_dict().values()]
        for ours, theirs in zip(overlapped, expected, strict=True):
            assert torch.equal(ours, theirs)
        net, opt = build(SLOTS, dtype)
        handle = opt.overlap_forward(net)
        train(net, opt, 3)
        handle.remove()
        tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3))
        net(tokens).float().square().mean().backward()
        opt.step()
        assert all(not module._forward_pre_hooks for module in net.modules())


def test_step_returns_before_late_units_are_done_and_forward_waits_for_its_own():
    gate, seen = threading.Event(), []
    armed = False

    def delays(stream: str, label: str) -> float:
        if armed and stream == "compute" and label == "update":
            seen.append(label)
            if len(seen) == 3:
                assert gate.wait(30)
        return 0.0

    with on_backend(lambda: ThreadedBackend(delays=delays)):
        net, opt = build(SLOTS)
        opt.overlap_forward(net)
        train(net, opt, 1)
        opt.drain()
        armed = True
        net(torch.arange(8)).float().square().mean().backward()
        before = [p.detach().clone() for p in net.parameters()]
        opt.step()  # would not return if it waited for the third layer
        entered: list[int] = []
        for index, layer in enumerate(net.layers):
            layer.register_forward_pre_hook(lambda *_, i=index: entered.append(i))
        forward = threading.Thread(target=lambda: net(torch.arange(8)), daemon=True)
        forward.start()
        forward.join(0.5)
        assert forward.is_alive()
        assert entered == [0, 1]  # the third waits for its own
        gate.set()
        forward.join(30)
        assert not forward.is_alive()
        assert entered == [0, 1, 2, 3]
        opt.drain()
        changed = [not torch.equal(b, p) for b, p in zip(before, net.parameters(), strict=True)]
        assert all(changed)


def test_the_checker_finds_a_forward_that_does_not_wait():
    for waits in (True, False):
        made: list[CheckedBackend] = []
        with on_backend(
            lambda made=made: made.append(CheckedBackend(SynchronousBackend())) or made[0]
        ):
            net, opt = build(SLOTS)
            opt.overlap_forward(net)
            train(net, opt, 2)
            net(torch.arange(8)).float().square().mean().backward()
            opt.step()
            with made[0].watch("forward"), torch.no_grad():
                if waits:
                    net(torch.arange(8))
                else:
                    net.layers[3][0].weight.sum()
            assert bool(made[0].hazards) is not waits


def test_state_dict_zero_grad_and_the_next_step_wait():
    with on_backend(lambda: ThreadedBackend(delays=seeded_delays(1, 5e-3))):
        net, opt = build(SLOTS)
        opt.overlap_forward(net)
        twin, other = build("device")
        for step in range(3):
            for one, its in ((net, opt), (twin, other)):
                one(torch.arange(8)).float().square().mean().backward()
                its.step()
                if step == 0:
                    assert one.state_dict()
                its.zero_grad(set_to_none=False)
        for ours, theirs in zip(bits(net, opt), bits(twin, other), strict=True):
            assert torch.equal(ours, theirs)


class Reader(nn.Module):
    """Reads the weight of a module inside it, which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.late.weight


def test_weights_that_a_parent_reads_are_waited_for():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Sequential(Reader())).bfloat16()
    with on_backend(lambda: ThreadedBackend(delays=seeded_delays(1, 5e-3))):
        opt = muonloom.Muon(net.named_parameters(), placement=SLOTS, **OPTIONS)
        opt.overlap_forward(net)
        twin = copy.deepcopy(net)  # its hooks wait for nobody
        other = muonloom.Muon(twin.named_parameters(), **OPTIONS)
        x = torch.randn(4, 16).bfloat16()
        for _ in range(4):
            outputs = []
            for one, its in ((net, opt), (twin, other)):
                outputs.append(one(x))
                outputs[-1].float().square().mean().backward()
                its.step()
                its.zero_grad()
            assert torch.equal(*outputs)


@pytest.mark.parametrize("seed", range(3))
def test_loading_weights_and_new_groups_meet_no_late_unit(seed: int):
    results = []
    for placement in ("device", SLOTS):
        with on_backend(lambda: ThreadedBackend(delays=seeded_delays(seed, 5e-3))):
            net, opt = build(placement, torch.float32)
            opt.overlap_forward(net)
            kept = {key: value.clone() for key, value in net.state_dict().items()}
            train(net, opt, 2)
            net.load_state_dict(kept)
            train(net, opt, 1)
            torch.manual_seed(5)
            net.layers.append(nn.Linear(16, 16, bias=False))
            opt.add_param_group({"params": [("layers.4.weight", net.layers[4].weight)]})
            train(net, opt, 3)
            results.append(bits(net, opt))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_hooked_model_can_be_pickled_and_outlives_the_optimizer():
    net, opt = build(SLOTS)
    opt.overlap_forward(net)
    train(net, opt, 1)
    copied = pickle.loads(pickle.dumps(net))
    tokens = torch.arange(8)
    assert torch.equal(copied(tokens), net(tokens))
    opt.drain()
    alive = weakref.ref(opt)
    del opt
    assert alive() is None
    net(tokens)


def test_a_model_without_the_parameter_is_refused():
    _, opt = build(SLOTS)
    with pytest.raises(
        ValueError, match=r"^embed\.weight: got a parameter that is not in the model"
    ):
        opt.overlap_forward(nn.Linear(3, 3))


def test_in_device_placement_nothing_changes():
    net, opt = build("device")
    with opt.overlap_forward(net):
        train(net, opt, 2)
    twin, other = build("device")
    train(twin, other, 2)
    for ours, theirs in zip(bits(net, opt), bits(twin, other), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_given_back_by_the_callers_thread():
    """Torch does not bear two threads that set one gradient: late units set none."""
    with on_backend(lambda: ThreadedBackend(delays=seeded_delays(0, 2e-3))):
        torch.manual_seed(0)
        net = Net().to(torch.bfloat16)
        opt = muonloom.Muon(net.named_parameters(), placement=SLOTS, free_gradients=True, **OPTIONS)
        with opt.overlap_forward(net):
            for _ in range(3):
                net(torch.arange(8)[None]).float().square().mean().backward()
                opt.step()
                assert all(parameter.grad is None for parameter in net.parameters())
