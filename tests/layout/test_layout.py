"""Names, overrides, guesses, requests that cannot be met, and the table."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from layout.tiny import CONFIGS, fresh, tiny
from muonloom.layout import (
    BlockSpec,
    Groups,
    HeadRows,
    Layout,
    Part,
    Rule,
    canonical_name,
    register_family,
)


def _llama_config(**changes: int) -> SimpleNamespace:
    return SimpleNamespace(model_type="llama", **{**CONFIGS["llama"], **changes})


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.weight",
        "module.layers.0.weight",
        "_orig_mod.layers.0.weight",
        "module._orig_mod.layers.0.weight",
        "layers.0._checkpoint_wrapped_module.weight",
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._orig_mod.weight",
    ],
)
def test_wrapper_prefixes_are_stripped_on_both_sides(name: str) -> None:
    assert canonical_name(name) == "layers.0.weight"
    for inside, asked in ((name, "layers.0.weight"), ("layers.0.weight", name)):
        layout = Layout.from_shapes({inside: (4, 3)})
        assert layout[asked].name == "layers.0.weight"
        assert asked in layout
    assert canonical_name("my_module.submodule.weight") == "my_module.submodule.weight"


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^layers\.w: got two parameters of this name"):
        Layout.from_shapes({"layers.w": (2, 2), "module.layers.w": (2, 2)})


def test_a_layout_is_an_immutable_mapping() -> None:
    layout = Layout.from_shapes({"a.weight": (2, 3), "b.bias": (3,)})
    assert isinstance(layout, Mapping)
    assert list(layout) == ["a.weight", "b.bias"]
    assert len(layout) == 2
    with pytest.raises(KeyError):
        layout["c"]
    with pytest.raises(TypeError):
        layout["a.weight"] = layout["b.bias"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        layout["a.weight"].algorithm = "adamw"  # type: ignore[misc]
    assert layout == Layout.from_shapes({"a.weight": (2, 3), "b.bias": (3,)})
    assert "1 parameters by Muon, 1 by AdamW" in repr(layout)


def _algorithms(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    return {name: rule.algorithm for name, rule in Layout.from_shapes(shapes).items()}


@pytest.mark.parametrize(
    "name",
    [
        "wte.weight",
        "transformer.wpe.weight",
        "head.weight",
        "output.weight",
        "lm_head.weight",
        "embed_out.weight",
        "model.embed_tokens.weight",
        "tok_embeddings.weight",
        "embedding.word_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "cls.predictions.decoder.weight",
        "classifier.weight",
        "vit.pos_embed",
        "shared.weight",
    ],
)
def test_embeddings_and_heads_by_name_go_to_adamw(name: str) -> None:
    rule = Layout.from_shapes({name: (64, 32)})[name]
    assert rule.algorithm == "adamw"
    assert rule.matrices == ()
    assert rule.guessed
    assert "by name" in rule.reason


@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.0.attention.output.dense.weight",
        "layers.0.head.weight",
        "blocks.3.attn.output.weight",
        "decoder.embedded_layer.weight",
        "mlp.gate.weight",
        "header.weight",
    ],
)
def test_hidden_matrices_with_similar_names_stay_with_muon(name: str) -> None:
    assert _algorithms({name: (64, 32)}) == {name: "muon"}


@pytest.mark.parametrize(
    ("name", "shape", "matrices"),
    [
        ("w", (5, 7), ((5, 7),)),
        ("experts.w", (3, 5, 7), ((5, 7),) * 3),
        ("patch.kernel", (64, 3, 4, 4), ((64, 48),)),
        ("depthwise.kernel", (64, 1, 3, 3), ((64, 9),)),
        ("volume.kernel", (8, 2, 2, 2, 2), ((8, 16),)),
        ("empty", (0, 7), ((0, 7),)),
        ("empty", (7, 0), ((7, 0),)),
        ("attn.qkv.weight", (96, 32), ((32, 32),) * 3),
        ("attn.in_proj_weight", (96, 32), ((32, 32),) * 3),
        ("mlp.gate_up_proj.weight", (96, 32), ((48, 32),) * 2),
        ("experts.b_bias", (3, 5), ()),
        ("linear_attn.conv1d.weight", (56, 1, 4), ()),
        ("cls_token", (1, 1, 8), ()),
        ("norm.weight", (5,), ()),
        ("scale", (), ()),
    ],
)
def test_without_a_model_shape_decides(
    name: str, shape: tuple[int, ...], matrices: tuple[tuple[int, int], ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = Layout.from_shapes({name: shape})[name]
    assert rule.shape == shape
    assert rule.matrices == matrices
    assert rule.algorithm == ("muon" if matrices else "adamw")
    assert rule.guessed == (len(shape) >= 2)


class _Unknown(nn.Module):
    """Every kind of parameter that an unknown model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
        self.patch = nn.Conv2d(3, 8, 4)
        self.hidden = nn.Linear(8, 6)
        self.experts = nn.Parameter(torch.zeros(2, 5, 6))
        self.final = nn.Linear(6, 11, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.final


def test_an_unknown_model_goes_by_shape_and_warns_once_with_a_list() -> None:
    with pytest.warns(UserWarning, match="no family table describes") as caught:
        layout = Layout.from_model(_Unknown())
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "'_Unknown'" in text
    assert "hidden.weight (6, 8) -> muon (matrix, by shape)" in text
    assert "tokens.weight" not in text, "its module is an embedding: not a guess"
    assert caught[0].filename == __file__
    assert {name: (rule.algorithm, rule.matrices) for name, rule in layout.items()} == {
        "experts": ("muon", ((5, 6),) * 2),
        "tokens.weight": ("adamw", ()),
        "conv.weight": ("muon", ((8, 24),)),
        "conv.bias": ("adamw", ()),
        "depthwise.weight": ("adamw", ()),
        "depthwise.bias": ("adamw", ()),
        "patch.weight": ("muon", ((8, 48),)),
        "patch.bias": ("adamw", ()),
        "hidden.weight": ("muon", ((6, 8),)),
        "hidden.bias": ("adamw", ()),
        "final.weight": ("adamw", ()),
    }


def test_unknown_experts_are_read_by_their_flags_and_unknown_conv1d_is_transposed() -> None:
    class Experts(nn.Module):
        is_transposed, is_concatenated, has_gate, has_bias = True, False, True, False

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 6, 10))
            self.down_proj = nn.Parameter(torch.zeros(2, 5, 6))

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 9))

    with pytest.warns(UserWarning, match="by the module's flags"):
        layout = Layout.from_model(nn.ModuleDict({"experts": Experts(), "fc": Conv1D()}))
    assert layout["experts.gate_up_proj"].matrices == ((5, 6),) * 4
    assert layout["experts.down_proj"].matrices == ((6, 5),) * 2
    assert layout["fc.weight"].matrices == ((9, 6),)


