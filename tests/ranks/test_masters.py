"""Masters over ranks: read whole, changed, rebuilt; and the device given back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import muonloom
from muonloom.math import settle_ties_
from ranks import spread
from ranks.spread import assert_equal, error_of, held, masters, optimizer, parameters, steps
from ranks.support import run

# By number of ranks, so that processes are started once for all ways.
WAYS = {2: ("ddp", "fsdp", "tp", "replicated"), 3: ("ddp", "fsdp"), 4: ("hsdp",)}
FEWER = {2: ("fsdp",), 3: ("ddp",)}


def begun(way: str, dtype: torch.dtype, placement: str, **options: Any) -> Any:
    """Parameters and their optimizer after two steps."""
    params = parameters(way, dtype)
    opt = optimizer(params, placement=spread.PLACEMENTS[placement], **options)
    steps(opt, params, range(2))
    return params, opt


# -- reading ------------------------------------------------------------------------------------------


def read(rank: int, ways: Sequence[str]) -> None:
    for way, dtype, placement in spread.settings(*ways):
        params, opt = begun(way, dtype, placement)
        known = (rank, way, dtype, placement)
        _, sent_before, _ = opt._membership.traffic()
        gathered = masters(opt, params)
        _, sent, _ = opt._membership.traffic()
        # Of those that hold the same, one sends it.
        assert (sent > sent_before) == (way != "replicated" and not (way == "hsdp" and rank > 1))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, gathered)
        for name, param in params.items():
            master = gathered[name]
            assert master.shape == spread.SHAPES[name], name
            assert_equal(everyone[0][name], master, *known, name)
            # It is what the weights, which other means gathered, were rounded from.
            assert_equal(master.to(dtype), spread.whole(param), *known, name)
            full = opt.get_full_parameter_master(param)
            share = opt._assignments[param].share
            if share is None or share.holding.own.sizes == tuple(param.shape):
                assert full is not None
                assert_equal(full, master, *known, name)
            else:
                assert full is None
            if param.ndim:
                some = slice(2, 5)
                assert_equal(opt.gathered_master(param, rows=some), master[some], *known, name)
        if way in ("ddp", "fsdp"):
            assert any(opt.get_full_parameter_master(p) is None for p in params.values())


@pytest.mark.parametrize("ranks", WAYS)
def test_masters_are_read_whole(ranks: int):
    run(ranks, read, WAYS[ranks])


def read_before_any_step(rank: int) -> None:
    for way, dtype, placement in spread.settings("ddp"):
        params = parameters(way, dtype)
        opt = optimizer(params, placement=spread.PLACEMENTS[placement])
        found = masters(opt, params)
        assert_equal(found, {name: t.float() for name, t in spread.weights(params).items()})


def test_without_a_master_the_weight_is_read():
    run(2, read_before_any_step)


def undrained(rank: int) -> None:
    params, opt = begun("ddp", torch.bfloat16, "host")
    spread.give_gradients(params, 9)
    opt.step()
    for read_one in (opt.get_full_parameter_master, opt.gathered_master):
        with pytest.raises(RuntimeError, match=r"heads: .*drain\(\)"):
            read_one(params["heads"])
    with pytest.raises(ValueError, match="not the optimizer's"):
        opt.gathered_master(nn.Parameter(torch.ones(2, 2)))
    opt.drain()


def test_reading_asks_for_drain():
    run(2, undrained)


# -- changing -----------------------------------------------------------------------------------------


def rescaled(master: Tensor) -> Tensor:
    """Depends on all of a master, so that a part of it would show."""
    return master * (1 + 1 / (1 + master.abs().max())) + master.numel()


def in_place(master: Tensor) -> None:
    master.copy_(rescaled(master))


def change(rank: int, ways: Sequence[str]) -> None:
    for way, dtype, placement in spread.settings(*ways):
        params, opt = begun(way, dtype, placement)
        known = (rank, way, dtype, placement)
        before, weights_before = masters(opt, params), spread.weights(params)
        chosen = {name: params[name] for name in ("experts", "heads", "odd", "norm", "scale")}
        opt.apply_to_masters(chosen.values(), rescaled if placement == "host" else in_place)
        wanted = before | {name: rescaled(before[name]) for name in chosen}
        if dtype == torch.bfloat16:
            for name in chosen:
                settle_ties_(wanted[name])
        assert_equal(masters(opt, params), wanted, *known)
        rounded = {name: master.to(dtype) for name, master in wanted.items()}
        assert_equal(spread.weights(params), rounded, *known)
        assert_equal(rounded["fused"], weights_before["fused"])
        # All that the weights were written from is known: the next step goes on from it.
        alone = parameters("alone", dtype)
        twin = optimizer(alone, process_group=False, placement=spread.PLACEMENTS[placement])
        steps(twin, alone, range(2))
        twin.apply_to_masters([alone[name] for name in chosen], rescaled)
        for one, own in ((opt, params), (twin, alone)):
            steps(one, own, range(2, 3))
        for name, master in masters(twin, alone).items():
            torch.testing.assert_close(
                opt.gathered_master(params[name]), master, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("ranks", WAYS)
def test_complete_masters_are_changed(ranks: int):
    run(ranks, change, WAYS[ranks])


def refused_change(rank: int, ways: Sequence[str]) -> None:
    for way, dtype, placement in spread.settings(*ways):
        params, opt = begun(way, dtype, placement)
        before = (held(opt, params), spread.local(params))

        def fails_here(master: Tensor) -> None:
            master.zero_()
            if rank == 1 and master.shape == (24, 8):
                raise KeyError("mine")

        def not_finite(master: Tensor) -> Tensor:
            return master / 0 if rank == 0 and master.shape == (3, 7) else master

        errors = [
            error_of(partial(opt.apply_to_masters, None, f)) for f in (fails_here, not_finite)
        ]
        kinds = [KeyError if rank == 1 else RuntimeError, ValueError if rank == 0 else RuntimeError]
        assert [type(error) for error in errors] == kinds, errors
        assert rank or "odd" in str(errors[1])
        mine = [params["heads"], params["odd"] if rank else params["fused"]]
        with pytest.raises(ValueError, match=r"apply_to_masters"):
            opt.apply_to_masters(mine, torch.zero_)
        with pytest.raises(ValueError if rank else RuntimeError):
            opt.apply_to_masters([nn.Parameter(torch.ones(1))] if rank else None, torch.zero_)
        assert_equal((held(opt, params), spread.local(params))[0], before[0], way, dtype, placement)
        assert_equal(spread.local(params), before[1], way, dtype, placement)
        steps(opt, params, range(3, 4))


def test_a_change_that_one_rank_cannot_make_is_made_by_none():
    run(2, refused_change, ["ddp", "fsdp"])


class Unwritable(muonloom.Muon):
    """Fails to write the weight of one parameter on one rank."""

    def spoil(self, param: Tensor) -> None:
        def fail(parameter: Tensor, *_: Any) -> None:
            if parameter is param:
                raise OSError("no")
            write(parameter, *_)

        write = self._weights.write
        self._weights.write = fail  # type: ignore[method-assign]


def half_written(rank: int) -> None:
    params = parameters("ddp", torch.bfloat16)
    layout = muonloom.Layout.from_shapes(spread.SHAPES, overrides=spread.OVERRIDES)
    opt = Unwritable(params.items(), layout=layout, **spread.OPTIONS)
    steps(opt, params, range(2))
    if rank == 1:
        opt.spoil(params["heads"])
    with pytest.raises(OSError if rank else RuntimeError):
        opt.apply_to_masters(None, torch.zero_)
    assert {"heads", "embed"} <= set(
        opt._assembly.torn
    )  # as far as ranks hold rows of each other's
    spread.give_gradients(params, 3)
    with pytest.raises(RuntimeError, match=r"half written|there before"):
        opt.step()


def test_weights_that_were_half_written_somewhere_are_torn_everywhere():
    run(2, half_written)


# -- weights from outside -----------------------------------------------------------------------------


def refresh(rank: int, ways: Sequence[str]) -> None:
    for way, _, placement in spread.settings(*ways):
        params, opt = begun(way, torch.bfloat16, placement)
        with torch.no_grad():
            for param in params.values():
                param.mul_(0.5)
        spread.give_gradients(params, 2)
        with pytest.raises(RuntimeError, match=r"refresh_masters|there before"):
            opt.step()
        momentum = held(opt, params)["heads"]["momentum_buffer"]
        opt.refresh_masters()
        wanted = {name: t.float() for name, t in spread.weights(params).items()}
        assert_equal(masters(opt, params), wanted, rank, placement)
        assert_equal(held(opt, params)["heads"]["momentum_buffer"], momentum)
        opt.step()
        opt.drain()


@pytest.mark.parametrize("ranks", FEWER)
def test_masters_follow_weights_from_outside(ranks: int):
    run(ranks, refresh, FEWER[ranks])


def not_finite_weight(rank: int) -> None:
    params, opt = begun("ddp", torch.bfloat16, "host")
    before = held(opt, params)
    params["heads"].data[-1] = float("nan")  # rows that one of the ranks updates
    with pytest.raises(ValueError, match=r"heads: .*NaN"):
        opt.refresh_masters()
    assert_equal(held(opt, params), before)


def test_a_replicated_weight_that_is_not_finite_is_refused_on_all_ranks():
    run(2, not_finite_weight)


# -- memory, release and resume -----------------------------------------------------------------------


def local_bytes(tensors: Any) -> int:
    held = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def give_back(rank: int, ways: Sequence[str]) -> None:
    for way, dtype, placement in spread.settings(*ways):
        params, opt = begun(way, dtype, placement)
        known = (rank, way, dtype, placement)
        full = opt.memory()
        assert full["device_weights"] == local_bytes(params.values()), known
        assert full["gradients"] >= local_bytes(p.grad for p in params.values()), known
        state = sum(t.nbytes for own in held(opt, params).values() for t in own.values())
        assert full["device_state" if placement == "device" else "host_state"] >= state, known
        before, weights, known_masters = (
            held(opt, params),
            spread.local(params),
            masters(opt, params),
        )
        opt.release(weights=False)
        left = opt.memory()
        assert all(
            left[place] == 0 for place in left if place not in ("host_state", "device_weights")
        )
        assert_equal(masters(opt, params), known_masters, *known)
        opt.resume()
        assert_equal(held(opt, params), before, *known)
        assert_equal(spread.local(params), weights, *known)
        steps(opt, params, range(2, 3))
        alone = parameters("alone", dtype)
        twin = optimizer(alone, process_group=False, placement=spread.PLACEMENTS[placement])
        steps(twin, alone, range(3))
        for name, master in masters(twin, alone).items():
            torch.testing.assert_close(
                opt.gathered_master(params[name]), master, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("ranks", FEWER)
def test_the_device_is_given_back_and_weights_stay(ranks: int):
    run(ranks, give_back, FEWER[ranks])


def reduced_gradients(rank: int) -> None:
    """FSDP2's gradients are parts of one buffer, which goes with the last of them."""
    net = spread.sharded(spread.Net(torch.bfloat16))
    opt = spread.net_optimizer(net)
    net(spread.batch(0)).float().square().mean().backward()
    gradients = [param.grad for param in net.parameters()]
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    assert any(gradient.to_local()._base is not None for gradient in gradients)
    report = opt.release(weights=False)
    assert report.kept_gradients == ()
    assert opt.memory()["gradients"] == 0


