"""The public surface, frozen; and what importing it costs."""

from __future__ import annotations

import inspect

import torch

import muonloom
from fresh import Fresh

PUBLIC = [
    "BFloat16Writer",
    "BlockSpec",
    "CheckpointError",
    "ConfigError",
    "ExpertEngine",
    "Float8BlockWriter",
    "HostPlacement",
    "Layout",
    "LostRanksError",
    "Muon",
    "Sharding",
    "StaleMasterError",
    "Writer",
    "__version__",
    "export_weights",
    "install_expert_engine",
    "muon_scale",
    "ns_coefficient_names",
    "orthogonalize",
    "parameter_groups",
    "register_family",
]


def test_public_names():
    assert sorted(muonloom.__all__) == sorted(PUBLIC)
    assert all(hasattr(muonloom, name) for name in PUBLIC)
    assert isinstance(muonloom.__version__, str)


def test_torchs_arguments_keep_torchs_defaults():
    ours = inspect.signature(muonloom.Muon).parameters
    for name, theirs in inspect.signature(torch.optim.Muon).parameters.items():
        assert ours[name].default == theirs.default, name


def test_the_other_arguments_and_their_defaults():
    wanted = {
        "layout": None, "adamw_lr": None, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8,
        "adamw_weight_decay": None, "momentum_dtype": torch.float32, "ns_method": "auto",
        "ns_compute_dtype": None, "ns_batch_bytes": "auto", "idle_matrices": "update",
        "skip_nonfinite": True, "max_consecutive_skips": 20, "process_group": None, "engine": None,
        "sharding": None, "step_group": None,
        "placement": "device",
    }  # fmt: skip
    signature = inspect.signature(muonloom.Muon).parameters
    assert {name: signature[name].default for name in wanted} == wanted
    keywords = [p for name, p in signature.items() if name != "params"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in keywords)


def test_public_things_have_docstrings():
    for name in PUBLIC:
        thing = getattr(muonloom, name)
        if callable(thing):
            assert thing.__doc__, name
    for name, method in vars(muonloom.Muon).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert inspect.getdoc(method), name


def test_importing_pulls_in_torch_and_the_standard_library_alone(fresh: Fresh):
    """Run apart, because this process has imported much else."""
    code = (
        "import sys, torch, torch.optim\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import muonloom\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "extra = after - before - set(sys.stdlib_module_names) - {'muonloom'}\n"
        "print(sorted(extra))\n"
        "loaded = [name for name in sys.modules if name.startswith('muonloom.')]\n"
        "print([n for n in loaded if n.split('.')[1] in ('train', 'cli', 'bench', 'experts')])\n"
    )
    run = fresh.run(code)
    assert run.stdout.splitlines() == ["[]", "[]"], run.stderr
