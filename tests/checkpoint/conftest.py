"""Checkpoints to be damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.damage import Damaged, options_of
from checkpoint.support import PLACEMENTS
from staging.support import assert_same_bits


@pytest.fixture(params=["device", "split"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Damaged]:
    found = Damaged(tmp_path, PLACEMENTS[request.param])
    yield found
    found.mend()
    found.run.load(found.path)
    assert_same_bits(found.run.everything(), found.expected)


@pytest.fixture
def on_device(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path, "device")


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(tmp_path_factory.mktemp("kept"), "device")


@pytest.fixture
def shared(_kept: Damaged) -> Iterator[Damaged]:
    """One for all tests whose loads are all refused: they step it once, its twin too."""
    _kept.before, _kept.groups = _kept.run.everything(), options_of(_kept.run)
    yield _kept
    _kept.mend()
