"""Where the text comes from: local files of three formats, or the standard library's sources."""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muonloom.errors import ConfigError, complaint


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of text that is trained on whole or held out whole.

    A text file is one document; so is a line of JSONL and a row of Parquet.
    """

    name: str
    text: str


def standard_library() -> Iterator[Document]:
    """Yield the sources of Python's standard library, and the prose of its help topics.

    Left out: tests, which not every installation has, and `encodings`, whose files are tables.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "encodings", "site-packages", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield Document(name=relative.as_posix(), text=text)
    from pydoc_data.topics import topics

    yield Document(
        name="pydoc_data/topics", text="\n\n".join(topics[key] for key in sorted(topics))
    )


def local_files(
    patterns: Sequence[str], *, key: str, format: str = "auto", field: str = "text"
) -> Iterator[Document]:
    """Yield the documents of every file that `patterns` (paths or globs, ``**`` too) name.

    Args:
        patterns: relative to the current directory.
        key: the key of the configuration that errors name, such as ``"data.files"``.
        format: ``"text"``, ``"jsonl"``, ``"parquet"``, or ``"auto"``: by the file's ending.
        field: the field (JSONL) or column (Parquet) that holds the text.

    Raises:
        ConfigError: no such file, or one that cannot be read as that format.
    """
    for path in _expand(patterns, key=key):
        reader = _READERS[_format_of(path, format, key=key)]
        try:
            yield from reader(path, field)
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from None
        except UnicodeDecodeError as error:
            raise _unreadable(path, f"bytes that are not UTF-8 at {error.start}") from None


def _expand(patterns: Sequence[str], *, key: str) -> list[Path]:
    found: dict[Path, None] = {}
    for pattern in patterns:
        literal = Path(pattern)
        paths = (
            [literal]
            if literal.is_file()
            else [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        )
        files = [path for path in paths if path.is_file()]
        if not files:
            raise ConfigError(
                complaint(
                    key,
                    got=f"{pattern!r}, which names no file",
                    wanted="paths or globs of existing files",
                    remedy="Paths are relative to the current directory.",
                )
            )
        found.update(dict.fromkeys(files))
    return list(found)


_ENDINGS = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


def _format_of(path: Path, format: str, *, key: str) -> str:
    if format != "auto":
        return format
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(
            complaint(
                key,
                got=f"{path}, whose ending tells no format",
                wanted="one of " + " ".join(_ENDINGS),
                remedy='Set data.format to "text", "jsonl" or "parquet".',
            )
        )
    return _ENDINGS[path.suffix.lower()]


def _read_text(path: Path, field: str) -> Iterator[Document]:
    text = path.read_text(encoding="utf-8")
    if text.strip():
        yield Document(name=str(path), text=text)


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise _unreadable(name, f"a line that is not JSON ({error})") from None
            yield from _document(name, record, field)


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        if field not in table.schema_arrow.names:
            raise _no_field(str(path), field, table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield from _document(f"{path}:{row}", {field: value}, field)
    except pyarrow.ArrowException as error:
        raise _unreadable(path, str(error).splitlines()[0]) from None


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


def _document(name: str, record: Any, field: str) -> Iterator[Document]:
    """Yield the record's text, or nothing where it is null or blank."""
    if not isinstance(record, dict):
        raise _unreadable(name, f"a {type(record).__name__}, not a record")
    if field not in record:
        raise _no_field(name, field, list(record))
    text = record[field]
    if text is None:
        return
    if not isinstance(text, str):
        raise _unreadable(name, f"{field} of type {type(text).__name__}, not text")
    if text.strip():
        yield Document(name=name, text=text)


def _no_field(name: str, field: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        complaint(
            "data.field",
            got=f"{field!r}, which {name} lacks",
            wanted="one of " + ", ".join(map(repr, names)),
            remedy="Name the field that holds the text.",
        )
    )


def _unreadable(where: object, reason: str) -> ConfigError:
    return ConfigError(
        complaint(
            str(where),
            got=reason,
            wanted="readable UTF-8 text in the format of data.format",
            remedy="Repair the file, or leave it out of data.files.",
        )
    )
