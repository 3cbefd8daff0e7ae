"""What a checkpoint loads into: other placements, layouts, groups, dtypes; what of another model says."""

from __future__ import annotations

import copy
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonloom
from checkpoint.support import PLACEMENTS, Run
from choosing import mostly_slow
from experts.support import attached, backward, expert_model
from layout.tiny import fresh
from muonloom import StaleMasterError, checkpoint
from staging import support
from staging.support import assert_same_bits, give_gradients, mixed

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {"bf16": BF16, "fp32": FP32, "mixed": mixed}


@pytest.fixture(scope="module")
def truth() -> dict[str, dict[int, dict[str, Tensor]]]:
    """What an undisturbed run has after 3 and 5 steps, which is the same in all placements."""
    found = {}
    for name, dtype in DTYPES.items():
        run = Run("device", dtype=dtype)
        found[name] = {3: run.go(3).everything(), 5: run.go(2).everything()}
    return found


def addresses(run: Run) -> dict[str, int]:
    found = {name: parameter.data_ptr() for name, parameter in run.named}
    for name, parameter in run.named:
        for key, tensor in run.opt.state[parameter].items():
            found[f"{name}/{key}"] = tensor.data_ptr()
    return found


# -- placements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "dtype"),
    mostly_slow(
        itertools.product(PLACEMENTS, DTYPES),
        but=[
            ("device", "mixed"),
            ("host", "bf16"),
            ("one slot", "fp32"),
            ("split", "fp32"),
            ("split", "mixed"),
        ],
    ),
)
def test_bits_are_those_that_were_saved_in_any_placement(
    source: str, dtype: str, truth: Any, tmp_path: Path
) -> None:
    saved = Run(PLACEMENTS[source], dtype=DTYPES[dtype]).go(3)
    saved.save(tmp_path / "c", extra={"a": 1})
    for number, placement in enumerate(PLACEMENTS.values()):
        other = Run(placement, dtype=DTYPES[dtype], seed=5).go(1 + number % 2)
        before = addresses(other)
        verify = ("full", "manifest")[number % 2]
        assert other.load(tmp_path / "c", verify=verify) == {"step": 3, "extra": {"a": 1}}
        assert addresses(other) == before
        assert_same_bits(other.everything(), truth[dtype][3])
        assert_same_bits(other.go(2).everything(), truth[dtype][5])
    assert_same_bits(saved.go(2).everything(), truth[dtype][5])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_fresh_optimizer_takes_all_of_it(placement: str, truth: Any, tmp_path: Path) -> None:
    Run("device").go(3).save(tmp_path / "c")
    other = Run(PLACEMENTS[placement], seed=5)
    other.load(tmp_path / "c")
    assert_same_bits(other.go(2).everything(), truth["bf16"][5])


@pytest.mark.parametrize(
    ("source", "target", "placement"),
    mostly_slow(
        [(*two, place) for two in ((FP32, BF16), (BF16, FP32)) for place in PLACEMENTS],
        but=[
            (FP32, BF16, "device"),
            (FP32, BF16, "split"),
            (BF16, FP32, "host"),
            (BF16, FP32, "one slot"),
            (BF16, FP32, "split"),
        ],
    ),
    ids=str,
)
def test_between_fp32_and_bf16(source: Any, target: Any, placement: str, tmp_path: Path) -> None:
    saved = Run(PLACEMENTS[placement], dtype=source).go(2)
    saved.save(tmp_path / "c")
    other = Run(PLACEMENTS[placement], dtype=target, seed=5).go(1)
    other.load(tmp_path / "c")
    mine, theirs = other.everything(), saved.everything()
    for name, parameter in other.named:
        master = other.opt.get_full_parameter_master(parameter)
        wanted = saved.opt.get_full_parameter_master(dict(saved.named)[name])
        assert torch.allclose(master, wanted, rtol=2**-23, atol=0), (
            "but for ties, which are settled"
        )
        assert torch.equal(parameter.detach(), master.to(target))
        for key in mine:
            if key.startswith(f"{name}/") and "master" not in key:
                assert torch.equal(mine[key], theirs[key])
    device = Run("device", dtype=target, seed=6)
    device.load(tmp_path / "c")
    assert_same_bits(other.go(2).everything(), device.go(2).everything())


