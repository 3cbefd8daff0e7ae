"""Checkpoints on a GPU: the state of the step that was asked for, whatever the streams are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cuda.test_host_placement import PLACEMENTS, build, everything, train
from muonloom import checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("extra_host_bytes", [0, None, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placement", ["device", *PLACEMENTS], ids=str)
def test_a_save_beside_training_has_the_state_of_its_step(
    placement: Any, dtype: torch.dtype, extra_host_bytes: int | None, tmp_path: Path
):
    net, opt = build(placement, dtype)
    train(net, opt, 2)
    wanted = everything(net, opt)
    handle = checkpoint.save(
        tmp_path / "saved",
        model=net,
        optimizer=opt,
        step=2,
        async_=True,
        extra_host_bytes=extra_host_bytes,
    )
    train(net, opt, 3)
    handle.result()
    after = everything(net, opt)
    for other in ("device", placement):
        twin, twin_opt = build(other, dtype)
        checkpoint.load(tmp_path / "saved", model=twin, optimizer=twin_opt)
        assert all(map(torch.equal, wanted, everything(twin, twin_opt)))
        train(twin, twin_opt, 3)
        assert all(map(torch.equal, after, everything(twin, twin_opt)))
