"""Layouts of whole Megatron-Core models: names over all ranks, what is left out, requests and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron.layout_modules import (
    HIDDEN,
    Ranks,
    gpt,
    grouped_experts,
    mlp_of,
    one_process,
    process_groups,
    self_attention,
)
from megatron.models import Tiny, build, initialize, pieces
from megatron.support import run_megatron
from muonloom import BlockSpec, Layout
from muonloom.integrations.megatron.layout import describe


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_process():
        yield


class Wrapper(nn.Module):
    """As Megatron's wrappers hold a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_layers_have_one_number_over_all_pipeline_stages() -> None:
    settings = {
        "num_layers": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.float32,
    }
    names: list[list[str]] = []
    for rank in range(2):
        groups = process_groups(pp=Ranks(2, rank))
        chunks = [Wrapper(Wrapper(gpt(groups, stage=stage, **settings))) for stage in range(2)]
        layout, described = describe(chunks, pg_collection=groups)
        assert list(layout) == [each.name for each in described]
        names.append(list(layout))
    whole = gpt(process_groups(), num_layers=4)
    assert sorted(names[0] + names[1]) == sorted(dict(whole.named_parameters()))
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0", "2"}


def test_a_model_of_experts_and_a_prediction_layer() -> None:
    groups = process_groups(tp=Ranks(2, 1), ep=Ranks(2, 1))
    settings = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 6,
        "moe_shared_expert_intermediate_size": 8,
        "moe_router_topk": 2,
        "mtp_num_layers": 1,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    }
    layout, described = describe([gpt(groups, **settings)], pg_collection=groups)
    found = {each.name: each for each in described}
    for above in ("decoder.layers.0", "mtp.layers.0.mtp_model_layer"):
        experts = [name for name in found if name.startswith(f"{above}.mlp.experts")]
        first = f"{above}.mlp.experts.local_experts"
        assert experts == [f"{first}.{n}.linear_fc{i}.weight" for n in (2, 3) for i in (1, 2)]
        for name in experts:
            assert (found[name].is_expert, found[name].cut_dim) == (True, None)
        assert layout[experts[0]].matrices == ((6, HIDDEN),) * 2
        shared = found[f"{above}.mlp.shared_experts.linear_fc1.weight"]
        assert (shared.is_expert, shared.cut_dim, shared.group) == (False, 0, groups.tp)
        assert layout[shared.name].matrices == ((8, HIDDEN),) * 2
        router = found[f"{above}.mlp.router.weight"]
        assert (router.is_expert, router.cut_dim, router.group) == (False, None, None)
        assert layout[router.name].matrices == ((4, HIDDEN),)
    assert layout["mtp.layers.0.eh_proj.weight"].matrices == ((HIDDEN, 2 * HIDDEN),)
    adamw = {name for name, rule in layout.items() if rule.algorithm == "adamw"}
    assert {name for name in adamw if len(layout[name].shape) > 1} == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "output_layer.weight",
    }
    assert all(len(rule.shape) > 1 for rule in layout.values() if rule.algorithm == "muon")
    assert layout["output_layer.weight"].reason == "embedding or output layer"
    assert not any(rule.guessed for rule in layout.values())


Found = dict[str, tuple[tuple[int, ...], int | None]]


def _of_a_rank(rank: int, tiny: Tiny, options: dict[str, Any]) -> tuple[Found, Found, list[str]]:
    initialize(tiny)
    chunks = build(tiny)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layout, described = describe(chunks, pg_collection=groups, **options)
    found = {each.name: (layout[each.name].shape, each.cut_dim) for each in described}
    expected = {piece.name: (piece.whole_shape, piece.dim) for piece in pieces(chunks)}
    return found, expected, [name for name, rule in layout.items() if "override" in rule.reason]


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(kind="moe", expert_parallel=2),
        Tiny(kind="mla", tensor_parallel=2),
        Tiny(kind="gated", pipeline_parallel=2, num_chunks=2, num_layers=4),
    ],
    ids=lambda tiny: tiny.kind,
)
def test_ranks_of_a_real_model_describe_its_parts_and_decide_together(tiny: Tiny) -> None:
    overrides = {"output_layer.weight": "adamw", "*.layers.1.*.linear_fc2.weight": "adamw"}
    options = {"heads_per_block": 1, "cut_output": True, "overrides": overrides}
    ranks = run_megatron(2, _of_a_rank, tiny, options)
    for found, expected, _ in ranks:
        assert found == expected
    decided = set().union(*(names for _, _, names in ranks))
    second = {name for found, _, _ in ranks for name in found if ".layers.1." in name}
    fitting = {name for name in second if name.endswith("linear_fc2.weight")}
    assert fitting
    assert decided == {"output_layer.weight", *fitting}