def test_a_long_list_of_guesses_is_cut() -> None:
    model = nn.ModuleDict({f"part{i}": nn.Linear(2, 2, bias=False) for i in range(25)})
    with pytest.warns(UserWarning, match="and 5 more kinds"):
        Layout.from_model(model)


def test_tied_embeddings_go_to_adamw_whatever_their_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backwards = nn.Linear(4, 9, bias=False)
            self.wte = nn.Module()
            self.wte.weight = self.backwards.weight

    layout = Layout.from_model(Tied())
    assert list(layout) == ["backwards.weight"]
    assert layout["backwards.weight"].algorithm == "adamw"
    assert "tied with wte.weight" in layout["backwards.weight"].reason
    tied = Layout.from_model(fresh("llama", tie_word_embeddings=True))
    assert tied["model.embed_tokens.weight"].algorithm == "adamw"
    assert "lm_head.weight" not in tied


def test_wrapped_models_have_the_layout_of_what_they_wrap() -> None:
    model = tiny("llama")
    plain = Layout.from_model(model, heads_per_block=1)
    assert Layout.from_model(nn.DataParallel(model), heads_per_block=1) == plain
    assert Layout.from_model(torch.compile(model, backend="eager"), heads_per_block=1) == plain


def test_frozen_parameters_are_listed_and_packed_integers_are_no_matrices() -> None:
    model = fresh("llama")
    model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    packed = nn.Parameter(torch.zeros(768, 1, dtype=torch.uint8), requires_grad=False)
    model.get_submodule("model.layers.1.self_attn.q_proj").weight = packed
    layout = Layout.from_model(model, heads_per_block=1)
    assert layout["model.layers.0.mlp.up_proj.weight"].algorithm == "muon"
    rule = layout["model.layers.1.self_attn.q_proj.weight"]
    assert (rule.algorithm, rule.reason) == ("adamw", "not a floating-point parameter")
    assert not rule.guessed


