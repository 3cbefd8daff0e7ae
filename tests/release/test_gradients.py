"""Gradients that a reducer owns stay; hooks and the gradient's accumulator outlive a release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muonloom
from release.support import NAMES, Run, build, has_storage
from staging.support import assert_same_bits


def in_one_bucket(run: Run, attribute: str, dtype: torch.dtype, names: tuple[str, ...]) -> Tensor:
    """Give these parameters gradients that are views of one tensor, one behind the other."""
    numel = sum(run[name].numel() for name in names)
    bucket = torch.randn(numel, generator=torch.Generator().manual_seed(5)).to(dtype)
    start = 0
    for name in names:
        param = run[name]
        view = bucket[start : start + param.numel()].view(param.shape)
        setattr(run[name], attribute, view)
        start += param.numel()
    return bucket


@pytest.mark.parametrize(("attribute", "dtype"), [("grad", None), ("main_grad", torch.float32)])
def test_views_of_a_bucket_stay_and_are_reported(attribute: str, dtype: torch.dtype | None) -> None:
    run = build("bf16", "device").step(0)
    run.give_gradients(1)
    names = ("up", "stack", "norm")
    bucket = in_one_bucket(run, attribute, dtype or torch.bfloat16, names)
    before = {name: getattr(run[name], attribute) for name in names}
    values = bucket.clone()
    report = run.opt.release()
    assert set(report.kept_gradients) == set(names)
    assert all(getattr(run[name], attribute) is before[name] for name in names)
    assert run["transposed"].grad is None
    assert run.opt.memory()["gradients"] == bucket.nbytes
    assert torch.equal(bucket, values)
    run.opt.resume()
    run.opt.step()  # on the gradients that stayed
    other = build("bf16", "device").step(0)
    other.give_gradients(1, without=[name for name in NAMES if name not in names])
    in_one_bucket(other, attribute, dtype or torch.bfloat16, names)
    other.opt.step()
    assert_same_bits(other.contents(), run.contents())


def test_gradients_that_are_alone_go() -> None:
    run = build("bf16", "device").step(0)
    run.give_gradients(1)
    run["up"].main_grad = main_grad = torch.ones(24, 16)
    run["norm"].grad = torch.zeros(16, dtype=torch.bfloat16)[None].squeeze(0)
    report = run.opt.release()
    assert "up" not in report.kept_gradients
    assert run["up"].grad is None
    assert run["transposed"].grad is None
    # Somebody made it once and adds to it: it stays, without storage, and comes back empty.
    assert run["up"].main_grad is main_grad
    assert main_grad.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"^up\.main_grad: "):
        main_grad.add_(1)
    run.opt.resume()
    assert torch.equal(main_grad, torch.zeros(24, 16))


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
def test_a_bucket_of_one_parameter_stays(attribute: str) -> None:
    run = build("bf16", "device").step(0)
    in_one_bucket(run, attribute, torch.bfloat16, ("up",))
    view = getattr(run["up"], attribute)
    report = run.opt.release()
    assert report.kept_gradients == ("up",)
    assert getattr(run["up"], attribute) is view


def test_released_in_part_only_their_gradients_go() -> None:
    run = build("bf16", "device").step(0)
    run.give_gradients(1)
    run.opt.release([run["up"]])
    assert run["up"].grad is None
    assert run["stack"].grad is not None


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 8))


def trained_by_ddp(*, release: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    model = with_batch_norm()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = muonloom.Muon(wrapped.named_parameters(), lr=0.02, adamw_lr=0.01)
    kept: tuple[str, ...] = ()
    for seed in range(4):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
        wrapped(x).square().sum().backward()
        opt.step()
        if release:
            kept = opt.release(model=wrapped).kept_gradients
            assert not any(map(has_storage, (*model.parameters(), *model.buffers())))
            opt.resume()
        opt.zero_grad(set_to_none=not release)
    return model.state_dict(), kept


@pytest.mark.usefixtures("one_rank")
def test_real_buckets_of_ddp() -> None:
    released, kept = trained_by_ddp(release=True)
    untouched, _ = trained_by_ddp(release=False)
    assert set(kept) == {f"{i}.{part}" for i in (0, 2, 3) for part in ("weight", "bias")}
    assert_same_bits(untouched, released)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_the_forward_of_ddp_is_refused(buffers: bool) -> None:
    wrapped = DistributedDataParallel(with_batch_norm())
    opt = muonloom.Muon(wrapped.named_parameters(), lr=0.02, adamw_lr=0.01)
    opt.release(model=wrapped if buffers else None)
    with pytest.raises(RuntimeError, match=r"resume\(\)"):
        wrapped(torch.ones(4, 12))
    opt.resume()
    wrapped(torch.ones(4, 12))


def accumulator(param: nn.Parameter) -> object:
    return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("placement", ["device", "host", "split"])
def test_parameters_are_the_same_objects_with_their_hooks(placement: str) -> None:
    run = build("bf16 and fp32", placement).step(0)
    fired: list[str] = []
    for name in ("up", "scale"):
        run[name].register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
        run[name].register_hook(lambda _, name=name: fired.append(f"{name}, before"))
    accumulators = {name: accumulator(param) for name, param in run.params.items()}
    objects = dict(run.model.named_parameters())
    run["up"].color = "blue"
    run.opt.release()
    # Also while it is released, as wrappers ask for it.
    assert accumulator(run["up"]) is accumulators["up"]
    run.opt.resume()
    assert run["up"].color == "blue"
    assert all(param is objects[name] for name, param in run.model.named_parameters())
    assert all(accumulator(run[name]) is accumulators[name] for name in NAMES)
    run.model(torch.ones(2, 24)).sum().backward()
    assert sorted(fired) == ["scale", "scale, before", "up", "up, before"]
    assert run["up"].grad is not None


def test_a_graph_made_before_is_refused_after() -> None:
    """The weight was written since: autograd says so, as after any step."""
    run = build("bf16 and fp32", "device").step(0)
    loss = (run["up"] * run["up"]).sum() + (run["transposed"] * run["transposed"]).sum()
    run.opt.release()
    run.opt.resume()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtypes", ["bf16", "fp32"])
def test_views_taken_before_see_the_new_weight(dtypes: str) -> None:
    """Views share the storage: empty with it, filled with it, wherever it is then."""
    run = build(dtypes, "host").step(0)
    row, transposed = run["up"].detach()[3], run["transposed"].detach().T
    run.opt.release()
    assert not has_storage(row)
    run.opt.resume()
    assert torch.equal(row, run["up"][3])
    run.step(1)
    assert torch.equal(row, run["up"][3])
    assert torch.equal(transposed, run["transposed"].T)
