"""Who keeps, sends and gets what: properties of the shares of all ranks, without a process group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from muonloom import BlockSpec
from muonloom.cuts import flat_views
from muonloom.dtensors import _boxes
from muonloom.ownership import Candidate, Ledger, Share
from muonloom.sharding import Box, row_box, whole_box

SPECS = {
    "whole": (BlockSpec.whole(), (6, 4)),
    "rows of three kinds": (BlockSpec.rows(4, 2, 2), (8, 3)),
    "heads": (BlockSpec.heads(6, heads_per_block=2), (12, 5)),
    "parts of heads": (BlockSpec.heads(4, heads_per_block=2, components=(2, 1)), (12, 5)),
    "gate and up": (BlockSpec.gate_up(), (10, 3)),
    "interleaved": (BlockSpec.gate_up(interleaved=True), (10, 3)),
    "experts": (BlockSpec.stacked(BlockSpec.gate_up()), (5, 8, 3)),
    "transposed experts": (
        BlockSpec.stacked(BlockSpec.transposed(BlockSpec.gate_up(True))),
        (3, 4, 6),
    ),
    "convolution": (BlockSpec.conv(), (5, 2, 3)),
    "columns": (BlockSpec.columns(2, 3), (4, 5)),
}
MESHES = {
    "replicated": ((3,), (Replicate(),)),
    "rows over 2": ((2,), (Shard(0),)),
    "rows over 4": ((4,), (Shard(0),)),
    "rows over 7": ((7,), (Shard(0),)),
    "columns over 2": ((2,), (Shard(1),)),
    "replicas of rows": ((2, 2), (Replicate(), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "rows twice": ((2, 3), (Shard(0), Shard(0))),
}


def shares_of(
    entries: Sequence[tuple[tuple[int, ...], BlockSpec | None]], mesh: str | int
) -> list[list[Share]]:
    """The shares of all ranks: by rank, then by parameter. A number is that of ranks that hold all."""
    if isinstance(mesh, int):
        num_ranks = mesh
    else:
        num_ranks = math.prod(MESHES[mesh][0])
    found = []
    for position in range(num_ranks):
        candidates = [
            Candidate(
                shape=shape,
                spec=spec,
                ranks=tuple(range(num_ranks)),
                position=position,
                weights=(whole_box(shape),) * num_ranks
                if isinstance(mesh, int)
                else _boxes(shape, *MESHES[mesh]),
                as_held=not isinstance(mesh, int),
            )
            for shape, spec in entries
        ]
        found.append(Ledger().share(candidates))
    return found


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(tuple(shape))


def covered(boxes: Sequence[Box], shape: Sequence[int]) -> list[int]:
    """How often each element is in one of the boxes."""
    count = torch.zeros(tuple(shape), dtype=torch.int64)
    for box in boxes:
        count[box.slices] += 1
    return count.flatten().tolist()


def matrices_of(
    spec: BlockSpec, part: torch.Tensor, skip: set[int] = frozenset()
) -> list[list[int]]:
    return [
        matrix.flatten().tolist()
        for index, view in enumerate(flat_views(spec, part))
        if index not in skip
        for matrix in view.tensor.reshape(view.count, view.rows, view.columns)
        if view.count * view.rows * view.columns
    ]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SPECS)
def test_every_matrix_is_done_once_and_every_fragment_has_its_way(name: str, mesh: str):
    spec, shape = SPECS[name]
    by_rank = [shares[0] for shares in shares_of([(shape, spec)], mesh)]
    whole = numbered(shape)
    done: list[list[int]] = []
    for share in by_rank:
        assert share.atoms == by_rank[0].atoms  # all ranks mean the same
        assert share.holding.states == by_rank[0].holding.states
        part = whole[share.holding.own.slices]
        assert share.spec is not None
        views = flat_views(share.spec, part)
        assert sum(view.tensor.numel() for view in views) == part.numel()
        done += matrices_of(share.spec, part, skip={view for view, _ in share.fragments})
        for view, index in share.fragments:
            atom = share.atoms[index]
            own = [box for position, box in atom.targets if position == share.holding.position]
            atom_values = whole[row_box(shape, atom.rows).slices]
            assert (
                views[view].tensor.flatten().tolist()
                == atom_values[own[0].slices].flatten().tolist()
            )
    for atom in by_rank[0].atoms:
        done += matrices_of(atom.spec, whole[row_box(shape, atom.rows).slices])
        assert set(covered([box for _, box in atom.sources], atom.shape)) == {1}
        assert min(covered([box for _, box in atom.targets], atom.shape)) >= 1
        holders = {position for position, _ in atom.targets}
        assert atom.owner in holders
        assert {position for position, _ in atom.sources} <= holders
        assert atom.owner in {position for position, _ in atom.sources}
        expected = {
            (position, part)
            for position, held in enumerate(by_rank[0].holding.weights)
            if (part := held.within(row_box(shape, atom.rows))) is not None
        }
        assert set(atom.targets) == expected
    assert sorted(done) == sorted(matrices_of(spec, whole))


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from([*SPECS, "vector", "table"]), min_size=1, max_size=6),
    num_ranks=st.integers(2, 9),
)
def test_what_all_hold_is_kept_once_in_whole_matrices(names: list[str], num_ranks: int):
    plain = {"vector": ((13,), None), "table": ((37, 6), None)}
    entries = [plain[name] if name in plain else SPECS[name][::-1] for name in names]
    by_rank = shares_of(entries, num_ranks)
    for index, (shape, spec) in enumerate(entries):
        states = by_rank[0][index].holding.states
        assert set(covered(states, shape)) == {1}
        done: list[list[int]] = []
        for position, shares in enumerate(by_rank):
            share = shares[index]
            assert share.holding.states == states
            assert share.holding.position == position
            assert not share.atoms
            assert not share.fragments
            part = numbered(shape)[share.holding.own.slices]
            if spec is not None:
                assert share.spec is not None
                done += matrices_of(share.spec, part)
            else:  # AdamW rounds the last elements of a span otherwise
                start = share.holding.own.offsets[0] * math.prod(shape[1:])
                assert start % 64 == 0 or not part.numel()
        if spec is not None:
            assert sorted(done) == sorted(matrices_of(spec, numbered(shape)))


def test_parameters_that_come_later_go_to_those_with_less_to_do():
    ledger = Ledger()
    large = Candidate(
        shape=(64, 64),
        spec=BlockSpec.whole(),
        ranks=(0, 1),
        position=0,
        weights=(whole_box((64, 64)),) * 2,
        as_held=False,
    )
    owners = []
    for _ in range(4):  # each added by itself, as by add_param_group
        (share,) = ledger.share([large])
        owners.append([box.numel > 0 for box in share.holding.states].index(True))
    assert sorted(owners) == [0, 0, 1, 1]
