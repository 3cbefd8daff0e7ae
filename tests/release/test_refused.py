"""While something is released, its use is an error that names a parameter, and changes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import muonloom
from layout.tiny import fresh
from muonloom import BFloat16Writer
from release.support import NAMED, EngineDouble, Run, build, has_storage
from staging.support import assert_same_bits

SAVED = build("bf16", "device").step(7)

READS: dict[str, Callable[[Run], Any]] = {
    "forward": lambda run: run.model(torch.ones(2, 24)),
    "state_dict": lambda run: run.model.state_dict(),
    "load_state_dict": lambda run: run.model.load_state_dict(SAVED.model.state_dict()),
    "deepcopy of the model": lambda run: copy.deepcopy(run.model),
    "deepcopy of the optimizer": lambda run: copy.deepcopy(run.opt),
    "pickle of the optimizer": lambda run: pickle.dumps(run.opt),
    "to": lambda run: run.model.to(torch.float64),
}
CHANGES: dict[str, Callable[[Run], Any]] = {
    "step": lambda run: run.opt.step(),
    "load_state_dict": lambda run: run.opt.load_state_dict(SAVED.opt.state_dict()),
    "add_param_group": lambda run: run.opt.add_param_group(
        {"params": [("new.weight", Parameter(torch.ones(4, 4)))]}
    ),
    "apply_to_masters": lambda run: run.opt.apply_to_masters([run["up"]], lambda m: m * 2),
    "refresh_masters": lambda run: run.opt.refresh_masters(),
    "refresh_masters of one": lambda run: run.opt.refresh_masters([run["norm"]]),
    "register_writer": lambda run: run.opt.register_writer(run["up"], BFloat16Writer()),
    "bind": lambda run: run.opt.bind(EngineDouble([(run["up"], BFloat16Writer())])),
    "rebind": lambda run: run.opt.rebind(run["up"]),
    "overlap_forward": lambda run: run.opt.overlap_forward(run.model),
}
ALL = {f"model: {name}": call for name, call in READS.items()} | {
    f"optimizer: {name}": call for name, call in CHANGES.items()
}
# torch itself goes on with the tensors that are not released, and then raises.
PARTIAL = {name: call for name, call in ALL.items() if name != "model: load_state_dict"}


def refused(run: Run, call: Callable[[Run], Any]) -> str:
    run.give_gradients(1)
    groups = len(run.opt.param_groups)
    with pytest.raises(RuntimeError, match=NAMED) as caught:
        call(run)
    assert len(run.opt.param_groups) == groups
    return str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_use_of_all_that_is_released(name: str) -> None:
    placement = "host"
    run = build("bf16 and fp32", placement).step(0)
    run.opt.overlap_forward(run.model).remove()
    before = run.contents()
    run.opt.release(model=run.model)
    assert "resume()" in refused(run, ALL[name])
    assert run.opt.memory()["device_weights"] == 0
    run.opt.resume()
    assert_same_bits(before, run.contents())
    run.step(1)
    wanted = build("bf16 and fp32", placement).step(0, 1)
    assert_same_bits(wanted.contents(), run.contents())


@pytest.mark.parametrize("name", PARTIAL)
def test_use_of_one_that_is_released(name: str) -> None:
    run = build("bf16 and fp32", "device").step(0)
    before = run.contents()
    run.opt.release([run["up"]])
    message = refused(run, ALL[name])
    assert message.startswith("up: "), message
    run.opt.resume()
    assert_same_bits(before, run.contents())


@pytest.mark.parametrize("name", CHANGES)
def test_the_optimizer_alone_is_released(name: str) -> None:
    run = build("bf16", "host").step(0)
    before = run.contents()
    run.opt.release(weights=False)
    refused(run, CHANGES[name])
    run.model(torch.ones(2, 24))
    run.model.state_dict()
    assert_same_bits(before, run.contents())


@pytest.mark.parametrize("arrangement", ["fp8 alone", "engine, fp8 beside"])
@pytest.mark.parametrize("name", ["step", "apply_to_masters", "rebind", "refresh_masters"])
def test_weights_of_writers(name: str, arrangement: str) -> None:
    run = build("bf16", "device", arrangement).step(0)
    before = run.contents()
    run.opt.release()
    calls = [] if run.engine is None else list(run.engine.calls)
    refused(run, CHANGES[name])
    if run.engine is not None:
        assert run.engine.calls == calls  # an engine may hold nothing now
    run.opt.resume()
    assert_same_bits(before, run.contents())


def test_a_closure_that_reads_the_model() -> None:
    run = build("bf16", "device").step(0)
    run.opt.release()
    with pytest.raises(RuntimeError, match=NAMED):
        run.opt.step(lambda: float(run.model(torch.ones(2, 24)).sum()))


def test_a_transformers_model(tmp_path: Path) -> None:
    model = fresh("llama").to(torch.bfloat16)
    opt = muonloom.Muon(model.named_parameters(), lr=0.02, adamw_lr=0.01)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
    buffers = [buffer.clone() for buffer in model.buffers()]
    opt.release(model=model)
    assert not any(map(has_storage, [*model.parameters(), *model.buffers()]))
    for call in (
        lambda: model.save_pretrained(tmp_path),
        lambda: model(input_ids=ids),
        lambda: model.generate(input_ids=ids, max_new_tokens=1),
        model.state_dict,
    ):
        with pytest.raises(RuntimeError, match=r"^[\w.]+\.weight\b.*resume\(\)"):
            call()
    assert not list(tmp_path.rglob("*.safetensors"))
    opt.resume()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    assert buffers
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    model.save_pretrained(tmp_path)
    assert list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("arrangement", [None, "bf16 alone"])
@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_what_is_allowed_gives_the_right_values(placement: str, arrangement: str | None) -> None:
    run = build("bf16 and fp32", placement, arrangement).step(0, 1)
    state, report = run.state(), dict(run.opt.last_step)
    masters = {name: run.opt.get_full_parameter_master(p) for name, p in run.params.items()}
    masters = {name: master.clone() for name, master in masters.items() if master is not None}
    run.opt.release(model=run.model)
    assert_same_bits(state, run.state())
    for name, param in run.params.items():
        master = run.opt.get_full_parameter_master(param)
        assert master is not None
        assert (master.dtype, master.device.type) == (torch.float32, "cpu")
        assert_same_bits({name: masters[name]}, {name: master})
    run.opt.drain()
    assert dict(run.opt.last_step) == report
    assert run.opt.memory()["device_weights"] == 0
    run.opt.zero_grad()
    repr(run.opt)
    assert not any(map(has_storage, run.params.values()))


def test_masters_of_parameters_without_state_while_released() -> None:
    run = build("all three", "device")
    wanted = {name: param.detach().float().clone() for name, param in run.params.items()}
    run.opt.release()
    found = {name: run.opt.get_full_parameter_master(p) for name, p in run.params.items()}
    assert all(torch.equal(wanted[name], master) for name, master in found.items())
    with pytest.raises(ValueError, match="not the optimizer's"):
        run.opt.get_full_parameter_master(Parameter(torch.ones(2, 2)))


def test_the_state_saved_while_released_can_be_loaded() -> None:
    run = build("bf16", "device").step(0, 1)
    run.opt.release()
    saved = copy.deepcopy(run.opt.state_dict())
    run.opt.resume()
    other = build("bf16", "device", seed=3)
    other.model.load_state_dict(run.model.state_dict())
    other.model.cache.copy_(run.model.cache)  # is in no state dictionary
    other.opt.load_state_dict(saved)
    assert_same_bits(run.step(2).contents(), other.step(2).contents())


def test_the_model_is_left_as_it_was() -> None:
    """No hook outlives the release, also where it was asked for several times."""
    run = build("bf16", "device").step(0)
    hooks = dict(run.model._forward_pre_hooks)
    for _ in range(3):
        run.opt.release([run["up"]], model=run.model)
        run.opt.release(model=run.model)
        run.opt.resume([run["up"]])
        with pytest.raises(RuntimeError, match=r"resume\(\)"):
            run.model(torch.ones(2, 24))
        run.opt.resume()
        assert dict(run.model._forward_pre_hooks) == hooks
        copy.deepcopy(run.model)(torch.ones(2, 24))


def test_the_forward_names_what_is_still_released() -> None:
    run = build("bf16", "device").step(0)
    run.opt.release(model=run.model)
    run.opt.resume([run["up"]])
    with pytest.raises(RuntimeError, match=r"^(?!up\b)\w+"):
        run.model(torch.ones(2, 24))
    run.opt.resume()
