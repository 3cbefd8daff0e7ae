"""Tables, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Sequence

Block = tuple[str, Sequence[str], list[list[str]]]
"""A table: title, columns, rows."""


def number(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with about ``digits`` digits; an en dash for None."""
    if value is None:
        return "–"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