class TestLogicalShapes:
    """A parameter whose data is not its matrix."""

    def _model(self, data: torch.Tensor) -> nn.Module:
        model = fresh("llama")
        model.get_submodule("model.layers.0.mlp.up_proj").weight = nn.Parameter(data)
        return model

    @pytest.mark.parametrize("attribute", ["logical_shape", "ds_shape"])
    def test_a_known_logical_shape_decides(self, attribute: str) -> None:
        model = self._model(torch.empty(0))
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        setattr(weight, attribute, torch.Size([48, 32]))
        rule = Layout.from_model(model)["model.layers.0.mlp.up_proj.weight"]
        assert (rule.shape, rule.matrices) == ((48, 32), ((48, 32),))

    @pytest.mark.parametrize("data", [torch.empty(0), torch.empty(768)])
    def test_an_unknown_one_is_an_error(self, data: torch.Tensor) -> None:
        message = r"^model\.layers\.0\.mlp\.up_proj\.weight: got data of shape .*logical_shape"
        with pytest.raises(ValueError, match=message):
            Layout.from_model(self._model(data))

    def test_a_parameter_that_no_module_explains_is_an_error(self) -> None:
        model = nn.Module()
        model.experts = nn.Parameter(torch.empty(0))
        with pytest.raises(ValueError, match=r"^experts: got data of shape \(0,\)"):
            Layout.from_model(model)

    def test_released_storage_keeps_its_shape(self) -> None:
        model = fresh("llama")
        before = Layout.from_model(model)
        for parameter in model.parameters():
            parameter.untyped_storage().resize_(0)
        assert Layout.from_model(model) == before

    def test_empty_biases_and_norms_are_vectors(self) -> None:
        model = nn.ModuleDict({"a": nn.Linear(3, 1), "n": nn.LayerNorm(3)})
        model["a"].weight = nn.Parameter(torch.empty(0, 3))
        model["a"].bias = nn.Parameter(torch.empty(0))
        model["n"].weight = nn.Parameter(torch.empty(0))
        with pytest.warns(UserWarning, match="no family table"):
            layout = Layout.from_model(model)
        assert layout["a.bias"].algorithm == layout["n.weight"].algorithm == "adamw"
        assert layout["a.weight"].matrices == ((0, 3),)


class TestOverrides:
    """A glob on the full name; first match wins."""

    def _layout(self, overrides: dict[str, Any], **options: Any) -> Layout:
        return Layout.from_model(tiny("llama"), overrides=overrides, **options)

    def test_each_kind_of_override(self) -> None:
        layout = self._layout(
            {
                "*.0.self_attn.q_proj.weight": BlockSpec.rows(30, 10),
                "*.1.self_attn.q_proj.weight": "adamw",
                "lm_head.*": "muon",
            }
        )
        first = layout["model.layers.0.self_attn.q_proj.weight"]
        assert first.matrices == ((30, 32), (10, 32))
        assert first.reason == "override '*.0.self_attn.q_proj.weight'"
        assert not first.guessed
        assert layout["model.layers.1.self_attn.q_proj.weight"].algorithm == "adamw"
        assert layout["lm_head.weight"].matrices == ((64, 32),)

    def test_the_first_match_wins(self) -> None:
        glob = {"*.0.mlp.up_proj.weight": "adamw", "*.mlp.*": BlockSpec.whole()}
        layout = self._layout(glob)
        assert layout["model.layers.0.mlp.up_proj.weight"].algorithm == "adamw"
        assert layout["model.layers.1.mlp.up_proj.weight"].algorithm == "muon"
        layout = self._layout(dict(reversed(glob.items())))
        assert layout["model.layers.0.mlp.up_proj.weight"].algorithm == "muon"

    def test_muon_means_the_tables_own_cut_where_it_has_one(self) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert len(self._layout({name: "muon"}, heads_per_block=1)[name].matrices) == 4
        shapes = {"stack": (2, 3, 4), "kernel": (2, 3, 4, 4), "wte.weight": (5, 4)}
        layout = Layout.from_shapes(shapes, overrides={"*": "muon"})
        counts = {name: len(rule.matrices) for name, rule in layout.items()}
        assert counts == {"stack": 2, "kernel": 1, "wte.weight": 1}

    def test_wrapper_prefixes_in_a_glob_are_ignored(self) -> None:
        layout = self._layout({"module.lm_head.weight": "muon"})
        assert layout["lm_head.weight"].algorithm == "muon"

    def test_an_override_that_matches_nothing_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=re.escape("overrides['self_attn.*']: got no param")):
            self._layout({"self_attn.*": "muon"})

    def test_a_spec_that_does_not_fit_names_the_parameter(self) -> None:
        with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight: got sizes"):
            self._layout({"*.0.mlp.up_proj.weight": BlockSpec.rows(1, 2)})

    def test_a_vector_cannot_be_given_to_muon(self) -> None:
        with pytest.raises(ValueError, match=r"^model\.norm\.weight: got Muon by override"):
            self._layout({"model.norm.weight": "muon"})

    def test_another_value_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="wanted a BlockSpec, 'adamw' or 'muon'"):
            self._layout({"*": "sgd"})