def test_frozen_parameters_are_left_out_and_tied_ones_described_once() -> None:
    first, second = mlp_of(process_groups()), mlp_of(process_groups())
    second.linear_fc2.weight = first.linear_fc2.weight
    first.linear_fc1.weight.requires_grad_(False)
    chunks = [nn.ModuleDict({"first": first}), nn.ModuleDict({"second": second})]
    layout, _ = describe(chunks, pg_collection=process_groups())
    assert list(layout) == ["first.linear_fc2.weight", "second.linear_fc1.weight"]


def test_each_module_is_read_by_its_own_config() -> None:
    layers = nn.ModuleList(
        self_attention(
            process_groups(), num_attention_heads=heads, num_query_groups=2, kv_channels=4
        )
        for heads in (4, 8)
    )
    for number, attention in enumerate(layers, start=1):
        attention.layer_number = number
    model = nn.ModuleDict({"layers": layers})
    layout, _ = describe([model], pg_collection=process_groups(), heads_per_block=4)
    matrices = [layout[f"layers.{index}.linear_qkv.weight"].matrices for index in range(2)]
    assert matrices == [
        ((16, HIDDEN), *((8, HIDDEN),) * 2),
        ((16, HIDDEN),) * 2 + ((8, HIDDEN),) * 2,
    ]


def test_a_module_is_not_read_by_the_name_of_one_around_it() -> None:
    outer, inner = mlp_of(process_groups(), gated_linear_unit=True), mlp_of(process_groups())
    outer.inner = nn.ModuleList([inner])
    model = nn.ModuleDict({"layers": nn.ModuleList([outer])})
    layout, _ = describe([model], pg_collection=process_groups())
    assert layout["layers.0.linear_fc1.weight"].matrices == ((8, HIDDEN),) * 2
    assert layout["layers.0.inner.0.linear_fc1.weight"].matrices == ((8, HIDDEN),)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": outer, "a": mlp_of(process_groups())})})
    layout, _ = describe([model], pg_collection=process_groups())
    assert layout["layers.a.linear_fc1.weight"].matrices == ((8, HIDDEN),)


def test_a_name_that_occurs_twice_is_refused() -> None:
    chunks = [mlp_of(process_groups()), mlp_of(process_groups())]
    with pytest.raises(ValueError, match=r"^linear_fc1\.weight: got two parameters of this name"):
        describe(chunks, pg_collection=process_groups())


def test_overrides_come_first() -> None:
    overrides = {"linear_fc1.*": BlockSpec.whole(), "*fc2.weight": "adamw"}
    layout, _ = describe(
        [mlp_of(process_groups(), gated_linear_unit=True)],
        pg_collection=process_groups(),
        overrides=overrides,
    )
    assert layout["linear_fc1.weight"].spec == BlockSpec.whole()
    assert layout["linear_fc2.weight"].algorithm == "adamw"
    overrides = {"*": "muon"}
    layout, _ = describe(
        [mlp_of(process_groups(), gated_linear_unit=True)],
        pg_collection=process_groups(),
        overrides=overrides,
    )
    assert layout["linear_fc1.weight"].spec == BlockSpec.gate_up()


