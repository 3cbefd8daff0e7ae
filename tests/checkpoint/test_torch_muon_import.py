"""State of ``torch.optim.Muon``, and of AdamW beside it, goes into one optimizer and is gone on with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import muonloom
from optimizer.support import (
    TORCH_LIKE,
    fingerprint,
    give_gradients,
    parameter,
    relative,
    same_bits,
    steps,
    through_a_file,
)

SHAPES = [(8, 40), (40, 8), (12, 48), (1, 40), (24, 64), (64, 16)]
DTYPES = [torch.float32, torch.bfloat16]
PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": muonloom.HostPlacement(slot_bytes=1 << 14),
    "split": muonloom.HostPlacement(slot_bytes=1 << 14, master_layout="split"),
}
OPTIONS = ["lr", "weight_decay", "momentum", "nesterov"]
OPTIONS += ["ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"]
GROUPS: list[dict[str, Any]] = [
    {},
    {
        "lr": 0.03,
        "weight_decay": 0.3,
        "momentum": 0.8,
        "nesterov": False,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "eps": 1e-6,
        "ns_steps": 3,
        "adjust_lr_fn": "match_rms_adamw",
    },
    {"lr": 0.5, "weight_decay": 0.0, "adjust_lr_fn": "original"},
]


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)]


def copies(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def next_updates(
    opt: torch.optim.Optimizer, params: list[nn.Parameter], seed: int = 90
) -> list[Tensor]:
    """What one more step adds to each weight, decay apart."""
    decays = {p: 1 - g["lr"] * g["weight_decay"] for g in opt.param_groups for p in g["params"]}
    before = [p.detach().double() for p in params]
    steps(opt, params, [seed])
    return [p.detach().double() - old * decays[p] for p, old in zip(params, before, strict=True)]


def assert_close(ours: list[Tensor], theirs: list[Tensor], bound: float = 1e-2):
    """1e-2 relative: the documented bound of a step against ``torch.optim.Muon``, here of all matrices.

    Where a matrix has a small singular value, two BF16 iterations differ by more in it alone; torch's
    differs by more than that from FP64.
    """
    together = [torch.cat([update.flatten() for update in side]) for side in (ours, theirs)]
    assert all(update.any() for update in theirs)
    assert relative(*together) < bound


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("options", GROUPS, ids=["defaults", "all others", "original"])
def test_momentum_and_every_option_come_over_and_the_next_step_is_theirs(
    options: dict[str, Any], placement: str
):
    theirs = matrices()
    peer = torch.optim.Muon(theirs, **options)
    steps(peer, theirs, range(3))
    ours = copies(theirs)
    wrong = {"lr": 9.0, "weight_decay": 9.0, "momentum": 0.1, "ns_steps": 1, "eps": 1e-3}
    opt = muonloom.Muon(ours, **wrong, placement=PLACEMENTS[placement], **TORCH_LIKE)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    for key in OPTIONS:
        assert opt.param_groups[0][key] == peer.param_groups[0][key], key
    assert opt.param_groups[0]["ns_compute_dtype"] is torch.bfloat16  # ours alone, as it was
    for p, q in zip(ours, theirs, strict=True):
        assert same_bits(opt.state[p]["momentum_buffer"], peer.state[q]["momentum_buffer"])
    assert_close(next_updates(opt, ours), next_updates(peer, theirs))


def test_each_group_keeps_its_own_options():
    theirs = matrices()
    peer = torch.optim.Muon(
        [{"params": [p], **o} for p, o in zip(theirs, GROUPS, strict=False)], lr=0.07
    )
    steps(peer, theirs, range(2))
    ours = copies(theirs[: len(GROUPS)])
    opt = muonloom.Muon([{"params": [p]} for p in ours], **TORCH_LIKE)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    for mine, other in zip(opt.param_groups, peer.param_groups, strict=True):
        assert {key: mine[key] for key in OPTIONS} == {key: other[key] for key in OPTIONS}
    assert len({str(group["lr"]) for group in opt.param_groups}) == 3
    assert_close(next_updates(opt, ours), next_updates(peer, theirs[: len(GROUPS)]))


def test_a_scheduler_of_theirs_goes_on():
    theirs, rule = matrices(), lambda step: 1 / (1 + step)
    peer = torch.optim.Muon(theirs, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(peer, rule)
    for seed in range(3):
        steps(peer, theirs, [seed])
        scheduler.step()
    opt = muonloom.Muon(copies(theirs), lr=9.0)
    mine = torch.optim.lr_scheduler.LambdaLR(opt, rule)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    mine.load_state_dict(scheduler.state_dict())
    for one, owner in ((scheduler, peer), (mine, opt)):
        owner.zero_grad()
        owner.step()
        one.step()
    assert opt.param_groups[0]["lr"] == peer.param_groups[0]["lr"] == 0.5 / 5


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_bfloat16_momentum_becomes_float32(nesterov: bool, placement: str):
    """The next step is that of ``torch.optim.Muon`` in FP32, from the same weights and buffers.

    Sums of BF16 numbers often lie half-way between two BF16 numbers, where the last bit of FP32 decides
    what the iteration starts from: up to 1.5e-2 of its result, in torch as here.
    """
    theirs = matrices(torch.bfloat16)
    peer = torch.optim.Muon(theirs, lr=0.02, nesterov=nesterov)
    steps(peer, theirs, range(3))
    saved = through_a_file(peer.state_dict())
    ours, wide = copies(theirs), copies(theirs, torch.float32)
    opt = muonloom.Muon(ours, placement=PLACEMENTS[placement], **TORCH_LIKE)
    opt.load_state_dict(saved)
    for p, q in zip(ours, theirs, strict=True):
        moment = opt.state[p]["momentum_buffer"]
        assert peer.state[q]["momentum_buffer"].dtype is torch.bfloat16
        assert same_bits(moment.cpu(), peer.state[q]["momentum_buffer"].float())
    exact = torch.optim.Muon(wide)
    exact.load_state_dict(saved)  # torch casts the buffers to the parameters' dtype
    give_gradients(theirs, 90)
    for p, q, gradient in zip(ours, wide, [p.grad for p in theirs], strict=True):
        p.grad, q.grad = gradient.clone(), gradient.float()
    before = [q.detach().clone() for q in wide]
    opt.step()
    exact.step()
    opt.drain()
    masters = [opt.get_full_parameter_master(p) for p in ours]
    decay = 1 - 0.02 * 0.1
    updates = [m - old * decay for m, old in zip(masters, before, strict=True)]
    wanted = [q.detach() - old * decay for q, old in zip(wide, before, strict=True)]
    assert_close(updates, wanted, bound=3e-2)


def test_before_the_first_step_of_theirs_there_are_options_alone():
    theirs = matrices()
    peer = torch.optim.Muon(theirs, lr=0.03)
    opt = muonloom.Muon(copies(theirs), **TORCH_LIKE)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    assert opt.param_groups[0]["lr"] == 0.03
    ours = opt.param_groups[0]["params"]
    assert_close(next_updates(opt, ours), next_updates(peer, theirs))


def test_a_matrix_that_never_had_a_gradient_starts_from_zero():
    theirs = matrices()
    peer = torch.optim.Muon(theirs)

    def drop(_: int) -> None:
        theirs[2].grad = None

    steps(peer, theirs, range(2), drop)
    ours = copies(theirs)
    opt = muonloom.Muon(ours, **TORCH_LIKE)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    assert_close(next_updates(opt, ours), next_updates(peer, theirs))


def test_momentum_belongs_to_the_whole_parameter_however_it_is_cut():
    p = parameter(16, 8)
    peer = torch.optim.Muon([p])
    steps(peer, [p], range(2))
    heads = muonloom.BlockSpec.heads(4, heads_per_block=1)
    layout = muonloom.Layout.from_shapes({"q.weight": (16, 8)}, overrides={"q.weight": heads})
    (q,) = copies([p])
    opt = muonloom.Muon([("q.weight", q)], layout=layout)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    assert same_bits(opt.state[q]["momentum_buffer"], peer.state[p]["momentum_buffer"])
    steps(opt, [q], [5])
    assert opt.last_step["matrices"] == [((4, 8), 4)]


# -- names ----------------------------------------------------------------------------------------

WRAPPED = ["", "module.", "_orig_mod."]


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_named_state_goes_by_name_whatever_wrapped_the_model(wrapper: str):
    theirs = [(f"{wrapper}layers.{i}.weight", parameter(6, 4, seed=i)) for i in range(3)]
    peer = torch.optim.Muon(theirs)
    steps(peer, [p for _, p in theirs], range(2))
    bare = [(name.removeprefix(wrapper), p) for name, p in theirs]
    ours = [(name, nn.Parameter(p.detach().clone())) for name, p in bare[::-1]]
    opt = muonloom.Muon(ours)
    opt.load_state_dict(through_a_file(peer.state_dict()))
    for name, p in bare:
        moment = opt.state[dict(ours)[name]]["momentum_buffer"]
        assert same_bits(moment, peer.state[p]["momentum_buffer"]), name
    assert opt.param_groups[0]["param_names"] == [name for name, _ in ours]


@pytest.mark.parametrize("named", [True, False])
def test_names_on_one_side_only_go_by_position_and_are_not_made_up(named: bool):
    theirs, names = matrices(), [f"layers.{i}.weight" for i in range(len(SHAPES))]
    ours = copies(theirs)
    peer = torch.optim.Muon(theirs if named else list(zip(names, theirs, strict=True)))
    opt = muonloom.Muon(list(zip(names, ours, strict=True)) if named else ours)
    steps(peer, theirs, range(2))
    opt.load_state_dict(through_a_file(peer.state_dict()))
    for p, q in zip(ours, theirs, strict=True):
        assert same_bits(opt.state[p]["momentum_buffer"], peer.state[q]["momentum_buffer"])
    # What is saved now fits an optimizer with names.
    again = muonloom.Muon(list(zip(names, copies(ours), strict=True)))
    again.load_state_dict(through_a_file(opt.state_dict()))
    assert again.param_groups[0]["param_names"] == names


# -- Muon for matrices, AdamW for the rest --------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 8)
        self.up_proj = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.down_proj = nn.Linear(12, 8, bias=False)
        self.to(dtype)


class TorchRun:
    """Both of torch's optimizers over one model, after three steps."""

    def __init__(self, dtype: torch.dtype, *, named: bool) -> None:
        self.net = Net(dtype)
        parts = split(self.net)
        params = parts if named else [[p for _, p in part] for part in parts]
        matrix, decayed, plain = params
        self.muon = torch.optim.Muon(matrix, lr=0.03, weight_decay=0.2, momentum=0.9)
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.99), eps=1e-6)
        for seed in range(3):
            self.step(seed)

    def step(self, seed: int) -> None:
        give_gradients(self.net.parameters(), seed)
        self.muon.step()
        self.adamw.step()


