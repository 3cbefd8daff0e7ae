"""``config.optimizer = "muonloom"``, as Megatron-Core makes and wraps it; and what is asked for first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import get_muon_scale_factor
from torch import Tensor

from megatron import test_resume
from megatron.models import Tiny, build, initialize
from megatron.pieces import gathered, pieces, weight
from megatron.steps import optimizer_config
from megatron.support import run_megatron
from muonloom import muon_scale
from muonloom.integrations.megatron import get_optimizer, register
from muonloom.integrations.megatron.features import require_features
from muonloom.integrations.megatron.options import muon_options
from muonloom.math import expand_coefficients

OPTIONS: dict[str, Any] = {"ns_compute_dtype": torch.float32, "heads_per_block": 1}
SETTINGS = {"muon_extra_scale_factor": 0.2, "muon_coefficient_type": "simple", "clip_grad": 0.0}


def trained(rank: int, tiny: Tiny, options: dict[str, Any] | None) -> dict[str, Tensor]:
    """Take three steps on drawn gradients; by Megatron's registry where there are options for it."""
    initialize(tiny)
    model = build(tiny)
    if options is None:
        optimizer = get_optimizer(optimizer_config(tiny, **SETTINGS), model, **OPTIONS)
    else:
        options = dict(options)
        layer_wise = options.pop("layer_wise", False)
        register(**OPTIONS, **options)
        settings = {
            **SETTINGS,
            "optimizer": "muonloom",
            "use_layer_wise_distributed_optimizer": layer_wise,
        }
        optimizer = get_megatron_optimizer(
            optimizer_config(tiny, **settings), list(model), use_gloo_process_groups=False
        )
    for step in range(3):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)  # as a scheduler does
        for piece in pieces(model):
            drawn = weight(f"gradient of {piece.name}", piece.whole_shape, step)
            piece.parameter.main_grad.copy_(piece.of(drawn))
        assert optimizer.step()[0]
    return gathered(model)


ARRANGEMENTS = {
    "alone": (1, Tiny(kind="moe")),
    "DP2": (2, Tiny(kind="gated")),
    "TP2": (2, Tiny(tensor_parallel=2)),
    "EP2": (2, Tiny(kind="moe", expert_parallel=2)),
}


@pytest.mark.parametrize("options", [{}, {"placement": "host"}], ids=str)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_the_registry_gives_the_same_weights(name: str, options: dict[str, Any]):
    world, tiny = ARRANGEMENTS[name]
    expected = run_megatron(world, trained, tiny, None)
    for found, wanted in zip(run_megatron(world, trained, tiny, options), expected, strict=True):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_registry_works_under_layer_wise_ownership(tensor_parallel: int):
    tiny = Tiny(dtype=torch.bfloat16, tensor_parallel=tensor_parallel)
    [expected, *_] = run_megatron(tensor_parallel, trained, tiny, None)
    for found in run_megatron(tensor_parallel, trained, tiny, {"layer_wise": True}):
        for key, wanted in expected.items():
            # Masters here are off the ties of BF16 by one unit of FP32, Megatron's are not.
            assert torch.allclose(found[key], wanted, rtol=2**-7, atol=2**-9), key


# -- with BF16 weights, whose masters are Megatron's -------------------------------------------------


@pytest.mark.parametrize(
    ("world", "tiny", "options"),
    [
        (2, Tiny(kind="gated"), {"placement": "host"}),
        (2, Tiny(tensor_parallel=2), {}),
        (2, Tiny(kind="moe", expert_parallel=2), {}),
        (2, Tiny(buffers="whole"), {"layer_wise": True}),
    ],
    ids=["DP2", "TP2", "EP2", "layer-wise, DP2"],
)
def test_bfloat16_weights_are_the_same_within_a_rounding(
    world: int, tiny: Tiny, options: dict[str, Any]
):
    tiny = replace(tiny, dtype=torch.bfloat16)
    [expected, *_] = run_megatron(world, trained, tiny, None)
    [found, *_] = run_megatron(world, trained, tiny, options)
    for key, wanted in expected.items():
        # As above: one rounding of BF16 in a few of a thousand weights.
        assert torch.allclose(found[key], wanted, rtol=2**-7, atol=2**-9), key
        assert (found[key] == wanted).float().mean() > 0.98, key


# -- checkpoints and schedules -----------------------------------------------------------------------


def by_registry(config: Any, model: Any, *, layer_wise: bool = False, **options: Any) -> Any:
    register("another name", **options)
    config.optimizer = "another name"
    config.use_layer_wise_distributed_optimizer = layer_wise
    return get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)


def started(tiny: Tiny, options: dict[str, Any]) -> test_resume.Run:
    test_resume.get_optimizer = by_registry  # this process ends with its rank
    return test_resume.Run(tiny, options)