class TestHeadRequests:
    """`heads_per_block` that cannot be met: never a silent whole matrix."""

    @pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
    def test_what_is_no_count(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"^heads_per_block: got .*whole number >= 1"):
            Layout.from_model(tiny("llama"), heads_per_block=value)

    def test_a_count_that_does_not_divide_names_the_module_and_what_works(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"^model\.layers\.0\.self_attn\.q_proj\.weight: got "
            r"heads_per_block=3 for 4 heads; .*these work: 1, 2, 4\.",
        ):
            Layout.from_model(tiny("llama"), heads_per_block=3)

    def test_key_value_heads_must_divide_too(self) -> None:
        shapes = {
            "layers.0.self_attn.q_proj.weight": (120, 32),
            "layers.0.self_attn.k_proj.weight": (60, 32),
        }
        config = _llama_config(num_attention_heads=12, num_key_value_heads=6)
        with pytest.raises(
            ValueError,
            match=r"^layers\.0\.self_attn\.k_proj\.weight: got heads_per"
            r"_block=4 for 6 heads; .*these work: 1, 2, 3, 6, 12\.",
        ):
            Layout.from_shapes(shapes, config=config, heads_per_block=4)

    @pytest.mark.parametrize("option", [{"heads_per_block": 1}, {"mla_components": True}])
    def test_an_unknown_family(self, option: dict[str, Any]) -> None:
        shapes = {"h.0.mlp.weight": (8, 8), "h.0.attn.to_q.weight": (8, 8)}
        message = r"modules like 'h\.0\.attn\.to_q\.weight'; wanted one of .*glm_moe_dsa.*register"
        with pytest.raises(ValueError, match=message) as caught:
            Layout.from_shapes(shapes, **option)
        assert str(caught.value).startswith(next(iter(option)))
        with pytest.raises(ValueError, match="unknown type '_Unknown'"):
            Layout.from_model(_Unknown(), **option)

    def test_a_family_where_nothing_matched(self) -> None:
        shapes = {"layers.0.mlp.up_proj.weight": (8, 8)}
        with pytest.raises(
            ValueError,
            match=r"^heads_per_block: got a model of type 'llama' with "
            r"no module .*layers\.0\.mlp\.up_proj\.weight",
        ):
            Layout.from_shapes(shapes, config=_llama_config(), heads_per_block=1)

    def test_attention_that_the_table_does_not_describe(self) -> None:
        shapes = {
            "layers.0.self_attn.q_proj.weight": (40, 32),
            "adapter.attn.qkv.weight": (96, 32),
        }
        with pytest.raises(ValueError, match=r"^adapter\.attn\.qkv\.weight: got heads_per_block"):
            Layout.from_shapes(shapes, config=_llama_config(), heads_per_block=1)
        layout = Layout.from_shapes(
            shapes,
            config=_llama_config(),
            heads_per_block=1,
            overrides={"adapter.*": BlockSpec.rows(32, 32, 32)},
        )
        assert len(layout["adapter.attn.qkv.weight"].matrices) == 3

    def test_components_without_mla(self) -> None:
        with pytest.raises(ValueError, match=r"^mla_components: got a model of type 'llama'"):
            Layout.from_model(tiny("llama"), mla_components=True)

    def test_output_columns_need_a_number_of_heads(self) -> None:
        with pytest.raises(ValueError, match=r"^cut_output: got True with heads_per_block=None"):
            Layout.from_model(tiny("llama"), cut_output=True)
        with pytest.raises(ValueError, match=r"^cut_output: got a model of type 'deepseek_v4'"):
            Layout.from_model(tiny("deepseek_v4"), heads_per_block=1, cut_output=True)

    def test_a_shape_that_contradicts_the_config_names_the_module(self) -> None:
        shapes = {"layers.0.self_attn.qkv_proj.weight": (60, 32)}
        config = SimpleNamespace(model_type="phi3", **CONFIGS["phi3"])
        with pytest.raises(ValueError, match=r"^layers\.0\.self_attn\.qkv_proj\.weight: got sizes"):
            Layout.from_shapes(shapes, config=config)

    def test_a_config_without_the_sizes_names_module_and_attribute(self) -> None:
        shapes = {"layers.0.self_attn.q_proj.weight": (40, 32)}
        with pytest.raises(ValueError, match=r"config\.num_attention_heads: got None"):
            Layout.from_shapes(shapes, config=SimpleNamespace(model_type="llama"))


