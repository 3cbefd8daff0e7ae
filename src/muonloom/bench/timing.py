"""Interleaved timing: every contender runs once a round, so that drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

FULL_LIMIT_S = 17.0
SLOW_RATIO = 8.0
"""Work is cut where all rounds take longer than the limit, and a call this many times ours.

CPUs without BF16 instructions need it: torch multiplies BF16 matrices there up to 150 times slower than
FP32 ones. Elsewhere everything is timed whole.
"""

PIECE_LIMIT_S = {"ours": 30.0, "reference": 25.0, "peer": 8.0, "ceiling": 3.0}
"""Time for one contender whose work was cut, by its role."""

LEAST_SAMPLE_S = 0.05
"""Shorter calls are repeated within a sample until it takes about this long."""

MOST_REPEATS = 50


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the work that the whole consists of ``times`` times: one matrix, one iteration.

    Attributes:
        times: how often the whole holds this part.
        run: carries the part out once.
        flops: of the part.
        what: plural noun of the part, for the report.
        prepare: runs before every call, untimed.
    """

    times: int
    run: Callable[[], object]
    flops: float
    what: str
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something to time.

    Attributes:
        name: shown and stored.
        role: ``"ours"``, ``"reference"`` (never left out), ``"peer"`` or ``"ceiling"``.
        dtype: what its matrix products run in.
        flops: of the whole.
        run: carries the whole out once.
        prepare: runs before every call, untimed.
        pieces: parts that add up to the whole; timed instead of it where it takes too long.
        note: shown with the result.
    """

    name: str
    role: str
    dtype: str
    flops: float
    run: Callable[[], object]
    prepare: Callable[[], None] | None = None
    pieces: tuple[Piece, ...] = ()
    note: str = ""


@dataclass(kw_only=True)
class Timing:
    """What was measured of one contender.

    Attributes:
        status: ``"ok"``, or why there is no time: ``"not installed"``, ``"failed: ..."``,
            ``"not timed: ..."``.
        samples_s: seconds of the whole work, one a round.
        measured: what was timed: ``"all"``, or which part of the work stands for it.
    """

    name: str
    role: str = "peer"
    dtype: str = ""
    flops: float = 0.0
    note: str = ""
    status: str = "ok"
    measured: str = "all"
    samples_s: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are times."""
        return self.status == "ok" and bool(self.samples_s)

    @property
    def median_s(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples_s)

    def quartiles_s(self) -> tuple[float, float]:
        """Return the first and third quartile."""
        if len(self.samples_s) < 2:
            return (self.samples_s[0], self.samples_s[0])
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return (low, high)

    @property
    def flops_per_s(self) -> float:
        """FLOPs of the whole by the median time."""
        return self.flops / self.median_s


