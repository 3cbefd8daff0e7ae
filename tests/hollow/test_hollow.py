"""A hollow tensor keeps what needs no data, and refuses the rest by name: never a crash."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from muonloom.hollow import hollow_, hollow_reason, is_hollow, recast_, whole_

NAME, WHY = "block.weight", "Its values are on the host."
REFUSED = (
    r"block\.weight: got .* of a weight whose storage was given up; .*Its values are on the host"
)


def hollow_linear() -> nn.Linear:
    module = nn.Linear(4, 3)
    hollow_(module.weight, NAME, WHY)
    return module


READS: dict[str, Callable[[nn.Linear], object]] = {
    "forward": lambda m: m(torch.ones(2, 4)),
    "linear": lambda m: functional.linear(torch.ones(2, 4), m.weight),
    "matmul": lambda m: torch.ones(2, 3) @ m.weight,
    "index": lambda m: m.weight[0],
    "slice": lambda m: m.weight[:1],
    "view": lambda m: m.weight.view(-1),
    "transpose": lambda m: m.weight.mT,
    "detach": lambda m: m.weight.detach(),
    "data": lambda m: m.weight.data,
    "set data": lambda m: setattr(m.weight, "data", torch.zeros(3, 4)),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(nn.Linear(4, 3).state_dict()),
    "copy_": lambda m: m.weight.copy_(torch.zeros(3, 4)),
    "copy from": lambda m: torch.zeros(3, 4).copy_(m.weight),
    "in place": lambda m: m.weight.mul_(2),
    "init": lambda m: nn.init.zeros_(m.weight),
    "clone": lambda m: m.weight.clone(),
    "to": lambda m: m.weight.to(torch.float64),
    "module to": lambda m: m.to(torch.float64),
    "cpu": lambda m: m.weight.cpu(),
    "numpy": lambda m: m.weight.numpy(),
    "tolist": lambda m: m.weight.tolist(),
    "item": lambda m: m.weight.item(),
    "bool": lambda m: bool(m.weight),
    "equal": lambda m: m.weight == m.weight,
    "iterate": lambda m: list(m.weight),
    "stack": lambda m: torch.stack([m.weight]),
    "foreach": lambda m: torch._foreach_add([m.weight], 1.0),
    "aten": lambda m: torch.ops.aten.add.Tensor(m.weight, m.weight),
    "as parameter": lambda m: nn.Parameter(m.weight),
    "flatten": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "deep copy": lambda m: copy.deepcopy(m.weight),
    "deep copy of the module": lambda m: copy.deepcopy(m),
    "pickle": lambda m: pickle.dumps(m.weight),
    "save": lambda m: torch.save(m.weight, io.BytesIO()),
    "save of the module": lambda m: torch.save(m, io.BytesIO()),
    "share memory": lambda m: m.share_memory(),
    "view of a view": lambda m: m.weight.view_as(m.weight) + 1,
}


@pytest.mark.parametrize("read", READS)
def test_everything_that_needs_data_raises_by_name(read: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        READS[read](hollow_linear())


@pytest.mark.parametrize("read", ["sum", "clone", "detach", "numpy", "mul_"])
def test_a_buffer_is_guarded_too(read: str) -> None:
    buffer = torch.ones(3)
    hollow_(buffer, NAME, WHY)
    with pytest.raises(RuntimeError, match=REFUSED):
        getattr(buffer, read)(*([2] if read == "mul_" else []))
    assert type(whole_(buffer)) is Tensor
    assert buffer.fill_(2.0).tolist() == [2.0, 2.0, 2.0]


def test_the_storage_is_gone_and_metadata_stays() -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16), requires_grad=True)
    version = weight._version
    assert hollow_(weight, NAME, WHY) is weight
    assert weight.untyped_storage().nbytes() == 0
    assert weight.data_ptr() == 0
    assert is_hollow(weight)
    assert hollow_reason(weight) == WHY
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert (weight.ndim, weight.numel(), weight.stride(), weight.nbytes) == (2, 12, (4, 1), 24)
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight._version == version
    assert weight in {weight}
    assert torch.zeros_like(weight).tolist() == torch.zeros(3, 4).tolist()
    torch.optim.SGD([weight], lr=0.1).zero_grad()


def test_printing_tells_instead_of_raising() -> None:
    module = hollow_linear()
    for text in (repr(module.weight), str(module.weight), f"{module.weight}"):
        assert text == f"<hollow parameter {NAME}: (3, 4), torch.float32, cpu; {WHY}>"
    buffer = hollow_(torch.ones(2), NAME, WHY)
    assert repr(buffer) == f"<hollow tensor {NAME}: (2,), torch.float32, cpu; {WHY}>"


class _Product(torch.autograd.Function):
    """x·wᵀ with a weight kept elsewhere, as an expert engine does it."""

    @staticmethod
    def forward(ctx, x, weight, real):
        ctx.save_for_backward(x, real)
        return x @ real.mT

    @staticmethod
    def backward(ctx, gradient):
        x, real = ctx.saved_tensors
        return gradient @ real, gradient.mT @ x, None


def test_gradients_hooks_and_the_accumulator_live_on() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    accumulator = torch.autograd.graph.get_gradient_edge(weight).node
    seen: list[str] = []
    weight.register_hook(lambda _: seen.append("before"))
    weight.grad = torch.ones(3, 4)
    hollow_(weight, NAME, WHY)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    assert torch.autograd.graph.get_gradient_edge(weight).node is accumulator
    assert weight.expand_as(weight).grad_fn.next_functions[0][0] is accumulator
    for _ in range(2):
        _Product.apply(torch.ones(2, 4), weight, torch.ones(3, 4)).sum().backward()
    assert seen == ["before", "after"] * 2
    torch.testing.assert_close(weight.grad, torch.full((3, 4), 5.0), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(
        _Product.apply(torch.ones(2, 4), weight, torch.ones(3, 4)).sum(), [weight]
    )
    assert gradient.tolist() == torch.full((3, 4), 2.0).tolist()
    total = nn.utils.clip_grad_norm_([weight], 1.0)
    assert float(total) == pytest.approx(5 * 12**0.5)


def test_whole_brings_storage_and_class_back_to_the_same_object() -> None:
    module = nn.Linear(4, 3)
    weight, gradient = module.weight, torch.ones(3, 4)
    weight.grad = gradient
    hollow_(weight, NAME, WHY)
    assert whole_(weight) is weight
    assert module.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.grad is gradient
    assert weight.untyped_storage().nbytes() == 48
    assert not is_hollow(weight)
    weight.data.fill_(1.0)
    module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(KeyError):
        hollow_reason(weight)
    assert whole_(weight) is weight
    assert float(weight.detach().sum()) == 12


def test_a_second_time_only_the_words_change() -> None:
    weight = hollow_(nn.Parameter(torch.ones(3)), "one", "First.")
    hollow_(weight, "two", "Second.")
    with pytest.raises(RuntimeError, match=r"two: .* Second\."):
        weight.sum()
    assert type(whole_(weight)) is nn.Parameter
    assert weight.untyped_storage().nbytes() == 12


def test_a_storage_of_two_parameters_is_resized_once_and_comes_back_for_both() -> None:
    first = nn.Parameter(torch.ones(4, 3))
    tied, tail = nn.Parameter(first.data), nn.Parameter(first.data[2:])
    for index, parameter in enumerate((tail, first, tied)):
        hollow_(parameter, f"p{index}", WHY)
    for order in ((first, tied, tail), (tail, tied, first)):
        for parameter in order:
            whole_(parameter)
        assert first.untyped_storage().nbytes() == 48
        first.data.fill_(3.0)
        assert float(tied.detach().sum()) == 36
        assert float(tail.detach().sum()) == 18
        for index, parameter in enumerate((tail, first, tied)):
            hollow_(parameter, f"p{index}", WHY)


def test_the_memory_of_a_mapped_file_is_let_go(tmp_path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(48))
    mapped = torch.from_file(str(path), size=12, dtype=torch.float32)
    parameter, neighbour = nn.Parameter(mapped[:6]), mapped[6:]
    sliced = torch.UntypedStorage.from_file(str(path), False, 48)[0:24]
    of_slice = torch.empty(0).set_(sliced, 0, (6,), (1,))
    for tensor in (parameter, of_slice):
        assert not tensor.untyped_storage().resizable()
        hollow_(tensor, NAME, WHY)
        assert tensor.untyped_storage().nbytes() == 0
        whole_(tensor)
        assert tensor.untyped_storage().nbytes() == 24
    assert neighbour.tolist() == [0.0] * 6


def test_a_subclass_of_parameter_stays_one() -> None:
    class Marked(nn.Parameter):
        pass

    weight = Marked(torch.ones(3))
    weight.mark = "kept"
    hollow_(weight, NAME, WHY)
    assert isinstance(weight, Marked)
    assert weight.mark == "kept"
    assert type(whole_(weight)) is Marked


def test_recast_changes_dtype_and_stays_hollow() -> None:
    weight = hollow_(nn.Parameter(torch.ones(3, 4)), NAME, WHY)
    assert recast_(weight, dtype=torch.bfloat16, device=torch.device("cpu")) is weight
    assert is_hollow(weight)
    assert (weight.dtype, weight.untyped_storage().nbytes()) == (torch.bfloat16, 0)
    assert whole_(weight).untyped_storage().nbytes() == 24
    assert weight.is_leaf


def test_an_empty_tensor_is_no_special_case() -> None:
    weight = hollow_(nn.Parameter(torch.ones(0, 4)), NAME, WHY)
    with pytest.raises(RuntimeError, match=REFUSED):
        weight.sum()
    assert whole_(weight).tolist() == []