def test_gradients_of_fsdp_are_given_back():
    run(2, reduced_gradients)


def dtensors_stay(rank: int) -> None:
    for way, dtype, placement in spread.settings("fsdp"):
        params, opt = begun(way, dtype, placement)
        before, weights, memory = held(opt, params), spread.local(params), opt.memory()
        gradients = {name: param.grad for name, param in params.items()}
        with pytest.raises(ValueError, match=r"heads: got a DTensor.*release\(weights=False\)"):
            opt.release()
        assert opt.memory() == memory
        assert_equal(held(opt, params), before, rank, dtype, placement)
        assert_equal(spread.local(params), weights, rank, dtype, placement)
        assert all(param.grad is gradients[name] for name, param in params.items())
        # Nor those of a model that are not the optimizer's.
        model = nn.Module()
        model.register_parameter("frozen", params["heads"].requires_grad_(False))
        plain = nn.Parameter(torch.ones(4, 4))
        other = muonloom.Muon([plain])
        with pytest.raises(ValueError, match="frozen: got a DTensor"):
            other.release(model=model)
        assert plain.untyped_storage().nbytes()
        params["heads"].requires_grad_()
        steps(opt, params, range(2, 3))


def test_weights_of_dtensors_are_not_given_back():
    run(2, dtensors_stay)


