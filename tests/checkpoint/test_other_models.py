"""Other models, names, groups and options than those that were saved: what fits, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonloom
from checkpoint.support import PLACEMENTS, Bare, Run
from muonloom import CheckpointError, checkpoint
from staging import support
from staging.support import assert_same_bits

BF16, FP32 = torch.bfloat16, torch.float32

SMALL: dict[str, tuple[int, ...]] = {
    "a.weight": (6, 8),
    "b.weight": (8, 6),
    "norm.weight": (8,),
    "table.weight": (9, 4),
}


class Small(Run):
    """A run of a few parameters, whose names, shapes, groups and options tests choose."""

    def __init__(
        self,
        placement: Any = "device",
        *,
        shapes: dict[str, tuple[int, ...]] = SMALL,
        overrides: dict[str, Any] | None = None,
        seed: int = 0,
        dtype: torch.dtype = BF16,
        groups: Callable[[Any], Any] = lambda named: named,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        change: Callable[[nn.Module], Any] = lambda model: None,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        named = [
            (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            for name, shape in shapes.items()
        ]
        self.bare = Bare(named)
        change(self.bare)
        self.model = wrap(self.bare)
        self.named = [(name, p) for name, p in named if p.requires_grad]
        known = {"table.weight": "adamw", **(overrides or {})}
        self.layout = muonloom.Layout.from_shapes(
            shapes, overrides={name: spec for name, spec in known.items() if name in shapes}
        )
        self.opt = muonloom.Muon(
            groups(self.named),
            layout=self.layout,
            placement=placement,
            **{**support.OPTIONS, **options},
        )
        self.step = 0


def without(name: str) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in SMALL.items() if key != name}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing parameter": ({"shapes": without("b.weight")}, r"^b\.weight: .*lacks"),
    "one more": ({"shapes": {**SMALL, "c.weight": (4, 4)}}, r"^c\.weight: .*lacks"),
    "renamed": (
        {"shapes": {**without("b.weight"), "other.weight": (8, 6)}},
        r"^(b|other)\.weight: ",
    ),
    "another shape": ({"shapes": {**SMALL, "a.weight": (8, 6)}}, r"^a\.weight: .*\(6, 8\)"),
    "another number of dimensions": (
        {"shapes": {**SMALL, "norm.weight": (8, 1)}},
        r"^norm\.weight: ",
    ),
    "muon for adamw": ({"overrides": {"table.weight": "muon"}}, r"^table\.weight: .*adamw"),
    "adamw for muon": ({"overrides": {"a.weight": "adamw"}}, r"^a\.weight: .*adamw"),
    "another buffer": (
        {"change": lambda model: model.register_buffer("more", torch.zeros(2))},
        r"^more: .*lacks",
    ),
    "a buffer of another shape": (
        {
            "change": lambda model: model.register_buffer(
                "counter", torch.zeros(2, dtype=torch.int64)
            )
        },
        r"^counter: .*\(3,\)",
    ),
    "a buffer of another kind": (
        {"change": lambda model: model.register_buffer("counter", torch.zeros(3))},
        r"^counter: .*int64",
    ),
    "no buffer": ({"change": lambda model: delattr(model, "counter")}, r"^counter: .*lacks"),
}


@pytest.mark.parametrize("verify", ["full", "manifest"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused_by_name_and_nothing_changes(
    name: str, verify: str, tmp_path: Path
) -> None:
    Small(seed=1).go(2).save(tmp_path / "c")
    changes, says = OTHERS[name]
    run = Small(**changes).go(1)
    before, counter = run.everything(), getattr(run.model, "counter", None)
    with pytest.raises(CheckpointError, match=says):
        run.load(tmp_path / "c", verify=verify)
    assert_same_bits(run.everything(), before)
    assert counter is None or not counter.any()
    assert_same_bits(run.go(1).everything(), Small(**changes).go(2).everything())


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    run, other = Small().go(1), Small()
    with pytest.raises(ValueError, match=r"^a\.weight: .*not in the model"):
        checkpoint.save(tmp_path / "c", model=other.model, optimizer=run.opt, step=1)
    assert list(tmp_path.iterdir()) == []
    run.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"^a\.weight: .*outside of the model"):
        checkpoint.load(tmp_path / "c", model=other.model, optimizer=run.opt)
    for wrong in (torch.optim.SGD(run.model.parameters()), "text"):
        with pytest.raises(TypeError, match=r"^optimizer: "):
            checkpoint.load(tmp_path / "c", model=run.model, optimizer=wrong)
        with pytest.raises(TypeError, match=r"^optimizer: "):
            checkpoint.save(tmp_path / "d", model=run.model, optimizer=wrong, step=1)
    for verify in ("half", None, True):
        with pytest.raises(ValueError, match=r"^verify: "):
            run.load(tmp_path / "c", verify=verify)
    assert not (tmp_path / "d").exists()


def test_weights_only_takes_those_of_another_algorithm(tmp_path: Path) -> None:
    saved = Small()
    saved.go(2).save(tmp_path / "c")
    other = Small(overrides={"a.weight": "adamw"}, seed=3)
    with pytest.raises(CheckpointError, match=r"^a\.weight: .*muon.*adamw"):
        other.load(tmp_path / "c")
    other.load(tmp_path / "c", weights_only=True)
    assert torch.equal(dict(other.named)["a.weight"], dict(saved.named)["a.weight"])
    other.go(1)


# -- names --------------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("target", ["bare", "DDP", "compile"])
@pytest.mark.parametrize("source", ["bare", "DDP", "compile"])
def test_names_are_those_of_the_bare_model(source: str, target: str, tmp_path: Path) -> None:
    wraps = {"bare": lambda model: model, "DDP": nn.DataParallel, "compile": compiled}
    saved = Small(wrap=wraps[source]).go(2)
    saved.save(tmp_path / "c")
    other = Small(wrap=wraps[target], seed=5).go(1)
    other.load(tmp_path / "c")
    assert_same_bits(other.everything(), saved.everything())
    assert_same_bits(other.go(1).everything(), saved.go(1).everything())


def tied(first: str, second: str) -> Callable[[nn.Module], Any]:
    """Have a model hold one parameter under two names, in this order."""

    def change(model: Any) -> None:
        parameter = model.table._parameters.pop("weight")
        for name in (first, second):
            module = nn.Module()
            module.weight = parameter
            model.add_module(name, module)
        del model._modules["table"]

    return change


@pytest.mark.parametrize("order", [("head", "embed"), ("embed", "head")])
def test_tied_weights_are_found_by_any_of_their_names(
    order: tuple[str, str], tmp_path: Path
) -> None:
    def small(first: str, second: str, seed: int) -> Small:
        return Small(change=tied(first, second), seed=seed)

    saved = small("embed", "head", 0).go(2)
    saved.save(tmp_path / "c")
    other = small(*order, 5).go(1)
    other.load(tmp_path / "c")
    assert_same_bits(other.everything(), saved.everything())
    assert other.model.head.weight is other.model.embed.weight
    assert_same_bits(other.go(1).everything(), saved.go(1).everything())


def test_a_parameter_frozen_since(tmp_path: Path) -> None:
    Small().go(2).save(tmp_path / "c")

    def freeze(model: nn.Module) -> None:
        model.b.weight.requires_grad_(False)

    run = Small(change=freeze, seed=5).go(1)
    before = run.everything()
    with pytest.raises(CheckpointError, match=r"^b\.weight: .*state"):
        run.load(tmp_path / "c")
    assert_same_bits(run.everything(), before)
    run.load(tmp_path / "c", weights_only=True)
    assert torch.equal(run.model.b.weight, Small().go(2).model.b.weight)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parameter_that_trains_only_now(placement: str, tmp_path: Path) -> None:
    def freeze(model: nn.Module) -> None:
        model.b.weight.requires_grad_(False)

    saved = Small(change=freeze).go(2)
    saved.save(tmp_path / "c")
    run = Small(PLACEMENTS[placement], seed=5).go(2)
    run.load(tmp_path / "c")
    found = run.everything()
    assert torch.equal(found["b.weight"], saved.model.b.weight)
    assert not any(key.startswith("b.weight/") for key in found)
    wanted = saved.everything()
    assert_same_bits({key: found[key] for key in wanted}, wanted)
    device = Small(seed=6)
    device.load(tmp_path / "c")
    assert_same_bits(run.go(2).everything(), device.go(2).everything())


def test_an_optimizer_without_parameters(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    opt = muonloom.Muon([], layout=muonloom.Layout.from_shapes({}), lr=0.1)
    checkpoint.save(tmp_path / "c", model=model, optimizer=opt, step=4)
    other = nn.Linear(3, 2).requires_grad_(False)
    opt = muonloom.Muon([], layout=muonloom.Layout.from_shapes({}), lr=0.1)
    assert checkpoint.load(tmp_path / "c", model=other, optimizer=opt)["step"] == 4
    assert torch.equal(other.weight, model.weight)
    checkpoint.save(tmp_path / "d", model=nn.Identity(), optimizer=opt, step=0)
    assert checkpoint.load(tmp_path / "d", model=nn.Identity(), optimizer=opt)["step"] == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_without_elements_scalars_and_odd_sizes(placement: str, tmp_path: Path) -> None:
    shapes = {"a.weight": (5, 7), "gain": (), "empty": (0,), "none.weight": (0, 4), "bias": (3,)}
    kinds = dict.fromkeys(("gain", "empty", "none.weight", "bias"), "adamw")
    for dtype in (BF16, FP32):
        saved = Small("device", shapes=shapes, overrides=kinds, dtype=dtype).go(2)
        saved.save(tmp_path / "c")
        run = Small(PLACEMENTS[placement], shapes=shapes, overrides=kinds, dtype=dtype, seed=5).go(
            1
        )
        run.load(tmp_path / "c")
        assert_same_bits(run.everything(), saved.everything())
        assert_same_bits(run.go(1).everything(), saved.go(1).everything())


def test_parameters_that_lie_transposed(tmp_path: Path) -> None:
    def transpose(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data = parameter.data.t().contiguous().t()

    plain = Small().go(2)
    plain.save(tmp_path / "plain")
    for placement in PLACEMENTS.values():
        other = Small(placement, change=transpose, seed=5).go(1)
        other.load(tmp_path / "plain")
        assert_same_bits(other.everything(), plain.everything())
        other.save(tmp_path / "transposed")
        back = Small(placement, seed=6)
        back.load(tmp_path / "transposed")
        assert_same_bits(back.everything(), plain.everything())


# -- groups and options -------------------------------------------------------------------------------


def one_by_one(**own: dict[str, Any]) -> Callable[[Any], Any]:
    """Have a group for each parameter, with options of its own."""
    return lambda named: [
        {"params": [pair], **own.get(pair[0].split(".")[0], {})} for pair in named
    ]


def test_one_group_into_many_and_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = Small().go(2)
    for group in saved.opt.param_groups:
        group["lr"], group["weight_decay"], group["mine"] = 0.125, 0.25, "yes"
    saved.save(tmp_path / "one")
    many = Small(groups=one_by_one(), seed=5).go(1)
    many.load(tmp_path / "one")
    for group in many.opt.param_groups:
        assert (group["lr"], group["weight_decay"], group["mine"]) == (0.125, 0.25, "yes")
    many.save(tmp_path / "many")
    one = Small(seed=6)
    one.load(tmp_path / "many")
    assert not [
        record for record in caplog.records if record.name == "muonloom" and record.levelno > 20
    ]
    wanted = saved.go(2).everything()
    assert_same_bits(many.go(2).everything(), wanted)
    assert_same_bits(one.go(2).everything(), wanted)


def test_options_that_differ_within_a_group_stay_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Small(groups=one_by_one(a={"lr": 0.5}, b={"lr": 0.25, "weight_decay": 0.0})).go(1).save(
        tmp_path / "c"
    )
    one = Small(lr=0.03, weight_decay=0.2, momentum=0.5)
    with caplog.at_level(logging.WARNING, logger="muonloom"):
        one.load(tmp_path / "c")
    muon = next(group for group in one.opt.param_groups if group["algorithm"] == "muon")
    assert muon["lr"] == 0.03
    assert muon["weight_decay"] == 0.2
    assert muon["momentum"] == 0.95  # the same in both: as it was saved
    told = [record.getMessage() for record in caplog.records if record.name == "muonloom"]
    assert [text for text in told if ".lr stays 0.03" in text and "0.5" in text and "0.25" in text]
    assert [text for text in told if ".weight_decay stays 0.2" in text]
    assert len(told) == 2


def test_options_come_back_as_what_they_were(tmp_path: Path) -> None:
    options = {
        "lr": 0.125,
        "adamw_betas": (0.8, 0.99),
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "ns_compute_dtype": FP32,
        "nesterov": False,
        "adjust_lr_fn": "match_rms_adamw",
        "eps": 1e-5,
    }
    saved = Small(**options).go(1)
    saved.save(tmp_path / "c")
    other = Small(seed=2)
    other.load(tmp_path / "c")
    for mine, theirs in zip(other.opt.param_groups, saved.opt.param_groups, strict=True):
        for key in theirs.keys() - {"params"}:
            assert mine[key] == theirs[key], key
            assert type(mine[key]) is type(theirs[key]), key
    assert_same_bits(other.go(2).everything(), saved.go(2).everything())


def test_a_rate_that_is_a_tensor_stays_one_and_takes_the_value(tmp_path: Path) -> None:
    saved = Small(lr=torch.tensor(0.02), adamw_lr=0.01).go(1)
    for group in saved.opt.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.125)
    saved.save(tmp_path / "c")
    for rate in (torch.tensor(0.5), 0.5):
        other = Small(lr=rate, adamw_lr=0.01, seed=2).go(1)
        kinds = [type(group["lr"]) for group in other.opt.param_groups]
        other.load(tmp_path / "c")
        assert [type(group["lr"]) for group in other.opt.param_groups] == kinds
        assert [float(g["lr"]) for g in other.opt.param_groups] == [
            float(g["lr"]) for g in saved.opt.param_groups
        ]


def test_options_that_json_does_not_know_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    run = Small().go(1)
    run.opt.param_groups[0]["mine"] = object()
    with pytest.raises(TypeError, match=r"^param_groups\[0\]\.mine: .*object"):
        run.save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_schedulers_are_right_in_the_first_step_after_a_resume(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Small, Any]:
        run = Small(seed=seed)
        return run, torch.optim.lr_scheduler.LambdaLR(run.opt, lambda step: 1 / (1 + step))

    def go(run: Small, scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            for group in run.opt.param_groups:
                group["weight_decay"] = 0.01 * run.step
            run.go(1)
            scheduler.step()

    run, scheduler = build(0)
    go(run, scheduler, 3)
    run.save(tmp_path / "c", extra={"scheduler": scheduler.state_dict()})
    other, others = build(5)
    found = other.load(tmp_path / "c")
    others.load_state_dict(found["extra"]["scheduler"])
    assert [g["lr"] for g in other.opt.param_groups] == [g["lr"] for g in run.opt.param_groups]
    assert [g["weight_decay"] for g in other.opt.param_groups] == [0.02] * len(
        other.opt.param_groups
    )
    go(run, scheduler, 2)
    go(other, others, 2)
    assert_same_bits(other.everything(), run.everything())


@pytest.mark.parametrize("placement", ["device", "split"])
def test_momentum_changes_its_dtype_and_the_choice_stays_the_optimizers(
    placement: str, tmp_path: Path
) -> None:
    for source, target in ((FP32, BF16), (BF16, FP32)):
        saved = Small(momentum_dtype=source).go(2)
        saved.save(tmp_path / "c")
        other = Small(PLACEMENTS[placement], momentum_dtype=target, seed=5).go(1)
        other.load(tmp_path / "c")
        assert all(group["momentum_dtype"] == target for group in other.opt.param_groups)
        mine, theirs = other.everything(), saved.everything()
        for key, value in theirs.items():
            wanted = value.to(target) if key.endswith("momentum_buffer") else value
            assert mine[key].dtype == wanted.dtype
            assert torch.equal(mine[key], wanted)
        other.go(1)


def test_another_batch_of_the_iteration_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Small(ns_batch_bytes=4000).go(1).save(tmp_path / "c")
    with caplog.at_level(logging.WARNING, logger="muonloom"):
        Small(ns_batch_bytes=4000).load(tmp_path / "c")
        assert not [r for r in caplog.records if "ns_batch_bytes" in r.getMessage()]
        Small(ns_batch_bytes=8000).load(tmp_path / "c")
    assert [r for r in caplog.records if "4000" in r.getMessage() and "8000" in r.getMessage()]
