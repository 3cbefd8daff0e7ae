from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom.train.baselines import WittenBell, baselines, zlib_nats


def codes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def row(text: bytes) -> np.ndarray:
    return codes(text)[None]


def test_unigram_counted_by_hand():
    # "aab": n(a)=2, n(b)=1, 2 distinct of 3 bytes.
    model = WittenBell.count(codes(b"aab"))
    a, b, c = ((n + 2 / 256) / 5 for n in (2, 1, 0))
    assert model.nats(row(b"xabc"), order=1) == pytest.approx(
        -(math.log(a) + math.log(b) + math.log(c)) / 3
    )


def test_bigram_counted_by_hand():
    # "abac": after a stand b and c, once each, so that n(a)=2 and t(a)=2.
    model = WittenBell.count(codes(b"abac"))
    unigram_b = (1 + 3 / 256) / (4 + 3)
    assert model.nats(row(b"ab"), order=2) == pytest.approx(-math.log((1 + 2 * unigram_b) / 4))
    # Nothing was seen after c: its history falls away.
    assert model.nats(row(b"cb"), order=2) == pytest.approx(-math.log(unigram_b))


def test_trigram_counted_by_hand():
    model = WittenBell.count(codes(b"abcabd"))
    unigram_c = (1 + 4 / 256) / (6 + 4)
    bigram_c = (1 + 2 * unigram_c) / (2 + 2)  # after b: c, d
    trigram_c = (1 + 2 * bigram_c) / (2 + 2)  # after ab: c, d
    unigram_b = (2 + 4 / 256) / (6 + 4)
    bigram_b = (2 + 1 * unigram_b) / (2 + 1)  # after a: b, b
    expected = -(math.log(bigram_b) + math.log(trigram_c)) / 2
    assert model.nats(row(b"abc"), order=3) == pytest.approx(expected)


def _recursive(text: bytes, history: bytes, byte: int) -> float:
    """The formula of the module's docstring, in strings and dictionaries."""
    lower = _recursive(text, history[1:], byte) if history else 1 / 256
    if not history:
        followers = Counter(text)
    else:
        size = len(history)
        followers = Counter(
            text[i + size] for i in range(len(text) - size) if text[i : i + size] == history
        )
    total, distinct = sum(followers.values()), len(followers)
    return (followers[byte] + distinct * lower) / (total + distinct) if total else lower


@settings(max_examples=25)  # each counts into arrays of 256³
@given(st.text("abc", min_size=4, max_size=30), st.text("abcd", min_size=2, max_size=8))
def test_agrees_with_the_formula_written_recursively(train, test):
    text, probe = train.encode(), test.encode()
    model = WittenBell.count(codes(text))
    for order in (1, 2, 3):
        expected = [
            -math.log(_recursive(text, probe[max(0, i - order + 1) : i], probe[i]))
            for i in range(1, len(probe))
        ]
        assert model.nats(row(probe), order=order) == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize(("history", "order"), [(b"q", 1), (b"a", 2), (b"z", 2)])
def test_probabilities_sum_to_one(history, order):
    model = WittenBell.count(codes(b"abacabad" * 3))
    nats = [model.nats(row(history + bytes([byte])), order=order) for byte in range(256)]
    assert sum(math.exp(-value) for value in nats) == pytest.approx(1.0)


def test_zlib_is_small_on_repetition_and_8_bits_or_more_on_noise():
    assert zlib_nats(codes(b"abc" * 10_000)) < 0.05
    noise = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    assert zlib_nats(noise) == pytest.approx(math.log(256), rel=0.01)
    assert zlib_nats(noise) > math.log(256)


def test_ladder_falls_on_text_with_structure():
    text = codes(b"the cat sat on the mat and the dog sat on the log. " * 40)
    ladder = baselines(text, text, windows=text[: 51 * 30].reshape(30, 51))
    assert list(ladder) == ["unigram", "bigram", "trigram", "zlib"]
    assert ladder["unigram"] > ladder["bigram"] > ladder["trigram"] > 0


def test_an_empty_training_text_gives_the_uniform_guess():
    model = WittenBell.count(codes(b""))
    assert model.nats(row(b"abc"), order=3) == pytest.approx(math.log(256))
