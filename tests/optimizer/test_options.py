"""Bad values: one line that leads with the option's name, at construction, in groups, and later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonloom
from optimizer.support import fingerprint, give_gradients, model_parameters, parameter, tensors_of

NAN, INF = math.nan, math.inf
BAD: dict[str, list[Any]] = {
    "lr": [-1e-9, NAN, INF, "0.1", None, True],
    "weight_decay": [-0.1, NAN, INF, "x", None],
    "momentum": [-0.1, 1.0, 1.5, NAN, "x", None],
    "nesterov": [None, "yes", 2],
    "ns_coefficients": ["no_such_name", (1.0, 2.0), (), ((1.0, 2.0),), (NAN, 1.0, 1.0), 3.0, None],
    "eps": [0.0, -1e-7, NAN, INF, "x", None],
    "ns_steps": [-1, 1.5, "5", None, 100],
    "adjust_lr_fn": ["no_such_rule", 1.0, ""],
    "adamw_lr": [-1e-9, NAN, "x"],
    "adamw_betas": [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), 0.9, None, ("a", "b")],
    "adamw_eps": [-1e-9, NAN, "x", None],
    "adamw_weight_decay": [-0.1, NAN, "x"],
    "momentum_dtype": [torch.float16, torch.int8, torch.float64, "float32", None],
    "ns_method": ["no_such_method", None, ""],
    "ns_compute_dtype": [torch.float16, torch.int32, "bfloat16"],
    "ns_batch_bytes": [0, -1, 1.5, "no_such_word", None, True],
    "idle_matrices": ["no_such_word", None, True],
    "skip_nonfinite": [None, "yes", 2],
    "max_consecutive_skips": [-1, 1.5, "x", None],
    "placement": ["no_such_place", None, 3],
}
FLAT = [(name, value) for name, values in BAD.items() for value in values]
GLOBAL = {"skip_nonfinite", "max_consecutive_skips", "placement", "ns_batch_bytes"}
ADAMW = {"adamw_betas", "adamw_eps"}


def build(**options: Any) -> muonloom.Muon:
    return muonloom.Muon(
        model_parameters(depth=1), **{"adjust_lr_fn": "match_rms_adamw", **options}
    )


@pytest.mark.parametrize(("name", "value"), FLAT, ids=[f"{n}={v!r}" for n, v in FLAT])
def test_a_bad_argument(name: str, value: Any):
    with pytest.raises((ValueError, TypeError)) as caught:
        build(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert "got" in message
    assert "wanted" in message


IN_GROUPS = [(n, v) for n, v in FLAT if n not in GLOBAL and v is not None]


@pytest.mark.parametrize(("name", "value"), IN_GROUPS, ids=[f"{n}={v!r}" for n, v in IN_GROUPS])
def test_a_bad_option_of_a_group(name: str, value: Any):
    good = {"params": [("layers.7.a.weight", parameter(4, 6)), ("b.bias", parameter(4))]}
    with pytest.raises((ValueError, TypeError)) as caught:
        muonloom.Muon(
            [{"params": model_parameters(depth=1)}, {**good, name: value}],
            adjust_lr_fn="match_rms_adamw",
        )
    message = str(caught.value).splitlines()[0]
    assert name in message.split(":")[0]
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "value"), IN_GROUPS, ids=[f"{n}={v!r}" for n, v in IN_GROUPS])
def test_a_bad_option_of_a_late_group_adds_nothing(name: str, value: Any):
    opt = build()
    members = [("layers.7.a.weight", parameter(4, 6)), ("b.bias", parameter(4))]
    count, before = len(opt.param_groups), fingerprint(opt)
    with pytest.raises((ValueError, TypeError), match=name):
        opt.add_param_group({"params": members, name: value})
    assert len(opt.param_groups) == count
    assert fingerprint(opt) == before
    opt.add_param_group({"params": members})


@pytest.mark.parametrize("name", sorted(GLOBAL))
def test_an_option_of_the_whole_optimizer_in_a_group(name: str):
    """It would be kept as the caller's own key, and do nothing."""
    good = {"skip_nonfinite": False, "max_consecutive_skips": 3, "placement": "device"}
    with pytest.raises(ValueError, match=name):
        muonloom.Muon([{"params": [parameter(4, 6)], name: good.get(name, 1 << 20)}])


LATER = [("lr", NAN), ("lr", -1.0), ("lr", INF), ("momentum", 1.5), ("weight_decay", NAN),
         ("adjust_lr_fn", "no_such_rule"), ("ns_steps", -1), ("ns_method", "no_such_method")]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), LATER)
def test_a_bad_value_set_between_steps_writes_nothing(name: str, value: Any):
    """What a schedule or a typing error leaves in ``param_groups``."""
    named = model_parameters()
    groups = [{"params": [pair]} for pair in named]
    opt = muonloom.Muon(groups, lr=0.02, adjust_lr_fn="match_rms_adamw")
    give_gradients(tensors_of(named), 1)
    opt.step()
    muon = [g for g in opt.param_groups if g["algorithm"] == "muon"]
    muon[-1][name] = value
    before = fingerprint(opt)
    with pytest.raises((ValueError, TypeError), match=name):
        opt.step()
    assert fingerprint(opt) == before


def test_an_unknown_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="learning_rate"):
        muonloom.Muon([parameter(4, 6)], learning_rate=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "params", [None, 3, parameter(4, 6), ["text"], [("name", "text")], [("only one",)], [{"lr": 1}]]
)
def test_params_that_are_none(params: Any):
    with pytest.raises((TypeError, ValueError, KeyError)) as caught:
        muonloom.Muon(params)
    assert "param" in str(caught.value) or "iterable" in str(caught.value)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lr=st.floats(0, 1),
    weight_decay=st.floats(0, 1),
    momentum=st.floats(0, 0.999),
    ns_steps=st.integers(0, 8),
    eps=st.floats(1e-12, 1e-2),
)
def test_every_good_value_steps(
    lr: float, weight_decay: float, momentum: float, ns_steps: int, eps: float
):
    p = parameter(4, 6)
    opt = muonloom.Muon(
        [p], lr=lr, weight_decay=weight_decay, momentum=momentum, ns_steps=ns_steps, eps=eps
    )
    give_gradients([p], 1)
    opt.step()
    opt.drain()
    assert bool(p.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.int32])
def test_dtypes_that_are_no_weights_are_refused_by_name(dtype: torch.dtype):
    p = torch.nn.Parameter(torch.zeros(4, 6, dtype=dtype), requires_grad=dtype.is_floating_point)
    if dtype is torch.complex64:
        p.requires_grad_(True)
    beside = ("layers.1.a.weight", parameter(4, 6))
    with pytest.raises((ValueError, TypeError), match=r"layers\.0\.a\.weight") as caught:
        muonloom.Muon([("layers.0.a.weight", p), beside])
    assert str(dtype) in str(caught.value)


def test_a_parameter_that_is_no_leaf_is_refused():
    leaf = parameter(4, 6)
    with pytest.raises(ValueError, match="leaf"):
        muonloom.Muon([("layers.0.a.weight", leaf * 2)])
