"""A checkpoint of any number of ranks, however they share the state, loads into any other, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import muonloom
from checkpoint.disks import stalled
from muonloom import checkpoint
from muonloom.checkpoint.reader import CheckpointReader
from ranks.checkpoint_runs import Run, assert_same, content
from ranks.support import run

# -- reshaping ----------------------------------------------------------------------------------------


def pass_on(rank: int, held: str, options: dict[str, Any], old: str, new: str) -> Any:
    """Load, and save at once; return what was written, and all weights."""
    passing = Run(held, seed=1 + rank, **options)
    found = passing.load(old)
    report = passing.save(new, extra=f"{held} {rank}").result()
    return report.nbytes, passing.weights(), found["extra"]


def rounded(saved: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights that a checkpoint stands for."""
    found = {key[6:]: value for key, value in saved.items() if key.startswith("model.")}
    kept = ("frozen", "counter")
    return {name: v if name in kept else v.to(dtype) for name, v in found.items()}


CHAINS: dict[str, list[tuple[int, str, dict[str, Any]]]] = {
    "BF16": [
        (4, "fsdp", {"placement": "host"}),
        (2, "tp", {"placement": "split"}),
        (1, "ddp", {"placement": "device"}),
        (3, "ddp", {"placement": "split"}),
        (4, "hsdp", {"placement": "device"}),
        (2, "experts", {"placement": "host"}),
    ],
    "FP32 and BF16": [
        (4, "2d", {"placement": "host", "dtype": torch.float32}),
        (3, "fsdp", {"placement": "split"}),
        (2, "copies", {"placement": "device"}),
        (2, "ddp", {"placement": "host", "dtype": torch.float32}),
    ],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_passes_through_ranks_unchanged(chain: str, tmp_path: Path):
    first = Run().go(3)
    old = tmp_path / "first"
    nbytes = first.save(old, extra="one process").result().nbytes
    wanted, extra = content(old), ["one process"]
    for stage, (n, held, options) in enumerate(CHAINS[chain]):
        new = tmp_path / str(stage)
        arguments = (held, options, str(old), str(new))
        found = run(n, pass_on, *arguments) if n > 1 else [pass_on(0, *arguments)]
        saved = content(new)
        assert_same(wanted, saved)
        weights = rounded(saved, options.get("dtype", torch.bfloat16))
        for _, own, _ in found:
            assert_same(own, weights)
        assert sum(bytes_of_rank for bytes_of_rank, _, _ in found) == nbytes, "each part once"
        assert [known for _, _, known in found] == [extra[r % len(extra)] for r in range(n)]
        old, extra = new, [f"{held} {rank}" for rank in range(n)]
    last = Run(seed=7, placement="host")
    last.load(old)
    assert_same(first.go(2).weights(), last.go(2).weights())


# -- going on -----------------------------------------------------------------------------------------


def go_on(rank: int, path: str) -> None:
    """Save in the middle, and do the rest again from there."""
    for held, placement in (("ddp", "host"), ("fsdp", "split"), ("hsdp", "device"), ("tp", "host")):
        options: dict[str, Any] = {"placement": placement}
        training = Run(held, **options).go(2)
        save = f"{path}/{held}"
        with stalled(lazy=True):  # the disk moves only while a step waits for it
            handle = training.save(save, extra={"rank": rank}, async_=True, extra_host_bytes=1000)
            training.go(3)
        report = handle.result()
        assert report.nbytes > 0, "every rank writes"
        assert report.copied_bytes > 0
        again = Run(held, seed=3 + rank, **options)
        assert again.load(save) == {"step": 2, "extra": {"rank": rank}}
        again.go(3)
        assert_same(training.weights(), again.weights())
        assert_same(training.states(), again.states())
        assert training.opt.last_step["grad_norm"] == again.opt.last_step["grad_norm"]


def test_as_many_ranks_go_on_bit_for_bit_from_a_save_beside_steps(tmp_path: Path):
    run(4, go_on, str(tmp_path))
    wanted = content_of_two_steps(tmp_path)
    for held in ("ddp", "fsdp", "hsdp"):
        assert_same(content(tmp_path / held), wanted)


def content_of_two_steps(folder: Path) -> dict[str, Tensor]:
    Run().go(2).save(folder / "one process")
    return content(folder / "one process")


def train_and_save(rank: int, held: str, old: str | None, new: str) -> dict[str, Tensor]:
    training = Run(held, seed=0 if old is None else 1 + rank, placement="host")
    if old is not None:
        training.load(old)
    training.go(1).save(new)
    return training.weights()


def test_ranks_come_and_go_while_it_trains(tmp_path: Path):
    """4 → 2 → 1 → 3, a step each: the bits are those of one process throughout."""
    old: str | None = None
    wanted = Run(placement="host")
    for n, held in ((4, "ddp"), (2, "fsdp"), (1, "ddp"), (3, "fsdp")):
        new = str(tmp_path / f"{n}")
        arguments = (held, old, new)
        found = run(n, train_and_save, *arguments) if n > 1 else [train_and_save(0, *arguments)]
        weights = wanted.go(1).weights()
        for own in found:
            assert_same(own, weights)
        old = new


def save_released(rank: int, folder: str) -> None:
    for held, placement in (("ddp", "host"), ("ddp", "device"), ("fsdp", "split")):
        training = Run(held, placement=placement).go(2)
        training.opt.release(weights=held == "ddp")
        training.save(f"{folder}/{held} {placement}")
        training.opt.resume()
        training.go(1)


def test_what_is_released_is_saved(tmp_path: Path):
    run(2, save_released, str(tmp_path))
    wanted = content_of_two_steps(tmp_path)
    for name in ("ddp host", "ddp device", "fsdp split"):
        assert_same(content(tmp_path / name), wanted)


# -- models that are wrapped, cut, or loaded without an optimizer --------------------------------------


class Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 6)

    def forward(self, data: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(data)))
        return hidden


