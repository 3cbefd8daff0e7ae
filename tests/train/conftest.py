"""A tiny run: two documents' worth of text and a Llama of a few thousand parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY_MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def tiny_model() -> dict[str, Any]:
    """The inline table of the tiny model."""
    return dict(TINY_MODEL)


@pytest.fixture
def text_files(tmp_path: Path) -> Path:
    """A directory of eight text files that differ."""
    directory = tmp_path / "text"
    directory.mkdir()
    for number in range(8):
        words = [f"word{(number * 7 + index) % 13}" for index in range(120)]
        (directory / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    return directory


@pytest.fixture
def tiny_config(tmp_path: Path, text_files: Path) -> Path:
    """A complete TOML file of a run of six steps."""
    return write_config(
        tmp_path / "tiny.toml",
        {
            "run": {"name": "tiny", "directory": str(tmp_path / "runs"), "tensorboard": False},
            "model": {"config": TINY_MODEL},
            "data": {
                "source": "files",
                "files": [str(text_files / "*.txt")],
                "eval_fraction": 0.3,
                "sequence_length": 16,
            },
            "optim": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"},
            "schedule": {"steps": 6, "batch_size": 2, "warmup_steps": 1},
            "eval": {
                "every": 3,
                "sequences": 4,
                "final_sequences": 8,
                "prompt_tokens": 8,
                "sample_tokens": 4,
            },
        },
    )


def write_config(path: Path, tables: dict[str, dict[str, Any]]) -> Path:
    """Write `tables` as TOML: its inline values are JSON's but for the tables."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_inline(value)}" for key, value in table.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
