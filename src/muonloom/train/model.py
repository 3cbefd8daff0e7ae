"""The model of a run: built from a configuration, or read from a local directory of safetensors."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from muonloom.errors import ConfigError, complaint
from muonloom.train.config import ModelConfig

if TYPE_CHECKING:
    from muonloom.experts import Float8Experts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(
    config: ModelConfig, *, vocabulary: int, sequence_length: int, device: torch.device
) -> nn.Module:
    """Return the causal LM of `config` on `device`, in train mode.

    Only safetensors are read, from local files, and no code of the model's directory is run. Random
    weights follow torch's global generator.

    Args:
        config: the `[model]` section.
        vocabulary: token numbers that the data has; the model must embed all of them.
        sequence_length: positions that the model must have.
        device: where the parameters go.

    Raises:
        ConfigError: a key, path or value that makes no model, or one that does not fit the data.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = _from_directory(config) if config.directory else _from_config(config)
    _check_vocabulary(model, vocabulary)
    _check_positions(model, sequence_length)
    if config.experts is not None:
        _set_experts(model, config.experts)
    return model.to(device).train()


def _from_directory(config: ModelConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    key = "model.directory"
    directory = Path(str(config.directory))
    if not directory.is_dir():
        raise _bad(key, f"{directory}, which is no directory", "a directory with a saved model")
    if not any(directory.glob("*.safetensors")):
        raise _bad(
            key,
            f"{directory}, without any .safetensors",
            "weights in safetensors",
            "Pickled weights are not read; save again with safe_serialization=True.",
        )
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            str(directory),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=DTYPES[config.dtype],
            **_attention(config),
        )
    except Exception as error:  # a damaged directory fails in many ways inside Transformers
        raise _bad(key, f"{directory} ({_first_line(error)})", "a model that loads") from None
    return model


def _from_config(config: ModelConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    description = make_transformers_config(config.config)
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(
            description,
            trust_remote_code=False,
            dtype=DTYPES[config.dtype],
            **_attention(config),
        )
    except Exception as error:  # values that do not fit together fail in the model's own code
        raise _bad("model.config", _first_line(error), "values that make a causal LM") from None
    return model


def make_transformers_config(config: dict[str, Any] | str | None) -> Any:
    """Return the Transformers configuration of an inline table, or of a path to a config.json.

    Raises:
        ConfigError: no such file, no known `model_type`, or a key that this type does not have.
    """
    from transformers import CONFIG_MAPPING

    fields = _read_json(config) if isinstance(config, str) else dict(config or {})
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=1)
        raise _bad(
            "model.config.model_type",
            repr(model_type),
            "a model type of the installed Transformers",
            f"Did you mean {near[0]!r}?" if near else 'Such as "glm_moe_dsa" or "llama".',
        )
    kind = CONFIG_MAPPING[model_type]
    if not isinstance(config, str):
        # Files of others carry keys of other versions; a table written for this run has no such excuse.
        _check_fields(kind, fields)
    try:
        return kind(**fields)
    except Exception as error:  # checked by huggingface_hub's own exception types
        raise _bad("model.config", _first_line(error), f"values that {model_type} admits") from None


def _check_fields(kind: type, fields: dict[str, Any]) -> None:
    default = kind()
    known = {*default.to_dict(), *inspect.signature(kind).parameters, *default.attribute_map}
    for name in fields:
        if name not in known and not _is_read(name, kind):
            near = difflib.get_close_matches(name, known, n=1)
            raise _bad(
                f"model.config.{name}",
                "an unknown key",
                f"a field of {kind.__name__}",
                f"Did you mean {near[0]}?" if near else "Remove it.",
            )


def _is_read(name: str, kind: type) -> bool:
    """Whether code reads a field that its configuration class does not declare.

    Such fields exist: `head_dim` of Qwen3-MoE is read by the attention and declared nowhere.
    """
    modules = (
        kind.__module__,
        kind.__module__.replace(".configuration_", ".modeling_"),
        "transformers.configuration_utils",
        "transformers.modeling_rope_utils",
    )
    pattern = re.compile(rf"""config\.{re.escape(name)}\b|["']{re.escape(name)}["']""")
    return any(pattern.search(_source(module)) for module in modules)


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return ""
    return Path(found.origin).read_text(encoding="utf-8")


def _read_json(path: str) -> dict[str, Any]:
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad("model.config", f"{path} ({error.strerror})", "a config.json") from None
    except ValueError as error:
        raise _bad("model.config", f"{path} ({error})", "a config.json") from None
    if not isinstance(fields, dict):
        raise _bad("model.config", f"{path}, a {type(fields).__name__}", "a JSON object")
    return fields


def _attention(config: ModelConfig) -> dict[str, str]:
    return {} if config.attention is None else {"attn_implementation": config.attention}


def _check_vocabulary(model: nn.Module, vocabulary: int) -> None:
    size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if size < vocabulary:
        raise _bad(
            "model.config.vocab_size",
            size,
            f"at least {vocabulary}, the token numbers of data.tokenizer",
            "Raise it, or choose another tokenizer.",
        )


def _check_positions(model: nn.Module, sequence_length: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < sequence_length:
        raise _bad(
            "data.sequence_length",
            sequence_length,
            f"at most the model's max_position_embeddings ({positions})",
            "Shorten the sequences, or raise model.config.max_position_embeddings.",
        )


def _set_experts(model: nn.Module, implementation: str) -> None:
    try:
        model.set_experts_implementation(implementation)  # type: ignore[operator]
    except (ValueError, AttributeError) as error:
        raise _bad(
            "model.experts",
            f"{implementation!r} ({_first_line(error)})",
            "an implementation it has",
        ) from None


def attach_experts(model: nn.Module, config: ModelConfig) -> Float8Experts | None:
    """Make the expert weights FP8 where `[model] expert_weights` says so, and return their engine.

    Raises:
        ConfigError: a model without experts, or with a layout that the engine does not know.
    """
    if config.expert_weights == "parameter":
        return None
    from muonloom.experts import Float8Experts

    try:
        return Float8Experts.attach(model)
    except ValueError as error:
        got = f'"{config.expert_weights}" ({_first_line(error)})'
        raise _bad("model.expert_weights", got, '"parameter" for this model') from None


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class; FSDP2 puts a class of its own in its place."""
    return type(model).__name__.removeprefix("FSDP")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def _bad(key: str, got: object, wanted: str, remedy: str = "Change it in the file.") -> ConfigError:
    return ConfigError(complaint(key, got=got, wanted=wanted, remedy=remedy))
