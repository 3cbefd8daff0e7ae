"""Who writes what: each part once, by one who holds it, about as much as the others; and parts made one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom.checkpoint.division import Claim, claims_of, digest, holders_of, own_parts
from muonloom.checkpoint.manifest import Chunk, Manifest, SavedParameter, SavedTensor, merged
from muonloom.segments import Place, SnapshotTensor

# -- division -----------------------------------------------------------------------------------------


def tensor(key: str, shape: tuple[int, ...], **place: Any) -> SnapshotTensor:
    known = {"whole": shape, "offsets": (0,) * len(shape)} | place
    return SnapshotTensor(
        key=key,
        dtype=torch.float32,
        shape=shape,
        read=lambda rows, out: None,
        place=Place(**known),
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[tuple[str, tuple[int, ...], int]]]:
    """How many ranks there are; and tensors: key, who holds the same of it, and rows."""
    n = draw(st.integers(1, 6))
    found = []
    for index in range(draw(st.integers(0, 12))):
        holders = draw(st.sets(st.integers(0, n - 1), min_size=1))
        found.append((f"t{index}", tuple(sorted(holders)), draw(st.integers(0, 9))))
    return n, found


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_each_part_is_written_once_by_one_of_its_holders(
    world: tuple[int, list[tuple[str, tuple[int, ...], int]]],
):
    n, found = world
    written: dict[str, list[int]] = {key: [] for key, _, _ in found}
    for rank in range(n):
        held = [
            tensor(key, (rows, 4), whole=(12, 4), ranks=holders, holders=holders)
            for key, holders, rows in found
            if rank in holders
        ]
        for own in own_parts(held, rank=rank, holders={}):
            written[own.key].append(rank)
    for key, holders, rows in found:
        assert len(written[key]) == (1 if rows else 0)
        assert set(written[key]) <= set(holders)


def test_copies_are_shared_out_by_size():
    shapes = [(1000, 8), (400, 8), (300, 8), (300, 8), (9, 8)]
    loads = []
    for rank in range(2):
        held = [tensor(str(i), shape, ranks=(0, 1)) for i, shape in enumerate(shapes)]
        loads.append(sum(own.nbytes for own in own_parts(held, rank=rank, holders={})))
    assert max(loads) <= 1.02 * sum(loads) / 2


def test_buffers_are_the_first_ones_and_of_nothing_there_is_one_part():
    buffer = tensor("b", (3,), is_equal=False)
    nothing = tensor("n", (0, 4))
    for rank in range(3):
        own = own_parts([buffer, nothing], rank=rank, holders={"b": (0, 1, 2), "n": (1, 2)})
        assert [part.key for part in own] == {0: ["b"], 1: ["n"], 2: []}[rank]


# -- contradictions -----------------------------------------------------------------------------------


def claim(**changes: Any) -> Claim:
    known: dict[str, Any] = {"dtype": "float32", "whole": (4, 3), "ranks": None, "sample": ""}
    return Claim(**known | changes)


def test_whoever_names_a_tensor_holds_it():
    both, alone = {"a": claim(), "b": claim(ranks=(0, 1))}, {"a": claim()}
    assert holders_of([both, both, alone]) == {"a": (0, 1, 2), "b": (0, 1)}


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"dtype": "bfloat16"}, {}, r"^w: got bfloat16 \(4, 3\) on rank 0; float32 .* on rank 1"),
        ({"whole": (4, 4)}, {}, r"\(4, 4\) on rank 0"),
        ({"ranks": (0,)}, {"ranks": (1,)}, "shared by rank 0 alone on rank 0; .*DTensor"),
        ({"ranks": (0, 1)}, {}, "shared by ranks 0 and 1"),
        ({"sample": "12345678"}, {"sample": "9"}, r"other values \(12345678\) on rank 0"),
    ],
)
def test_other_tensors_of_one_name_are_refused(
    one: dict[str, Any], other: dict[str, Any], text: str
):
    with pytest.raises(ValueError, match=text):
        holders_of([{"model.w": claim(**one)}, {"model.w": claim(**other)}])


def test_a_part_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="parts on rank 1, and none on ranks 0 and 2"):
        holders_of([{}, {"optimizer.w.exp_avg": claim(ranks=(0, 1, 2))}, {}])


def test_a_digest_tells_claims_apart():
    same = {"a": claim(), "b": claim(ranks=(0, 1))}
    assert digest(same) == digest(dict(reversed(same.items())))
    for other in ({"a": claim()}, {**same, "a": claim(dtype="bfloat16")}, {**same, "c": claim()}):
        assert digest(same) != digest(other)
    assert claims_of([tensor("a", (4, 3))]) == {"a": claim()}


# -- parts of a manifest ------------------------------------------------------------------------------


def part(rank: int, rows: tuple[int, int], **changes: Any) -> Manifest:
    chunk = Chunk(file=f"data-{rank}", start=0, offsets=(rows[0], 0), sizes=(rows[1], 3), blocks=())
    known = {
        "step": 1,
        "created_s": float(rank),
        "versions": {},
        "tensors": {"model.w": SavedTensor(dtype=torch.float32, shape=(6, 3), chunks=(chunk,))},
        "parameters": {},
        "options": (),
        "ns_batch_bytes": 0,
        "extras": (f"extra-{rank}",),
        "files": {},
    }
    return Manifest(**known | changes)


def test_parts_make_one_manifest():
    plain, other = {"lr": 0.1}, {"lr": 0.2}
    known = {name: SavedParameter(algorithm="muon", options=0, dtype="float32") for name in "abc"}
    first = part(0, (0, 2), options=(plain, plain), parameters={"a": known["a"]})
    second = part(1, (2, 4), options=(other,), parameters={"b": known["b"]}, aliases={"x": "w"})
    third = part(2, (6, 0), options=(plain,), parameters={"c": known["c"]}, model={"class": "M"})
    third = replace(third, tensors={})
    found = merged([first, second, third])
    chunks = found.tensors["model.w"].chunks
    assert [chunk.file for chunk in chunks] == ["data-0", "data-1"]
    assert sum(math.prod(chunk.sizes) for chunk in chunks) == 18
    assert found.options == (plain, plain, other), "equal ones are not added"
    numbers = {name: entry.options for name, entry in found.parameters.items()}
    assert numbers == {"a": 0, "b": 2, "c": 0}
    assert found.extras == ("extra-0", "extra-1", "extra-2")
    assert found.aliases == {"x": "w"}
    assert found.model == {"class": "M"}
    assert merged([first]) == first
