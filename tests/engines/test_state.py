"""Masters, saved state and copies of an optimizer whose weights are written by others."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

import muonloom
from choosing import pairwise
from engines.support import (
    SHAPES,
    TRIED,
    Blind,
    Engine,
    Recorder,
    assert_equal,
    bits_of,
    build,
    held,
    masters,
    model,
    recorders,
    register,
    release,
    run,
    train,
)
from muonloom import Float8BlockWriter
from staging.support import Named, everything, give_gradients

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def sources(named: Named) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(p.shape, generator=generator) for name, p in named}


# -- first masters ----------------------------------------------------------------------------------


WAYS = [
    ("engine", "bf16"),
    ("engine", "fp32"),
    ("bind", "bf16"),
    ("bind", "fp32"),
    ("register", "bf16"),
    ("register", "fp32"),
]


@pytest.mark.parametrize(("way", "dtype"), WAYS)
@pytest.mark.parametrize("placement", TRIED)
def test_masters_start_from_the_source_and_not_from_the_weight(
    placement: str, way: str, dtype: str
):
    named = model(DTYPES[dtype])
    wanted = sources(named)
    writers = {name: Recorder(name, p, source=wanted[name].clone()) for name, p in named}
    seen = [weakref.ref(writer.source) for writer in writers.values() if writer.source is not None]
    engine = Engine([(p, writers[name]) for name, p in named])
    _, opt = build(TRIED[placement], named=named, engine=engine if way == "engine" else None)
    if way == "bind":
        opt.bind(engine)
    elif way == "register":
        register(opt, named, writers)
    assert_equal(wanted, masters(opt, named))
    assert_equal(wanted, held(writers))
    gc.collect()
    assert [source() for source in seen] == [None] * len(SHAPES), "the source is kept"
    train(named, opt, 0, 1)
    twin = [(name, Parameter(wanted[name].clone())) for name, _ in named]
    if dtype == "fp32":
        _, plain = build(TRIED[placement], named=twin)
        train(twin, plain, 0, 1)
        assert_equal(masters(plain, twin), held(writers))


@pytest.mark.parametrize("placement", TRIED)
def test_a_source_may_be_a_parameter_of_another_dtype(placement: str):
    named, opt = build(TRIED[placement])
    down = dict(named)["down"]
    source = Parameter(torch.randn(down.shape).half())
    opt.register_writer(down, Recorder("down", down, source=source))
    master = opt.state[down]["master_weight"]
    assert torch.equal(master, source.detach().float())
    assert not master.requires_grad
    assert master.grad_fn is None
    opt.refresh_masters()
    assert not opt.state[down]["master_weight"].requires_grad


def test_float8_masters_are_exact_where_the_weight_is_not():
    named = model()
    down = dict(named)["down"]
    source = torch.randn(down.shape)
    writer = Float8BlockWriter((4, 8))
    writer.set_source(source.clone())
    _, opt = build(named=named, engine=Engine([(down, writer)]))
    release(down)
    assert torch.equal(opt.state[down]["master_weight"], source)
    fresh = Float8BlockWriter((4, 8))
    fresh.prepare(Parameter(source))
    for one, other in zip(writer.tensors(), fresh.tensors(), strict=True):
        assert torch.equal(bits_of(one), bits_of(other))
    assert writer.take_source(down) is None
    train(named, opt, 0)


def test_without_a_source_the_parameter_is_the_first_master():
    named = model()
    down = dict(named)["down"]
    _, opt = build(named=named)
    opt.register_writer(down, Float8BlockWriter((4, 8)))
    assert torch.equal(opt.state[down]["master_weight"], down.detach().float())


# -- saved and loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", TRIED)
def test_state_before_the_first_step_holds_masters_and_loads_back(placement: str, dtype: str):
    names = ("down", "norm.weight")
    saved: list[dict[str, Any]] = []
    for number in range(2):
        named, opt = build(TRIED[placement], named=model(DTYPES[dtype]))
        writers = {n: Recorder(n, p, source=torch.full(p.shape, 1.5 + number)) for n, p in named}
        register(opt, named, {name: writers[name] for name in names})
        saved.append(opt.state_dict())
        for name in names:
            assert torch.equal(masters(opt, named)[name], torch.full(SHAPES[name], 1.5 + number))
        rest = [
            value
            for state in saved[-1]["state"].values()
            for key, value in state.items()
            if key != "master_weight"
        ]
        assert not any(bool(value.any()) for value in rest), "nothing has happened yet"
    opt.load_state_dict(copy.deepcopy(saved[0]))
    for name in names:
        assert torch.equal(writers[name].data, torch.full(SHAPES[name], 1.5))
        assert torch.equal(masters(opt, named)[name], torch.full(SHAPES[name], 1.5))
    train(named, opt, 0)
    assert_equal({n: writers[n].data for n in names}, {n: masters(opt, named)[n] for n in names})


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("placement", TRIED)
def test_loading_writes_float8_bytes_exactly(placement: str, released: bool):
    def start() -> tuple[Named, muonloom.Muon, dict[str, Float8BlockWriter]]:
        named, opt = build(TRIED[placement])
        writers = {
            name: Float8BlockWriter((4, 8)) for name in ("down", "qkv.weight", "embed.weight")
        }
        register(opt, named, writers)
        for name, parameter in named:
            if released and name in writers:
                release(parameter)
        return named, opt, writers

    named, opt, writers = start()
    train(named, opt, 0, 1)
    saved = copy.deepcopy(opt.state_dict())
    then = {f"{n}{i}": t.clone() for n, w in writers.items() for i, t in enumerate(w.tensors())}
    rest = {name: p.detach().clone() for name, p in named if name not in writers}
    train(named, opt, 2)
    last = {f"{n}{i}": t.clone() for n, w in writers.items() for i, t in enumerate(w.tensors())}
    for fresh in (False, True):
        again, other, found = start() if fresh else (named, opt, writers)
        other.load_state_dict(copy.deepcopy(saved))
        with torch.no_grad():
            for name, parameter in again:
                if name in rest:
                    parameter.copy_(rest[name])
        assert_equal(
            then, {f"{n}{i}": t for n, w in found.items() for i, t in enumerate(w.tensors())}
        )
        train(again, other, 2)
        assert_equal(
            last, {f"{n}{i}": t for n, w in found.items() for i, t in enumerate(w.tensors())}
        )


@pytest.mark.parametrize("kind", [Recorder, Blind])
@pytest.mark.parametrize("placement", TRIED)
def test_a_state_without_masters_leaves_what_the_writer_holds(placement: str, kind: type):
    """Saved where nobody wrote (FP32): the master is made again from the device weight, the writer's."""
    plain, other, _ = run(TRIED[placement], named=model(torch.float32), writers=False, steps=1)
    saved = copy.deepcopy(other.state_dict())
    named, opt = build(TRIED[placement], named=model(torch.float32))
    writers = {n: kind(p) if kind is Blind else kind(n, p) for n, p in named}
    register(opt, named, writers)
    train(named, opt, 0, 1, 2)
    before = held(writers)
    opt.load_state_dict(saved)
    assert_equal(before, held(writers))
    for group in opt.param_groups:
        group["lr"] = 0.0
    train(named, opt, 3)
    assert_equal(before, held(writers))
    assert_equal(before, masters(opt, named))
    del plain


