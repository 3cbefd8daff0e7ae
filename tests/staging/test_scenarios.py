"""Host placement gives the bits of device placement, whatever happens between two steps."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import muonloom
import muonloom.compute
from choosing import pairwise
from muonloom import Layout
from staging.support import (
    BACKENDS,
    PLACEMENTS,
    SHAPES,
    Named,
    Scenario,
    assert_same_bits,
    built,
    everything,
    give_gradients,
    mixed,
    on_backend,
    outcome,
    steps,
)


def parameter(named: Named, name: str) -> Parameter:
    return dict(named)[name]


# -- what happens between steps -----------------------------------------------------------------------


def accumulate(named: Named, opt: muonloom.Muon) -> None:
    for step in range(3):
        give_gradients(named, 2 * step)
        first = [p.grad for _, p in named]
        give_gradients(named, 2 * step + 1)
        for (_, p), gradient in zip(named, first, strict=True):
            assert p.grad is not None
            p.grad.add_(gradient)
        clip_grad_norm_([p for _, p in named], 1.0)
        opt.step()
        opt.zero_grad(set_to_none=step == 1)


def schedule_the_rate(named: Named, opt: muonloom.Muon) -> None:
    scheduler = LambdaLR(opt, lambda step: 1.0 / (1 + step))
    for step in range(4):
        steps(named, opt, step)
        scheduler.step()


def change_options(named: Named, opt: muonloom.Muon) -> None:
    for step in range(4):
        for group in opt.param_groups:
            group["lr"] = 0.02 / (1 + step)
            group["weight_decay"] = 0.1 * step
            group["ns_steps"] = 5 - step % 2
        steps(named, opt, step)


def skip_a_step(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    give_gradients(named, 2)
    gradient = parameter(named, "layers.1.down.weight").grad
    assert gradient is not None
    gradient[3, 3] = float("nan")
    with pytest.warns(RuntimeWarning, match=r"layers\.1\.down\.weight"):
        opt.step()
    assert opt.last_step["skipped"]
    steps(named, opt, 3, 4)


def go_without_gradients(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    steps(named, opt, 2, absent=lambda name, step: True)
    steps(named, opt, 3)
    steps(named, opt, 4, absent=lambda name, step: name != "head.weight")
    steps(named, opt, 5)


def add_a_group(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    generator = torch.Generator().manual_seed(9)
    shapes = {"late.weight": (16, 24), "late.bias": (7,)}
    late = [
        (name, Parameter(torch.randn(shape, generator=generator).bfloat16()))
        for name, shape in shapes.items()
    ]
    fresh = Layout.from_shapes({**SHAPES, **shapes}, overrides={"late.bias": "adamw"})
    opt._layout = fresh
    opt.add_param_group({"params": late, "lr": 0.05})
    named += late
    steps(named, opt, 2, 3)


def go_back(named: Named, opt: muonloom.Muon) -> None:
    """Load what was saved two steps ago; state tensors stay where they are."""
    steps(named, opt, 0, 1)
    saved = copy.deepcopy(opt.state_dict())
    weights = [p.detach().clone() for _, p in named]
    steps(named, opt, 2, 3)
    opt.drain()
    before = addresses(opt)
    with torch.no_grad():
        for (_, p), weight in zip(named, weights, strict=True):
            p.copy_(weight)
    opt.load_state_dict(saved)
    steps(named, opt, 4, 5)
    opt.drain()
    assert opt._assembly.host is None or addresses(opt) == before


def addresses(opt: muonloom.Muon) -> dict[tuple[int, str], int]:
    pairs = [(id(p), own) for p, own in opt.state.items()]
    return {(p, key): value.data_ptr() for p, own in pairs for key, value in own.items()}


def refresh(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    with torch.no_grad():
        for _, p in named[::2]:
            p.mul_(0.5)
    opt.refresh_masters()
    steps(named, opt, 2, 3)


def edit_masters(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    opt.apply_to_masters([p for _, p in named[1:5]], lambda master: master.mul_(0.75))
    steps(named, opt, 2)
    opt.apply_to_masters([named[0][1]], lambda master: master + 1e-3)
    steps(named, opt, 3)


def write_state(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    opt.drain()
    opt.state[parameter(named, "layers.0.q.weight")]["momentum_buffer"].zero_()
    opt.state[parameter(named, "head.weight")]["exp_avg"].mul_(0.5)
    opt.state[parameter(named, "head.weight")]["step"].fill_(7)
    steps(named, opt, 2, 3)


def replace_state(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    opt.drain()
    for name, key in [("layers.1.gate_up", "momentum_buffer"), ("embed.weight", "exp_avg_sq")]:
        own = opt.state[parameter(named, name)]
        own[key] = own[key] * 0.5
    steps(named, opt, 2, 3)


def clear_state(named: Named, opt: muonloom.Muon) -> None:
    steps(named, opt, 0, 1)
    opt.drain()
    del opt.state[parameter(named, "layers.0.q.weight")]["momentum_buffer"]
    steps(named, opt, 2, 3)
    opt.drain()
    opt.state.clear()
    steps(named, opt, 4, 5)


def rewrite_weights(named: Named, opt: muonloom.Muon) -> None:
    """As a checkpoint of the model that is loaded together with the optimizer's own does."""
    steps(named, opt, 0, 1)
    saved = copy.deepcopy(opt.state_dict())
    with torch.no_grad():
        for _, p in named:
            p.copy_(p.clone())
    opt.load_state_dict(saved)
    steps(named, opt, 2, 3)