def inner(optimizer: Any) -> Iterator[Any]:
    """Yield each `muonloom.Muon` within Megatron-Core's wrappers."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each is not optimizer:
            yield from inner(each)
        elif hasattr(each, "optimizer"):
            yield each.optimizer.muon


def inner_rates(run: test_resume.Run) -> set[tuple[float, float]]:
    muons = list(inner(run.optimizer))
    assert muons
    groups = [group for muon in muons for group in muon.param_groups]
    return {(round(group["lr"], 9), round(group["weight_decay"], 9)) for group in groups}


def resumed(rank: int, tiny: Tiny, options: dict[str, Any], path: str) -> None:
    whole = started(tiny, options)
    whole.steps(0, 2)
    whole.save(path)
    expected = whole.steps(2, 2)
    again = started(tiny, options)
    again.load(path)
    # The end of the warm-up; of matrices, and of norms, which may be other ranks'.
    assert {(0.02, 0.12)} <= inner_rates(again) <= {(0.02, 0.12), (0.02, 0.0)}
    assert again.steps(2, 2) == expected
    weights = gathered(whole.model)
    for name, tensor in gathered(again.model).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize(
    ("world", "tiny", "options"),
    [
        (2, Tiny(tensor_parallel=2), {"placement": "host"}),
        (2, Tiny(kind="moe", expert_parallel=2), {}),
        (2, Tiny(kind="moe", expert_parallel=2, dtype=torch.bfloat16), {"placement": "host"}),
        (1, Tiny(dtype=torch.bfloat16), {"layer_wise": True}),
        (2, Tiny(dtype=torch.bfloat16, buffers="whole"), {"layer_wise": True}),
    ],
    ids=["TP2, host", "EP2", "EP2, BF16, host", "layer-wise", "layer-wise, DP2"],
)
def test_a_registered_run_goes_on_bit_for_bit(
    world: int, tiny: Tiny, options: dict[str, Any], tmp_path: Any
):
    run_megatron(world, resumed, tiny, {"heads_per_block": 1, **options}, str(tmp_path / "saved"))


def went_on(rank: int, tiny: Tiny, path: str, is_first: bool) -> list[float]:
    run = started(tiny, {"heads_per_block": 1})
    if is_first:
        run.steps(0, 3)
        run.save(path)
    else:
        run.load(path)
    return run.steps(3, 3)


def test_a_registered_run_is_loaded_by_other_ranks(tmp_path: Any):
    path = str(tmp_path / "saved")
    [losses, *_] = run_megatron(2, went_on, Tiny(kind="gated", tensor_parallel=2), path, True)
    for world in (1, 2):
        [found, *_] = run_megatron(world, went_on, Tiny(kind="gated"), path, False)
        assert found == pytest.approx(losses, rel=1e-5)  # sums in another order


def test_an_option_that_there_is_not_is_refused():
    [text] = run_megatron(1, refused)
    assert "no_such_option" in text


def refused(rank: int) -> str:
    with pytest.raises(TypeError) as error:
        trained(rank, Tiny(), {"no_such_option": 1})
    return str(error.value)


# -- what is asked for first --------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["module", "attribute"])
def test_what_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch):
    actual = importlib.import_module

    class Older:
        __version__ = "0.16.0"

    def find(name: str) -> Any:
        if name == "megatron.core.optimizer.emerging_optimizers":
            if missing == "module":
                raise ImportError(name)
            return Older
        return Older if name == "megatron.core" else actual(name)

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(ImportError, match=r"^megatron\.core: got .*emerging_optimizers") as error:
        require_features()
    assert "megatron-core 0.19" in str(error.value)
    if missing == "attribute":
        assert "0.16.0" in str(error.value)
        assert "EmergingOptimizerEntry" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("loss_scale", 2.0),
        ("decoupled_weight_decay", False),
        ("use_precision_aware_optimizer", True),
        ("optimizer_cpu_offload", True),
        ("use_distributed_optimizer", True),
        ("overlap_param_gather", True),
        ("muon_scalar_optimizer", "lion"),
        ("lr", None),
        ("muon_scale_mode", "shape_scaling"),
        ("muon_coefficient_type", "no such"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(name: str, value: Any):
    config = OptimizerConfig(lr=0.1, muon_extra_scale_factor=0.2, muon_coefficient_type="simple")
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf"^config\.{name}"):
        muon_options(config, {})


@pytest.mark.parametrize(
    ("mode", "factor"), [("spectral", 0.2), ("shape_scaling", 1.0), ("unit_rms_norm", 1.0)]
)
@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 32)])
def test_scales_are_megatrons(mode: str, factor: float, shape: tuple[int, int]):
    config = OptimizerConfig(
        lr=0.1,
        muon_scale_mode=mode,
        muon_extra_scale_factor=factor,
        muon_coefficient_type="simple",
    )
    rule = muon_options(config, {})["adjust_lr_fn"]
    assert muon_scale(*shape, rule) == pytest.approx(factor * get_muon_scale_factor(*shape, mode))


@pytest.mark.parametrize("steps", [5, 7])
def test_coefficients_are_megatrons(steps: int):
    taken = 0
    for kind, table in muon_utils._COEFFICIENT_SETS.items():
        config = OptimizerConfig(lr=0.1, muon_extra_scale_factor=0.2, muon_coefficient_type=kind)
        config.muon_num_ns_steps = steps
        try:
            ours = muon_options(config, {})["ns_coefficients"]
        except ValueError:
            continue
        taken += 1
        ends = "repeat_last" if kind == "polar_express" else "cycle"
        theirs = muon_utils.get_coefficient_iterator(steps, table, ends)
        for own, other in zip(expand_coefficients(ours, steps), theirs, strict=True):
            assert own == pytest.approx(other, rel=1e-3), kind  # some are quoted with fewer digits
    assert taken == 3