def split(net: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Matrices, what AdamW decays, and what it does not."""
    named = list(net.named_parameters())
    matrix = [(n, p) for n, p in named if p.ndim == 2 and "embed" not in n]
    return [matrix, named[:1], [(n, p) for n, p in named[1:] if p.ndim == 1]]


def mirrored(net: nn.Module, placement: str = "device") -> muonloom.Muon:
    """An optimizer whose groups are theirs: Muon's first, then AdamW's."""
    matrix, decayed, plain = split(net)
    groups = [
        {"params": matrix, "algorithm": "muon"},
        {"params": decayed, "algorithm": "adamw"},
        {"params": plain, "algorithm": "adamw"},
    ]
    return muonloom.Muon(groups, adamw_lr=9.0, placement=PLACEMENTS[placement], **TORCH_LIKE)


WORDS = {key: key for key in ("lr", "weight_decay", "param_names")}
WORDS |= {"betas": "adamw_betas", "eps": "adamw_eps"}


def merged(muon: dict[str, Any], adamw: dict[str, Any]) -> dict[str, Any]:
    """As docs/checkpoints.md has it: what the two saved, as one dictionary."""
    first = sum(len(group["params"]) for group in muon["param_groups"])
    groups = [
        {ours: group[theirs] for theirs, ours in WORDS.items() if theirs in group}
        | {"algorithm": "adamw", "params": [first + i for i in group["params"]]}
        for group in adamw["param_groups"]
    ]
    state = muon["state"] | {first + i: entry for i, entry in adamw["state"].items()}
    return {"state": state, "param_groups": muon["param_groups"] + groups}


def import_files(run: TorchRun, net: nn.Module, opt: muonloom.Muon) -> None:
    saved = [through_a_file(one.state_dict()) for one in (run.muon, run.adamw)]
    opt.load_state_dict(merged(*saved))


def import_by_name(run: TorchRun, net: nn.Module, opt: muonloom.Muon) -> None:
    saved = through_a_file(get_optimizer_state_dict(run.net, (run.muon, run.adamw)))
    for group in saved["param_groups"]:
        if "betas" in group:
            group |= {"algorithm": "adamw"} | {WORDS[k]: group.pop(k) for k in ("betas", "eps")}
    set_optimizer_state_dict(net, opt, saved)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("load", [import_files, import_by_name])
def test_muon_and_adamw_come_over_together(
    load: Any, named: bool, dtype: torch.dtype, placement: str
):
    run = TorchRun(dtype, named=named)
    net = copy.deepcopy(run.net)
    opt = mirrored(net, placement)
    load(run, net, opt)
    muon_group, decayed, plain = opt.param_groups
    assert [g["algorithm"] for g in opt.param_groups] == ["muon", "adamw", "adamw"]
    assert {k: muon_group[k] for k in OPTIONS} == {k: run.muon.param_groups[0][k] for k in OPTIONS}
    for group, decay in ((decayed, 0.01), (plain, 0.0)):
        numbers = [group[k] for k in ("lr", "weight_decay", "adamw_eps")]
        assert numbers == [3e-3, decay, 1e-6]
        assert tuple(group["adamw_betas"]) == (0.8, 0.99)
    theirs = {**run.muon.state, **run.adamw.state}
    for p, q in zip(net.parameters(), run.net.parameters(), strict=True):
        for key, value in theirs[q].items():
            assert same_bits(opt.state[p][key].cpu(), value.float()), key
    if dtype is torch.float32:
        assert_next_step_is_theirs(run, net, opt)


def assert_next_step_is_theirs(run: TorchRun, net: nn.Module, opt: muonloom.Muon) -> None:
    before = [p.detach().clone() for p in net.parameters()]
    run.step(90)
    steps(opt, list(net.parameters()), [90])
    sides = zip(net.parameters(), run.net.parameters(), before, strict=True)
    for p, q, old in sides:
        # AdamW's arithmetic is torch's own but for the order of roundings.
        bound = 1e-2 if "momentum_buffer" in opt.state[p] else 1e-5
        assert relative(p - old, q - old) < bound


# -- refusals -------------------------------------------------------------------------------------


def refused(opt: muonloom.Muon, saved: dict[str, Any], match: str) -> None:
    before, rates = fingerprint(opt), [group["lr"] for group in opt.param_groups]
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(saved)
    assert fingerprint(opt) == before
    assert [group["lr"] for group in opt.param_groups] == rates


def test_matrices_alone_do_not_fill_an_optimizer_that_has_more():
    run = TorchRun(torch.float32, named=True)
    refused(mirrored(copy.deepcopy(run.net)), run.muon.state_dict(), "param_groups")


def test_a_group_of_adamw_that_does_not_say_so_is_refused():
    run = TorchRun(torch.float32, named=True)
    saved = merged(run.muon.state_dict(), run.adamw.state_dict())
    del saved["param_groups"][1]["algorithm"]
    refused(mirrored(copy.deepcopy(run.net)), saved, r"param_groups\[1\].algorithm")


def test_state_that_this_adamw_has_not_is_refused():
    run = TorchRun(torch.float32, named=True)
    saved = copy.deepcopy(merged(run.muon.state_dict(), run.adamw.state_dict()))
    for entry in saved["state"].values():
        if "exp_avg" in entry:  # as with amsgrad=True
            entry["max_exp_avg_sq"] = entry["exp_avg_sq"].clone()
    refused(mirrored(copy.deepcopy(run.net)), saved, "max_exp_avg_sq")
