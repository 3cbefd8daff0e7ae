"""The corpus of a run: documents split into trained-on and held-out, and the sequences cut from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muonloom.errors import ConfigError, complaint
from muonloom.train.config import DataConfig
from muonloom.train.sources import Document, local_files, standard_library
from muonloom.train.tokens import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Split:
    """One side of the corpus, joined: as the model reads it, and as bytes for the baselines."""

    tokens: NDArray[Any]  # 1-D, the tokenizer's dtype
    text: NDArray[np.uint8]  # 1-D, UTF-8
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Both sides of the text, and what reads them."""

    train: Split
    held_out: Split
    tokenizer: Tokenizer
    sequence_length: int

    @property
    def bytes_per_token(self) -> float:
        """Held-out bytes that one token stands for: turns a loss a token into one a byte."""
        return len(self.held_out.text) / len(self.held_out.tokens)

    def train_batch(self, *, seed: int, step: int, rows: int) -> Tensor:
        """Return int64 `(rows, sequence_length + 1)`, a pure function of its arguments.

        Being one, a resumed run needs no state of the sampler to read the same text.
        """
        draw = np.random.default_rng([seed, step])
        width = self.sequence_length + 1
        starts = draw.integers(0, len(self.train.tokens) - width + 1, size=rows)
        picked = np.stack([self.train.tokens[start : start + width] for start in starts])
        return torch.from_numpy(picked.astype(np.int64))

    def held_out_windows(self, limit: int) -> Tensor:
        """Return int64 `(n <= limit, sequence_length + 1)`, evenly spread over the held-out text."""
        picked = cut_windows(self.held_out.tokens, self.sequence_length + 1, limit)
        return torch.from_numpy(picked.astype(np.int64))


def cut_windows(values: NDArray[Any], width: int, limit: int) -> NDArray[Any]:
    """Return `(n <= limit, width)`: windows that do not overlap, evenly spread over 1-D `values`."""
    total = len(values) // width
    rows = values[: total * width].reshape(total, width)
    picked: NDArray[Any] = rows[np.linspace(0, total - 1, min(limit, total)).astype(np.int64)]
    return picked


def load_corpus(config: DataConfig) -> Corpus:
    """Read, split and encode the text of a run.

    Raises:
        ConfigError: a file that is missing or malformed, or too little text for one sequence.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    train, held_out = _split_documents(config)
    corpus = Corpus(
        train=_encode(train, tokenizer),
        held_out=_encode(held_out, tokenizer),
        tokenizer=tokenizer,
        sequence_length=config.sequence_length,
    )
    for side, split in (("trained-on", corpus.train), ("held-out", corpus.held_out)):
        if len(split.tokens) <= config.sequence_length:
            raise ConfigError(
                complaint(
                    "data.files",
                    got=f"{len(split.tokens)} {side} tokens",
                    wanted=f"more than data.sequence_length ({config.sequence_length})",
                    remedy="Give more text, or shorten the sequences.",
                )
            )
    return corpus


def _split_documents(config: DataConfig) -> tuple[list[Document], list[Document]]:
    if config.source == "standard-library":
        return split_documents(standard_library(), config.eval_fraction)
    read = {"format": config.format, "field": config.field}
    documents = local_files(config.files, key="data.files", **read)
    if not config.eval_files:
        return split_documents(documents, config.eval_fraction)
    held_out = list(local_files(config.eval_files, key="data.eval_files", **read))
    seen = {_digest(document) for document in held_out}
    return [document for document in documents if _digest(document) not in seen], held_out


def split_documents(
    documents: Iterable[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
    """Return (trained-on, held-out) documents; at most `fraction` of the text is held out.

    The choice follows the SHA-256 of each text, so it depends neither on names nor on order, and
    equal documents, of which one is kept, cannot stand on both sides. Of a single document its
    last part is held out.
    """
    unique = {_digest(document): document for document in documents}
    if len(unique) == 1:
        return _split_one(next(iter(unique.values())), fraction)
    budget = fraction * sum(len(document.text) for document in unique.values())
    train: list[Document] = []
    held_out: list[Document] = []
    for digest in sorted(unique):
        document = unique[digest]
        if len(document.text) <= budget:
            held_out.append(document)
            budget -= len(document.text)
        else:
            train.append(document)
    if not held_out and train:
        shortest = min(train, key=lambda document: len(document.text))
        train.remove(shortest)
        held_out.append(shortest)
    return train, held_out


def _split_one(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    cut = int(len(document.text) * (1 - fraction))
    head = Document(name=f"{document.name} (first part)", text=document.text[:cut])
    tail = Document(name=f"{document.name} (last part)", text=document.text[cut:])
    return [head], [tail]


def _digest(document: Document) -> str:
    return hashlib.sha256(document.text.encode("utf-8", errors="replace")).hexdigest()


def _encode(documents: list[Document], tokenizer: Tokenizer) -> Split:
    tokens = [tokenizer.encode(document.text) for document in documents]
    text = [
        np.frombuffer((document.text + "\n").encode("utf-8", errors="replace"), dtype=np.uint8)
        for document in documents
    ]
    return Split(
        tokens=np.concatenate(tokens) if tokens else np.empty(0, dtype=tokenizer.dtype),
        text=np.concatenate(text) if text else np.empty(0, dtype=np.uint8),
        num_documents=len(documents),
    )
