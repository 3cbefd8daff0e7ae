"""State dictionaries over ranks: DTensors of DTensors, whole ones cut, parts refused; torch's tools."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ranks import spread
from ranks.spread import assert_equal, error_of, held, masters, optimizer, parameters, steps
from ranks.support import run

DTENSORS = {2: ("fsdp", "tp", "replicated"), 4: ("hsdp",)}
NAMES = list(spread.SHAPES)


def new(way: str, dtype: torch.dtype, placement: str, seed: int = 0, **options: Any) -> Any:
    params = parameters(way, dtype, seed)
    return params, optimizer(params, placement=spread.PLACEMENTS[placement], **options)


def begun(way: str, dtype: torch.dtype, placement: str, **options: Any) -> Any:
    params, opt = new(way, dtype, placement, **options)
    steps(opt, params, range(2))
    return params, opt


def by_name(state_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    return {names[index]: state for index, state in state_dict["state"].items()}


def load_weights(params: spread.Params, whole: dict[str, Tensor]) -> None:
    for name, param in params.items():
        with torch.no_grad():
            param.copy_(spread.placed_as(whole[name], param))


# -- DTensors -----------------------------------------------------------------------------------------


def state_of_dtensors(rank: int) -> None:
    for way, dtype, placement in spread.settings(*DTENSORS[dist.get_world_size()]):
        params, opt = begun(way, dtype, placement)
        known = (rank, way, dtype, placement)
        kept, saved = held(opt, params), opt.state_dict()
        complete = masters(opt, params)
        for name, state in by_name(saved).items():
            param = params[name]
            for key, value in state.items():
                if key == "step" or not isinstance(param, DTensor):
                    assert not isinstance(value, DTensor), (*known, name, key)
                    continue
                assert isinstance(value, DTensor), (*known, name, key)
                assert value.placements == param.placements
                assert value.shape == param.shape
                assert value.device_mesh == param.device_mesh
                if key in kept[name]:
                    assert_equal(value.to_local(), kept[name][key], *known, name, key)
            if dtype == torch.bfloat16:
                assert_equal(spread.whole(state["master_weight"]), complete[name], *known, name)
        twins, twin = new(way, dtype, placement, seed=1)
        load_weights(twins, spread.weights(params))
        twin.load_state_dict(copy_of(saved))
        assert_equal(held(twin, twins), kept, *known)
        for one, own in ((opt, params), (twin, twins)):
            steps(one, own, range(2, 4))
        assert_equal(held(twin, twins), held(opt, params), *known)
        assert_equal(spread.local(twins), spread.local(params), *known)


def copy_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Another dictionary, of clones."""
    state = {
        index: {key: value.clone() for key, value in own.items()}
        for index, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@pytest.mark.parametrize("ranks", DTENSORS)
def test_state_of_dtensors_is_placed_as_they_are(ranks: int):
    run(ranks, state_of_dtensors)


def refused_placements(rank: int) -> None:
    params, opt = begun("fsdp", torch.bfloat16, "host")
    before = held(opt, params)
    saved = opt.state_dict()
    mesh = init_device_mesh("cpu", (2,))
    for spoil in (
        lambda t: t.redistribute(mesh, [Replicate()]),
        lambda t: t.redistribute(mesh, [Shard(1)]),
    ):
        other = copy_of(saved)
        other["state"][1]["momentum_buffer"] = spoil(other["state"][1]["momentum_buffer"])
        with pytest.raises(ValueError, match=rf"{NAMES[1]}: got saved momentum_buffer placed as"):
            opt.load_state_dict(other)
    plain = parameters("alone", torch.bfloat16)
    alone = optimizer(plain, process_group=False)
    with pytest.raises(ValueError, match="wanted a plain tensor, as the parameter is"):
        alone.load_state_dict(saved)
    assert not alone.state
    other = copy_of(saved)
    if rank == 1:
        other["state"][0]["momentum_buffer"].to_local()[-1] = float("nan")
    error = error_of(lambda: opt.load_state_dict(other))
    assert (error is None) == (rank == 0)  # each looks at its own
    if rank == 1:
        assert "non-finite" in str(error)
        assert_equal(held(opt, params), before)


def test_state_that_is_placed_otherwise_is_refused():
    run(2, refused_placements)


def whole_dictionaries(rank: int) -> None:
    for _, dtype, placement in spread.settings("alone"):
        alone, saver = begun(_, dtype, placement, process_group=False)
        saved = saver.state_dict()
        for way in ("ddp", "fsdp", "tp"):
            params, opt = new(way, dtype, placement, seed=1)
            known = (rank, way, dtype, placement)
            load_weights(params, spread.weights(alone))
            opt.load_state_dict(saved)
            assert_equal(masters(opt, params), masters(saver, alone), *known)
            for name, param in params.items():
                share = opt._assignments[param].share
                box = ... if share is None else share.holding.own.slices
                for key, value in opt.state[param].items():
                    if key not in ("master_low", "step"):
                        assert_equal(value, by_name(saved)[name][key][box], *known, name, key)
        steps(opt, params, range(2, 3))
        twins, twin = new("alone", dtype, placement, process_group=False)
        load_weights(twins, spread.weights(alone))
        twin.load_state_dict(saved)
        steps(twin, twins, range(2, 3))
        for name, master in masters(twin, twins).items():
            torch.testing.assert_close(
                opt.gathered_master(params[name]), master, rtol=1e-5, atol=1e-5
            )


def test_each_rank_takes_its_part_of_what_one_has_saved():
    run(2, whole_dictionaries)


# -- replicated ---------------------------------------------------------------------------------------


def parts(rank: int) -> None:
    params, opt = begun("ddp", torch.bfloat16, "host")
    for part in (
        opt.state_dict,
        lambda: copy.deepcopy(opt),
        lambda: pickle.dumps(opt),
        lambda: get_optimizer_state_dict(module_of(params), opt),
    ):
        with pytest.raises(RuntimeError, match=r"heads: .*muonloom\.checkpoint\.save\(\)"):
            part()
    steps(opt, params, range(2, 3))
    _, own = begun("ddp", torch.bfloat16, "host", process_group=False)
    assert own.state_dict()["state"][0]["momentum_buffer"].shape == spread.SHAPES["heads"]
    assert copy.deepcopy(own).state_dict()["state"].keys() == own.state_dict()["state"].keys()


def module_of(params: spread.Params) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, param in params.items():
        module.register_parameter(name, param)
    return module


def test_no_part_is_given_away_as_the_whole():
    run(2, parts)


def copies_of_dtensors(rank: int) -> None:
    for way, dtype, placement in spread.settings("fsdp"):
        params, opt = begun(way, dtype, placement)
        twin = copy.deepcopy(opt)
        twins = dict(zip(NAMES, (p for g in twin.param_groups for p in g["params"]), strict=False))
        order = [opt._assignments[p].name for g in opt.param_groups for p in g["params"]]
        twins = dict(zip(order, twins.values(), strict=True))
        assert_equal(held(twin, twins), held(opt, params))
        for one, own in ((opt, params), (twin, twins)):
            steps(one, own, range(2, 4))
        assert_equal(held(twin, twins), held(opt, params), rank, dtype, placement)
        assert_equal(spread.local(twins), spread.local(params), rank, dtype, placement)


def test_an_optimizer_of_dtensors_is_copied():
    run(2, copies_of_dtensors)


# -- torch's tools ------------------------------------------------------------------------------------

FULL = {"full_state_dict": True, "cpu_offload": True}
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": FULL,
}


