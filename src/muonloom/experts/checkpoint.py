"""The FP8 layout of DeepSeek for attached experts: `weight` and `weight_scale_inv` of each expert."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonloom.conversions import float8_description
from muonloom.experts.modules import Float8Module, shown_as, unfit
from muonloom.experts.weights import ExpertWeight
from muonloom.math.float8 import encode_float8_, scale_shape

Pair = tuple[Tensor, Tensor]


def save_float8(
    model: Any, modules: Sequence[Float8Module], directory: str | Path, **options: Any
) -> None:
    """Write `model` so that experts are FP8 with scales, and all else is as the model has it.

    Args:
        model: of Transformers; its names on disk are Transformers' for this family.
        modules: its attached experts.
        directory: made where it is missing.
        options: of Transformers' `save_pretrained`, such as ``max_shard_size``.

    Raises:
        ValueError: the model cannot be saved, or the family's experts have no such layout.
        RuntimeError: a weight is released.
    """
    if not hasattr(model, "save_pretrained"):
        raise unfit(
            "model", type(model).__name__, "a model of Transformers", "Pass the inner model."
        )
    pairs = {
        weight.name: _by_matrix(weight, gated=name == "gate_up_proj", module=module)
        for module in modules
        for name, weight in module._float8_weights().items()
    }
    with shown_as(modules, lambda weight: pairs[weight.name][0]):
        state = model.state_dict()
    state = _names_on_disk(model, state)
    numbers = {key for key, value in state.items() if value.dtype == torch.float8_e4m3fn}
    scales = _names_on_disk(model, {name: pair[1] for name, pair in pairs.items()})
    _check_names(numbers, scales)
    state |= {f"{key}_scale_inv": value for key, value in scales.items()}
    any_weight = next(iter(modules[0]._float8_weights().values()))
    description = _description(state, any_weight)
    # Empties the dictionary as it goes.
    model.save_pretrained(directory, state_dict=state, save_original_format=False, **options)
    path = Path(directory) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": description}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _by_matrix(weight: ExpertWeight, *, gated: bool, module: Any) -> Pair:
    """Return the numbers (experts, rows, columns) and the scales, with none across gate and up.

    The bytes are those of the engine where halves are whole blocks, or the two are one block; elsewhere
    blocks lie across, and the halves are quantized again from the dequantized weight.
    """
    weight.check_present()
    if module.is_transposed:
        raise unfit(
            weight.name,
            "experts that are stored transposed",
            "one matrix (out, in) an expert, as DeepSeek has it",
            "Save with model.save_pretrained, in BF16.",
        )
    _check_blocks(weight, gated)
    data, scale_inv = weight.writer.storage.data, weight.writer.storage.scale_inv
    rows, high = weight.parameter.shape[1], weight.writer.block[0]
    if not gated or rows // 2 % high == 0:
        return data, scale_inv
    if rows <= high:
        return data, torch.cat((scale_inv, scale_inv), dim=1)
    return _quantized_by_halves(weight)


def _quantized_by_halves(weight: ExpertWeight) -> Pair:
    experts, rows, columns = weight.parameter.shape
    block, held = weight.writer.block, weight.writer.storage
    halves = (2, rows // 2, columns)
    data = torch.empty((experts, *halves), dtype=held.data.dtype, device=held.data.device)
    scale_inv = held.scale_inv.new_empty((experts, *scale_shape(halves, block)))
    for expert in range(experts):
        values = torch.empty((1, rows, columns), device=held.data.device)
        encode_float8_(
            weight.decode_((expert,), values).view(halves),
            data[expert],
            scale_inv[expert],
            block=block,
            power_of_two=weight.writer.scale_format == "ue8m0",
        )
    return data.flatten(1, 2), scale_inv.flatten(1, 2)


def _check_blocks(weight: ExpertWeight, gated: bool) -> None:
    """Refuse what Transformers would read with other blocks: it divides rows by the number of scales."""
    _, rows, columns = weight.parameter.shape
    for size, block in zip((rows // (1 + gated), columns), weight.writer.block, strict=True):
        if size > block and size % block:
            raise unfit(
                weight.name,
                f"{size} rows or columns of a matrix in blocks of {block}",
                "whole blocks, or one",
                "Transformers reads other scales wrong: save with model.save_pretrained, in BF16.",
            )


def _names_on_disk(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted


def _check_names(numbers: set[str], scales: Mapping[str, Tensor]) -> None:
    odd = sorted(numbers ^ scales.keys()) or [
        name for name, value in scales.items() if value.ndim != 2 or not name.endswith(".weight")
    ]
    if odd:
        raise unfit(
            odd[0],
            "experts that this family stores together on disk",
            "one matrix an expert, as DeepSeek has it",
            "Save with model.save_pretrained, in BF16.",
        )


def _description(state: Mapping[str, Tensor], weight: ExpertWeight) -> dict[str, Any]:
    """Return the `quantization_config` of the saved configuration."""
    plain = [
        name.removesuffix(".weight")
        for name, value in state.items()
        if name.endswith(".weight") and value.ndim > 1 and value.dtype != torch.float8_e4m3fn
    ]
    quantization = float8_description(weight.writer.block, plain)
    if weight.writer.storage.scale_inv.dtype == torch.float8_e8m0fnu:
        quantization["scale_fmt"] = "ue8m0"
    return quantization