def released_weights(rank: int) -> None:
    for way, dtype, placement in spread.settings("ddp"):
        params, opt = begun(way, dtype, placement)
        known = (rank, way, dtype, placement)
        model = nn.Module()
        for name, param in params.items():
            model.register_parameter(name, param)
        model.register_buffer("mask", torch.arange(7))
        before, weights, known_masters = (
            held(opt, params),
            spread.local(params),
            masters(opt, params),
        )
        for some in (None, [params["heads"], params["odd"]]):
            opt.release(some, model=None if some else model)
            left = opt.memory()
            assert some or all(left[place] == 0 for place in left if place != "host_state"), known
            assert all(params[name].untyped_storage().nbytes() == 0 for name in ("heads", "odd"))
            assert_equal(masters(opt, params), known_masters, *known)
            for use in (opt.step, partial(opt.apply_to_masters, None, torch.zero_)):
                with pytest.raises(RuntimeError, match="while it is released"):
                    use()
            opt.resume()
            assert_equal(held(opt, params), before, *known)
            assert_equal(spread.local(params), weights, *known)
            assert torch.equal(model.mask, torch.arange(7))
        steps(opt, params, range(2, 4))
        alone = parameters("alone", dtype)
        twin = optimizer(alone, process_group=False, placement=spread.PLACEMENTS[placement])
        steps(twin, alone, range(4))
        for name, master in masters(twin, alone).items():
            torch.testing.assert_close(
                opt.gathered_master(params[name]), master, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicated_weights_come_back_on_all_ranks(ranks: int):
    run(ranks, released_weights)


def forward_while_released(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    wrapped = DistributedDataParallel(model)
    opt = muonloom.Muon(wrapped.named_parameters(), **spread.OPTIONS)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        wrapped(x).sum().backward()
        opt.step()
    opt.drain()
    before = [p.detach().clone() for p in model.parameters()]
    # What is called is not always what was given; a read of released buffers would end the process.
    for given in (wrapped, model, nn.Sequential(wrapped)):
        report = opt.release(model=given)
        assert (report.kept_weights == ()) == (given is not model), report
        assert (model[1].running_mean.untyped_storage().nbytes() == 0) == (given is not model)
        for called in (given, wrapped, model):
            with pytest.raises(RuntimeError, match=r"while it is released|given up"):
                called(x)
        opt.resume()
    assert_equal(dict(enumerate(p.detach() for p in model.parameters())), dict(enumerate(before)))
    wrapped(x).sum().backward()
    opt.step()


def test_a_wrapped_model_is_not_called_while_released():
    run(2, forward_while_released)
