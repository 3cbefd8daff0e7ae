"""torch.distributed's helpers and checkpoints over ``state_dict``, in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import muonloom
from optimizer.support import fingerprint, steps, through_a_file, weights_fingerprint

OPTIONS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}
DTYPES = [torch.float32, torch.bfloat16]


class Net(nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up_proj = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down_proj = nn.Linear(10, 6)
        self.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_distributed_state_dict_round_trip(dtype: torch.dtype):
    net, twin_net = Net(0, dtype), Net(1, dtype)
    opt = muonloom.Muon(net.named_parameters(), **OPTIONS)
    twin = muonloom.Muon(twin_net.named_parameters(), **OPTIONS)
    steps(opt, list(net.parameters()), range(2))
    twin_net.load_state_dict(net.state_dict())
    state = through_a_file(get_optimizer_state_dict(net, opt))
    assert "up_proj.weight" in state["state"]
    set_optimizer_state_dict(twin_net, twin, state)
    assert fingerprint(twin) == fingerprint(opt)
    steps(opt, list(net.parameters()), [3])
    steps(twin, list(twin_net.parameters()), [3])
    assert fingerprint(twin) == fingerprint(opt)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_distributed_state_dict_before_any_step_changes_nothing(dtype: torch.dtype):
    net, plain_net = Net(0, dtype), Net(0, dtype)
    opt = muonloom.Muon(net.named_parameters(), **OPTIONS)
    plain = muonloom.Muon(plain_net.named_parameters(), **OPTIONS)
    before = weights_fingerprint(net.parameters())
    state = get_optimizer_state_dict(net, opt)
    assert weights_fingerprint(net.parameters()) == before
    set_optimizer_state_dict(net, opt, state)
    assert weights_fingerprint(net.parameters()) == before
    assert [g["lr"] for g in opt.param_groups] == [0.02, 0.02]
    steps(opt, list(net.parameters()), [1])
    steps(plain, list(plain_net.parameters()), [1])
    assert weights_fingerprint(net.parameters()) == weights_fingerprint(plain_net.parameters())


OPTIONS_OF_TORCH = {
    "full": {"full_state_dict": True},
    "full on the host": {"full_state_dict": True, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", OPTIONS_OF_TORCH)
def test_torch_distributed_state_dict_options(kind: str, at: int):
    net, twin_net = Net(0), Net(1)
    opt = muonloom.Muon(net.named_parameters(), **OPTIONS)
    twin = muonloom.Muon(twin_net.named_parameters(), **OPTIONS)
    steps(opt, list(net.parameters()), range(at))
    twin_net.load_state_dict(net.state_dict())
    options = StateDictOptions(**OPTIONS_OF_TORCH[kind])
    state = through_a_file(get_optimizer_state_dict(net, opt, options=options))
    set_optimizer_state_dict(twin_net, twin, state, options=options)
    steps(opt, list(net.parameters()), [3, 4])
    steps(twin, list(twin_net.parameters()), [3, 4])
    assert fingerprint(twin) == fingerprint(opt)


@pytest.mark.parametrize("flat", [False, True])
def test_torch_distributed_checkpoint_round_trip(tmp_path: Path, flat: bool):
    net, twin_net = Net(0), Net(1)
    opt = muonloom.Muon(net.named_parameters(), **OPTIONS)
    twin = muonloom.Muon(twin_net.named_parameters(), **OPTIONS)
    steps(opt, list(net.parameters()), range(2))
    twin_net.load_state_dict(net.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = {"optimizer": get_optimizer_state_dict(net, opt, options=options)}
    target = {"optimizer": get_optimizer_state_dict(twin_net, twin, options=options)}
    with warnings.catch_warnings():  # of torch, about planners without process groups
        warnings.simplefilter("ignore")
        checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
        checkpoint.load(target, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(twin_net, twin, target["optimizer"], options=options)
    steps(opt, list(net.parameters()), [3])
    steps(twin, list(twin_net.parameters()), [3])
    assert fingerprint(twin) == fingerprint(opt)
