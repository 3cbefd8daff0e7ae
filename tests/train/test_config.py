from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

import muonloom
from muonloom.errors import ConfigError
from muonloom.train.config_file import load_config, parse_override

ROOT = Path(__file__).parents[2]
MODEL = '[model]\nconfig = {model_type = "llama"}\n'


@pytest.fixture
def write(tmp_path):
    def _write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.mark.parametrize("name", ["default.toml", "default-adamw.toml", "host-split.toml"])
def test_shipped_configs_are_valid(name):
    assert load_config(ROOT / "configs" / name).model.config["model_type"] == "glm_moe_dsa"


def test_shipped_configs_differ_in_the_optimizer_alone():
    muon, adamw = (load_config(ROOT / "configs" / f"default{s}.toml") for s in ("", "-adamw"))
    assert (muon.optim.algorithm, adamw.optim.algorithm) == ("muon", "adamw")
    for section in ("model", "data", "schedule", "eval"):
        assert getattr(muon, section) == getattr(adamw, section)
    assert muon.run.seed == adamw.run.seed


def test_defaults_are_those_of_the_optimizer(write):
    optim = load_config(write(MODEL)).optim
    signature = inspect.signature(muonloom.Muon).parameters
    shared = [name for name in type(optim).model_fields if name in signature]
    assert len(shared) > 12
    for name in shared:
        value = getattr(optim, name)
        value = getattr(torch, value) if name == "momentum_dtype" else value
        assert value == signature[name].default, name


def test_the_host_table_has_the_fields_and_defaults_of_a_host_placement(write):
    host = load_config(write(MODEL)).optim.host
    assert host.model_dump() == dataclasses.asdict(muonloom.HostPlacement())


def test_the_default_run_cuts_heads_and_places_state_on_the_host():
    optim = load_config(ROOT / "configs" / "default.toml").optim
    assert (optim.placement, optim.heads_per_block) == ("host", 1)


def test_the_default_run_goes_to_the_device_by_one_override():
    optim = load_config(ROOT / "configs" / "default.toml", ["optim.placement=device"]).optim
    assert optim.placement == "device"


@pytest.mark.parametrize("host", ["host = {}", "[optim.host]\nnum_slots = 3"])
@pytest.mark.parametrize("placement", ["", 'placement = "device"\n'])
def test_a_host_table_that_nothing_reads_is_refused(write, host, placement):
    with pytest.raises(ConfigError, match=r"^optim\.host: got a table .*placement = .host."):
        load_config(write(MODEL + f"[optim]\n{placement}{host}\n"))