class TestRegistration:
    """Families that users add."""

    def test_a_registered_family_works_like_a_built_in_one(self) -> None:
        register_family(
            "test_registered",
            {
                "*.attn.q.weight": (HeadRows("n_heads"), "query"),
                "*.mix.weight": BlockSpec.columns(3, 5),
                "*.up.weight": "muon",
                "tok.weight": "adamw",
            },
        )
        shapes = {
            "tok.weight": (20, 8),
            "h.0.attn.q.weight": (6, 8),
            "h.0.mix.weight": (6, 8),
            "h.0.up.weight": (6, 8),
        }
        config = SimpleNamespace(model_type="test_registered", n_heads=3)
        layout = Layout.from_shapes(shapes, config=config, heads_per_block=1)
        assert [rule.matrices for rule in layout.values()] == [
            (),
            ((2, 8),) * 3,
            ((6, 3), (6, 5)),
            ((6, 8),),
        ]
        assert layout["h.0.attn.q.weight"].reason == "query; 3 heads in blocks of 1"
        assert layout["h.0.up.weight"].reason == "family test_registered"
        assert not any(rule.guessed for rule in layout.values())

    def test_groups_say_which_numbers_of_heads_are_rectangular(self) -> None:
        """4 groups of 3 query heads: 2 heads of one group, then 1 of it and 1 of the next, ..."""
        parts = (Part("3 * 2", "q_heads"), Part(2, "groups"), Part(2, "groups"))
        register_family("test_groups", {"qkv.weight": Groups("groups", parts)})
        config = SimpleNamespace(model_type="test_groups", q_heads=12, groups=4)
        shapes = {"qkv.weight": (40, 5)}
        counts = {
            k: len(
                Layout.from_shapes(shapes, config=config, heads_per_block=k)["qkv.weight"].matrices
            )
            for k in (None, 1, 6, 12)
        }
        assert counts == {None: 3, 1: 12 + 4 + 4, 6: 2 + 1 + 1, 12: 3}
        with pytest.raises(
            ValueError,
            match=r"^qkv\.weight: got heads_per_block=2 for 12 and 4 "
            r"heads; .*these work: 1, 6, 12\.",
        ):
            Layout.from_shapes(shapes, config=config, heads_per_block=2)

    def test_a_model_class_may_offer_its_table_itself(self) -> None:
        class Own(nn.Module):
            muonloom_family = {"q.weight": HeadRows("heads"), "e": "adamw"}  # noqa: RUF012
            heads = 3

            def __init__(self) -> None:
                super().__init__()
                self.q = nn.Linear(8, 6, bias=False)
                self.e = nn.Parameter(torch.zeros(7, 8))

        layout = Layout.from_model(Own(), heads_per_block=1)
        assert layout["q.weight"].matrices == ((2, 8),) * 3
        assert layout["e"].algorithm == "adamw"

    @pytest.mark.parametrize(
        ("model_type", "table", "message"),
        [
            ("", {"*": "muon"}, "model_type: got ''"),
            ("test_bad", {}, "test_bad: got {}"),
            ("test_bad", [("*", "muon")], "wanted a mapping"),
            ("test_bad", {"*.w": 3}, "test_bad['*.w']: got 3"),
            ("test_bad", {"*.w": ("muon", 3)}, "test_bad['*.w']: got ('muon', 3)"),
        ],
    )
    def test_what_is_no_table(self, model_type: str, table: Any, message: str) -> None:
        with pytest.raises(TypeError) as caught:
            register_family(model_type, table)
        assert message in str(caught.value)

    @pytest.mark.parametrize("size", ["a b", "a / 2", "f(a)", "a.b", "1.5", "__import__('os')"])
    def test_sizes_are_arithmetic_on_names_and_nothing_else(self, size: str) -> None:
        register_family("test_sizes", {"w": HeadRows(size)})
        config = SimpleNamespace(model_type="test_sizes", a=2)
        with pytest.raises(ValueError, match="wanted config attributes and whole numbers joined"):
            Layout.from_shapes({"w": (4, 4)}, config=config)

    def test_size_arithmetic(self) -> None:
        register_family("test_sizes", {"w": HeadRows("2 * a + b - 1 // c")})
        config = SimpleNamespace(model_type="test_sizes", a=2, b=3, c=2)
        layout = Layout.from_shapes({"w": (14, 4)}, config=config, heads_per_block=1)
        assert layout["w"].matrices == ((2, 4),) * 7


