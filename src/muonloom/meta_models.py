"""Models of transformers on the meta device, from a configuration alone.

No weight is read, no network is used and no code of a model's directory is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muonloom.errors import ConfigError, complaint

# Published model types whose modules are those of another type.
_SAME_MODULES = {"kimi_k2": "deepseek_v3"}


def read_fields(path: Path) -> dict[str, Any]:
    """Read a config.json, or the one of a directory.

    Raises:
        ConfigError: there is none, or it is no JSON object.
    """
    if path.is_dir():
        path = path / "config.json"
    fields = parse_file(path, json.loads, "a model's config.json")
    if not isinstance(fields, dict):
        raise bad(str(path), f"a {type(fields).__name__}", "a JSON object")
    return fields


def parse_file(path: Path, parse: Callable[[str], Any], wanted: str) -> Any:
    """Return what `parse` makes of a text file; it may raise ValueErrors.

    Raises:
        ConfigError: there is no such file, or it cannot be parsed.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise bad(str(path), error.strerror, wanted) from None
    except ValueError as error:  # JSON, TOML and UTF-8 errors alike
        raise bad(str(path), str(error), wanted) from None


def make_config(fields: Mapping[str, Any], source: str) -> Any:
    """Return the configuration object of these fields.

    Args:
        fields: of a config.json.
        source: what they are from, for errors.

    Raises:
        ConfigError: a type that transformers does not have, or values that it does not admit.
    """
    from transformers import CONFIG_MAPPING

    model_type = fields.get("model_type")
    kind = _SAME_MODULES.get(str(model_type), model_type)
    if kind not in CONFIG_MAPPING:
        raise bad(
            f"{source}: model_type", repr(model_type), "a type that the installed Transformers has"
        )
    rest = {key: value for key, value in fields.items() if key not in ("model_type", "auto_map")}
    try:
        with quiet():
            return CONFIG_MAPPING[kind](**rest)
    except Exception as error:  # values are checked by several libraries' own exception types
        raise bad(source, _first_line(error), f"values that {kind} admits") from None


def build_on_meta(config: Any, source: str, *, class_name: str | None = None) -> nn.Module:
    """Return the model of a configuration.

    Args:
        config: a configuration object.
        source: what it is from, for errors.
        class_name: of transformers' model class; None, or a name that it does not have: the causal LM of
            this configuration, or its bare model where there is none.

    Raises:
        ConfigError: values that do not fit together.
    """
    build = _builder(config, class_name)
    try:
        with quiet(), torch.device("meta"):
            model: nn.Module = build(config, dtype=config.dtype or torch.float32)
    except Exception as error:  # values that do not fit together fail in the model's own code
        raise bad(source, _first_line(error), "values that make a model") from None
    return model


def _builder(config: Any, class_name: str | None) -> Any:
    import transformers

    named = getattr(transformers, class_name or "", None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        build: Any = named
        return build._from_config
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM.from_config
    return transformers.AutoModel.from_config


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers from logging advice that concerns generation and weights."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def bad(name: str, got: object, wanted: str) -> ConfigError:
    """Return the error about a file's content."""
    return ConfigError(complaint(name, got=got, wanted=wanted, remedy="Correct the file."))
