"""For all tests: processes of their own, and less to search for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fresh import Fresh


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """What runs programs in processes that have imported torch alone."""
    found = Fresh(tmp_path_factory.mktemp("fresh"))
    yield found
    found.close()


@pytest.fixture(scope="module", autouse=True)
def _long_lived() -> None:
    """Have collections pass over modules and caches, which are most of all objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries find at exit that their objects go."""
    gc.unfreeze()
