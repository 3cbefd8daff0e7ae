"""Multi-head latent attention on real tiny models: what is cut, what stays, and by whose update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom import BlockSpec, Layout
from split.support import (
    FP32_TOLERANCE,
    HEADS,
    KV_HEAD,
    MLA_MODELS,
    NOPE,
    Q_HEAD,
    VALUE,
    alone,
    gradients_of,
    mla_sample,
    relative,
    same_bits,
    updates,
)

DIVISORS = [k for k in range(1, HEADS + 1) if HEADS % k == 0]
EACH_MODEL = pytest.mark.parametrize("name", MLA_MODELS)


def is_query(name: str) -> bool:
    return name.endswith(("self_attn.q_b_proj.weight", "self_attn.q_proj.weight"))


def is_up_projection(name: str) -> bool:
    return is_query(name) or name.endswith("self_attn.kv_b_proj.weight")


@EACH_MODEL
def test_none_changes_nothing_bit_for_bit(name: str) -> None:
    """The default is the same step as with every attention projection declared whole."""
    model = mla_sample(name)
    default = updates(gradients_of(model), Layout.from_model(model, heads_per_block=None))
    whole = updates(
        gradients_of(model),
        Layout.from_model(model, overrides={"*.self_attn.*_proj*.weight": BlockSpec.whole()}),
    )
    assert default.keys() == whole.keys()
    assert all(same_bits(default[key], whole[key]) for key in default)
    for key, parameter in model.named_parameters():
        if is_up_projection(key):
            assert parameter.grad is not None
            assert relative(default[key], alone(parameter.grad)) < FP32_TOLERANCE


@EACH_MODEL
@pytest.mark.parametrize("k", DIVISORS)
def test_up_projections_are_cut_and_nothing_else(name: str, k: int) -> None:
    model = mla_sample(name)
    plain = Layout.from_model(model)
    layout = Layout.from_model(model, heads_per_block=k)
    whole, cut = updates(gradients_of(model), plain), updates(gradients_of(model), layout)
    for key, rule in layout.items():
        if not is_up_projection(key):
            assert rule == plain[key]
            assert torch.allclose(cut[key], whole[key], rtol=0, atol=1e-5)
            continue
        rows = k * (Q_HEAD if is_query(key) else KV_HEAD)
        assert rule.matrices == ((rows, rule.shape[1]),) * (HEADS // k)
        distance = relative(cut[key], whole[key])
        assert distance < FP32_TOLERANCE if k == HEADS else distance > 0.05
    kept = {
        "self_attn.o_proj.",
        "self_attn.kv_a_proj_with_mqa.",
        "mlp.gate.",
        "mlp.down_proj.",
        "mlp.experts.",
        "mlp.shared_experts.",
        *(["self_attn.q_a_proj."] if "without" not in name else []),
        *(["self_attn.indexer."] if name == "glm_moe_dsa" else []),
    }
    assert all(any(part in key for key in layout) for part in kept)


def test_the_indexer_has_no_gradient_and_stays_bit_for_bit() -> None:
    model = mla_sample("glm_moe_dsa")
    indexer = [key for key, grad in gradients_of(model).items() if ".indexer." in key]
    assert indexer
    assert all(gradients_of(model)[key] is None for key in indexer)
    step = updates(gradients_of(model), Layout.from_model(model, heads_per_block=1))
    assert not any(step[key].any() for key in indexer)


@EACH_MODEL
@pytest.mark.parametrize("k", [k for k in range(1, HEADS) if k not in DIVISORS])
def test_a_count_that_does_not_divide_is_an_error_that_tells_which_do(name: str, k: int) -> None:
    with pytest.raises(ValueError, match=r"self_attn\.(q_b|q|kv_b)_proj.*1, 2, 4, 8"):
        Layout.from_model(mla_sample(name), heads_per_block=k)


@EACH_MODEL
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("components", [False, True])
def test_a_block_is_updated_as_a_parameter_of_its_own(name: str, k: int, components: bool) -> None:
    model = mla_sample(name)
    layout = Layout.from_model(model, heads_per_block=k, mla_components=components)
    step = updates(gradients_of(model), layout)
    for key, gradient in gradients_of(model).items():
        if not is_up_projection(key):
            continue
        assert gradient is not None
        first, second = (NOPE, Q_HEAD - NOPE) if is_query(key) else (NOPE, VALUE)
        got = step[key].view(HEADS // k, k, first + second, -1)
        blocks = gradient.view(HEADS // k, k, first + second, -1)
        for part in (slice(0, first), slice(first, None)) if components else (slice(None),):
            for block, update in zip(blocks[:, :, part], got[:, :, part], strict=True):
                wanted = alone(block.flatten(0, 1))
                assert relative(update.flatten(0, 1), wanted) < FP32_TOLERANCE


@EACH_MODEL
def test_components_of_all_heads_are_two_matrices_where_heads_stay_together(name: str) -> None:
    """Key-up and value-up apart, nope and rope apart: the paper's W_UK and W_UV."""
    model = mla_sample(name)
    step = updates(gradients_of(model), Layout.from_model(model, mla_components=True))
    key = "model.layers.1.self_attn.kv_b_proj.weight"
    gradient = gradients_of(model)[key]
    assert gradient is not None
    heads, got = gradient.view(HEADS, KV_HEAD, -1), step[key].view(HEADS, KV_HEAD, -1)
    for part in (slice(0, NOPE), slice(NOPE, None)):
        wanted = alone(heads[:, part].flatten(0, 1))
        assert relative(got[:, part].flatten(0, 1), wanted) < FP32_TOLERANCE


@EACH_MODEL
@pytest.mark.parametrize("k", [1, 4])
def test_the_output_is_cut_by_head_columns_on_request_only(name: str, k: int) -> None:
    model = mla_sample(name)
    gradients = gradients_of(model)
    cut = updates(gradients, Layout.from_model(model, heads_per_block=k, cut_output=True))
    for key in (n for n in gradients if n.endswith("o_proj.weight")):
        gradient = gradients[key]
        assert gradient is not None
        width = k * VALUE
        pairs = zip(cut[key].split(width, 1), gradient.split(width, 1), strict=True)
        assert all(relative(got, alone(block)) < FP32_TOLERANCE for got, block in pairs)


@EACH_MODEL
@settings(max_examples=6, deadline=None, derandomize=True)
@given(head=st.integers(0, HEADS - 1), exponent=st.floats(-12, 12))
def test_the_size_of_one_heads_gradient_changes_no_heads_update(
    name: str, head: int, exponent: float
) -> None:
    model = mla_sample(name)
    layout = Layout.from_model(model, heads_per_block=1)
    plain = {key: g for key, g in gradients_of(model).items() if is_up_projection(key)}
    scaled = {key: g.clone() for key, g in plain.items() if g is not None}
    for gradient in scaled.values():
        gradient.view(HEADS, -1)[head] *= 10.0**exponent
    before, after = updates(plain, layout), updates(scaled, layout)
    others = [h for h in range(HEADS) if h != head]
    for key in plain:
        a, b = before[key].view(HEADS, -1), after[key].view(HEADS, -1)
        assert same_bits(a[others], b[others])
        assert relative(b[head], a[head]) < FP32_TOLERANCE
