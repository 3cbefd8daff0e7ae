"""Weights that share their storage with others, and storage of unusual kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import muonloom
from muonloom.hollow import is_hollow
from release.support import has_storage
from staging.support import assert_same_bits, give_gradients


class Flat(nn.Module):
    """Three matrices in one buffer, the last frozen where asked for."""

    def __init__(self, dtype: torch.dtype, *, frozen: bool = False) -> None:
        super().__init__()
        self.flat = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        for index, name in enumerate("abc"):
            grad = not (frozen and name == "c")
            self.register_parameter(name, Parameter(self.flat[index].view(8, 8), grad))

    def optimizer(self, placement: str = "device") -> muonloom.Muon:
        opt = muonloom.Muon(self.trainable(), lr=0.02, placement=placement)
        give_gradients(self.trainable(), 0)
        opt.step()
        opt.drain()
        return opt

    def trainable(self) -> list[tuple[str, Parameter]]:
        return [(f"{n}.weight", p) for n, p in self.named_parameters() if p.requires_grad]

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_a_buffer_stay_and_are_reported(dtype: torch.dtype) -> None:
    model = Flat(dtype)
    opt, before = model.optimizer(), model.weights()
    report = opt.release([model.a, model.c])
    assert report.kept_weights == ("a.weight", "c.weight")
    assert not is_hollow(model.a)
    assert_same_bits(before, model.weights())
    with pytest.raises(RuntimeError, match=r"^a\.weight.*resume"):
        opt.step()
    opt.resume()
    assert_same_bits(before, model.weights())
    give_gradients(model.trainable(), 1)
    opt.step()


def test_a_frozen_neighbour_keeps_the_buffer() -> None:
    model = Flat(torch.bfloat16, frozen=True)
    opt, before = model.optimizer(), model.weights()
    report = opt.release()
    assert set(report.kept_weights) == {"a.weight", "b.weight"}
    assert_same_bits(before, model.weights())
    opt.resume()
    assert_same_bits(before, model.weights())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_whole_buffer_goes(dtype: torch.dtype, placement: str, frozen: bool) -> None:
    model = Flat(dtype, frozen=frozen)
    opt, before = model.optimizer(placement), model.weights()
    report = opt.release(model=model)
    assert report.kept_weights == ()
    assert model.flat.untyped_storage().nbytes() == 0
    assert opt.memory()["device_weights"] == 0
    opt.resume()
    assert_same_bits(before, model.weights())
    # Still views of one buffer.
    assert torch.equal(model.flat[0].view(8, 8), model.a)
    assert model.flat.untyped_storage().nbytes() == model.flat.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_first_then_all_then_parts_back(dtype: torch.dtype) -> None:
    model = Flat(dtype)
    opt, before = model.optimizer(), model.weights()
    assert opt.release([model.a]).kept_weights == ("a.weight",)
    assert opt.release().kept_weights == ()
    assert opt.memory()["device_weights"] == 0
    opt.resume([model.b])
    assert torch.equal(model.b, before["b"])
    assert is_hollow(model.a)
    assert opt.release([model.b]).kept_weights == ("b.weight",)
    opt.resume()
    assert_same_bits(before, model.weights())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tied_weights(dtype: torch.dtype) -> None:
    """One parameter under two names, as `tie_weights` leaves it."""
    model = nn.Module()
    model.embed, model.head = nn.Embedding(12, 8, dtype=dtype), nn.Linear(8, 12, dtype=dtype)
    model.head.weight = model.embed.weight
    named = [*model.named_parameters(), ("up.weight", Parameter(torch.ones(8, 8, dtype=dtype)))]
    opt = muonloom.Muon(named, lr=0.02, adamw_lr=0.01)
    give_gradients(named, 0)
    opt.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = opt.release(model=model)
    assert report.kept_weights == ()
    assert opt.memory()["device_weights"] == 0
    opt.resume()
    assert model.head.weight is model.embed.weight
    assert_same_bits(before, model.state_dict())


def test_two_parameters_over_one_storage() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = Parameter(model[0].weight.detach(), requires_grad=False)
    named = [("0.weight", model[0].weight)]
    opt = muonloom.Muon(named, lr=0.02)
    give_gradients(named, 0)
    opt.step()
    before = model[0].weight.detach().clone()
    opt.release(model=model)
    opt.resume()
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[1].weight, before)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


@pytest.mark.parametrize("given", [True, False])
def test_an_alias_that_is_not_released_keeps_the_storage(given: bool) -> None:
    """The same tensor twice; what is known of the second decides."""
    first = Parameter(torch.ones(8, 8).bfloat16())
    model = nn.Module()
    model.register_buffer("alias", first.detach()[:4])
    opt = muonloom.Muon([("first.weight", first)], lr=0.02)
    report = opt.release([] if given else None, model=model if given else None)
    if given:
        assert report.kept_weights == ("alias",)
        assert has_storage(first)
        assert not is_hollow(model.alias)
    else:
        assert report.kept_weights == ()
    opt.resume()
    assert torch.equal(model.alias, torch.ones(4, 8).bfloat16())


def test_holes_in_a_storage_keep_it() -> None:
    strided = Parameter(torch.randn(16, 16)[:, :8])
    vector = Parameter(torch.randn(32)[::2])
    named = [("strided.weight", strided), ("vector", vector)]
    opt = muonloom.Muon(named, lr=0.02, adamw_lr=0.01)
    give_gradients(named, 0)
    opt.step()
    before = {name: p.detach().clone() for name, p in named}
    assert set(opt.release().kept_weights) == {"strided.weight", "vector"}
    opt.resume()
    assert_same_bits(before, {name: p.detach() for name, p in named})
    give_gradients(named, 1)
    opt.step()


def test_memory_that_is_not_torchs() -> None:
    """Of NumPy or of a mapped file: it cannot be resized."""
    weight = Parameter(torch.from_numpy(torch.randn(8, 8).numpy().copy()))
    assert not weight.untyped_storage().resizable()
    named = [("a.weight", weight)]
    opt = muonloom.Muon(named, lr=0.02)
    for seed in range(3):
        give_gradients(named, seed)
        opt.step()
        before = weight.detach().clone()
        opt.release()
        assert not has_storage(weight)
        opt.resume()
        assert torch.equal(weight, before)


def test_parameters_without_elements() -> None:
    named = [("a.weight", Parameter(torch.zeros(0, 8))), ("b.weight", Parameter(torch.ones(8, 8)))]
    opt = muonloom.Muon(named, lr=0.02)
    give_gradients(named, 0)
    opt.step()
    assert opt.release().kept_weights == ()
    opt.resume()
    give_gradients(named, 1)
    opt.step()


def test_an_expanded_buffer() -> None:
    model = nn.Linear(8, 8, bias=False)
    model.register_buffer("mask", torch.arange(8.0).expand(4, 8))
    opt = muonloom.Muon(model.named_parameters(), lr=0.02)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert opt.release(model=model).kept_weights == ("mask",)
    assert torch.equal(model.mask, before["mask"])
    opt.resume()
    assert_same_bits(before, model.state_dict())