def test_ties_of_an_fp32_model_are_settled_alike_in_all_placements(tmp_path: Path) -> None:
    saved = Run("device", dtype=FP32).go(1)
    with torch.no_grad():
        for _, parameter in saved.named:
            flat = parameter.view(-1).view(torch.int32)
            flat[::3] = (flat[::3] & ~0xFFFF) | 0x8000  # halfway between two of BF16
    saved.opt.refresh_masters()
    saved.save(tmp_path / "c")
    found = []
    for placement in PLACEMENTS.values():
        other = Run(placement, seed=2).go(1)
        other.load(tmp_path / "c")
        found.append(other.go(2).everything())
    for one in found[1:]:
        assert_same_bits(one, found[0])


@pytest.mark.parametrize("placement", ["device", "split"])
def test_state_that_was_not_saved_is_gone(placement: str, tmp_path: Path) -> None:
    never = {"layers.0.q.weight", "embed.weight", "layers.1.norm.weight"}

    def absent(name: str, _: int) -> bool:
        return name in never

    saved = Run(PLACEMENTS[placement]).go(2, absent=absent)
    saved.save(tmp_path / "c")
    other = Run(PLACEMENTS[placement], seed=5).go(2)
    other.load(tmp_path / "c")
    assert_same_bits(other.everything(), saved.everything())
    assert not any(name.split("/")[0] in never for name in other.everything() if "/" in name)
    assert_same_bits(other.go(2).everything(), saved.go(2).everything())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_saved_before_any_step(placement: str, tmp_path: Path) -> None:
    saved = Run(PLACEMENTS[placement])
    saved.save(tmp_path / "c")
    straight = Run("device")
    at_first, then = straight.everything(), straight.go(2).everything()
    for target in PLACEMENTS.values():
        other = Run(target, seed=5).go(1)
        assert other.load(tmp_path / "c")["step"] == 0
        assert_same_bits(other.everything(), at_first)
        assert_same_bits(other.go(2).everything(), then)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_saved_while_released_and_loaded_never(placement: str, truth: Any, tmp_path: Path) -> None:
    run = Run(PLACEMENTS[placement]).go(3)
    run.opt.release(model=run.model)
    run.save(tmp_path / "c")
    with pytest.raises(RuntimeError, match="resume"):
        run.load(tmp_path / "c")
    run.opt.resume()
    other = Run("device", seed=5)
    other.load(tmp_path / "c")
    assert_same_bits(other.everything(), truth["bf16"][3])
    assert_same_bits(run.go(2).everything(), truth["bf16"][5])
    run.load(tmp_path / "c")
    run.opt.release([run.named[1][1]])
    run.save(tmp_path / "c")
    run.opt.resume()
    other.load(tmp_path / "c")
    assert_same_bits(other.go(2).everything(), truth["bf16"][5])


def test_a_model_alone(truth: Any, tmp_path: Path) -> None:
    saved = Run(PLACEMENTS["split"]).go(3)
    saved.model.counter.add_(7)
    saved.save(tmp_path / "c", extra=[1])
    model = Run("device", seed=5).model
    found = checkpoint.load(tmp_path / "c", model=model)
    assert found == {"step": 3, "extra": [1]}
    assert model.counter.tolist() == [7, 7, 7]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, truth["bf16"][3][name])
    wide = Run("device", dtype=FP32, seed=5).model
    checkpoint.load(tmp_path / "c", model=wide, verify="manifest")
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, truth["bf16"][3][f"{name}/master_weight"])


def test_a_model_alone_whose_optimizer_was_not_told_is_refused_by_its_step(tmp_path: Path) -> None:
    Run("device").go(1).save(tmp_path / "c")
    run = Run("device", seed=3).go(1)
    checkpoint.load(tmp_path / "c", model=run.model)
    with pytest.raises(StaleMasterError):
        run.go(1)