def test_the_host_table_is_read(write):
    text = '[optim]\nplacement = "host"\nhost = {slot_bytes = 4096, master_layout = "split"}\n'
    host = load_config(write(MODEL + text), ["optim.host.num_slots=1"]).optim.host
    assert host.model_dump() == {"slot_bytes": 4096, "num_slots": 1, "master_layout": "split"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[optim]\nlrr = 1\n", "optim.lrr"),
        ("[optim]\nlr = 'fast'\n", "optim.lr"),
        ("[optim]\nlr = -1.0\n", "optim.lr"),
        ("[optim]\nlr = nan\n", "optim.lr"),
        ("[optim]\nmomentum = 1.0\n", "optim.momentum"),
        ("[optim]\nadamw_betas = [0.9]\n", "optim.adamw_betas"),
        ("[optim]\nheads_per_block = 0\n", "optim.heads_per_block"),
        ("[optim]\nplacement = 'moon'\n", "optim.placement"),
        ("[optim]\nmomentum_dtype = 'float16'\n", "optim.momentum_dtype"),
        ("[optim]\nns_batch_bytes = 0\n", "optim.ns_batch_bytes"),
        ("[optim]\nns_batch_bytes = 'all'\n", "optim.ns_batch_bytes"),
        ("[optim]\nfree_gradients = 1\n", "optim.free_gradients"),
        ("[optim]\nhost = 3\n", "optim.host"),
        ("[optim]\nplacement = 'host'\nhost.slot_bytes = -1\n", "optim.host.slot_bytes"),
        ("[optim]\nplacement = 'host'\nhost.slot_bytes = true\n", "optim.host.slot_bytes"),
        ("[optim]\nplacement = 'host'\nhost.num_slots = 0\n", "optim.host.num_slots"),
        ("[optim]\nplacement = 'host'\nhost.master_layout = 'half'\n", "optim.host.master_layout"),
        ("[optim]\nplacement = 'host'\nhost.slots = 2\n", "optim.host.slots"),
        ("[schedule]\nsteps = 0\n", "schedule.steps"),
        ("[schedule]\nsteps = true\n", "schedule.steps"),
        ("[schedule]\nsteps = 2.5\n", "schedule.steps"),
        ("[schedule]\nsteps = 5\nwarmup_steps = 5\n", "schedule.warmup_steps"),
        ("[data]\nsource = 'files'\n", "data"),
        ("[data]\nfiles = ['a.txt']\n", "data"),
        ("[data]\neval_fraction = 1.0\n", "data.eval_fraction"),
        ("[model2]\n", "model2"),
        ("optim = 3\n", "optim"),
    ],
)
def test_errors_lead_with_the_key(write, text, key):
    path = write((text + MODEL) if text.startswith("optim =") else MODEL + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{key}:") or message.startswith(f"{key}.")
    assert "\n" not in message


@pytest.mark.parametrize("model", ["", "[model]\n", '[model]\ndirectory = "d"\nconfig = "c"\n'])
def test_a_model_has_one_origin(write, model):
    with pytest.raises(ConfigError, match=r"^model: "):
        load_config(write(model))


def test_a_misspelt_key_is_told_before_what_it_leaves_missing(write):
    with pytest.raises(ConfigError, match=r"^modle: .*Did you mean model\?.*1 more"):
        load_config(write(MODEL.replace("[model]", "[modle]")))


@pytest.mark.parametrize("content", [None, b"[a\n", b"\xff"])
def test_a_file_that_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml: got "):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=0.5", (["optim", "lr"], 0.5)),
        ("a.b.c = [1, 2]", (["a", "b", "c"], [1, 2])),
        ("run.name=first", (["run", "name"], "first")),
        ('run.name="1"', (["run", "name"], "1")),
        ("run.name=a=b", (["run", "name"], "a=b")),
        ("run.tensorboard=false", (["run", "tensorboard"], False)),
        ("run.name=", (["run", "name"], "")),
        ("run.name=1\nrun.seed=2", (["run", "name"], "1\nrun.seed=2")),
    ],
)
def test_override_values_are_toml_or_text(override, expected):
    assert parse_override(override) == expected


@pytest.mark.parametrize("override", ["optim.lr", "=1", "a..b=1", ""])
def test_override_without_key_or_value_is_refused(override):
    with pytest.raises(ConfigError, match=r"^--set: got "):
        parse_override(override)


def test_overrides_reach_the_config_in_order(write):
    overrides = ["optim.lr=0.5", "optim.lr=0.25", "model.config.hidden_size=8", "data.field=body"]
    config = load_config(write(MODEL), overrides)
    assert config.optim.lr == 0.25
    assert config.model.config == {"model_type": "llama", "hidden_size": 8}
    assert config.data.field == "body"


def test_override_below_a_value_is_refused(write):
    with pytest.raises(ConfigError, match=r"^--set optim.lr.x: got optim.lr"):
        load_config(write(MODEL + "[optim]\nlr = 0.1\n"), ["optim.lr.x=1"])


def test_zeros_given_stay_zeros(write):
    config = load_config(write(MODEL + "[optim]\nlr = 0.0\nweight_decay = 0.0\nadamw_lr = 0.0\n"))
    assert (config.optim.lr, config.optim.weight_decay, config.optim.adamw_lr) == (0.0, 0.0, 0.0)
