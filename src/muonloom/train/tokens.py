"""From text to token numbers and back: bytes, or a tokenizer from a local directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from muonloom.errors import ConfigError, complaint


class Tokenizer(Protocol):
    """What the data and the sample need of a tokenizer."""

    name: str
    vocabulary: int  # token numbers are in [0, vocabulary)
    dtype: np.dtype[Any]  # the smallest that holds them

    def encode(self, text: str) -> NDArray[Any]:
        """Return the numbers of `text`, 1-D of `dtype`, with what ends a document."""
        ...

    def decode(self, tokens: NDArray[Any]) -> str:
        """Return the text of 1-D `tokens`."""
        ...

    def save(self, directory: Path) -> None:
        """Write what `data.tokenizer` needs to read it again."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; a newline ends a document."""

    name = "bytes"
    vocabulary = 256
    dtype = np.dtype(np.uint8)

    def encode(self, text: str) -> NDArray[Any]:
        """Return the UTF-8 bytes of `text` and one newline, uint8."""
        return np.frombuffer((text + "\n").encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, tokens: NDArray[Any]) -> str:
        """Return the text; bytes that are not UTF-8 show as replacement characters."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Write nothing: bytes need no files."""


class DirectoryTokenizer:
    """A Transformers tokenizer, read from local files only and without code from them."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        if not directory.is_dir():
            raise _bad_tokenizer(f"{directory}, which is no directory")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # its loaders raise many kinds for a bad directory
            raise _bad_tokenizer(f"{directory} ({str(error).splitlines()[0]})") from None
        self.name = str(directory)
        self.vocabulary = len(self._tokenizer)
        self.dtype = np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.int32)
        eos = self._tokenizer.eos_token_id
        self._end = [] if eos is None else [int(eos)]

    def encode(self, text: str) -> NDArray[Any]:
        """Return the numbers of `text` and the end-of-sequence token, where there is one."""
        # verbose=False: a document longer than the model's window is cut later, no cause to warn.
        numbers = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return np.asarray(numbers + self._end, dtype=self.dtype)

    def decode(self, tokens: NDArray[Any]) -> str:
        """Return the text of `tokens`."""
        return str(self._tokenizer.decode([int(token) for token in tokens]))

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(directory)


def _bad_tokenizer(got: str) -> ConfigError:
    return ConfigError(
        complaint(
            "data.tokenizer",
            got=got,
            wanted='"bytes" or a directory with tokenizer files',
            remedy="Save one there with tokenizer.save_pretrained(directory).",
        )
    )


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names.

    Raises:
        ConfigError: the directory holds no tokenizer that can be read.
    """
    return ByteTokenizer() if name == "bytes" else DirectoryTokenizer(Path(name))
