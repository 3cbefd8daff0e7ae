from __future__ import annotations

import pytest
import torch

from muonloom.bench import timing
from muonloom.bench.timing import Contender, Pace, Piece, Timing, interleave

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a test says so."""

    class Clock:
        now = 0.0

        def passes(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def contender(clock, log, name, seconds, role="peer", **options):
    def run():
        log.append(name)
        clock.passes(seconds)

    return Contender(name=name, role=role, dtype="float32", flops=1e9, run=run, **options)


def test_every_round_runs_every_contender_and_starts_with_another_one(clock):
    log = []
    both = [contender(clock, log, "a", 1.0, role="ours"), contender(clock, log, "b", 2.0)]
    first, second = interleave(both, rounds=4, device=CPU)
    assert log == ["a", "b", *["a", "b", "b", "a"] * 2]  # a warm-up each, then four rounds
    assert first.samples_s == [1.0] * 4
    assert second.samples_s == [2.0] * 4
    assert second.flops_per_s == 0.5e9


def test_short_calls_are_repeated_within_a_sample(clock):
    log = []
    (result,) = interleave([contender(clock, log, "a", 0.01)], rounds=3, device=CPU)
    assert len(log) == 1 + 3 * 5
    assert result.samples_s == pytest.approx([0.01] * 3)


def test_what_prepares_a_call_is_not_timed(clock):
    prepared = []

    def prepare():
        prepared.append(1)
        clock.passes(5.0)

    peer = contender(clock, [], "a", 1.0, prepare=prepare)
    (result,) = interleave([peer], rounds=2, device=CPU)
    assert result.samples_s == [1.0, 1.0]
    assert len(prepared) == 3


def test_work_that_takes_too_long_is_timed_by_its_pieces_and_says_so(clock):
    log = []
    piece = Piece(times=64, run=lambda: clock.passes(1.0), flops=1e9 / 64, what="matrices")
    (result,) = interleave(
        [contender(clock, log, "a", 64.0, pieces=(piece,))], rounds=7, device=CPU
    )
    assert log == []
    assert set(result.samples_s) == {64.0}
    assert len(result.samples_s) == 7
    assert result.measured == "1 of 64 matrices"


def test_pieces_of_several_kinds_add_up_to_the_whole(clock):
    kinds = (
        Piece(times=3, run=lambda: clock.passes(1.0), flops=1e8, what="matrices"),
        Piece(times=2, run=lambda: clock.passes(10.0), flops=3.5e8, what="matrices"),
    )
    peer = contender(clock, [], "a", 23.0, pieces=kinds, role="reference")
    (result,) = interleave([peer], rounds=7, device=CPU)
    assert result.samples_s == [23.0, 23.0]  # 11 s a round, 25 s for it
    assert result.measured == "1 of each of 2 kinds"


def test_work_that_fits_is_timed_whole_though_it_has_pieces(clock):
    piece = Piece(times=4, run=lambda: clock.passes(0.1), flops=1e9 / 4, what="matrices")
    (result,) = interleave([contender(clock, [], "a", 0.3, pieces=(piece,))], rounds=7, device=CPU)
    assert result.samples_s == pytest.approx([0.3] * 7)
    assert result.measured == "all"


def test_a_peer_that_would_take_minutes_is_left_out_with_the_expected_time(clock):
    log, pace = [], Pace()
    pace.note(Timing(name="a", flops=1e9, samples_s=[100.0]))
    (peer,) = interleave([contender(clock, log, "a", 100.0)], rounds=7, device=CPU, pace=pace)
    assert log == []
    assert peer.status == "not timed: about 100 s a call here"
    assert not peer.ok
    reference = contender(clock, log, "a", 100.0, role="reference")
    (kept,) = interleave([reference], rounds=7, device=CPU, pace=pace)
    assert kept.samples_s == [100.0]


def test_a_peer_that_is_not_much_slower_than_ours_is_timed_whole(clock):
    piece = Piece(times=64, run=lambda: clock.passes(1.0), flops=1e9 / 64, what="matrices")
    ours = contender(clock, [], "a", 10.0, role="ours")
    peer = contender(clock, [], "b", 70.0, pieces=(piece,))
    _, result = interleave([ours, peer], rounds=7, device=CPU)
    assert result.samples_s == [70.0] * 7


def test_ours_is_never_cut(clock):
    ours = contender(clock, [], "a", 100.0, role="ours")
    (result,) = interleave([ours], rounds=7, device=CPU)
    assert result.samples_s == [100.0] * 7


def test_a_peer_that_raises_is_reported_and_the_others_go_on(clock):
    def broken():
        raise RuntimeError("no kernel\nsecond line")

    peer = Contender(name="b", role="peer", dtype="float32", flops=1.0, run=broken)
    ours = contender(clock, [], "a", 1.0, role="ours")
    first, second = interleave([ours, peer], rounds=2, device=CPU)
    assert first.samples_s == [1.0, 1.0]
    assert second.status == "failed: RuntimeError: no kernel"
    assert second.samples_s == []


def test_our_own_failure_ends_the_run(clock):
    def broken():
        raise RuntimeError("no kernel")

    ours = Contender(name="a", role="ours", dtype="float32", flops=1.0, run=broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        interleave([ours], rounds=2, device=CPU)


def test_medians_and_quartiles():
    result = Timing(name="a", flops=12.0, samples_s=[5.0, 1.0, 2.0, 4.0, 3.0])
    assert result.median_s == 3.0
    assert result.quartiles_s() == (2.0, 4.0)
    assert result.flops_per_s == 4.0
    assert Timing(name="a", samples_s=[1.0]).quartiles_s() == (1.0, 1.0)
