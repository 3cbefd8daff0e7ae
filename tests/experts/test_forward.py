"""An attached model computes what a plain one with the dequantized weights does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from experts.support import (
    FAMILIES,
    assert_same_gradients,
    attached,
    backward,
    expert_model,
    stacks,
    token_ids,
    twins,
)
from fresh import Fresh
from muonloom.experts import Float8Experts
from muonloom.experts.weights import ExpertWeight
from muonloom.hollow import is_hollow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_are_those_of_the_dequantized_weights(
    family: str, dtype: torch.dtype
) -> None:
    # The same kernels see the same numbers in the same order, so that not a bit may differ.
    model, _, plain = twins(family, dtype)
    assert torch.equal(backward(model), backward(plain))
    assert_same_gradients(model, plain)
    assert all(is_hollow(p) and p.grad is not None for p in stacks(model).values())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_quantization_is_not_left_out(family: str) -> None:
    model, engine = attached(family)
    plain = expert_model(family)
    for name, parameter in stacks(model).items():
        exact = dict(plain.named_parameters())[name].detach()
        held = engine.dequantize(parameter)
        relative = float((held - exact).norm() / exact.norm())
        assert 0.01 < relative < 0.04  # e4m3 rounds to 3 bits: 2.6e-2 of normal data


@pytest.mark.parametrize("family", ["glm_moe_dsa", "gpt_oss"])
def test_several_backwards_add_up(family: str) -> None:
    model, _, plain = twins(family)
    for seed in range(3):
        backward(model, seed=seed)
        backward(plain, seed=seed)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    model, _, plain = twins("qwen3_moe")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    plain.train()
    assert torch.equal(backward(model), backward(plain))
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_the_experts_alone(reentrant: bool) -> None:
    model, _, plain = twins("mixtral")
    module = model.model.layers[0].mlp.experts
    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)
    backward(model)
    backward(plain)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_autocast_decides_the_dtype(family: str) -> None:
    model, _, plain = twins(family)
    one = model.model.layers[0].mlp.experts
    other = plain.model.layers[0].mlp.experts.to(torch.bfloat16)
    index, weights = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.ones(3, 2)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = one(x, index, weights)
    assert out.dtype == x.dtype
    # The sum over two experts is FP32 here and rounded to BF16 there: half of 2**-8.
    wanted = other(x.bfloat16(), index, weights).float()
    torch.testing.assert_close(out, wanted, rtol=2**-8, atol=0)
    assert not torch.equal(out, one(x, index, weights))
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in one.parameters())


def test_without_gradients_and_generation() -> None:
    model, _, plain = twins("glm_moe_dsa")
    with torch.no_grad():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    one = model.generate(token_ids(2, 4), **options)
    assert torch.equal(one, plain.generate(token_ids(2, 4), **options))


def test_frozen_experts_get_no_gradient_and_keep_no_input() -> None:
    model, _, plain = twins("mixtral")
    for each in (model, plain):
        for parameter in stacks(each).values():
            parameter.requires_grad_(False)
    backward(model)
    backward(plain)
    assert_same_gradients(model, plain)
    assert all(p.grad is None for p in stacks(model).values())
    module = model.model.layers[0].mlp.experts
    x = torch.randn(6, 32, requires_grad=True)
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        module(x, torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1))
    assert torch.Size((6, 32)) not in saved


def run_experts(module: nn.Module, index: list[list[int]], **values: Any) -> Any:
    """Output, and the gradients of x, of the router's weights and of the parameters."""
    torch.manual_seed(3)
    ids = torch.tensor(index, dtype=torch.long).reshape(len(index), -1 if index else 2)
    x = torch.randn(len(index), 32, requires_grad=True)
    weights = torch.rand(ids.shape, requires_grad=True)
    if "nan" in values:
        with torch.no_grad():
            x[0, 0] = float("nan")
    module.zero_grad()
    out = module(x, ids, weights)
    out.sum().backward()
    return out.detach(), x.grad, weights.grad, [p.grad.clone() for p in module.parameters()]


