"""Families that a test registers end with the test."""

from __future__ import annotations

import pytest

from muonloom.layout import families


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_families", dict(families._families))