class Pace:
    """FLOP/s by contender as seen at earlier works: tells what would take minutes without trying."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def expected_s(self, name: str, flops: float) -> float:
        """Return the expected seconds; 0 where the contender has not been seen."""
        rate = self._rates.get(name)
        return flops / rate if rate else 0.0

    def note(self, timing: Timing) -> None:
        """Take up what was measured."""
        if timing.ok and timing.flops:
            self._rates[timing.name] = timing.flops_per_s


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Entry:
    """One contender in the rounds: how it is run, and what it has given so far."""

    def __init__(self, contender: Contender, device: torch.device, rounds: int) -> None:
        self.contender = contender
        self.device = device
        self.rounds = rounds
        self.repeats = 1
        self.cut = False
        self.once_s = 0.0
        self.timing = Timing(
            name=contender.name,
            role=contender.role,
            dtype=contender.dtype,
            flops=contender.flops,
            note=contender.note,
        )

    def begin(self, pace: Pace, ours_s: float) -> None:
        """Warm up, and settle whether the whole or its pieces are timed, and how often.

        Args:
            pace: rates of earlier works.
            ours_s: what our own call took; 0 where it is not known yet.
        """
        c = self.contender
        expected = pace.expected_s(c.name, c.flops)
        pieces_expected = pace.expected_s(c.name, sum(piece.flops for piece in c.pieces))
        limit = PIECE_LIMIT_S[c.role]
        least = pieces_expected if c.pieces else expected
        if c.role not in ("ours", "reference") and least > limit and expected > SLOW_RATIO * ours_s:
            self.timing.status = f"not timed: about {expected:.0f} s a call here"
            return
        if c.role != "ours" and c.pieces:
            first = self._sample_pieces()
            self.cut = self._too_slow(first, ours_s)
            if self.cut:
                self._begin_cut(first, limit)
                return
        self.once_s = once = self._call(c.run, c.prepare)
        if c.role != "ours" and self._too_slow(once, ours_s):
            self.rounds = max(1, int(limit / once))
            self.timing.samples_s.append(once)
        else:
            self.repeats = max(1, min(MOST_REPEATS, int(LEAST_SAMPLE_S / max(once, 1e-9))))

    def _too_slow(self, seconds: float, ours_s: float) -> bool:
        return seconds * self.rounds > FULL_LIMIT_S and seconds > SLOW_RATIO * ours_s

    def _begin_cut(self, first: float, limit: float) -> None:
        pieces = self.contender.pieces
        share = first * sum(p.flops for p in pieces) / max(1.0, self.contender.flops)
        self.rounds = max(1, min(self.rounds, int(limit / max(share, 1e-9))))
        self.timing.samples_s.append(first)
        self.timing.measured = measured_text(pieces)

    def step(self) -> None:
        """Take one sample, if this contender has rounds left."""
        if self.timing.status != "ok" or len(self.timing.samples_s) >= self.rounds:
            return
        if self.cut:
            self.timing.samples_s.append(self._sample_pieces())
        else:
            c = self.contender
            total = sum(self._call(c.run, c.prepare) for _ in range(self.repeats))
            self.timing.samples_s.append(total / self.repeats)

    def _sample_pieces(self) -> float:
        pieces = self.contender.pieces
        return sum(piece.times * self._call(piece.run, piece.prepare) for piece in pieces)

    def _call(self, run: Callable[[], object], prepare: Callable[[], None] | None) -> float:
        if prepare is not None:
            prepare()
        synchronize(self.device)
        begin = time.perf_counter()
        run()
        synchronize(self.device)
        return time.perf_counter() - begin


def measured_text(pieces: Sequence[Piece]) -> str:
    """Return what stood for the whole: ``1 of 64 matrices``, or ``1 of each of 6 kinds``."""
    if len(pieces) == 1:
        return f"1 of {pieces[0].times} {pieces[0].what}"
    return f"1 of each of {len(pieces)} kinds"


def interleave(
    contenders: Sequence[Contender], *, rounds: int, device: torch.device, pace: Pace | None = None
) -> list[Timing]:
    """Time all contenders in rounds; each round starts with another one.

    A contender that raises gets the status ``"failed: <reason>"``, and the others go on. Contenders
    that would need minutes are cut to their pieces, or left out with the reason, as their timing says.

    Args:
        contenders: what to time.
        rounds: samples of each.
        device: waited for before and after every call.
        pace: rates seen so far; updated.

    Returns:
        One timing a contender, in their order.
    """
    pace = Pace() if pace is None else pace
    entries = [_Entry(contender, device, rounds) for contender in contenders]
    ours_s = 0.0
    for entry in entries:
        _guarded(entry, partial(entry.begin, pace, ours_s))
        if entry.contender.role == "ours":
            ours_s = entry.once_s
    for index in range(rounds):
        start = index % max(1, len(entries))
        for entry in entries[start:] + entries[:start]:
            _guarded(entry, entry.step)
    for entry in entries:
        pace.note(entry.timing)
    return [entry.timing for entry in entries]


def _guarded(entry: _Entry, action: Callable[[], None]) -> None:
    # A broken peer may raise anything; only our own failures must end the run.
    try:
        action()
    except Exception as error:
        if entry.contender.role == "ours":
            raise
        entry.timing.status = failure(error)
        entry.timing.samples_s.clear()


def failure(error: BaseException) -> str:
    """Return the status of a contender that raised: one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0]}"[:200]