@pytest.mark.parametrize("placement", TRIED)
def test_a_state_goes_from_writers_to_none_and_back(placement: str):
    named, opt, writers = run(TRIED[placement], steps=2)
    saved = copy.deepcopy(opt.state_dict())
    plain, other = build(TRIED[placement])
    with torch.no_grad():
        for name, parameter in plain:
            parameter.copy_(writers[name].data)
    other.load_state_dict(saved)
    train(plain, other, 2)
    train(named, opt, 2)
    assert_equal(masters(other, plain), masters(opt, named))
    opt.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_equal(held(writers), masters(other, plain))


def test_refused_state_changes_nothing():
    named, opt, writers = run("device", steps=2)
    before = {**everything(named, opt), **held(writers)}
    saved = copy.deepcopy(opt.state_dict())
    first = next(iter(saved["state"]))
    saved["state"][first]["master_weight"] = torch.full_like(
        saved["state"][first]["master_weight"], float("nan")
    )
    with pytest.raises(ValueError, match="non-finite"):
        opt.load_state_dict(saved)
    assert_equal(before, {**everything(named, opt), **held(writers)})


class Net(nn.Module):
    """Two matrices, a bias and a norm."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up_proj = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down_proj = nn.Linear(10, 6)
        self.to(dtype)


def with_writers(
    net: Net, placement: Any, names: tuple[str, ...]
) -> tuple[muonloom.Muon, dict[str, Recorder]]:
    opt = muonloom.Muon(net.named_parameters(), placement=placement, lr=0.02, adamw_lr=0.01)
    writers = {name: Recorder(name, p) for name, p in net.named_parameters() if name in names}
    register(opt, list(net.named_parameters()), writers)
    return opt, writers


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("placement", "dtype", "at"), pairwise(TRIED, DTYPES, [0, 2]))
def test_torch_distributed_state_dict_round_trip(
    placement: str, dtype: str, at: int, tmp_path: Path
):
    names = ("up_proj.weight", "up_proj.bias")
    net, twin_net = Net(0, DTYPES[dtype]), Net(1, DTYPES[dtype])
    opt, writers = with_writers(net, TRIED[placement], names)
    twin, twins = with_writers(twin_net, TRIED[placement], names)
    train(list(net.named_parameters()), opt, *range(at))
    twin_net.load_state_dict(net.state_dict())
    before = held(writers)
    state = get_optimizer_state_dict(net, opt)
    assert_equal(before, held(writers))
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    loaded = get_optimizer_state_dict(twin_net, twin)
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(twin_net, twin, loaded)
    assert_equal(before, held(twins))
    for number in (5, 6):
        train(list(net.named_parameters()), opt, number)
        train(list(twin_net.named_parameters()), twin, number)
    assert_equal(held(writers), held(twins))
    assert_equal(
        masters(opt, list(net.named_parameters())), masters(twin, list(twin_net.named_parameters()))
    )


# -- copies -----------------------------------------------------------------------------------------


def by_deepcopy(pair: Any) -> Any:
    return copy.deepcopy(pair)


def by_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def by_file(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [by_deepcopy, by_pickle, by_file]


@pytest.mark.parametrize(
    ("placement", "dtype", "make"),
    pairwise(TRIED, ["bf16", "fp32"], COPIES),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_copy_has_masters_and_no_writers(placement: str, dtype: str, make: Any):
    """Its parameters' own storage is old: it trains only when writers are registered, or weights taken."""
    named, opt, writers = run(TRIED[placement], named=model(DTYPES[dtype]), steps=2)
    train(named, opt, 2)
    twin, other = make((named, opt))
    assert all(other._weights.writer(p) is None for _, p in twin)
    assert other._weights.engines == ()
    give_gradients(twin, 3)
    before = {name: bits_of(p) for name, p in twin}
    with pytest.raises(muonloom.StaleMasterError, match=r"^[a-z_.]+: got "):
        other.step()
    assert_equal(before, {name: bits_of(p) for name, p in twin})
    copies = recorders(twin)
    register(other, twin, copies)
    assert_equal(held(writers), held(copies))
    train(named, opt, 3)
    train(twin, other, 3)
    assert_equal(held(writers), held(copies))