def new_run(dtype: torch.dtype, placement: str, seed: int = 0) -> Any:
    net = spread.sharded(spread.Net(dtype, seed))
    return net, spread.net_optimizer(net, placement=spread.PLACEMENTS[placement])


# Torch's flattened form has no place for split masters, which is an error that says so.
RUNS = {
    (torch.bfloat16, "device"): tuple(KINDS),
    (torch.bfloat16, "split"): ("sharded", "full"),
    (torch.float32, "host"): ("flat",),
}


def save_with_torch(rank: int, directory: str) -> dict[str, Any]:
    wanted = {}
    for (dtype, placement), kinds in RUNS.items():
        net, opt = new_run(dtype, placement)
        spread.train(net, opt, range(2))
        for kind in kinds:
            where = f"{directory}/{dtype} {placement} {kind}".replace("torch.", "")
            options = StateDictOptions(**KINDS[kind])
            state = {
                "model": get_model_state_dict(net, options=options),
                "optimizer": get_optimizer_state_dict(net, opt, options=options),
            }
            if kind == "full":
                if rank == 0:
                    torch.save(state, f"{where}.pt")
                continue
            checkpoint.save(state, checkpoint_id=where)
        wanted[str((dtype, placement))] = spread.net_state(net, opt)
        steps(opt, dict(net.named_parameters()), range(2, 4))
        wanted[str((dtype, placement, "later"))] = spread.net_state(net, opt)
    dist.barrier()
    return wanted