class Meeting(Ranks):
    """A process group of threads."""

    def __init__(self, size: int, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        super().__init__(size, rank)
        self._barrier, self._table = barrier, table

    def gather(self, mine: object) -> list[Any]:
        self._table[self.rank()] = mine
        self._barrier.wait(timeout=60)
        return list(self._table)


def _of_two_stages(chunks: Sequence[nn.Module], **options: Any) -> list[Layout]:
    barrier, table = threading.Barrier(2), [None, None]

    def call(rank: int) -> Layout:
        groups = process_groups(pp=Meeting(2, rank, barrier, table))
        return describe([chunks[rank]], pg_collection=groups, **options)[0]

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:

        def gather(found: list[Any], mine: object, group: Meeting) -> None:
            found[:] = group.gather(mine)

        patch.setattr(dist, "all_gather_object", gather)
        futures = [pool.submit(call, rank) for rank in range(2)]
        failures = [future.exception() for future in futures]
    if any(failures):
        assert [type(each) for each in failures] == [ValueError, ValueError]
        assert len(set(map(str, failures))) == 1
        raise failures[0] or AssertionError
    return [future.result() for future in futures]


def test_a_request_may_concern_another_stage_alone() -> None:
    chunks = [mlp_of(process_groups()), self_attention(process_groups())]
    layouts = _of_two_stages(chunks, heads_per_block=1, overrides={"linear_fc2.*": "adamw"})
    assert list(layouts[0]) == ["linear_fc1.weight", "linear_fc2.weight"]
    assert layouts[0]["linear_fc2.weight"].algorithm == "adamw"
    assert len(layouts[1]["linear_qkv.weight"].matrices) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"nothing": "adamw"}}, r"^overrides\['nothing'\]: got no parameter"),
        (
            {"mla_components": True},
            "^mla_components: got a model of type 'megatron' with no module",
        ),
        ({"heads_per_block": 3}, r"^linear_qkv\.weight: got heads_per_block=3 .*work: 1, 2, 4\."),
    ],
)
def test_what_no_stage_has_is_an_error_on_all(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _of_two_stages([mlp_of(process_groups()), self_attention(process_groups())], **options)


def test_blocks_that_span_query_groups_unevenly_are_refused_with_what_works() -> None:
    attention = self_attention(
        process_groups(), num_attention_heads=12, num_query_groups=4, kv_channels=4
    )
    with pytest.raises(ValueError, match=r"^linear_qkv\.weight: .*these work: 1, 6, 12\."):
        describe([attention], pg_collection=process_groups(), heads_per_block=2)


@pytest.mark.parametrize("name", ["gtp_remat", "expt_gtp_remat"])
def test_generalized_tensor_parallelism_is_refused(name: str) -> None:
    groups = process_groups()
    setattr(groups, name, Ranks(2))
    with pytest.raises(ValueError, match=rf"^pg_collection\.{name}: got weights cut over 2 ranks"):
        describe([mlp_of(groups)], pg_collection=groups)


def test_a_stride_that_no_gate_explains_is_refused() -> None:
    for stride, settings in ((2, {}), (3, {"gated_linear_unit": True})):
        mlp = mlp_of(process_groups(), **settings)
        mlp.linear_fc1.weight.partition_stride = stride
        with pytest.raises(
            ValueError, match=rf"^linear_fc1\.weight: got partition_stride={stride}"
        ):
            describe([mlp], pg_collection=process_groups())


def test_a_cut_without_its_group_or_dimension_is_refused() -> None:
    mlp = mlp_of(process_groups())
    with pytest.raises(ValueError, match=r"^linear_fc1\.weight: .* pg_collection\.tp\."):
        describe([mlp], pg_collection=ProcessGroupCollection())
    mlp.linear_fc2.weight.partition_dim = -1
    with pytest.raises(ValueError, match=r"^linear_fc2\.weight: .*partition_dim=-1"):
        describe([mlp], pg_collection=process_groups())


def test_a_config_that_does_not_fit_is_named() -> None:
    attention = self_attention(process_groups())
    attention.config.kv_channels = 7
    with pytest.raises(ValueError, match=r"^linear_qkv\.weight: got sizes"):
        describe([attention], pg_collection=process_groups())


def test_experts_of_one_grouped_tensor_are_refused() -> None:
    groups = process_groups()
    experts = grouped_experts(groups)
    experts.linear_fc1.weight = nn.Parameter(torch.zeros(4, 16, HIDDEN))
    with pytest.raises(ValueError, match=r"^linear_fc1\.weight: got .*single_grouped_weight=False"):
        describe([experts], pg_collection=groups)
