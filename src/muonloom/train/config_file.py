"""From a TOML file and `--set` overrides to a `TrainConfig`, or to one line that names the bad key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from muonloom.errors import ConfigError, complaint
from muonloom.train.config import TrainConfig


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read `path`, apply each ``a.b=value``, and check everything.

    Raises:
        ConfigError: one line that leads with the path, the override or the key.
    """
    table = _read_toml(path)
    for override in overrides:
        _apply_override(table, override)
    try:
        return TrainConfig.model_validate(_tuples(table))
    except ValidationError as error:
        raise ConfigError(_first_complaint(error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            complaint(
                str(path), got=reason, wanted="a TOML file", remedy="See configs/default.toml."
            )
        ) from None


def parse_override(override: str) -> tuple[list[str], Any]:
    """Split ``a.b=value`` into its path and its TOML value; what is not TOML is a string."""
    key, equals, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(
            complaint(
                "--set", got=repr(override), wanted="KEY=VALUE", remedy="Try --set optim.lr=0.02"
            )
        )
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return path, text
    return path, value["value"] if value.keys() == {"value"} else text


def _apply_override(table: dict[str, Any], override: str) -> None:
    path, value = parse_override(override)
    for depth, part in enumerate(path[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                complaint(
                    f"--set {'.'.join(path)}",
                    got=f"{'.'.join(path[:depth])}, which is a value",
                    wanted="a table",
                    remedy="Set the value itself.",
                )
            )
    table[path[-1]] = value


def _tuples(value: Any) -> Any:
    """TOML's arrays under the keys that are tuples of fixed length."""
    optim = value.get("optim")
    if not isinstance(optim, dict):
        return value
    fixed = {
        key: tuple(item)
        for key, item in optim.items()
        if key in ("adamw_betas", "ns_coefficients") and isinstance(item, list)
    }
    return {**value, "optim": {**optim, **fixed}}


def _first_complaint(error: ValidationError) -> str:
    """One line for pydantic's first error, and how many more there are."""
    errors = error.errors(include_url=False, include_context=False)
    # An unknown key explains most other errors (a misspelt one is also missing): tell it first.
    errors.sort(key=lambda item: item["type"] != "extra_forbidden")
    first = errors[0]
    key = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    line = _describe(key, dict(first))
    return line if len(errors) == 1 else f"{line} ({len(errors) - 1} more after this one.)"


def _is_branch(part: int | str) -> bool:
    """Whether a part of pydantic's path names a branch of a union, and not a key of the file."""
    return isinstance(part, str) and (part in _UNION_BRANCHES or "[" in part)


_UNION_BRANCHES = {"str", "dict", "float", "int", "none"}


def _describe(key: str, first: dict[str, Any]) -> str:
    kind = first["type"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return _unknown_key(key, first["loc"])
    if kind == "missing":
        return complaint(key, got="nothing", wanted="a value", remedy="This key is required.")
    if kind == "value_error":
        return message if message.startswith(key or "schedule.") else f"{key}: {message}."
    wanted = "a table" if kind == "model_type" else message.removeprefix("Input should be ")
    return complaint(
        key, got=repr(first["input"]), wanted=wanted, remedy="Change it in the file or by --set."
    )


def _fields(location: Sequence[int | str]) -> list[str]:
    """Return the keys that the section at `location`'s parent admits."""
    section: type[BaseModel] = TrainConfig
    for part in location[:-1]:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    return list(section.model_fields)


def _unknown_key(key: str, location: Sequence[int | str]) -> str:
    known = _fields(location)
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    wanted = "a key of this section" if near else "one of " + ", ".join(known)
    remedy = f"Did you mean {near[0]}?" if near else "Remove it."
    return complaint(key, got="an unknown key", wanted=wanted, remedy=remedy)
