from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonloom.errors import ConfigError
from muonloom.train.config import DataConfig
from muonloom.train.data import cut_windows, load_corpus, split_documents
from muonloom.train.sources import Document
from muonloom.train.tokens import ByteTokenizer, load_tokenizer


def documents(*texts):
    return [Document(name=str(index), text=text) for index, text in enumerate(texts)]


def config(directory, **options):
    settings = {"eval_fraction": 0.3, "sequence_length": 16, **options}
    return DataConfig(source="files", files=[str(directory / "*.txt")], **settings)


@given(st.lists(st.text(min_size=1, max_size=50), min_size=2, max_size=30, unique=True))
def test_a_split_keeps_every_text_on_one_side(texts):
    train, held_out = split_documents(documents(*texts), 0.25)
    assert sorted(d.text for d in train + held_out) == sorted(texts)
    assert held_out
    assert train


def test_a_split_holds_out_at_most_the_fraction_and_ignores_order_and_names():
    texts = [f"{index} " * 50 for index in range(40)]
    _, held_out = split_documents(documents(*texts), 0.2)
    assert 0.1 < sum(len(d.text) for d in held_out) / sum(map(len, texts)) <= 0.2
    _, again = split_documents(documents(*reversed(texts)), 0.2)
    assert [d.text for d in again] == [d.text for d in held_out]


def test_equal_documents_are_kept_once():
    train, held_out = split_documents(documents("same", "same", "other", "third one"), 0.4)
    assert sorted(d.text for d in train + held_out) == ["other", "same", "third one"]


def test_of_a_single_document_the_end_is_held_out():
    train, held_out = split_documents(documents("0123456789"), 0.2)
    assert ([d.text for d in train], [d.text for d in held_out]) == (["01234567"], ["89"])


def test_no_document_gives_no_text():
    assert split_documents([], 0.2) == ([], [])


def test_files_named_for_evaluation_are_not_trained_on(tmp_path, text_files):
    held_out = text_files / "3.txt"
    corpus = load_corpus(config(text_files, eval_files=[str(held_out)]))
    text = held_out.read_bytes()
    assert corpus.held_out.text.tobytes() == text + b"\n"
    assert corpus.train.num_documents == 7
    assert text not in corpus.train.text.tobytes()


@pytest.mark.parametrize(("length", "side"), [(700, "trained-on"), (3000, "trained-on")])
def test_too_little_text_is_refused(tmp_path, length, side):
    (tmp_path / "a.txt").write_text("word " * 100)
    with pytest.raises(ConfigError, match=rf"^data\.files: got \d+ {side} tokens"):
        load_corpus(config(tmp_path, sequence_length=length))


def test_too_little_held_out_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 100)
    with pytest.raises(ConfigError, match=r"^data\.files: got \d+ held-out tokens"):
        load_corpus(config(tmp_path, sequence_length=200))


def test_only_empty_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=r"^data\.files: got 0 trained-on tokens"):
        load_corpus(config(tmp_path))


def test_batches_are_a_pure_function_of_seed_and_step(text_files):
    corpus = load_corpus(config(text_files))
    batch = corpus.train_batch(seed=1, step=5, rows=3)
    assert batch.shape == (3, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, corpus.train_batch(seed=1, step=5, rows=3))
    assert not torch.equal(batch, corpus.train_batch(seed=1, step=6, rows=3))
    assert not torch.equal(batch, corpus.train_batch(seed=2, step=5, rows=3))
    train = corpus.train.text.tobytes()
    assert all(bytes(row.tolist()) in train for row in batch)


def test_a_corpus_of_one_sequence_is_drawn_whole(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh")
    (tmp_path / "b.txt").write_text("ABCDEFGH")
    corpus = load_corpus(config(tmp_path, sequence_length=8, eval_files=[str(tmp_path / "b.txt")]))
    # a.txt is 8 bytes and its newline: exactly the 9 that one sequence and its targets need.
    assert bytes(corpus.train_batch(seed=0, step=0, rows=1)[0].tolist()) == b"abcdefgh\n"


def test_windows_do_not_overlap_and_spread_from_first_to_last():
    windows = cut_windows(np.arange(100), 7, 4)
    assert windows.shape == (4, 7)
    assert windows[0].tolist() == list(range(7))
    assert windows[-1].tolist() == list(range(91, 98))
    assert len(np.unique(windows)) == 28
    assert len(cut_windows(np.arange(100), 7, 1000)) == 14


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    encodable = text.encode("utf-8", errors="replace").decode("utf-8")
    assert tokenizer.decode(tokens) == encodable + "\n"


def test_a_tokenizer_comes_from_a_directory(tmp_path, text_files):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"word{number}": number for number in range(13)} | {"[UNK]": 13, "[END]": 14}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token="[END]")
    wrapped.save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert tokenizer.encode("word3 word12 what").tolist() == [3, 12, 13, 14]
    assert tokenizer.vocabulary == 15
    assert tokenizer.dtype == np.uint16
    corpus = load_corpus(config(text_files, tokenizer=str(tmp_path / "tokenizer")))
    assert len(corpus.train.tokens) == 121 * corpus.train.num_documents
    assert corpus.bytes_per_token == len(corpus.held_out.text) / (
        121 * corpus.held_out.num_documents
    )


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{"}])
def test_a_directory_without_a_tokenizer_is_refused(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: got "):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: got .*no directory"):
        load_tokenizer(str(tmp_path / "missing"))
