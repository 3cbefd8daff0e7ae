"""Which of many alike cases run each time; the others are marked slow, and `make test-all` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of `parametrize` that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Return the cases in their order, marked slow but for those in `but`, each of which is one."""
    whole = list(cases)
    assert all(case in whole for case in but), "not a case"
    return [case if case in but else _slow_case(case) for case in whole]


def pairwise(*axes: Iterable[Any], unless: Callable[..., bool] | None = None) -> list[Any]:
    """Return all combinations of the axes' values, in the order of `itertools.product`.

    Marked slow are those without which any value of an axis still meets any value of another: what
    goes wrong with one value, or with two together, is found without them.

    Args:
        unless: says of a combination, value by value, that there is no such case.
    """
    values = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in values)))
    cases = dict(zip(places, itertools.product(*values), strict=True))
    if unless is not None:
        cases = {place: case for place, case in cases.items() if not unless(*case)}
    kept = _covering(list(cases))
    return [case if place in kept else slow(*case) for place, case in cases.items()]


def _slow_case(case: Any) -> Any:
    return slow(*case) if isinstance(case, tuple) else slow(case)


Place = tuple[int, ...]


def _covering(places: list[Place]) -> set[Place]:
    """Return few of the places, greedily, with all pairs that any of them have."""
    missing = set().union(*map(_pairs, places))
    kept = set()
    while missing:
        best = max(places, key=lambda place: len(_pairs(place) & missing))
        kept.add(best)
        missing -= _pairs(best)
    return kept


def _pairs(place: Place) -> set[tuple[tuple[int, int], ...]]:
    """Return which values of which two axes meet; with one axis, the value."""
    return set(itertools.combinations(enumerate(place), min(2, len(place))))