# -- weights only -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify", "placement"),
    mostly_slow(
        itertools.product(["full", "manifest"], PLACEMENTS),
        but=[
            ("full", "device"),
            ("full", "split"),
            ("manifest", "device"),
            ("manifest", "host"),
            ("manifest", "one slot"),
        ],
    ),
)
def test_weights_only_takes_masters_exactly_and_leaves_the_rest(
    verify: str, placement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Run("device").go(3)
    for group in saved.opt.param_groups:
        group["lr"] = 0.5
    saved.save(tmp_path / "c")
    run = Run(PLACEMENTS[placement], seed=5).go(2)
    before, theirs = run.everything(), saved.everything()
    rates = [group["lr"] for group in run.opt.param_groups]
    with caplog.at_level(logging.WARNING, logger="muonloom"):
        assert run.load(tmp_path / "c", weights_only=True, verify=verify)["step"] == 3
    assert [r for r in caplog.records if r.name == "muonloom" and "momentum" in r.getMessage()]
    for key, value in run.everything().items():
        is_weight = "/" not in key or "master" in key
        assert torch.equal(value, theirs[key] if is_weight else before[key]), key
    assert [group["lr"] for group in run.opt.param_groups] == rates
    twin = Run("device", seed=5).go(2)
    twin.load(tmp_path / "c", weights_only=True)
    assert_same_bits(run.go(2).everything(), twin.go(2).everything())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_only_of_what_was_saved_before_a_step(placement: str, tmp_path: Path) -> None:
    saved = Run("device")
    saved.save(tmp_path / "c")
    run = Run(PLACEMENTS[placement], seed=5).go(2)
    momentum = {k: v for k, v in run.everything().items() if "/" in k and "master" not in k}
    run.load(tmp_path / "c", weights_only=True)
    after = run.everything()
    for name, parameter in saved.named:
        assert torch.equal(after[name], parameter)
    assert_same_bits({k: after[k] for k in momentum}, momentum)
    run.go(1)


# -- models of transformers ---------------------------------------------------------------------------


def language_model(
    family: str, seed: int, placement: Any = "device", **layout: Any
) -> tuple[nn.Module, muonloom.Muon]:
    torch.manual_seed(seed)
    model = fresh(family).to(BF16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    known = muonloom.Layout.from_model(model, **layout)
    groups = muonloom.parameter_groups(model, known)
    opt = muonloom.Muon(groups, layout=known, lr=1e-2, adamw_lr=1e-3, placement=placement)
    return model, opt


def language_steps(model: nn.Module, opt: muonloom.Muon, *numbers: int) -> dict[str, Tensor]:
    named = list(model.named_parameters())
    for number in numbers:
        give_gradients(named, number)
        opt.step()
    return support.everything(named, opt)


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_heads_per_block_may_be_another(family: str, tmp_path: Path) -> None:
    for source in (None, 1, 2):
        model, opt = language_model(family, 0, heads_per_block=source)
        before = language_steps(model, opt, 0, 1)
        checkpoint.save(tmp_path / "c", model=model, optimizer=opt, step=2)
        for target in (None, 2, 1)[: 3 if source is None else 2]:
            other, its = language_model(family, 1, heads_per_block=target)
            language_steps(other, its, 0)
            checkpoint.load(tmp_path / "c", model=other, optimizer=its)
            assert_same_bits(support.everything(list(other.named_parameters()), its), before)
            after = language_steps(other, its, 2)
            if target == source:
                again, its_own = language_model(family, 0, heads_per_block=source)
                assert_same_bits(after, language_steps(again, its_own, 0, 1, 2))


# -- FP8 experts --------------------------------------------------------------------------------------

EXPERTS: dict[str, dict[str, Any]] = {
    "device": {"placement": "device"},
    "host": {"placement": "host"},
    "one slot": {"placement": muonloom.HostPlacement(slot_bytes=20_000, num_slots=1)},
    "plain split": {
        "placement": muonloom.HostPlacement(slot_bytes=20_000, master_layout="split"),
        "plain": True,
    },
}


class Experts:
    """A tiny Mixtral whose experts are in FP8, or its plain twin."""

    def __init__(self, placement: Any, *, plain: bool = False, scale: float = 1.0) -> None:
        if plain:
            self.model, self.engine = expert_model("mixtral", BF16), None
        else:
            self.model, self.engine = attached("mixtral", BF16)
        layout = muonloom.Layout.from_model(self.model)
        self.opt = muonloom.Muon(
            muonloom.parameter_groups(self.model, layout),
            layout=layout,
            lr=1e-2 * scale,
            adamw_lr=1e-3,
            engine=self.engine,
            placement=placement,
        )

    def go(self, *numbers: int) -> Experts:
        named = list(self.model.named_parameters())
        for number in numbers:
            give_gradients(named, number)
            self.opt.step()
        self.opt.drain()
        return self

    def state(self) -> dict[str, Tensor]:
        """All masters, momentum and moments, and what the forward pass computes."""
        saved = self.opt.state_dict()
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        ids = [index for group in saved["param_groups"] for index in group["params"]]
        found = {
            f"{name}/{key}": value.clone()
            for index, name in zip(ids, names, strict=True)
            for key, value in saved["state"].get(index, {}).items()
        }
        if self.engine is not None:
            for index, (_, writer) in enumerate(self.engine.named_writers()):
                for number, tensor in enumerate(writer.tensors()):
                    found[f"writer {index} {number}"] = tensor.view(torch.uint8).clone()
        self.model.zero_grad()
        found["logits"] = backward(self.model)
        self.model.zero_grad()
        return found


@pytest.fixture(scope="module")
def expert_truth() -> dict[bool, list[dict[str, Tensor]]]:
    found = {}
    for is_plain in (False, True):
        run = Experts("device", plain=is_plain).go(0, 1)
        found[is_plain] = [run.state(), run.go(2, 3).state()]
    return found


@pytest.mark.parametrize("source", mostly_slow(EXPERTS, but=["device", "one slot", "plain split"]))
def test_experts_in_float8_in_any_placement(source: str, expert_truth: Any, tmp_path: Path) -> None:
    saved = Experts(**EXPERTS[source]).go(0, 1)
    for target, options in EXPERTS.items():
        if target in ("device", source):
            saved.opt.release()
        checkpoint.save(tmp_path / "c", model=saved.model, optimizer=saved.opt, step=2)
        saved.opt.resume()
        other = Experts(**options, scale=9).go(5)
        if target != source:
            other.opt.release()
            with pytest.raises(RuntimeError, match="resume"):
                checkpoint.load(tmp_path / "c", model=other.model, optimizer=other.opt)
            other.opt.resume()
        checkpoint.load(tmp_path / "c", model=other.model, optimizer=other.opt)
        is_plain = "plain" in options
        if is_plain == ("plain" in EXPERTS[source]):
            assert_same_bits(other.state(), expert_truth[is_plain][0])
            assert_same_bits(other.go(2, 3).state(), expert_truth[is_plain][1])
        else:
            mine, theirs = (
                {
                    name: run.opt.get_full_parameter_master(p)
                    for name, p in run.model.named_parameters()
                }
                for run in (other, saved)
            )
            assert_same_bits(mine, theirs)
            other.go(2)


def test_experts_before_a_step_and_between_float8_and_plain(tmp_path: Path) -> None:
    for steps in ((), (0, 1)):
        for is_plain in (True, False):
            saved = Experts("device", plain=is_plain).go(*steps)
            checkpoint.save(tmp_path / "c", model=saved.model, optimizer=saved.opt, step=2)
            other = Experts("host", plain=not is_plain).go(7)
            checkpoint.load(tmp_path / "c", model=other.model, optimizer=other.opt)
            for parameter, twin in zip(
                other.model.parameters(), saved.model.parameters(), strict=True
            ):
                mine = other.opt.get_full_parameter_master(parameter)
                assert torch.equal(mine, saved.opt.get_full_parameter_master(twin).to(mine.dtype))
            other.go(2)


def test_experts_without_an_optimizer_take_the_weights(tmp_path: Path) -> None:
    saved = Experts("device").go(0, 1)
    checkpoint.save(tmp_path / "c", model=saved.model, optimizer=saved.opt, step=2)
    model, engine = attached("mixtral", BF16)
    checkpoint.load(tmp_path / "c", model=model)
    saved.model.zero_grad()
    assert torch.equal(backward(model), backward(saved.model))
    held = [tensor for _, writer in engine.named_writers() for tensor in writer.tensors()]
    theirs = [t for _, writer in saved.engine.named_writers() for t in writer.tensors()]
    for one, other in zip(held, theirs, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    plain = expert_model("mixtral", BF16)
    checkpoint.load(tmp_path / "c", model=plain)
    twin = Experts("device", plain=True)
    checkpoint.load(tmp_path / "c", model=twin.model, optimizer=twin.opt)
    assert_same_bits(dict(plain.state_dict()), dict(twin.model.state_dict()))


@pytest.mark.parametrize("verify", ["full", "manifest"])
def test_experts_weights_only(verify: str, tmp_path: Path) -> None:
    saved = Experts("device").go(0, 1)
    checkpoint.save(tmp_path / "c", model=saved.model, optimizer=saved.opt, step=2)
    other = Experts("host").go(5)
    before = other.state()
    checkpoint.load(
        tmp_path / "c", model=other.model, optimizer=other.opt, weights_only=True, verify=verify
    )
    wanted = saved.state()
    for key, value in other.state().items():
        is_weight = "master" in key or "writer" in key or key == "logits"
        assert torch.equal(value, wanted[key] if is_weight else before[key]), key


def test_a_copy_of_an_optimizer_takes_a_checkpoint(tmp_path: Path) -> None:
    run = Run(PLACEMENTS["split"]).go(2)
    run.save(tmp_path / "c")
    twin = copy.deepcopy(run)
    twin.go(1)
    twin.load(tmp_path / "c")
    assert_same_bits(twin.go(1).everything(), run.go(1).everything())