def test_a_constructor_that_fails_gives_sources_back():
    """They are handed out once; whoever tries again gets exact masters all the same."""
    weight = Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    norm = Parameter(torch.ones(32))
    source = torch.randn(64, 32)
    writer = Float8BlockWriter()
    writer.prepare(weight)
    writer.set_source(source.clone())
    engine = Engine([(weight, writer)])
    named = [("weight", weight), ("norm", norm)]
    with pytest.raises(UserWarning, match="adamw_lr"):
        muonloom.Muon(named, engine=engine)  # tests turn its warning into an error
    opt = muonloom.Muon(named, engine=engine, adamw_lr=1e-3)
    assert torch.equal(opt.get_full_parameter_master(weight), source)


@pytest.mark.parametrize("placement", TRIED)
def test_state_made_in_inference_mode_is_ordinary(placement: str):
    named, opt = build(TRIED[placement])
    writers = recorders(named)
    with torch.inference_mode():
        register(opt, named, writers)
        opt.apply_to_masters(None, lambda master: master.mul_(2))
        opt.load_state_dict(opt.state_dict())
        opt.refresh_masters()
    train(named, opt, 0, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refreshing_from_weights_that_are_not_finite_changes_nothing(value: float):
    named, opt = build("device")
    train(named, opt, 0)
    before = masters(opt, named)
    name, parameter = named[0]
    with torch.no_grad():
        parameter.view(-1)[0] = value
    with pytest.raises(ValueError, match=f"^{name}: got a weight with a NaN or an infinity"):
        opt.refresh_masters()
    assert_equal(before, masters(opt, named))
