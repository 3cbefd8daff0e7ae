"""Which tasks must wait for which, from what they touch: as few waits as keep conflicts in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Access:
    """Bytes ``start:stop`` of `place`, read or written."""

    place: Hashable
    start: int
    stop: int
    write: bool = False

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        overlap = max(self.start, other.start) < min(self.stop, other.stop)
        return self.place == other.place and overlap and (self.write or other.write)


@dataclass(frozen=True)
class _Past:
    """An access that was made: by which task, of which stream, as that stream's how-manieth."""

    access: Access
    task: int
    stream: str
    count: int


def add_waits(
    streams: Sequence[str], accesses: Sequence[Sequence[Access]]
) -> list[tuple[int, ...]]:
    """Return for each task the tasks of other streams that it has to wait for.

    The tasks are issued in order, step after step. Work of one stream is in order by itself, and what a
    task waited for, later tasks of its stream need not wait for again. A wait for a task that comes
    later in the order means that task in the step before.

    Args:
        streams: of each task.
        accesses: of each task.
    """
    history: dict[Hashable, list[_Past]] = {}
    clocks: dict[str, dict[str, int]] = {stream: {} for stream in streams}
    finished: dict[tuple[str, int], dict[str, int]] = {}
    waits: list[tuple[int, ...]] = []
    for step in range(2):
        for task, (stream, own) in enumerate(zip(streams, accesses, strict=True)):
            clock = clocks[stream]
            found = _missing(own, history, clock, stream)
            latest = {past.stream: past for past in sorted(found, key=lambda past: past.count)}
            chosen = [
                past
                for past in latest.values()
                if not any(
                    finished[other.stream, other.count].get(past.stream, 0) >= past.count
                    for other in latest.values()
                    if other is not past
                )
            ]
            for past in chosen:
                _merge(clock, finished[past.stream, past.count])
            clock[stream] = clock.get(stream, 0) + 1
            finished[stream, clock[stream]] = dict(clock)
            for access in own:
                _remember(history, _Past(access, task, stream, clock[stream]))
            if step:
                waits.append(tuple(sorted(past.task for past in chosen)))
    return waits


def _missing(
    own: Sequence[Access],
    history: dict[Hashable, list[_Past]],
    clock: dict[str, int],
    stream: str,
) -> list[_Past]:
    return [
        past
        for access in own
        for past in history.get(access.place, ())
        if past.stream != stream
        and clock.get(past.stream, 0) < past.count
        and past.access.conflicts(access)
    ]


def _merge(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def _remember(history: dict[Hashable, list[_Past]], past: _Past) -> None:
    """Keep an access; one of the same stream that it covers is not asked for again."""
    new = past.access
    if new.start >= new.stop:
        return
    kept = [
        old
        for old in history.get(new.place, ())
        if old.stream != past.stream
        or not (new.start <= old.access.start and old.access.stop <= new.stop)
        or (old.access.write and not new.write)
    ]
    history[new.place] = [*kept, past]
