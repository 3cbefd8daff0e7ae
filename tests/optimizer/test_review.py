"""Strides, halves of state, atomic groups: what a hostile review found, each as a test of its kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import muonloom
from optimizer.support import give_gradients, parameter

RATE: dict[str, Any] = {"lr": 0.1, "adamw_lr": 0.1}


def strided(kind: str) -> tuple[nn.Parameter, torch.Tensor]:
    """A parameter over part of a buffer, and the buffer."""
    buffer = torch.zeros(6, 8)
    views = {"columns": buffer[:, :4], "every second": buffer[:, ::2], "transposed": buffer.T}
    return nn.Parameter(views[kind]), buffer


@pytest.mark.parametrize("kind", ["columns", "every second", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_obeys_strides(kind: str, dtype: torch.dtype):
    param, buffer = strided(kind)
    if dtype != torch.float32:
        buffer = buffer.to(dtype)
        param = nn.Parameter(torch.as_strided(buffer, param.shape, param.stride()))
    plain = nn.Parameter(param.detach().float().contiguous().clone())
    ours = muonloom.Muon([("embed_tokens.weight", param), ("a.weight", parameter(4, 4))], **RATE)
    theirs = torch.optim.AdamW([plain], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(
            dtype
        )
        plain.grad = param.grad.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(param.detach().float(), plain.detach().to(dtype).float())
    if kind != "transposed":
        untouched = buffer[:, 4:] if kind == "columns" else buffer[:, 1::2]
        assert not untouched.any()


def test_strides_may_change_between_steps():
    torch.manual_seed(0)
    pair = [nn.Parameter(torch.ones(3, 4, 5, 5)) for _ in range(2)]
    opts = []
    for p in pair:
        opt = muonloom.Muon(
            [
                {"params": [("conv.weight", p)], "algorithm": "adamw", "lr": 0.1},
                {"params": [("a.weight", parameter(4, 4))]},
            ]
        )
        opts.append(opt)
    for step in range(2):
        gradient = torch.randn(3, 4, 5, 5)
        for p, opt in zip(pair, opts, strict=True):
            p.grad = gradient.clone()
            opt.step()
        if step == 0:
            pair[1].data = pair[1].data.to(memory_format=torch.channels_last)
    torch.testing.assert_close(pair[0], pair[1])


def test_elements_that_share_memory_are_refused():
    with pytest.raises(ValueError, match=r"^norm\.bias: .*share memory"):
        muonloom.Muon([("norm.bias", nn.Parameter(torch.zeros(1).expand(50)))])


def bf16_pair() -> tuple[nn.Parameter, nn.Parameter, muonloom.Muon]:
    a, b = (nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(2))
    opt = muonloom.Muon([a, b], lr=1e-3)
    give_gradients([a, b], 0)
    opt.step()
    return a, b, opt


def test_an_edit_elsewhere_does_not_hide_a_write_from_outside():
    a, b, opt = bf16_pair()
    b.data.fill_(5)
    opt.apply_to_masters([a], lambda master: master)
    with pytest.raises(muonloom.StaleMasterError):
        opt.step()


def test_a_write_from_outside_waits_for_the_next_gradient():
    _, b, opt = bf16_pair()
    b.data.fill_(5)
    gradient, b.grad = b.grad, None
    opt.step()
    b.grad = gradient
    with pytest.raises(muonloom.StaleMasterError):
        opt.step()
    opt.refresh_masters([b])
    opt.step()
    assert float(b.detach().float().mean()) > 4


@pytest.mark.parametrize("missing", ["step", "exp_avg", "exp_avg_sq"])
def test_half_of_adamws_state_is_refused(missing: str):
    opt = muonloom.Muon([("norm.weight", parameter(8)), ("a.weight", parameter(4, 4))], **RATE)
    for group in opt.param_groups:
        give_gradients(group["params"], 0)
    opt.step()
    saved = opt.state_dict()
    state = next(s for s in saved["state"].values() if "exp_avg" in s)
    del state[missing]
    with pytest.raises(ValueError, match=rf"^norm\.weight: .*{missing}"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("step", [float("nan"), float("inf"), -1.0])
def test_a_saved_counter_must_be_a_count(step: float):
    opt = muonloom.Muon([("norm.weight", parameter(8)), ("a.weight", parameter(4, 4))], **RATE)
    for group in opt.param_groups:
        give_gradients(group["params"], 0)
    opt.step()
    saved = opt.state_dict()
    next(s for s in saved["state"].values() if "step" in s)["step"] = step
    with pytest.raises(ValueError, match=r"^norm\.weight: "):
        opt.load_state_dict(saved)


def test_bad_options_in_a_saved_dictionary_change_nothing():
    opt = muonloom.Muon([parameter(4, 4)], lr=0.1)
    for key, value in (("lr", float("nan")), ("ns_compute_dtype", "bogus")):
        saved = opt.state_dict()
        saved["param_groups"][0][key] = value
        with pytest.raises(ValueError, match=key.removeprefix("ns_")):
            opt.load_state_dict(saved)
        assert opt.param_groups[0]["lr"] == 0.1


def test_fp64_iterations_step():
    p = parameter(6, 4)
    opt = muonloom.Muon([p], ns_compute_dtype=torch.float64)
    give_gradients([p], 0)
    opt.step()
    opt.drain()
    assert opt.last_step.update_rms["muon"] > 0


@pytest.mark.parametrize(
    "fn",
    [lambda m: m.double() * 1e300, lambda m: m.to(torch.int32), lambda m: m.to(torch.complex64)],
    ids=["overflow", "integers", "complex"],
)
def test_an_unusable_edit_writes_nothing(fn: Any):
    p = nn.Parameter(torch.ones(4, 4))
    opt = muonloom.Muon([p])
    with pytest.raises(ValueError, match="Nothing was written"):
        opt.apply_to_masters([p], fn)
    assert torch.equal(p.detach(), torch.ones(4, 4))


def test_an_edit_that_the_weights_dtype_cannot_hold_is_refused():
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    opt = muonloom.Muon([p])
    with pytest.raises(ValueError, match="Nothing was written"):
        opt.apply_to_masters([p], lambda master: master.mul_(1e6))


def test_the_workspace_does_not_grow_with_adamw_parameters():
    sizes = []
    for width in (1 << 16, 1 << 20):  # a pack, and many
        scalar, matrix = parameter(width), parameter(8, 8)
        opt = muonloom.Muon([("norm.bias", scalar), ("a.weight", matrix)], **RATE)
        give_gradients([scalar, matrix], 0)
        opt.step()
        sizes.append(opt.memory()["device_workspace"])
    assert sizes[0] == sizes[1]


def test_a_group_is_added_whole_or_not_at_all():
    opt = muonloom.Muon([("a.weight", parameter(4, 4))], ns_batch_bytes=4 * 4 * 4, **RATE)
    leafless = torch.zeros(4, requires_grad=True) * 2
    for bad in (
        [("b.weight", parameter(4, 4)), ("b.bias", leafless)],
        [("c.weight", parameter(9, 9))],
    ):
        with pytest.raises(ValueError, match=r"leaf|ns_batch_bytes"):
            opt.add_param_group({"params": bad})
        assert len(opt.param_groups) == 1
        opt.step()
    opt.add_param_group({"params": [("b.weight", parameter(4, 4))]})
    assert len(opt.param_groups) == 2


def test_halves_do_not_share_a_tensor_learning_rate():
    opt = muonloom.Muon(
        [("a.weight", parameter(4, 4)), ("a.bias", parameter(4))],
        lr=torch.tensor(1.0),
        adjust_lr_fn="match_rms_adamw",
    )
    for group in opt.param_groups:
        group["lr"].mul_(0.5)
    assert [float(group["lr"]) for group in opt.param_groups] == [0.5, 0.5]


def test_gradients_whose_squares_underflow_have_a_norm():
    p = parameter(4, 4)
    opt = muonloom.Muon([p])
    p.grad = torch.full((4, 4), 1e-28)
    opt.step()
    assert opt.last_step.grad_norm == pytest.approx(4e-28, rel=1e-5)
