from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muonloom.errors import ConfigError
from muonloom.train.sources import local_files, standard_library


def read(*patterns, **options):
    return list(local_files([str(pattern) for pattern in patterns], key="data.files", **options))


def test_text_files_are_documents_and_blank_ones_none(tmp_path):
    (tmp_path / "b.txt").write_text("zwei", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins ü", encoding="utf-8")
    (tmp_path / "c.txt").write_text(" \n")
    assert [document.text for document in read(tmp_path / "*.txt")] == ["eins ü", "zwei"]


def test_globs_recurse_and_name_a_file_once(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "deep.md").write_text("deep")
    found = read(tmp_path / "**" / "*.md", tmp_path / "x" / "y" / "deep.md")
    assert [document.text for document in found] == ["deep"]


def test_a_file_whose_name_looks_like_a_glob_is_read(tmp_path):
    (tmp_path / "a[1].txt").write_text("bracket")
    assert [document.text for document in read(tmp_path / "a[1].txt")] == ["bracket"]


def test_jsonl_lines_are_documents(tmp_path):
    lines = [{"body": "one"}, {"body": None}, {"body": "  "}, {"body": "two", "other": 3}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = read(path, field="body")
    assert [document.text for document in found] == ["one", "two"]
    assert found[1].name == f"{path}:7"


def test_parquet_rows_are_documents(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "", "two"], "n": [1, 2, 3, 4]}), path)
    assert [document.text for document in read(path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: got a line that is not JSON"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1: got a list, not a record"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: got text of type int"),
        ("a.jsonl", b'{"body": "x"}\n', r"^data\.field: got 'text', which .*wanted one of 'body'"),
        ("a.txt", b"ok \xff", r"a\.txt: got bytes that are not UTF-8 at 3"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl: got bytes that are not UTF-8"),
        ("a.parquet", b"not parquet at all", r"a\.parquet: got "),
        ("a.parquet", b"", r"a\.parquet: got "),
        ("a.bin", b"x", r"^data\.files: got .*a\.bin, whose ending tells no format"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=match) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_parquet_without_the_column_or_with_numbers_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2]}), path)
    with pytest.raises(ConfigError, match=r"^data\.field: got 'text'.*wanted one of 'n'"):
        read(path)
    with pytest.raises(ConfigError, match=r"a\.parquet:1: got n of type int"):
        read(path, field="n")


def test_format_overrides_the_ending(tmp_path):
    (tmp_path / "a.bin").write_text('{"text": "x"}')
    assert [d.text for d in read(tmp_path / "a.bin", format="jsonl")] == ["x"]
    assert [d.text for d in read(tmp_path / "a.bin", format="text")] == ['{"text": "x"}']


@pytest.mark.parametrize("pattern", ["missing.txt", "*.nothing", "."])
def test_a_pattern_that_names_no_file_is_refused(tmp_path, pattern):
    with pytest.raises(ConfigError, match=r"^data\.files: got .*names no file"):
        read(tmp_path / pattern)


def test_the_standard_library_gives_megabytes_of_text_and_no_tests():
    documents = list(standard_library())
    names = {document.name for document in documents}
    assert {"argparse.py", "pydoc_data/topics"} <= names
    assert not any(name.startswith(("test/", "encodings/", "site-packages/")) for name in names)
    assert sum(len(document.text) for document in documents) > 3_000_000
