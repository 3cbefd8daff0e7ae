"""What simpler models reach on the same held-out bytes: n-grams with Witten–Bell, and zlib.

A count model over byte strings h (the history) and next bytes c, smoothed as Witten and Bell do
(*The zero-frequency problem*, IEEE Trans. Inf. Theory 37(4), 1991, method C, interpolated)::

    P(c | h) = (n(h c) + t(h) · P(c | h')) / (n(h) + t(h))

n counts occurrences in the training text, t(h) is the number of distinct bytes seen after h, h' is h
without its first byte, and the last resort is 1/256. Where h was never seen, P(c | h) = P(c | h').
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Values = NDArray[np.float64]

_NAMES = ("unigram", "bigram", "trigram")


@dataclass(frozen=True)
class WittenBell:
    """Counts of one-, two- and three-byte strings of a text."""

    counts: tuple[NDArray[np.int64], ...]  # (256,), (256, 256), (256, 256, 256)

    @classmethod
    def count(cls, text: Bytes) -> WittenBell:
        """Count the strings of `text`, uint8 `(n,)`."""
        codes = text.astype(np.int64)
        counts = []
        for order in (1, 2, 3):
            length = max(len(text) - order + 1, 0)
            strings = np.zeros(length, dtype=np.int64)
            for offset in range(order):
                strings = strings * 256 + codes[offset : offset + length]
            counts.append(np.bincount(strings, minlength=256**order).reshape((256,) * order))
        return cls(tuple(counts))

    def nats(self, windows: Bytes, *, order: int) -> float:
        """Return the mean nats a byte of every byte of `windows` but the first of each row.

        Args:
            windows: uint8 `(rows, width)`; a byte sees only what stands before it in its row, as a
                model that reads the rows does, so that the second byte has one byte of history.
            order: 1 (unigram), 2 (bigram) or 3 (trigram).
        """
        first = self._probability(windows[:, :2], order=min(order, 2))
        rest = self._probability(windows, order=order)[:, -(windows.shape[1] - 2) :]
        probabilities = first if windows.shape[1] == 2 else np.concatenate([first, rest], axis=1)
        return float(-np.log(probabilities).mean())

    def _probability(self, windows: Bytes, *, order: int) -> Values:
        """Return P of bytes ``max(order - 1, 1)`` and on of each row, given up to `order` - 1 before."""
        width = windows.shape[1]
        start = max(order - 1, 1)
        probability: Values = np.full((len(windows), width - start), 1 / 256)
        for size, counts in enumerate(self.counts[:order], start=1):
            columns = tuple(
                windows[:, start - back : width - back] for back in range(size - 1, -1, -1)
            )
            history = columns[:-1]
            seen = counts.sum(axis=-1)[history]
            distinct = (counts > 0).sum(axis=-1)[history]
            blended = (counts[columns] + distinct * probability) / np.maximum(seen + distinct, 1)
            probability = np.where(seen > 0, blended, probability)
        return probability


def zlib_nats(text: Bytes) -> float:
    """Return the nats a byte of `text` compressed by zlib at level 9, all of it at once."""
    return 8 * math.log(2) * len(zlib.compress(text.tobytes(), 9)) / max(len(text), 1)


def baselines(train: Bytes, held_out: Bytes, *, windows: Bytes) -> dict[str, float]:
    """Return nats a byte by name: unigram, bigram, trigram and zlib.

    Args:
        train: uint8 `(n,)`, counted.
        held_out: uint8 `(m,)`, what zlib compresses.
        windows: uint8 `(rows, width)` out of `held_out`, what the n-grams predict.
    """
    model = WittenBell.count(train)
    ladder = {name: model.nats(windows, order=order) for order, name in enumerate(_NAMES, start=1)}
    return ladder | {"zlib": zlib_nats(held_out)}
