"""Savers of others: Hugging Face's Trainer, and ``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

import functools
import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import muonloom
from choosing import mostly_slow, pairwise
from optimizer.support import give_gradients, same_bits, steps, through_a_file, weights_fingerprint

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": muonloom.HostPlacement(slot_bytes=1 << 14),
    "split": muonloom.HostPlacement(slot_bytes=1 << 14, master_layout="split"),
}
DTYPES = [torch.float32, torch.bfloat16]
RATE: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}


class Net(nn.Module):
    """An embedding, heads, a matrix, a stack, a norm: all that a layout tells apart."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(11, 8)
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.up_proj = nn.Linear(8, 12)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))
        self.norm = nn.LayerNorm(12)
        self.to(dtype)


def named_groups(net: nn.Module, **options: Any) -> muonloom.Muon:
    """Three groups, of matrices in blocks of heads, of AdamW, and of AdamW without decay."""
    heads = muonloom.BlockSpec.heads(4, heads_per_block=1)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    layout = muonloom.Layout.from_shapes(shapes, overrides={"q_proj.weight": heads})
    groups = muonloom.parameter_groups(net, layout)
    return muonloom.Muon(groups, layout=layout, **{**RATE, **options})


def run_of(seed: int, dtype: torch.dtype, placement: str) -> tuple[Net, muonloom.Muon]:
    net = Net(seed, dtype)
    return net, named_groups(net, placement=PLACEMENTS[placement])


def assert_same_run(net: nn.Module, opt: muonloom.Muon, twin_net: nn.Module, twin: muonloom.Muon):
    """Weights, whole state by name, and group options, bit for bit."""
    sides = []
    for model, owner in ((net, opt), (twin_net, twin)):
        state = owner.state_dict()
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        options = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
            for group in state["param_groups"]
        ]
        held = {names[i]: entry for i, entry in state["state"].items()}
        sides.append((held, options, dict(model.named_parameters())))
    (held, options, weights), (twin_held, twin_options, twin_weights) = sides
    assert twin_options == options
    assert twin_held.keys() == held.keys()
    for name, entry in held.items():
        assert twin_held[name].keys() == entry.keys(), name
        for key, value in entry.items():
            assert same_bits(twin_held[name][key], value), (name, key)
    for name, weight in weights.items():
        assert same_bits(twin_weights[name], weight), name


