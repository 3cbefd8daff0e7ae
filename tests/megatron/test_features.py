"""What the adapter asks of Megatron-Core before it uses it, and what it makes of Megatron's options."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from emerging_optimizers.orthogonalized_optimizers.muon_utils import NSCoeffT
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from torch import Tensor

from megatron.models import Tiny, build, initialize
from megatron.steps import optimizer_config
from megatron.support import run_megatron
from muonloom.integrations import megatron
from muonloom.integrations.megatron import features, get_optimizer, register
from muonloom.integrations.megatron.options import muon_options

SETTINGS = {"muon_extra_scale_factor": 0.2, "muon_coefficient_type": "simple"}


# -- what has to be there -----------------------------------------------------------------------------


def test_what_is_installed_has_all():
    features.require_features()


def imported() -> set[tuple[str, str]]:
    """Return all that the package imports of Megatron-Core, as module and name."""
    found = set()
    for path in Path(megatron.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron."):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found - {("megatron.core", "tensor_parallel")}  # a module


def test_all_that_is_imported_is_asked_for():
    asked = {(module, name) for module, names in features._FEATURES.items() for name in names}
    assert imported() - asked == set()


@pytest.mark.parametrize("module", features._FEATURES)
def test_each_module_that_is_missing_is_named(module: str, monkeypatch: pytest.MonkeyPatch):
    actual = importlib.import_module

    def find(name: str) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return actual(name)

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(ImportError, match=rf"^megatron\.core: got no {module} ") as error:
        features.require_features()
    assert "pip install 'megatron-core>=0.19,<0.20'" in str(error.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in features._FEATURES.items() for name in names],
)
def test_each_name_that_is_missing_is_named(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    actual = importlib.import_module
    older = SimpleNamespace(**{k: v for k, v in vars(actual(module)).items() if k != name})
    monkeypatch.setattr(
        importlib, "import_module", lambda asked: older if asked == module else actual(asked)
    )
    version = actual("megatron.core").__version__
    with pytest.raises(ImportError) as error:
        features.require_features()
    text = str(error.value)
    assert text.startswith(f"megatron.core: got version {version}, where {module} lacks {name};")
    assert "wanted megatron-core 0.19.x" in text


def test_without_megatron_the_import_says_so_and_muonloom_works():
    program = """
import sys
import muonloom
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"]
sys.modules["megatron"] = None
try:
    import muonloom.integrations.megatron
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    [line] = done.stdout.splitlines()
    assert line.startswith("megatron.core: got no megatron.core.optimizer ")
    assert "pip install" in line


# -- options ------------------------------------------------------------------------------------------


def test_options_are_those_of_the_config():
    config = OptimizerConfig(
        lr=0.3,
        weight_decay=0.07,
        muon_momentum=0.9,
        muon_nesterov=True,
        muon_num_ns_steps=7,
        adam_beta1=0.8,
        adam_beta2=0.7,
        adam_eps=1e-6,
        **SETTINGS,
    )
    assert muon_options(config, {}) == {
        "lr": 0.3,
        "adamw_lr": 0.3,
        "weight_decay": 0.07,
        "momentum": 0.9,
        "nesterov": True,
        "ns_steps": 7,
        "ns_coefficients": "quintic",  # muonloom's
        "adjust_lr_fn": "match_rms_adamw",
        "adamw_betas": (0.8, 0.7),
        "adamw_eps": 1e-6,
    }


def test_what_the_caller_gives_comes_first():
    config = OptimizerConfig(lr=0.3)  # of which the scale has no equal here
    config.muon_coefficient_type = "no such"
    given = {
        "adjust_lr_fn": "none",
        "ns_coefficients": (1.5, -0.5, 0.0),
        "momentum": 0.5,
        "placement": "host",
    }
    found = muon_options(config, given)
    assert found.items() >= given.items()
    assert found["lr"] == 0.3


def refusal(kind: str) -> str | None:
    try:
        muon_options(OptimizerConfig(lr=0.1, **{**SETTINGS, "muon_coefficient_type": kind}), {})
    except ValueError as error:
        return str(error)
    return None


def test_coefficient_types_with_the_same_numbers_are_accepted():
    """`test_registry.py` compares their numbers."""
    # The last is a name of muonloom's alone.
    refusals = {kind: refusal(kind) for kind in (*get_args(NSCoeffT), "polar_express_1.02")}
    accepted = {kind for kind, text in refusals.items() if text is None}
    assert accepted == {"simple", "quintic", "polar_express"}
    for text in filter(None, refusals.values()):
        assert text.startswith("config.muon_coefficient_type: ")
        assert "pass ns_coefficients=" in text


@pytest.mark.parametrize(
    ("mode", "factor"),
    [("spectral", 1.0), ("shape_scaling", 0.2), ("unit_rms_norm", 0.2), ("no such", 1.0)],
)
def test_scales_without_an_equal_are_refused(mode: str, factor: float):
    config = OptimizerConfig(lr=0.1, muon_coefficient_type="simple")
    config.muon_scale_mode, config.muon_extra_scale_factor = mode, factor
    with pytest.raises(
        ValueError, match=r"^config\.muon_scale_mode, .*pass adjust_lr_fn="
    ) as error:
        muon_options(config, {})
    assert repr((mode, factor)) in str(error.value)


# -- overrides of groups ------------------------------------------------------------------------------


def fc2_group(rank: int, override: dict[str, Any], by_registry: bool) -> dict[str, Any] | str:
    """Return the group of all `linear_fc2` and norms with the override, or the error."""
    tiny = Tiny()
    initialize(tiny)
    model = build(tiny)
    config = optimizer_config(tiny, **SETTINGS)
    overrides = {**get_standard_config_overrides(config), ParamKey(name="*linear_fc2*"): override}
    try:
        if by_registry:
            register()
            config.optimizer = "muonloom"
            [outer] = get_megatron_optimizer(
                config, model, config_overrides=overrides
            ).chained_optimizers
            muon: Any = outer.optimizer.muon
        else:
            muon = get_optimizer(config, model, config_overrides=overrides).muon
    except ValueError as error:
        return str(error)
    wanted = {model[0].module.decoder.layers[0].mlp.linear_fc2.weight}
    [group] = [group for group in muon.param_groups if wanted & set(group["params"])]
    return {
        key: value
        for key, value in group.items()
        if not isinstance(value, Tensor | list) and key != "process_group"
    }


@pytest.mark.parametrize("by_registry", [False, True], ids=["get_optimizer", "register"])
def test_an_override_of_eps_is_adamws(by_registry: bool):
    [group] = run_megatron(1, fc2_group, {"eps": 1e-3}, by_registry)
    assert group["adamw_eps"] == 1e-3
    [plain] = run_megatron(1, fc2_group, {}, by_registry)
    assert group["eps"] == plain["eps"] == 1e-7  # of the iteration's norm


def test_an_override_of_the_optimizer_is_refused():
    [text] = run_megatron(1, fc2_group, {"optimizer": "adam"}, False)
    assert isinstance(text, str)
    assert text.startswith("config_overrides: ")
    assert "linear_fc2" in text


@pytest.mark.parametrize("by_registry", [False, True], ids=["get_optimizer", "register"])
def test_overrides_of_rates_are_kept(by_registry: bool):
    override = {"max_lr": 0.5, "min_lr": 0.25, "wd_mult": 2.0, "start_wd": 0.1, "end_wd": 0.3}
    [group] = run_megatron(1, fc2_group, override, by_registry)
    assert group.items() >= override.items()
    assert group["lr"] == 0.5
    assert group["weight_decay"] == pytest.approx(0.2)