def test_the_table_reads_at_a_glance() -> None:
    shapes = {f"layers.{i}.w.weight": (4, 3) for i in range(12)} | {"norm.weight": (3,)}
    lines = str(Layout.from_shapes(shapes)).splitlines()
    assert [line.split("  ") for line in (re.sub(r" {2,}", "  ", line) for line in lines)] == [
        ["parameter", "count", "shape", "algorithm", "matrices in each", "why"],
        lines[1].split("  "),
        [
            "layers.*.w.weight",
            "12",
            "(4, 3)",
            "muon",
            "1 x (4, 3)",
            "matrix, by shape (guessed)",
        ],
        ["norm.weight", "1", "(3,)", "adamw", "-", "scalar or vector"],
    ]
    assert set(lines[1]) == {"-", " "}


def test_kinds_keep_different_treatments_apart() -> None:
    layout = Layout.from_model(tiny("llama"), overrides={"*.0.mlp.up_proj.weight": "adamw"})
    of_up = [kind for kind in layout.kinds() if kind.kind == "model.layers.*.mlp.up_proj.weight"]
    assert [(kind.count, kind.algorithm, kind.parameters) for kind in of_up] == [
        (1, "adamw", 48 * 32),
        (1, "muon", 48 * 32),
    ]


def test_a_rule_is_data() -> None:
    rule = Layout.from_shapes({"layers.7.experts.3.w": (4, 3)})["layers.7.experts.3.w"]
    assert rule.kind == "layers.*.experts.*.w"
    assert isinstance(rule, Rule)
    assert hash(rule) == hash(Layout.from_shapes({rule.name: (4, 3)})[rule.name])


def test_transposed_convolutions_are_no_matrices() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 6, 3), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="no family table"):
        layout = Layout.from_model(model)
    assert layout["0.weight"].algorithm == "adamw"
    assert "transposed convolution" in layout["0.weight"].reason


def test_numbers_make_no_kinds() -> None:
    shapes = {
        f"layers.{layer}.experts.fc1.weight{expert}": (4, 8)
        for layer in range(2)
        for expert in range(3)
    }
    assert {rule.kind for rule in Layout.from_shapes(shapes).values()} == {
        "layers.*.experts.fc1.weight*"
    }
