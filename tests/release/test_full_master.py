"""`get_full_parameter_master`: whole, FP32, on the host; a view where the slab has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muonloom
from release.support import ARRANGEMENTS, NAMES, SPLITTABLE, Run, build
from staging.support import assert_same_bits


def master_of(run: Run, name: str) -> Tensor:
    master = run.opt.get_full_parameter_master(run[name])
    assert master is not None
    assert (master.dtype, master.device.type) == (torch.float32, "cpu")
    assert master.shape == run[name].shape
    return master


def slabs(run: Run) -> list[Tensor]:
    store = run.opt._assembly._slabs
    assert store is not None
    return [slab.memory for slab in store._slabs]


@pytest.mark.parametrize("arrangement", [None, "fp8 alone", "bf16 beside", "minimal alone"])
@pytest.mark.parametrize("name", ["up", "transposed", "conv", "scale", "norm"])
def test_a_view_of_the_slab_without_a_copy(name: str, arrangement: str | None) -> None:
    run = build("bf16", "host", arrangement).step(0)
    master = master_of(run, name)
    assert master.data_ptr() == run.opt.state[run[name]]["master_weight"].data_ptr()
    inside = [
        slab.data_ptr() <= master.data_ptr() < slab.data_ptr() + slab.nbytes for slab in slabs(run)
    ]
    assert any(inside)
    assert master_of(run, name).data_ptr() == master.data_ptr()
    run.opt.release()
    assert master_of(run, name).data_ptr() == master.data_ptr()
    run.opt.resume()
    old = master.clone()
    run.step(1)
    assert not torch.equal(old, master)  # the view follows
    assert torch.equal(master, master_of(run, name))


@pytest.mark.parametrize("dtypes", SPLITTABLE)
def test_split_masters_are_put_together(dtypes: str) -> None:
    run, full = build(dtypes, "split").step(0, 1), build(dtypes, "host").step(0, 1)
    for name in NAMES:
        assert_same_bits({name: master_of(full, name)}, {name: master_of(run, name)})
    master = master_of(run, "up")
    before = run.contents()
    master.zero_()  # a new tensor: nothing else sees it
    assert_same_bits(before, run.contents())


@pytest.mark.parametrize("dtypes", ["bf16", "fp32", "all three"])
def test_device_placement_gives_a_copy(dtypes: str) -> None:
    run = build(dtypes, "device").step(0)
    before = run.contents()
    for name in NAMES:
        wanted = run.opt.state.get(run[name], {}).get("master_weight", run[name].detach().float())
        master = master_of(run, name)
        assert torch.equal(master, wanted)
        master.zero_()
    assert_same_bits(before, run.contents())


@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS])
def test_all_kinds_of_weights_are_of_one_master(arrangement: str) -> None:
    """Whatever writes the weight, the master is what the same steps give."""
    run = build("bf16", "host", arrangement).step(0, 1)
    plain = build("bf16", "host").step(0, 1)
    for name in NAMES:
        assert_same_bits({name: master_of(plain, name)}, {name: master_of(run, name)})


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_an_undrained_optimizer_is_refused(placement: str) -> None:
    run = build("bf16 and fp32", placement)
    run.give_gradients(0)
    run.opt.step()
    for name in NAMES:
        with pytest.raises(RuntimeError, match=rf"^{name}: .*drain\(\)"):
            run.opt.get_full_parameter_master(run[name])
    run.opt.drain()
    master_of(run, "up")
    run.give_gradients(1)
    run.opt.step()
    run.opt.release()  # drains by itself
    master_of(run, "up")


def test_a_stranger_is_refused() -> None:
    run = build("bf16", "host").step(0)
    for stranger in (run.model.frozen, Parameter(run["up"].detach().clone()), torch.ones(3)):
        with pytest.raises(ValueError, match="not the optimizer's"):
            run.opt.get_full_parameter_master(stranger)


def test_half_a_master_of_an_edited_weight_is_refused() -> None:
    run = build("bf16", "split").step(0)
    with torch.no_grad():
        run["up"].fill_(2.0)
    with pytest.raises(muonloom.StaleMasterError, match=r"^up: "):
        run.opt.get_full_parameter_master(run["up"])
    master_of(run, "norm")
    run.opt.refresh_masters([run["up"]])
    assert torch.equal(master_of(run, "up"), torch.full((24, 16), 2.0))
