"""What fits no batch, slot or block is refused as a writer is registered, and nothing has changed then."""

from __future__ import annotations

import re

import pytest
import torch

import muonloom
from muonloom import BlockSpec, HostPlacement, Layout

# -- what the optimizer says ------------------------------------------------------------------------

EXPERTS = (4, 16, 8)  # gate and up of an expert: two matrices of 256 bytes


class Plain:
    """Writes FP32 to a tensor of its own."""

    def __init__(self, param: torch.Tensor, block_rows: int = 1) -> None:
        self.data = param.detach().float().clone()
        self.block_rows = block_rows

    @property
    def storage(self) -> object:
        return self.data

    def rows_per_block(self, param: torch.Tensor) -> int:
        return self.block_rows

    def write(self, param: torch.Tensor, master: torch.Tensor, rows: slice) -> None:
        self.data[rows].copy_(master)

    def read(self, param: torch.Tensor) -> torch.Tensor:
        return self.data.clone()


def optimizer(**options: object) -> tuple[torch.nn.Parameter, muonloom.Muon]:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(EXPERTS, generator=generator).bfloat16())
    param.grad = torch.randn(EXPERTS, generator=generator).bfloat16()
    layout = Layout.from_shapes(
        {"mlp.experts": EXPERTS},
        overrides={"mlp.experts": BlockSpec.stacked(BlockSpec.gate_up())},
    )
    settled = {"ns_compute_dtype": torch.float32, "lr": 0.1, **options}
    return param, muonloom.Muon([("mlp.experts", param)], layout=layout, **settled)  # type: ignore[arg-type]


REFUSED = {
    "batch": (
        {"ns_batch_bytes": 300},
        r"a 8×8 matrix of 256 bytes.*2 of which are written together.*=300;.*512 or more",
    ),
    "slot": (
        {"placement": HostPlacement(slot_bytes=300)},
        r".*stages 512 bytes and slot_bytes=300;.*512 or more",
    ),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_fits_no_batch_or_slot_is_refused_at_registration(case: str, stepped: bool):
    options, message = REFUSED[case]
    param, opt = optimizer(**options)
    twin, other = optimizer(**options)
    if stepped:
        opt.step()
        other.step()
    before, keys = param.detach().clone(), {p: set(s) for p, s in opt.state.items()}
    writer = Plain(param)
    with pytest.raises(ValueError, match=r"^mlp\.experts: got " + message):
        opt.register_writer(param, writer)
    assert torch.equal(param, before)
    assert {p: set(s) for p, s in opt.state.items()} == keys
    for _ in range(2):
        opt.step()
        other.step()
    assert torch.equal(param, twin)
    assert torch.equal(writer.data, (param * 0 + before).float())


@pytest.mark.parametrize("case", REFUSED)
def test_a_second_writer_that_is_refused_leaves_the_first(case: str):
    """A stack has one atom an expert whatever its blocks are, so that heads are asked for here."""
    param = torch.nn.Parameter(torch.randn(32, 8).bfloat16())
    layout = Layout.from_shapes(
        {"q.weight": (32, 8)}, overrides={"q.weight": BlockSpec.heads(4, heads_per_block=1)}
    )
    options: dict[str, object] = {**REFUSED[case][0], "ns_compute_dtype": torch.float32}
    opt = muonloom.Muon([("q.weight", param)], layout=layout, **options)  # type: ignore[arg-type]
    first = Plain(param)
    opt.register_writer(param, first)
    with pytest.raises(ValueError, match=r"^q\.weight: "):
        opt.register_writer(param, Plain(param, block_rows=32))
    param.grad = torch.ones_like(param)
    before = first.data.clone()
    opt.step()
    assert not torch.equal(first.data, before)


def test_an_unfit_block_is_refused_at_registration():
    shapes = {"qkv.weight": (128, 4)}
    param = torch.nn.Parameter(torch.randn(128, 4))
    layout = Layout.from_shapes(shapes, overrides={"qkv.weight": BlockSpec.rows(64, 32, 32)})
    opt = muonloom.Muon([("qkv.weight", param)], layout=layout)
    with pytest.raises(ValueError, match=r"^qkv\.weight: got a writer for blocks of 128 rows") as e:
        opt.register_writer(param, Plain(param, block_rows=128))
    assert re.search(r"Choose blocks|cut the parameter", str(e.value))
    assert not opt.state
    opt.register_writer(param, Plain(param, block_rows=32))