# -- Hugging Face's Trainer -----------------------------------------------------------------------


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (12,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def trainer(directory: Path, dtype: torch.dtype, placement: str) -> Trainer:
    """6 steps with dropout, so that the state of the random numbers counts too; saves after 2 and 4."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        attention_dropout=0.2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(dtype)
    layout = muonloom.Layout.from_model(model, heads_per_block=1)
    groups = muonloom.parameter_groups(model, layout)
    opt = muonloom.Muon(groups, layout=layout, placement=PLACEMENTS[placement], **RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    args = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        max_steps=6,
        save_steps=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    return Trainer(model=model, args=args, train_dataset=Texts(), optimizers=(opt, scheduler))


def finished(run: Trainer, resume_from: Path | None = None) -> tuple[nn.Module, muonloom.Muon]:
    run.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    opt = run.optimizer.optimizer  # of accelerate's wrapper
    assert isinstance(opt, muonloom.Muon)
    return run.model, opt


Uninterrupted = Callable[[torch.dtype, str], tuple[Path, nn.Module, muonloom.Muon]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """A whole run of each kind, made once, and the directory of its checkpoints."""

    @functools.cache
    def run(dtype: torch.dtype, placement: str) -> tuple[Path, nn.Module, muonloom.Muon]:
        directory = tmp_path_factory.mktemp("run")
        return directory, *finished(trainer(directory, dtype, placement))

    return run


@pytest.mark.parametrize(
    ("placement", "dtype"),
    mostly_slow(
        itertools.product(PLACEMENTS, DTYPES),
        but=[
            ("device", torch.bfloat16),
            ("host", torch.float32),
            ("split", torch.bfloat16),
        ],
    ),
    ids=str,
)
def test_a_run_that_the_trainer_resumed_is_the_uninterrupted_one(
    placement: str, dtype: torch.dtype, uninterrupted: Uninterrupted, tmp_path: Path
):
    directory, *through = uninterrupted(dtype, placement)
    resumed = finished(trainer(tmp_path, dtype, placement), directory / "checkpoint-2")
    assert_same_run(*through, *resumed)
    saved = torch.load(directory / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert ("master_weight" in saved["state"][0]) == (dtype is torch.bfloat16)


@pytest.mark.parametrize(("saved", "loaded"), [("device", "split"), ("split", "host")])
def test_the_trainers_checkpoint_is_not_tied_to_a_placement(
    saved: str, loaded: str, uninterrupted: Uninterrupted, tmp_path: Path
):
    directory, *through = uninterrupted(torch.bfloat16, saved)
    resumed = finished(trainer(tmp_path, torch.bfloat16, loaded), directory / "checkpoint-4")
    assert_same_run(*through, *resumed)


def test_without_optimizer_pt_the_resumed_run_is_another(
    uninterrupted: Uninterrupted, tmp_path: Path
):
    """What the tests above compare does depend on the file."""
    directory, net, _ = uninterrupted(torch.bfloat16, "host")
    lacking = shutil.copytree(directory / "checkpoint-2", tmp_path / "checkpoint-2")
    (lacking / "optimizer.pt").unlink()
    other, _ = finished(trainer(tmp_path, torch.bfloat16, "host"), lacking)
    assert weights_fingerprint(net.parameters()) != weights_fingerprint(other.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_saved_before_the_first_step_changes_nothing(placement: str, dtype: torch.dtype):
    """Also accelerate loads the optimizer's own state into it, before any step."""
    plain_net, plain = run_of(0, dtype, placement)
    net, opt = run_of(0, dtype, placement)
    saved = through_a_file(opt.state_dict())
    assert saved["state"] == {}
    wrapped = Accelerator(cpu=True).prepare_optimizer(opt)
    wrapped.load_state_dict(saved)
    steps(plain, list(plain_net.parameters()), range(3))
    steps(opt, list(net.parameters()), range(3))
    assert_same_run(plain_net, plain, net, opt)


# -- torch.distributed.checkpoint -----------------------------------------------------------------


def on_disk(
    saver: tuple[nn.Module, muonloom.Muon],
    loader: tuple[nn.Module, muonloom.Muon],
    directory: Path,
    options: StateDictOptions,
    planner: DefaultLoadPlanner | None = None,
) -> None:
    """Save weights and state of one side as torch's tutorial does, and load them on the other."""
    model_state, state = get_state_dict(*saver, options=options)
    twin_model_state, twin_state = get_state_dict(*loader, options=options)
    saved = {"model": model_state, "optimizer": state}
    target = {"model": twin_model_state, "optimizer": twin_state}
    with warnings.catch_warnings():  # of torch, about planners without process groups
        warnings.simplefilter("ignore")
        checkpoint.save(saved, checkpoint_id=directory, no_dist=True)
        checkpoint.load(target, checkpoint_id=directory, no_dist=True, planner=planner)
    set_state_dict(
        *loader,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
        options=options,
    )


def assert_goes_on_alike(
    net: nn.Module, opt: muonloom.Muon, twin_net: nn.Module, twin: muonloom.Muon
):
    for seed in (50, 51):
        steps(opt, list(net.parameters()), [seed])
        steps(twin, list(twin_net.parameters()), [seed])
        assert_same_run(net, opt, twin_net, twin)


@pytest.mark.parametrize(
    ("saved", "loaded", "flat", "at"), pairwise(PLACEMENTS, PLACEMENTS, [False, True], [0, 2])
)
def test_a_checkpoint_on_disk_goes_into_any_placement(
    saved: str, loaded: str, flat: bool, at: int, tmp_path: Path
):
    """Also over the state of a run that is on its way, whose tensors torch fills in place."""
    opt_run = run_of(0, torch.bfloat16, saved)
    steps(opt_run[1], list(opt_run[0].parameters()), range(at))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    twin_run = run_of(1, torch.bfloat16, loaded)
    steps(twin_run[1], list(twin_run[0].parameters()), [20, 21])
    if flat and loaded == "split":
        with pytest.raises(ValueError, match="flattened form"):
            on_disk(opt_run, twin_run, tmp_path, options)
        return
    on_disk(opt_run, twin_run, tmp_path, options)
    assert_goes_on_alike(*opt_run, *twin_run)


KINDS: dict[str, dict[str, Any]] = {
    "nested": {},
    "full on the host": {"full_state_dict": True, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


@pytest.mark.parametrize(
    ("placement", "kind", "dtype"), pairwise(["host", "split"], KINDS, DTYPES), ids=str
)
def test_state_handed_over_in_memory(placement: str, kind: str, dtype: torch.dtype):
    net, opt = run_of(0, dtype, placement)
    twin_net, twin = run_of(1, dtype, placement)
    options = StateDictOptions(**KINDS[kind])
    for group in opt.param_groups:
        group["weight_decay"], group["note"] = 0.3, 7
    for at in (0, 2):
        steps(opt, list(net.parameters()), range(at))
        twin_net.load_state_dict(net.state_dict())
        state = through_a_file(get_optimizer_state_dict(net, opt, options=options))
        if placement == "split" and "full_state_dict" in KINDS[kind]:
            twin.refresh_masters()  # torch reads the old state first, which has lost its half
        for group in twin.param_groups:
            group["note"] = 0  # torch's flat form takes what the loader's groups have
        if kind == "flat" and placement == "split" and dtype == torch.bfloat16:
            with pytest.raises(ValueError, match="flattened form"):
                set_optimizer_state_dict(twin_net, twin, state, options=options)
            return
        set_optimizer_state_dict(twin_net, twin, state, options=options)
        assert_goes_on_alike(net, opt, twin_net, twin)


@pytest.mark.parametrize("placement", ["host", "split"])
def test_reading_before_the_first_step_changes_nothing(placement: str):
    net, opt = run_of(0, torch.bfloat16, placement)
    plain_net, plain = run_of(0, torch.bfloat16, placement)
    for _ in range(2):
        state = get_optimizer_state_dict(net, opt)
        assert not any(
            v.any() for entry in state["state"].values() for k, v in entry.items() if "m" not in k
        )
        assert weights_fingerprint(net.parameters()) == weights_fingerprint(plain_net.parameters())
        assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in plain.param_groups]
        assert all(p.grad is None for p in net.parameters())
    assert_goes_on_alike(plain_net, plain, net, opt)


# -- parameters without gradient ------------------------------------------------------------------

LATE = ("q_proj.weight", "up_proj.bias")


def without_late(net: nn.Module) -> Callable[[int], None]:
    def drop(_: int) -> None:
        for name in LATE:
            net.get_parameter(name).grad = None

    return drop


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", ["nested", "flat"])
def test_a_parameter_that_never_had_a_gradient(kind: str, placement: str):
    """Its absent state is zero. Torch itself asks for ``strict=False`` in the nested form."""
    net, opt = run_of(0, torch.bfloat16, placement)
    twin_net, twin = run_of(1, torch.bfloat16, placement)
    steps(opt, list(net.parameters()), range(2), without_late(net))
    twin_net.load_state_dict(net.state_dict())
    options = StateDictOptions(**KINDS[kind], strict=False)
    state = through_a_file(get_optimizer_state_dict(net, opt, options=options))
    if kind == "flat" and placement == "split":
        with pytest.raises(ValueError, match="flattened form"):
            set_optimizer_state_dict(twin_net, twin, state, options=options)
        return
    set_optimizer_state_dict(twin_net, twin, state, options=options)
    assert_goes_on_alike(net, opt, twin_net, twin)


def test_a_parameter_that_never_had_a_gradient_through_a_checkpoint_on_disk(tmp_path: Path):
    """Torch leaves what the file lacks: a new run's zeros, and masters of weights that are no more."""
    net, opt = run_of(0, torch.bfloat16, "host")
    twin_net, twin = run_of(1, torch.bfloat16, "host")
    steps(opt, list(net.parameters()), range(2), without_late(net))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    on_disk((net, opt), (twin_net, twin), tmp_path, StateDictOptions(strict=False), planner)
    give_gradients(twin_net.parameters(), 50)
    with pytest.raises(muonloom.StaleMasterError, match=r"q_proj\.weight"):
        twin.step()
    twin.refresh_masters([twin_net.get_parameter(name) for name in LATE])
    assert_goes_on_alike(net, opt, twin_net, twin)


# -- other orders and groups ----------------------------------------------------------------------


class Alike(nn.Module):
    """Matrices of one shape, so that a mistaken one raises nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_of_parameters_never_swaps_state(kind: str):
    net, twin_net = Alike(), Alike(1)
    opt = muonloom.Muon(net.named_parameters(), lr=0.02)
    first, *others = twin_net.named_parameters()
    twin = muonloom.Muon([*others, first], lr=0.02)
    steps(opt, list(net.parameters()), range(2))
    twin_net.load_state_dict(net.state_dict())
    options = StateDictOptions(**KINDS[kind])
    state = through_a_file(get_optimizer_state_dict(net, opt, options=options))
    set_optimizer_state_dict(twin_net, twin, state, options=options)
    for (name, p), q in zip(net.named_parameters(), twin_net.parameters(), strict=True):
        assert same_bits(twin.state[q]["momentum_buffer"], opt.state[p]["momentum_buffer"]), name
    names = [name for name, _ in others] + [first[0]]
    assert twin.param_groups[0]["param_names"] == names
    steps(opt, list(net.parameters()), [5])
    steps(twin, list(twin_net.parameters()), [5])
    assert weights_fingerprint(net.parameters()) == weights_fingerprint(twin_net.parameters())


def rearranged(flat: bool) -> tuple[muonloom.Muon, muonloom.Muon]:
    """One saved group, loaded by an optimizer that has three."""
    net, twin_net = Alike(), Alike(1)
    opt = muonloom.Muon(net.named_parameters(), lr=0.02)
    twin = muonloom.Muon([{"params": [pair]} for pair in twin_net.named_parameters()], lr=0.5)
    steps(opt, list(net.parameters()), range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = through_a_file(get_optimizer_state_dict(net, opt, options=options))
    set_optimizer_state_dict(twin_net, twin, state, options=options)
    return opt, twin


def test_the_flat_form_goes_into_another_arrangement_of_groups():
    opt, twin = rearranged(flat=True)
    (group,) = opt.param_groups
    for p, theirs in zip(group["params"], twin.param_groups, strict=True):
        (q,) = theirs["params"]
        assert same_bits(twin.state[q]["momentum_buffer"], opt.state[p]["momentum_buffer"])
        assert theirs["lr"] == 0.02


def test_the_nested_form_does_not_and_says_so():
    """Torch gives a saved group's options to one group of the loader's only."""
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        rearranged(flat=False)
