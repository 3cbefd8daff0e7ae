"""Statistics over heads: true numbers, made only for what is cut in head blocks."""

from __future__ import annotations

import json

import torch

import muonloom
from muonloom.layout import BlockSpec

NAME = "layers.0.attn.q.weight"


def stepped(spec: BlockSpec | str, scales: list[float]) -> tuple[muonloom.Muon, torch.nn.Parameter]:
    layout = muonloom.Layout.from_shapes({NAME: (32, 16)}, overrides={NAME: spec})
    parameter = torch.nn.Parameter(torch.zeros(32, 16))
    opt = muonloom.Muon(
        [(NAME, parameter)],
        layout=layout,
        lr=1.0,
        ns_coefficients="polar_express_1.01",
        ns_steps=12,
    )
    torch.manual_seed(0)
    parameter.grad = torch.randn(4, 8, 16).mul_(torch.tensor(scales)[:, None, None]).view(32, 16)
    opt.step()
    return opt, parameter


def test_spreads_are_those_of_the_tensors():
    opt, parameter = stepped(BlockSpec.heads(4, heads_per_block=1), [1.0, 10.0, 100.0, 1.0])
    report = json.loads(json.dumps(opt.last_step))["heads"]["layers.*.attn.q.weight"]
    updates = parameter.detach().view(4, -1).square().mean(1).sqrt()
    momenta = opt.state[parameter]["momentum_buffer"].view(4, -1).norm(dim=1)
    assert report["blocks"] == 4
    torch.testing.assert_close(torch.tensor(report["update_rms"]), torch.stack(updates.aminmax()))
    torch.testing.assert_close(report["update_spread"], float(updates.max() / updates.min()))
    torch.testing.assert_close(report["momentum_spread"], float(momenta.max() / momenta.min()))
    assert report["momentum_spread"] > 50
    assert report["update_spread"] < 1.02  # a scale of one head changes no head's update


def test_an_idle_head_has_no_ratio():
    opt, _ = stepped(BlockSpec.heads(4, heads_per_block=1), [1.0, 0.0, 1.0, 1.0])
    report = opt.last_step["heads"]["layers.*.attn.q.weight"]
    assert report["momentum_spread"] is None
    assert report["update_rms"][0] == 0.0


def test_whole_matrices_have_none():
    assert stepped(BlockSpec.whole(), [1.0] * 4)[0].last_step["heads"] == {}
    assert stepped(BlockSpec.heads(4), [1.0] * 4)[0].last_step["heads"] == {}
