"""Shares of work: every atom has one owner, no rank is much heavier than it must be, all ranks agree."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonloom.bench import ownership as bench
from muonloom.bench.flops import standard_flops
from muonloom.layout import Rule, restricted, row_atoms
from muonloom.meta_models import build_on_meta, make_config, read_fields
from muonloom.ownership import Atoms, matrix_cost, owners, scalar_cost, shared_out

RANKS = (8, 16, 32, 64, 128, 256, 512)
GLM5 = Path(__file__).parents[1] / "layout" / "data" / "glm5_config.json"
MODELS = pytest.mark.parametrize("name", bench.MODELS)
CUTS = pytest.mark.parametrize("heads_per_block", [None, 1])
many = settings(max_examples=150, deadline=None)

costs = st.one_of(
    st.integers(0, 12).map(float), st.floats(0, 1e16, allow_subnormal=False), st.just(0.1)
)
parameters = st.lists(st.builds(Atoms, cost=costs, count=st.integers(0, 40)), max_size=12)


def loads_of(
    atoms: Sequence[Atoms], borders: Sequence[tuple[int, ...]], before: Sequence[float]
) -> list[float]:
    loads = list(before)
    for each, border in zip(atoms, borders, strict=True):
        for rank, (start, stop) in enumerate(itertools.pairwise(border)):
            if start < stop:
                loads[rank] += each.cost * (stop - start)
    return loads


def num_pieces(borders: Sequence[tuple[int, ...]]) -> int:
    return sum(len(set(border)) - 1 for border in borders)


def poured(loads: Sequence[float], work: float) -> float:
    """The level of work that can be cut anywhere: the highest of what its lowest k ranks reach."""
    ascending = sorted(loads)
    return min((work + sum(ascending[:k])) / k for k in range(1, len(loads) + 1))


def best(items: Sequence[float], num_ranks: int) -> float:
    """The heaviest rank of the best of all assignments."""
    return min(
        max(sum(w for w, r in zip(items, chosen, strict=True) if r == rank) for rank in set(chosen))
        for chosen in itertools.product(range(num_ranks), repeat=len(items))
    )


# -- costs --------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_matrix_costs_its_iteration_and_its_state(rows: int, columns: int) -> None:
    state = rows * columns * 8 * 1000
    assert matrix_cost(rows, columns) == standard_flops(rows, columns) + state
    assert matrix_cost(rows, columns) == matrix_cost(columns, rows)


def test_costs_of_published_matrices() -> None:
    # q_b of GLM-5: 1.46e12 FLOPs whole, 8 times fewer one head each.
    whole, heads = matrix_cost(64 * 256, 2048), 64 * matrix_cost(256, 2048)
    state = 64 * 256 * 2048 * 8000
    assert whole - state == pytest.approx(1.46e12, rel=5e-3)
    assert (whole - state) / (heads - state) == pytest.approx(8.0, rel=5e-3)
    # An element of AdamW's has 12 bytes of state, one of Muon's 8, which it also iterates on.
    assert scalar_cost(1000) == 12 * 1000 * 1000 < 1000 * matrix_cost(1, 1) * 12 / 8
    assert scalar_cost(0) == matrix_cost(0, 5) == 0.0


# -- parameters that all ranks have ------------------------------------------------------------------


@many
@given(parameters, st.integers(1, 9))
def test_every_atom_has_one_owner_and_a_rank_owns_a_run(atoms: list[Atoms], ranks: int) -> None:
    borders = shared_out(atoms, num_ranks=ranks)
    assert len(borders) == len(atoms)
    for each, border in zip(atoms, borders, strict=True):
        assert len(border) == ranks + 1
        assert (border[0], border[-1]) == (0, each.count)
        assert list(border) == sorted(border)


@many
@given(parameters, st.lists(st.floats(0, 1e16), min_size=1, max_size=9))
def test_no_rank_is_above_the_level_by_more_than_an_atom(
    atoms: list[Atoms], before: list[float]
) -> None:
    borders = shared_out(atoms, num_ranks=len(before), loads=before)
    loads = loads_of(atoms, borders, before)
    level = poured(before, sum(each.cost * each.count for each in atoms))
    for rank, load in enumerate(loads):
        own = [
            each.cost
            for each, border in zip(atoms, borders, strict=True)
            if border[rank] < border[rank + 1]
        ]
        # Only the last atom that it took went above the level, and that was its cheapest.
        over = min(own, default=0.0)
        assert load <= max(before[rank], (level + over) * (1 + 1e-9))
    assert max(loads) >= level * (1 - 1e-9)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 12).map(float), min_size=1, max_size=8), st.integers(2, 3))
def test_the_heaviest_rank_is_within_four_thirds_of_the_best(
    items: list[float], ranks: int
) -> None:
    bound = (4 / 3 - 1 / (3 * ranks)) * best(items, ranks) * (1 + 1e-12)
    nothing = [0.0] * ranks
    atoms = [Atoms(cost=cost, count=count) for cost, count in Counter(items).items()]
    assert max(loads_of(atoms, shared_out(atoms, num_ranks=ranks), nothing)) <= bound
    chosen = owners(items, [range(ranks)] * len(items), loads=nothing)
    loads = [0.0] * ranks
    for cost, rank in zip(items, chosen, strict=True):
        loads[rank] += cost
    assert max(loads) <= bound


def test_equal_parameters_are_not_torn_where_whole_ones_balance() -> None:
    atoms = [Atoms(cost=3.0, count=8)] * 6
    assert num_pieces(shared_out(atoms, num_ranks=3)) == 6
    # Where they do not, each rank begins or ends at most one parameter inside.
    borders = shared_out(atoms, num_ranks=4)
    assert loads_of(atoms, borders, [0.0] * 4) == [36.0] * 4
    assert num_pieces(borders) <= 6 + 4


@many
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 12))
def test_pieces_of_equal_atoms_are_few(counts: list[int], ranks: int) -> None:
    atoms = [Atoms(cost=1.0, count=count) for count in counts]
    borders = shared_out(atoms, num_ranks=ranks)
    loads = loads_of(atoms, borders, [0.0] * ranks)
    assert max(loads) - min(loads) <= 1
    assert num_pieces(borders) <= len(counts) + 2 * ranks


def test_small_atoms_fill_what_large_ones_leave() -> None:
    atoms = [Atoms(cost=1.0, count=60), Atoms(cost=50.0, count=3)]
    borders = shared_out(atoms, num_ranks=3)
    assert borders == [(0, 20, 40, 60), (0, 1, 2, 3)]


def test_more_ranks_than_atoms() -> None:
    borders = shared_out([Atoms(cost=1.0, count=2), Atoms(cost=5.0, count=1)], num_ranks=6)
    assert borders == [(0, 0, 1, 2, 2, 2, 2), (0, 1, 1, 1, 1, 1, 1)]


def test_atoms_without_cost_have_owners_too() -> None:
    nothing = [Atoms(cost=0.0, count=7), Atoms(cost=0.0, count=0)]
    assert shared_out(nothing, num_ranks=3) == [(0, 7, 7, 7), (0, 0, 0, 0)]
    # They go where there is least to do, and cost no balance.
    assert shared_out([*nothing, Atoms(cost=1.0, count=2)], num_ranks=3) == [
        (0, 0, 0, 7),
        (0, 0, 0, 0),
        (0, 1, 2, 2),
    ]
    assert shared_out([], num_ranks=3) == []


def test_one_rank_owns_all() -> None:
    assert shared_out([Atoms(cost=0.1, count=9)], num_ranks=1) == [(0, 9)]


def test_ranks_that_have_much_to_do_anyway_get_nothing() -> None:
    atoms = [Atoms(cost=1.0, count=20)]
    assert shared_out(atoms, num_ranks=3, loads=[100.0, 0.0, 0.0]) == [(0, 0, 10, 20)]
    assert shared_out(atoms, num_ranks=3, loads=[4.0, 0.0, 6.0]) == [(0, 6, 16, 20)]


def test_loads_are_left_as_they_are() -> None:
    before = [2.0, 1.0]
    shared_out([Atoms(cost=1.0, count=5)], num_ranks=2, loads=before)
    owners([1.0, 1.0], [(0, 1), (1,)], loads=before)
    assert before == [2.0, 1.0]


# -- atoms with candidates ---------------------------------------------------------------------------


def naive_owners(
    costs: Sequence[float], candidates: Sequence[Sequence[int]], loads: Sequence[float]
) -> list[int]:
    loads = list(loads)
    chosen = [-1] * len(costs)
    for atom in sorted(range(len(costs)), key=lambda atom: (-costs[atom], atom)):
        chosen[atom] = min(candidates[atom], key=lambda rank: (loads[rank], rank))
        loads[chosen[atom]] += costs[atom]
    return chosen


@st.composite
def candidate_cases(draw: st.DrawFn) -> tuple[list[float], list[Sequence[int]], list[float]]:
    loads = draw(st.lists(costs, min_size=1, max_size=7))
    ranks = st.lists(st.integers(0, len(loads) - 1), min_size=1, max_size=7)
    # Few kinds, so that many atoms share a sequence, or have equal ones.
    kinds: list[Sequence[int]] = [*draw(st.lists(ranks, min_size=1, max_size=3)), range(len(loads))]
    picks = draw(st.lists(st.integers(0, len(kinds) - 1), max_size=30))
    own = draw(st.lists(costs, min_size=len(picks), max_size=len(picks)))
    copies = draw(st.booleans())
    return own, [list(kinds[pick]) if copies else kinds[pick] for pick in picks], loads


@many
@given(candidate_cases())
def test_the_dearest_first_to_the_least_loaded_candidate(
    case: tuple[list[float], list[Sequence[int]], list[float]],
) -> None:
    own, candidates, loads = case
    assert owners(own, candidates, loads=loads) == naive_owners(own, candidates, loads)


def test_ties_go_to_the_lower_rank() -> None:
    assert owners([1.0] * 4, [(2, 1, 0)] * 4, loads=[0.0] * 3) == [0, 1, 2, 0]
    assert owners([0.0] * 3, [(2, 1)] * 3, loads=[0.0] * 3) == [1, 1, 1]


def test_straddling_atoms_balance_what_lies_whole() -> None:
    # Neighbours share each atom; rank 1 has much to do of its own.
    assert owners([2.0, 2.0, 2.0], [(0, 1), (1, 2), (2, 3)], loads=[3, 9, 3, 4]) == [0, 2, 3]


# -- all processes agree -----------------------------------------------------------------------------

SCRIPT = """
import json, random
from muonloom.ownership import Atoms, owners, shared_out
draw = random.Random(3)
cost = lambda: draw.choice([0.1, 0.7, draw.uniform(0, 9), float(draw.randint(0, 9))])
atoms = [Atoms(cost=cost(), count=draw.randint(0, 50)) for _ in range(60)]
loads = [cost() for _ in range(13)]
candidates = [draw.sample(range(13), draw.randint(1, 4)) for _ in range(200)]
costs = [cost() for _ in candidates]
found = [shared_out(atoms, num_ranks=13, loads=loads), owners(costs, candidates, loads=loads)]
"""


def test_shares_are_equal_in_every_process() -> None:
    here: list[dict[str, object]] = [{}, {}]
    for scope in here:
        exec(SCRIPT, scope)
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + "print(json.dumps(found))"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert here[0]["found"] == here[1]["found"]
    assert json.loads(done.stdout) == json.loads(json.dumps(here[0]["found"]))


# -- published models --------------------------------------------------------------------------------


def atoms_of(rule: Rule) -> Atoms:
    """A parameter's atoms, which are equal in these models; AdamW's are rows."""
    if rule.spec is None:
        count = rule.shape[0] if len(rule.shape) > 1 else 1
        return Atoms(cost=scalar_cost(math.prod(rule.shape) // count), count=count)
    found = [
        restricted(rule.spec, rule.shape, rows).matrices((rows[1] - rows[0], *rule.shape[1:]))
        for rows in row_atoms(rule.spec, rule.shape)
    ]
    assert len(set(found)) == 1
    assert sum(map(len, found)) == len(rule.matrices)
    return Atoms(cost=sum(matrix_cost(*shape) for shape in found[0]), count=len(found))


@MODELS
@CUTS
def test_heaviest_rank_of_published_models(name: str, heads_per_block: int | None) -> None:
    layout = bench.MODELS[name].layout(heads_per_block)
    largest = max(matrix_cost(*shape) for rule in layout.values() for shape in rule.matrices)
    for with_adamw in (True, False):
        rules = [rule for rule in layout.values() if with_adamw or rule.spec is not None]
        atoms = [atoms_of(rule) for rule in rules]
        for ranks in RANKS:
            borders = shared_out(atoms, num_ranks=ranks)
            loads = loads_of(atoms, borders, [0.0] * ranks)
            assert max(loads) <= 1.1 * max(sum(loads) / ranks, largest)
            assert max(loads) <= 1.15 * min(loads)
            # One atom after the other would make 50,000 pieces for 512 ranks.
            assert num_pieces(borders) <= len(atoms) + 4 * ranks


def fields_of(name: str) -> dict[str, object]:
    if name == "GLM-5":
        return read_fields(GLM5)
    if name == "DeepSeek-V3":  # what Transformers' configuration has by itself
        return {"model_type": "deepseek_v3"}
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    }


@MODELS
def test_published_models_have_the_shapes_of_their_classes(name: str) -> None:
    layers = 4  # three dense ones, where there are any, and a mixture
    config = make_config(fields_of(name) | {"num_hidden_layers": layers}, name)
    theirs = {n: tuple(p.shape) for n, p in build_on_meta(config, name).named_parameters()}
    ours = bench.MODELS[name].parameters()
    kept = {n for n in ours if n.split(".")[1] != "layers" or int(n.split(".")[2]) < layers}
    assert {n: ours[n] for n in kept} == theirs


def test_the_published_numbers_of_parameters() -> None:
    def billions(name: str) -> float:
        return sum(map(math.prod, bench.MODELS[name].parameters().values())) / 1e9

    assert billions("GLM-5") == pytest.approx(744, rel=2e-3)
    assert billions("DeepSeek-V3") == pytest.approx(671, rel=2e-3)
    assert billions("Qwen3-30B-A3B") == pytest.approx(30.5, rel=2e-3)


def test_the_table_has_the_goal_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--quick"])
    balance, traffic = capsys.readouterr().out.strip().split("\n\n")
    tables = []
    for text in (balance, traffic):
        lines = text.splitlines()[1:]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert [tuple(row[:3]) for row in rows[2:]] == [
            (name, cut, "8") for name in bench.MODELS for cut in bench.CUTS
        ]
        tables.append(rows)
    assert tuple(tables[0][0]) == bench.COLUMNS
    assert all(1.0 <= float(row[3]) <= bench.GOAL for row in tables[0][2:])
    # Each shared matrix is sent at most once each way, and less for what its owner holds itself.
    assert all(0 < float(row[4]) <= 2 for row in tables[1][2:])


# -- size --------------------------------------------------------------------------------------------


def test_experts_kept_apart_take_little_memory() -> None:
    cost, experts = matrix_cost(2048, 6144), 3 * 57_600
    borders = shared_out([Atoms(cost=cost, count=1)] * experts, num_ranks=512)
    chosen = owners([cost] * experts, [range(512)] * experts, loads=[0.0] * 512)
    # As many sequences of 513 indices as parameters would be 700 MB.
    assert len({id(border) for border in borders}) == 512
    counts = Counter(chosen).values()
    assert max(counts) - min(counts) <= 1