def copied(named: Named, opt: muonloom.Muon) -> tuple[Named, muonloom.Muon]:
    """A copy made while stores may still be on their way goes on as the first would have."""
    steps(named, opt, 0, 1)
    named, opt = copy.deepcopy((named, opt))
    steps(named, opt, 2, 3)
    return named, opt


def pickled(named: Named, opt: muonloom.Muon) -> tuple[Named, muonloom.Muon]:
    steps(named, opt, 0, 1)
    named, opt = pickle.loads(pickle.dumps((named, opt)))
    steps(named, opt, 2, 3)
    return named, opt


def spare_a_matrix(named: Named, opt: muonloom.Muon) -> None:
    """The first matrix of each batch fails: weight and momentum stay bit for bit, the others move."""
    steps(named, opt, 0, 1)
    before = everything(named, opt)
    with pytest.MonkeyPatch.context() as patch:
        genuine = muonloom.compute.iterate

        def iterate(x: Tensor, recipe: Any, scratch: Tensor) -> Tensor:
            out = genuine(x, recipe, scratch)
            out[0, -1, -1] = float("nan")
            return out

        patch.setattr(muonloom.compute, "iterate", iterate)
        steps(named, opt, 2)
        with pytest.raises(FloatingPointError):
            opt.drain()
    after = everything(named, opt)
    kept = {
        name
        for name, _ in named
        if all(torch.equal(before[k], after[k]) for k in before if k.split("/")[0] == name)
    }
    assert "layers.0.down.weight" in kept
    assert "layers.1.down.weight" not in kept
    steps(named, opt, 3)


SCENARIOS: list[Scenario] = [
    accumulate,
    schedule_the_rate,
    change_options,
    skip_a_step,
    go_without_gradients,
    add_a_group,
    go_back,
    refresh,
    edit_masters,
    write_state,
    replace_state,
    clear_state,
    rewrite_weights,
    copied,
    pickled,
    spare_a_matrix,
]


@pytest.mark.parametrize(
    ("scenario", "master_layout", "backend"),
    pairwise(SCENARIOS, PLACEMENTS, ["synchronous", "hostile"]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_scenario(scenario: Scenario, master_layout: str, backend: str):
    options: dict[str, Any] = {"dtype": mixed, "ns_batch_bytes": 5000}
    wanted = outcome(scenario, "device", **options)
    with on_backend(BACKENDS[backend]):
        assert_same_bits(wanted, outcome(scenario, PLACEMENTS[master_layout], **options))


# -- saved in one placement, loaded in another --------------------------------------------------------


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    ("momentum_dtype", "source", "target"),
    pairwise([torch.float32, torch.bfloat16], ["device", *PLACEMENTS], ["device", *PLACEMENTS]),
    ids=str,
)
def test_a_state_goes_from_placement_to_placement(
    source: str, target: str, momentum_dtype: torch.dtype
):
    options: dict[str, Any] = {"dtype": mixed, "momentum_dtype": momentum_dtype}
    straight_named, straight = built("device", **options)
    steps(straight_named, straight, 0, 1, 2, 3)
    named, opt = built(PLACEMENTS.get(source, source), **options)
    steps(named, opt, 0, 1)
    saved = through_a_file(opt.state_dict())
    other_named, other = built(PLACEMENTS.get(target, target), **options)
    steps(other_named, other, 9)
    with torch.no_grad():
        for (_, old), (_, new) in zip(named, other_named, strict=True):
            new.copy_(old)
    other.load_state_dict(saved)
    steps(other_named, other, 2, 3)
    assert_same_bits(everything(straight_named, straight), everything(other_named, other))