def fully_sharded(seed: int) -> tuple[Network, muonloom.Muon]:
    network = Network(seed)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(network.first, mesh=mesh)
    fully_shard(network, mesh=mesh)
    layout = muonloom.Layout.from_shapes(shapes)
    return network, muonloom.Muon(network.named_parameters(), layout=layout, lr=0.1, adamw_lr=0.1)


def learn(network: nn.Module, opt: muonloom.Muon, steps: range) -> None:
    for step in steps:
        data = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
        network(data).square().sum().backward()
        opt.step()
        opt.zero_grad()


def save_with_fsdp2(rank: int, path: str) -> None:
    network, opt = fully_sharded(0)
    learn(network, opt, range(2))
    with torch.no_grad():
        network(torch.ones(1, 12))  # leaves the parameters of the root whole
    checkpoint.save(path, model=network, optimizer=opt, step=2)
    other, twin = fully_sharded(1)
    learn(other, twin, range(1))
    with torch.no_grad():
        other(torch.ones(1, 12))
    checkpoint.load(path, model=other, optimizer=twin)
    data = torch.ones(2, 12)
    assert torch.equal(network(data), other(data)), (
        "nothing is left of what was put together before"
    )
    learn(network, opt, range(2, 4))
    learn(other, twin, range(2, 4))
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert torch.equal(one.full_tensor(), two.full_tensor())
    bare = DistributedDataParallel(Network(2))
    checkpoint.load(path, model=bare)


def test_modules_of_fsdp2_also_after_a_forward_pass(tmp_path: Path):
    run(2, save_with_fsdp2, str(tmp_path / "c"))
    bare = Network(3)
    checkpoint.load(tmp_path / "c", model=bare)
    saved = content(tmp_path / "c")
    assert_same(dict(bare.state_dict()), {k[6:]: v for k, v in saved.items() if k[:6] == "model."})


class Stage(nn.Module):
    """A piece of a pipeline: its parameters are nobody else's."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(10 * seed + number)
        weight = torch.randn(8, 6 + number, generator=generator)
        self.stages = nn.ModuleDict({str(number): nn.Linear(6 + number, 8)})
        with torch.no_grad():
            self.stages[str(number)].weight.copy_(weight)
        self.register_buffer("shared", torch.full((2,), float(seed)))


def stage_of(number: int, seed: int) -> tuple[Stage, muonloom.Muon]:
    stage = Stage(number, seed)
    opt = muonloom.Muon(
        stage.named_parameters(), lr=0.1 * (1 + number), adamw_lr=0.1, process_group=False
    )
    return stage, opt


def one_stage_a_rank(rank: int, path: str) -> dict[str, Tensor]:
    stage, opt = stage_of(rank, 0)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + rank)
    opt.step()
    checkpoint.save(path, model=stage, optimizer=opt, step=1)
    other, twin = stage_of(rank, 1)
    checkpoint.load(path, model=other, optimizer=twin)
    assert twin.param_groups[0]["lr"] == 0.1 * (1 + rank)
    for one, two in zip(opt.state.values(), twin.state.values(), strict=True):
        assert_same(one, two)
    return dict(other.state_dict())


def test_stages_of_a_pipeline_make_one_checkpoint(tmp_path: Path):
    wanted: dict[str, Tensor] = {}
    for found in run(3, one_stage_a_rank, str(tmp_path / "c")):
        wanted |= found
    saved = content(tmp_path / "c")
    assert_same({k[6:]: v for k, v in saved.items() if k[:6] == "model."}, wanted)
    options = CheckpointReader(tmp_path / "c").manifest.options
    assert sorted(group["lr"] for group in options) == [0.1, 0.1, 0.2, 0.1 * 3], "equal ones once"
    with pytest.raises(muonloom.CheckpointError, match="a saved tensor that the model lacks"):
        checkpoint.load(tmp_path / "c", model=stage_of(1, 4)[0])


def load_in_parts(rank: int, path: str) -> None:
    saved = content(Path(path))
    for held in ("ddp", "fsdp", "tp"):
        bare = Run(held, seed=1 + rank)
        checkpoint.load(path, model=bare.model)
        assert_same(bare.weights(), rounded(saved, torch.bfloat16))
        fed = Run(held, seed=1, placement="host").go(1)
        momentum = {k: v for k, v in fed.states().items() if "master" not in k}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fed.load(path, weights_only=True, verify="manifest")
        assert_same(fed.weights(), rounded(saved, torch.bfloat16))
        assert_same({k: v for k, v in fed.states().items() if "master" not in k}, momentum)
        fed.go(1)


def test_weights_alone_into_any_sharding(tmp_path: Path):
    Run().go(2).save(tmp_path / "c")
    run(2, load_in_parts, str(tmp_path / "c"))
