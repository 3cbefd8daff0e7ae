"""What an attached model does when it is moved, loaded, copied, released and detached."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

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
from layout.tiny import fresh
from muonloom.experts import Float8Experts
from muonloom.experts.modules import IMPLEMENTATION
from muonloom.experts.weights import ExpertWeight
from muonloom.hollow import is_hollow
from muonloom.math.float8 import decode_float8, encode_float8_
from muonloom.writers import ExpertEngine, Writer

NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_offers_every_stacked_weight_with_its_writer(family: str) -> None:
    model, engine = attached(family)
    typed: ExpertEngine = engine
    pairs = dict(typed.named_writers())
    assert {id(p) for p in pairs} == {id(p) for p in stacks(model).values()}
    assert all(isinstance(writer, Writer) for writer in pairs.values())
    again = dict(engine.named_writers())
    for parameter, writer in pairs.items():
        assert again[parameter] is writer
        assert writer.rows_per_block(parameter) == 1
        writer.prepare(parameter)
    assert all(not is_hollow(p) for p in model.parameters() if p.ndim < 3)


def test_masters_can_start_from_the_source() -> None:
    exact = {name: p.detach().clone() for name, p in stacks(expert_model()).items()}
    model, engine = attached()
    writers = dict(engine.named_writers())
    for name, parameter in stacks(model).items():
        source = writers[parameter].take_source(parameter)
        assert source.device.type == "cpu"
        assert torch.equal(source, exact[name])
        assert writers[parameter].take_source(parameter) is None
        assert writers[parameter].agrees(parameter, exact[name])
    assert engine.memory()["host_sources"] == 0


def test_the_source_keeps_its_dtype_and_costs_no_copy_on_the_host() -> None:
    model = expert_model(dtype=torch.bfloat16)
    places = {p.data_ptr() for p in stacks(model).values()}
    engine = Float8Experts.attach(model)
    sources = [writer.take_source(p) for p, writer in engine.named_writers()]
    assert {source.data_ptr() for source in sources} == places
    assert {source.dtype for source in sources} == {torch.bfloat16}


def test_a_neighbour_in_the_same_storage_is_left_alone() -> None:
    model = expert_model()
    parameter = stacks(model)[NAME]
    flat = torch.ones(parameter.numel() + 3)
    flat[: parameter.numel()] = parameter.detach().flatten()
    parameter.data = flat[: parameter.numel()].view(parameter.shape)
    Float8Experts.attach(model)
    assert parameter.untyped_storage().nbytes() == 0
    assert flat[-3:].tolist() == [1.0] * 3


def test_writing_changes_what_forward_reads() -> None:
    model, engine, plain = twins("mixtral")
    draw = torch.Generator().manual_seed(5)
    for (parameter, writer), twin in zip(
        engine.named_writers(), stacks(plain).values(), strict=True
    ):
        master = torch.randn(parameter.shape, generator=draw)
        for expert in range(0, 5, 2):
            rows = slice(expert, min(expert + 2, 5))
            writer.write(parameter, master[rows].contiguous(), rows)
        twin.data.copy_(writer.read(parameter))
    assert torch.equal(backward(model), backward(plain))
    assert_same_gradients(model, plain)


def test_dtype_and_device_follow_the_module_and_fp8_is_never_cast() -> None:
    model, engine = attached()
    backward(model)
    writers = dict(engine.named_writers())
    storages = {p: writer.storage for p, writer in writers.items()}
    bytes_before = [writer.storage.data.view(torch.uint8).clone() for writer in writers.values()]
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    assert model.to(torch.bfloat16) is model
    assert [name for name, _ in model.named_parameters()] == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for parameter, before in zip(writers, bytes_before, strict=True):
        assert (parameter.dtype, parameter.grad.dtype) == (torch.bfloat16,) * 2
        assert is_hollow(parameter)
        assert parameter.untyped_storage().nbytes() == 0
        storage = writers[parameter].storage
        assert storage is storages[parameter]
        assert torch.equal(storage.data.view(torch.uint8), before)
        assert storage.scale_inv.dtype == torch.float32
    backward(model)
    assert all(p.grad.dtype == torch.bfloat16 for p in writers)
    model.float()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in writers)


def test_the_meta_device_is_refused_by_name() -> None:
    model, _ = attached()
    with pytest.raises(RuntimeError, match=f"{NAME}: got a move from cpu to meta"):
        model.to("meta")


def test_device_moves_the_tensors_of_the_same_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    # "meta" is the one other device that is always there; parameters cannot go to it.
    monkeypatch.setattr("muonloom.experts.weights.recast_", lambda *args, **options: None)
    model, engine = attached()
    pairs = [(w, w.storage) for _, w in engine.named_writers()]
    model.to("meta")
    for writer, storage in pairs:
        assert writer.storage is storage
        assert storage.data.device.type == storage.scale_inv.device.type == "meta"


@pytest.mark.cuda
def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shapes = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8}
    for before in (True, False):
        model = expert_model("mixtral", torch.bfloat16, **shapes)
        plain = copy.deepcopy(model)
        engine = Float8Experts.attach(
            model, device="cuda" if before else None, workspace_bytes=1 << 18
        )
        model.cuda()
        plain.cuda().load_state_dict(model.state_dict())
        ids = token_ids().cuda()
        for each in (model, plain):
            out = each(ids, labels=ids)
            out.loss.backward()
        for name, parameter in stacks(model).items():
            assert parameter.device.type == "cuda"
            twin = dict(plain.named_parameters())[name]
            # The same kernel over runs of experts: sums in the same order, up to its choice of tiles.
            error = (parameter.grad.float() - twin.grad.float()).norm() / twin.grad.float().norm()
            assert float(error) < 1e-2
        assert engine.memory()["device_workspace"] == (1 << 18) + 256


def test_attach_can_choose_the_device_of_the_experts() -> None:
    model = expert_model()
    engine = Float8Experts.attach(model, device="cpu")
    assert all(w.storage.data.device.type == "cpu" for _, w in engine.named_writers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dict_is_ordinary(dtype: torch.dtype) -> None:
    model, engine = attached("gpt_oss", dtype)
    plain = expert_model("gpt_oss", dtype)
    state, reference = model.state_dict(), plain.state_dict()
    assert list(state) == list(reference)
    for name, value in state.items():
        assert (type(value), value.dtype) == (torch.Tensor, reference[name].dtype)
        if name in stacks(model):
            held = dict(engine.named_writers())[stacks(model)[name]].storage
            assert torch.equal(value, decode_float8(held.data, held.scale_inv).to(dtype))
        else:
            assert torch.equal(value, reference[name])
    plain.load_state_dict(state)


def test_load_state_dict_quantizes_what_it_gets() -> None:
    other = expert_model()
    for parameter in stacks(other).values():
        parameter.data.mul_(1.7).add_(0.1)
    model, engine = attached()
    storages = [(p, w.storage.data) for p, w in engine.named_writers()]
    result = model.load_state_dict(other.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    for (name, parameter), (same, data) in zip(stacks(model).items(), storages, strict=True):
        writer = dict(engine.named_writers())[parameter]
        exact = dict(other.named_parameters())[name].detach()
        assert parameter is same
        assert writer.storage.data is data
        assert writer.agrees(parameter, exact)
        source = writer.take_source(parameter)  # not taken before: it is what was loaded
        assert torch.equal(source, exact)
    model.load_state_dict(other.state_dict())
    assert engine.memory()["host_sources"] == 0


def test_strictness_of_load_state_dict() -> None:
    model, engine = attached()
    before = engine.dequantize(stacks(model)[NAME])
    state = model.state_dict()
    part = {key: value for key, value in state.items() if key != NAME}
    with pytest.raises(RuntimeError, match=f"Missing key.*{NAME}"):
        model.load_state_dict(part)
    assert model.load_state_dict(part, strict=False).missing_keys == [NAME]
    assert torch.equal(engine.dequantize(stacks(model)[NAME]), before)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, NAME + "x": state[NAME]})
    with pytest.raises(RuntimeError, match=f"size mismatch for {NAME}"):
        model.load_state_dict({**state, NAME: state[NAME][:2]})


def test_copies_are_refused_by_name() -> None:
    model, _ = attached()
    for make in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RuntimeError, match=rf"{NAME}: got a deep copy or .*engine\.detach\(\)"):
            make(model)


def test_reading_the_parameter_is_refused_by_name() -> None:
    model, _ = attached()
    parameter = stacks(model)[NAME]
    for read in (
        lambda: parameter.sum(),
        lambda: functional.linear(torch.ones(1, 32), parameter[0]),
        lambda: model.get_parameter(NAME).detach(),
    ):
        with pytest.raises(RuntimeError, match=f"{NAME}: got .* engine.dequantize"):
            read()
    assert NAME in repr(parameter)


def test_detach_brings_back_what_was_attached_while_that_is_kept() -> None:
    model = expert_model("qwen3_moe", torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    Float8Experts.attach(model).detach()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_detach_brings_everything_back() -> None:
    model, engine, plain = twins("qwen3_moe", torch.bfloat16)
    engine.drop_sources()
    logits = backward(model)
    kept = {name: (p, p.grad) for name, p in model.named_parameters()}
    module = model.model.layers[1].mlp.experts
    engine.detach()
    assert type(module).__name__ == "Qwen3MoeExperts"
    assert module.config is model.config
    for name, parameter in model.named_parameters():
        assert parameter is kept[name][0]
        assert parameter.grad is kept[name][1]
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, dict(plain.named_parameters())[name])
    model.zero_grad()
    assert torch.equal(backward(model), logits)
    assert torch.equal(copy.deepcopy(model)(token_ids()).logits, logits)
    assert not list(engine.named_writers())
    engine.detach()
    Float8Experts.attach(model)


def test_the_models_own_implementation_is_not_touched() -> None:
    model, _ = attached()
    assert model.config._experts_implementation == "grouped_mm"
    assert model.model.layers[0].mlp.experts.config._experts_implementation == IMPLEMENTATION
    model.set_experts_implementation("eager")
    backward(model)
    # Another module that shares the configuration goes on as it was.
    half = expert_model()
    Float8Experts.attach(half.model.layers[0])
    plain = expert_model()
    plain.load_state_dict(half.state_dict())
    assert torch.equal(backward(half), backward(plain))


@pytest.mark.parametrize("partial", [False, True])
def test_release_and_resume(partial: bool) -> None:
    model, engine = attached()
    logits = backward(model)
    everything = list(stacks(model).values())
    chosen = everything[:1] if partial else everything
    writers = dict(engine.named_writers())
    kept = {p: [(t, t.view(torch.uint8).clone()) for t in writers[p].tensors()] for p in everything}
    weights = engine.memory()["device_weights"]
    for _ in range(2):
        engine.release(chosen)
    memory = engine.memory()
    assert memory["device_workspace"] == 0
    assert memory["device_weights"] == sum(
        t.nbytes for p in everything for t, _ in kept[p] if not any(p is c for c in chosen)
    )
    for use in (
        lambda: backward(model),
        model.state_dict,
        lambda: engine.dequantize(chosen[0]),
        engine.detach,
        lambda: model.load_state_dict(fresh("mixtral", **FAMILIES["mixtral"]).state_dict()),
    ):
        with pytest.raises(RuntimeError, match=rf"{NAME}: got .*given back.*call resume first"):
            use()
    for _ in range(2):
        engine.resume(chosen)
    assert engine.memory()["device_weights"] == weights
    for parameter in chosen:
        for tensor, content in kept[parameter]:
            assert any(tensor is held for held in writers[parameter].tensors())
            tensor.view(torch.uint8).copy_(content)
    assert torch.equal(backward(model), logits)


def test_release_between_forward_and_backward_raises_by_name() -> None:
    model, engine = attached()
    loss = model(token_ids(), labels=token_ids()).loss
    engine.release()
    with pytest.raises(RuntimeError, match=r"experts\.\w+: got .*given back"):
        loss.backward()


def test_foreign_parameters_are_refused() -> None:
    _, engine = attached()
    for method in (engine.release, engine.resume):
        with pytest.raises(ValueError, match=r"params: got a parameter .* does not hold"):
            method([nn.Parameter(torch.ones(2))])


def test_what_cannot_be_attached_is_named() -> None:
    with pytest.raises(ValueError, match="model: got LlamaForCausalLM without stacked expert"):
        Float8Experts.attach(fresh("llama"))
    model, _ = attached()
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts: got .*attached already"):
        Float8Experts.attach(model)
    llama4 = fresh("llama4_text")
    with pytest.raises(ValueError, match=r"feed_forward\.experts: got Llama4TextExperts without"):
        Float8Experts.attach(llama4)
    llama4.state_dict()  # nothing has changed
    empty = expert_model()
    empty.to("meta")
    with pytest.raises(ValueError, match=f"{NAME}: got a parameter on the meta device"):
        Float8Experts.attach(empty)
    tied = expert_model()
    tied.model.layers[1].mlp.experts.down_proj = tied.model.layers[0].mlp.experts.down_proj
    with pytest.raises(ValueError, match="got the same parameter as"):
        Float8Experts.attach(tied)
    assert not any(is_hollow(p) for p in tied.parameters())


@pytest.mark.parametrize(("block", "scale_format"), [((1, 128), "float32"), ((16, 16), "ue8m0")])
def test_other_blocks_and_scales(block: tuple[int, int], scale_format: str) -> None:
    model, engine, plain = twins("mixtral", block=block, scale_format=scale_format)
    assert torch.equal(backward(model), backward(plain))
    for parameter, writer in engine.named_writers():
        source = writer.take_source(parameter)
        data = torch.empty_like(writer.storage.data)
        scale_inv = torch.empty_like(writer.storage.scale_inv)
        encode_float8_(source, data, scale_inv, block=block, power_of_two=scale_format == "ue8m0")
        assert torch.equal(data.view(torch.uint8), writer.storage.data.view(torch.uint8))
        assert torch.equal(scale_inv.view(torch.uint8), writer.storage.scale_inv.view(torch.uint8))


def test_hooks_of_the_parameter_run() -> None:
    model, _ = attached()
    parameter = stacks(model)[NAME]
    seen: list[str] = []
    parameter.register_hook(lambda _: seen.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    backward(model)
    assert seen == ["gradient", "accumulated"]


def test_data_parallel_over_one_rank(tmp_path) -> None:
    from torch import distributed

    model, _, plain = twins("mixtral")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with pytest.raises(RuntimeError, match=f"{NAME}: got `detach`"):
            nn.parallel.DistributedDataParallel(model)
        wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False)
        for _ in range(2):
            backward(wrapped)
            backward(plain)
        assert_same_gradients(model, plain)
    finally:
        distributed.destroy_process_group()


def fp8_model() -> nn.Module:
    """Experts as Transformers has them when it loads an FP8 checkpoint onto a GPU."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = expert_model("mixtral", hidden_size=32, intermediate_size=16).config
    kind = use_experts_implementation(
        type("FP8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    model = nn.ModuleDict({"experts": kind(config, block_size=(16, 16))})
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        random = torch.randn(parameter.shape, generator=draw).abs() + 0.1
        parameter.data.copy_(random * (0.01 if name.endswith("scale_inv") else 1.0))
    return model


def test_experts_that_are_fp8_already_keep_their_bytes() -> None:
    model = fp8_model()
    module = model["experts"]
    before = {name: p.detach().view(torch.uint8).clone() for name, p in model.named_parameters()}
    engine = Float8Experts.attach(model)
    assert list(dict(model.named_parameters())) == ["experts.gate_up_proj", "experts.down_proj"]
    for parameter, writer in engine.named_writers():
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad
        assert writer.block == (16, 16)
        assert writer.take_source(parameter) is None  # the FP8 numbers are all there is
    x = torch.randn(4, 32, requires_grad=True)
    module(x, torch.tensor([[0, 1], [2, 3], [4, 0], [1, 1]]), torch.ones(4, 2)).sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    engine.detach()
    after = {name: p.detach().view(torch.uint8) for name, p in model.named_parameters()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_fp8_scales_that_are_not_one_a_block_are_refused() -> None:
    model = fp8_model()
    model["experts"].block_size = (128, 128)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj: got FP8 weights with scales"):
        Float8Experts.attach(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loading_what_state_dict_gave_changes_no_byte(dtype):
    """Quantizing rounded values anew would move scales, and make masters stale that are not."""
    model, engine = attached("mixtral", dtype)
    tensors = [tensor for _, writer in engine.named_writers() for tensor in writer.tensors()]
    before = [(tensor.view(torch.uint8).clone(), tensor._version) for tensor in tensors]
    model.load_state_dict(model.state_dict())
    for tensor, (held, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), held)
        assert tensor._version == version


def test_an_attach_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch) -> None:
    model = expert_model("mixtral", torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    quantize, count = ExpertWeight.quantize_, 0

    def fail_at_last(weight, values, **options):
        nonlocal count
        count += 1
        if count == len(stacks(model)):
            raise torch.OutOfMemoryError("planted")
        quantize(weight, values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertWeight, "quantize_", fail_at_last)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            Float8Experts.attach(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    Float8Experts.attach(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value) -> None:
    model = expert_model("mixtral")
    name, parameter = next(reversed(stacks(model).items()))
    parameter.data[1, 2, 3] = value
    with pytest.raises(ValueError, match=rf"^{name}: got a weight with a NaN or an infinity"):
        Float8Experts.attach(model)
    assert type(parameter) is nn.Parameter