ROUTES = {
    "one token": [[4, 1]],
    "all to one expert": [[2, 2]] * 7,
    "one expert without tokens": [[0, 1], [1, 3], [4, 3], [0, 4]],
    "empty batch": [],
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_uneven_routes(family: str, route: str) -> None:
    model, _, plain = twins(family)
    one, other = (each.model.layers[0].mlp.experts for each in (model, plain))
    got, wanted = run_experts(one, ROUTES[route]), run_experts(other, ROUTES[route])
    for mine, theirs in zip((*got[:3], *got[3]), (*wanted[:3], *wanted[3]), strict=True):
        assert torch.equal(mine, theirs)
    idle = set(range(5)) - {expert for row in ROUTES[route] for expert in row}
    for name, gradient in zip(dict(one.named_parameters()), got[3], strict=True):
        for expert in idle:
            assert gradient[expert].abs().max() == 0, name


def test_a_nan_stays_with_its_experts() -> None:
    model, _ = attached("mixtral")
    module = model.model.layers[0].mlp.experts
    out, x_grad, _, gradients = run_experts(module, [[0, 1], [2, 3]], nan=True)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()
    assert not x_grad[1].isnan().any()
    for gradient in gradients:
        assert gradient[:2].isnan().any()
        assert not gradient[2:].isnan().any()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_of_other_ranks_are_left_out(family: str) -> None:
    model, _, plain = twins(family)
    one, other = (each.model.layers[0].mlp.experts for each in (model, plain))
    for module in (one, other):
        module._is_expert_parallel = True
    index = [[0, 5], [5, 5], [3, 1]]  # 5 is what transformers puts for an expert that is elsewhere
    # In transformers' own the clamped tail also adds to the last expert's bias gradient, times zero.
    got, wanted = run_experts(one, index), run_experts(other, index)
    for mine, theirs in zip((*got[:3], *got[3]), (*wanted[:3], *wanted[3]), strict=True):
        assert torch.equal(mine, theirs)
        assert not mine.isnan().any()
    assert got[0][1].abs().max() == 0


def test_a_norm_after_the_experts() -> None:
    model, _, plain = twins("mixtral")
    one, other = (each.model.layers[0].mlp.experts for each in (model, plain))
    for module in (one, other):
        module.has_post_expert_norm = True
        module.post_expert_norm = lambda x: x * 3
    got, wanted = run_experts(one, [[0, 1], [2, 3]]), run_experts(other, [[0, 1], [2, 3]])
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_experts_without_a_gate() -> None:
    model, plain = expert_model("mixtral"), expert_model("mixtral")
    for each in (model, plain):
        for layer in each.model.layers:
            module = layer.mlp.experts
            module.has_gate = False
            module.up_proj = nn.Parameter(module.gate_up_proj.detach()[:, :48].clone())
            del module.gate_up_proj
    engine = Float8Experts.attach(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(backward(model), backward(plain))
    assert_same_gradients(model, plain)
    assert len(list(engine.named_writers())) == 4


def test_only_experts_with_tokens_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = attached("mixtral")
    seen: list[int] = []
    decode = ExpertWeight.decode_
    monkeypatch.setattr(
        ExpertWeight,
        "decode_",
        lambda self, experts, out: seen.extend(experts) or decode(self, experts, out),
    )
    run_experts(model.model.layers[0].mlp.experts, [[1, 3]])
    assert sorted(seen) == [1] * 4 + [3] * 4  # two weights, forward and backward


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    model, engine = attached("mixtral")
    ids = token_ids()
    loss = model(ids, labels=ids).loss
    name, parameter = next(iter(stacks(model).items()))
    writer = dict(engine.named_writers())[parameter]
    writer.write(parameter, torch.ones(1, *parameter.shape[1:]), slice(0, 1))
    with pytest.raises(RuntimeError, match=f"{name}: got FP8 weights that were written between"):
        loss.backward()


class _LargestFloat(TorchDispatchMode):
    """The largest storage in which any operation returns numbers that can be multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def test_the_workspace_is_the_same_with_8_and_64_experts() -> None:
    largest, workspace = [], []
    for experts in (8, 64):
        model = expert_model(
            "mixtral", num_local_experts=experts, hidden_size=64, intermediate_size=96
        )
        engine = Float8Experts.attach(model, workspace_bytes=1 << 17)
        module = model.model.layers[0].mlp.experts
        for parameter in module.parameters():
            parameter.requires_grad_(False)  # gradients are as large as the weights
        ids = torch.arange(256).reshape(128, 2) % experts
        x = torch.randn(128, 64, requires_grad=True)
        with _LargestFloat() as watch:
            module(x, ids, torch.ones(128, 2)).sum().backward()
        largest.append(watch.nbytes)
        workspace.append(engine.memory()["device_workspace"])
    assert workspace[0] == workspace[1] == (1 << 17) + 256
    # The rows of two experts each, as the first product returns them; all weights are 64 · 192 · 64 · 4.
    assert largest[0] == largest[1] == 256 * 192 * 4


def test_nothing_dequantized_is_saved_for_backward() -> None:
    model, _ = attached("mixtral")
    module = model.model.layers[0].mlp.experts
    weights = {p.untyped_storage().nbytes() for p in module.parameters()} | {5 * 96 * 32 * 4}
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    x = torch.randn(6, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x, torch.arange(12).reshape(6, 2) % 5, torch.ones(6, 2))
    assert saved
    assert not weights & set(saved)
    assert max(saved) <= 12 * 96 * 4  # activations of 12 rows


def test_expert_bytes_on_the_device() -> None:
    model = expert_model(
        "mixtral", torch.bfloat16, hidden_size=128, intermediate_size=128, num_attention_heads=4
    )
    bytes_before = sum(p.nbytes for p in stacks(model).values())
    engine = Float8Experts.attach(model)
    memory = engine.memory()
    assert memory["device_weights"] <= 0.52 * bytes_before
    assert memory["device_weights"] == bytes_before // 2 * (1 + 4 / 128**2)
    assert sum(p.untyped_storage().nbytes() for p in stacks(model).values()) == 0
    assert memory["host_sources"] == bytes_before
    engine.drop_sources()
    assert engine.memory()["host_sources"] == 0


def test_importing_the_package_imports_neither_engine_nor_transformers(fresh: Fresh) -> None:
    code = (
        "import sys, muonloom; "
        "assert not {'transformers', 'muonloom.experts'} & set(sys.modules); "
        "import muonloom.experts; assert 'transformers' not in sys.modules"
    )
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
