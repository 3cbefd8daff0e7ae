from __future__ import annotations

import torch

from muonloom.bench.flops import standard_flops
from muonloom.bench.orthogonalization import CUT_GATE_FLOPS, OURS, _gates
from muonloom.bench.peers import JORDAN, Peer
from muonloom.bench.shapes import BatchShape
from muonloom.bench.timing import Timing
from muonloom.math import orthogonalize

CPU = torch.device("cpu")


def gates(side, measured):
    peer = Peer(
        name="peer",
        dtype="float32",
        coefficients=(JORDAN,) * 5,
        batched=True,
        orthogonalize=lambda x, steps: orthogonalize(x, ns_steps=steps),
    )
    timing = Timing(name="peer", measured=measured, samples_s=[1.0])
    shape = BatchShape(count=2, rows=side, columns=side)
    return set(_gates(shape, [peer], [timing], device=CPU, variants=False))


def test_large_matrices_are_not_judged_for_peers_that_are_slow_here():
    assert standard_flops(32, 32) < CUT_GATE_FLOPS < standard_flops(200, 200)
    assert gates(200, "all") == gates(32, "1 of 2 matrices") == {OURS, "peer"}
    assert gates(200, "1 of 2 matrices") == {OURS}
