"""Whether a saved run and a configuration are the same training: key by key, and the text itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from muonloom.errors import ConfigError, complaint
from muonloom.train.config import TrainConfig
from muonloom.train.data import Corpus
from muonloom.train.logs import dump_json

MUST_AGREE: Mapping[str, tuple[str, ...]] = {
    "run": ("seed", "device", "threads"),
    "model": ("config", "dtype", "autocast", "attention", "experts", "expert_weights"),
    "data": ("sequence_length",),
    "optim": (
        *("algorithm", "lr", "weight_decay", "momentum", "nesterov"),
        *("ns_steps", "ns_coefficients", "ns_method", "ns_batch_bytes", "adjust_lr_fn"),
        *("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay", "momentum_dtype"),
        *("no_decay", "heads_per_block", "mla_components", "cut_output", "overrides"),
        *("idle_matrices", "skip_nonfinite"),
    ),
    "schedule": (
        *("steps", "batch_size", "accumulate", "clip_norm"),
        *("warmup_steps", "decay", "decay_fraction", "final_fraction"),
    ),
    "eval": ("sequences",),
    "checkpoint": (),
    "parallel": ("reduce_dtype",),
}
"""By section, the keys that change the weights, or what a loss of the curve is a loss on."""

MAY_DIFFER: Mapping[str, tuple[str, ...]] = {
    "run": ("name", "directory", "tensorboard", "save_model", "proofs"),
    "model": ("directory",),  # its config.json must agree; the weights are those of the checkpoint
    # All of them choose a text, and the text must agree.
    "data": ("source", "files", "eval_files", "format", "field", "eval_fraction", "tokenizer"),
    "optim": ("max_consecutive_skips", "free_gradients", "placement", "host"),
    "schedule": (),
    "eval": ("every", "final_sequences", "prompt_tokens", "sample_tokens", "temperature"),
    "checkpoint": ("every", "keep_last", "asynchronous", "extra_host_bytes", "resume", "verify"),
    # How many ranks there are, and what each holds, moves losses by the order of sums.
    "parallel": ("mode", "replicas", "backend", "timeout_s"),
}
"""By section, the keys that change no bit of the weights, but for the order in which ranks add up."""

_TEXT = "text"  # the SHA-256 of the corpus among the settings, beside the sections' keys


def settings_of(config: TrainConfig, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Return what decides a run's numbers, as plain values by dotted key."""
    sections = config.model_dump()
    settings = {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
    settings["run.device"] = device.type
    del settings["model.config"]
    settings |= {f"model.config.{key}": value for key, value in _description(config).items()}
    settings[_TEXT] = text_sha256(corpus)
    plain: dict[str, Any] = json.loads(dump_json(settings))
    return plain


def _description(config: TrainConfig) -> dict[str, Any]:
    """Return the model's configuration itself, wherever it was read from."""
    if isinstance(config.model.config, dict):
        return config.model.config
    path = config.model.config or Path(str(config.model.directory)) / "config.json"
    described: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return described


def text_sha256(corpus: Corpus) -> str:
    """Return the SHA-256 of both sides of the corpus, as tokens and as bytes."""
    digest = hashlib.sha256()
    for split in (corpus.train, corpus.held_out):
        for values in (split.tokens, split.text):
            digest.update(f"{values.dtype} {len(values)}\n".encode())
            digest.update(values.data)
    return digest.hexdigest()


def check_agreement(saved: Mapping[str, Any], asked: Mapping[str, Any], path: Path) -> None:
    """Compare the settings of the checkpoint at `path` with those of this run.

    Raises:
        ConfigError: they differ in what changes numbers; names the first such key.
    """
    sections = {key.partition(".")[0] for key in saved}  # releases have added some
    for key in (*asked, *(key for key in saved if key not in asked)):
        is_known = key.partition(".")[0] in sections
        if is_known and _must_agree(key) and saved.get(key) != asked.get(key):
            raise _other(key, saved, asked, path)
    if saved[_TEXT] != asked[_TEXT]:
        moved = [key for key in asked if key.startswith("data.") and saved[key] != asked[key]]
        raise _other(moved[0] if moved else "data", saved, asked, path)


def _must_agree(key: str) -> bool:
    section, _, name = key.partition(".")
    return name.partition(".")[0] in MUST_AGREE.get(section, ())


def _other(key: str, saved: Mapping[str, Any], asked: Mapping[str, Any], path: Path) -> ConfigError:
    if key == "data":
        got, wanted = "another text", "the text"
    else:
        got, wanted = (_shown(settings, key) for settings in (asked, saved))
    return ConfigError(
        complaint(
            key,
            got=got,
            wanted=f"{wanted} of the run that was saved in {path}",
            remedy="Set it back to resume; or start anew by --set checkpoint.resume=false, "
            "or under another run.name.",
        )
    )


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "nothing"
