"""Tests with real Megatron-Core objects; without these, one skipped test a file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PACKAGES = ("megatron-core", "emerging-optimizers")


def _missing() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            found.append(package)
    return found


MISSING = _missing()
if not MISSING:
    from megatron import shim


class _Without(pytest.Item):
    """All tests of a file that need what is not installed."""

    def runtest(self) -> None:
        pytest.skip(f"not installed: {', '.join(MISSING)} (`make test-megatron` does)")


class _WithoutFile(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        yield _Without.from_parent(self, name="all")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    if MISSING:
        return _WithoutFile.from_parent(parent, path=module_path)
    return None


def pytest_configure(config: pytest.Config) -> None:
    if not MISSING:
        config.addinivalue_line("filterwarnings", f"ignore:::{shim.MODULES}")
