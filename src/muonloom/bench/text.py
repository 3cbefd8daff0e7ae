"""Tables, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muonloom.errors import complaint

Block = tuple[str, Sequence[str], list[list[str]]]
"""A table: title, columns, rows."""


def number(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with about ``digits`` digits; an en dash for None."""
    if value is None:
        return "–"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def between_markers(text: str, content: str, *, begin: str, end: str, owner: str) -> str:
    """Return ``text`` with what stands between two markers replaced.

    Raises:
        ValueError: the markers are not there, in order; the message leads with ``owner``.
    """
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(
            complaint(owner, got="no markers", wanted=f"{begin} ... {end}", remedy="Add both.")
        )
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"


def write_between(page: Path, lines: Sequence[str], *, begin: str, end: str) -> None:
    """Replace what stands between two markers of a page, which ``--out`` named, with these lines.

    Raises:
        ValueError: the markers are not there, in order.
    """
    text = page.read_text(encoding="utf-8")
    text = between_markers(text, "\n".join(lines), begin=begin, end=end, owner="--out")
    page.write_text(text, encoding="utf-8")