def load_with_torch(rank: int, directory: str, wanted: dict[str, Any]) -> None:
    for (dtype, placement), kinds in RUNS.items():
        for kind in kinds:
            where = f"{directory}/{dtype} {placement} {kind}".replace("torch.", "")
            net, opt = new_run(dtype, placement, seed=1)
            if kind == "full":
                options = StateDictOptions(**FULL, broadcast_from_rank0=True)
                # Only the first rank reads.
                state = torch.load(f"{where}.pt", weights_only=True) if rank == 0 else {}
                state = state or {"model": {}, "optimizer": {}}
            else:
                options = StateDictOptions(**KINDS[kind])
                state = {
                    "model": get_model_state_dict(net, options=options),
                    "optimizer": get_optimizer_state_dict(net, opt, options=options),
                }
                checkpoint.load(state, checkpoint_id=where)
            set_model_state_dict(net, state["model"], options=options)
            set_optimizer_state_dict(net, opt, state["optimizer"], options=options)
            known = (rank, kind, dtype, placement)
            assert_equal(spread.net_state(net, opt), wanted[str((dtype, placement))], *known)
            steps(opt, dict(net.named_parameters()), range(2, 4))
            for name, state in wanted[str((dtype, placement, "later"))].items():
                now = opt.gathered_master(net.get_parameter(name))
                torch.testing.assert_close(now, state["master"], rtol=1e-4, atol=1e-5)


def test_torchs_tools_save_and_load_over_other_numbers_of_ranks(tmp_path: Path):
    wanted = run(2, save_with_torch, str(tmp_path))
    for ranks in (3, 1):
        run(ranks, load_with_torch, str(tmp_path), wanted[0])


def init_step(rank: int) -> None:
    for _, dtype, placement in spread.settings("fsdp"):
        net, opt = new_run(dtype, placement)
        before = spread.local(dict(net.named_parameters()))
        saved = get_optimizer_state_dict(net, opt)
        assert_equal(spread.local(dict(net.named_parameters())), before, rank, dtype, placement)
        assert {group["lr"] for group in opt.param_groups} == {1e-2, 1e-3}
        first = saved["state"]["layers.0.q_proj.weight"]["momentum_buffer"]
        assert isinstance(first, DTensor)
        assert not first.to_local().any()
        set_optimizer_state_dict(net, opt, saved)
        assert_equal(spread.local(dict(net.named_parameters())), before, rank, dtype, placement)
        plain_net, plain = new_run(dtype, placement)
        for one, own in ((net, opt), (plain_net, plain)):
            spread.train(one, own, range(2))
        assert_equal(spread.net_state(net, opt), spread.net_state(plain_net, plain), rank)


def test_the_step_by_which_torch_has_state_made_changes_nothing():
    run(2, init_step)
