"""The ranks of one save, which meet by files in its directory: threads must not enter collectives.

Each rank but the first leaves its part of the manifest when its data is on the disk. The first one waits
for all parts, makes the manifest of them and renames it; then it removes the parts, which tells the others.
A rank that fails leaves a mark instead, so that all fail soon. One that is killed leaves nothing: the first
one gives up when it has written nothing for as long as a collective may take. The others watch the first
one alone, which touches its file while it waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from muonloom.checkpoint.files import saved_name, write_whole
from muonloom.checkpoint.manifest import FILE_NAME, Manifest, read_manifest_file
from muonloom.checkpoint.together import Failure
from muonloom.errors import LostRanksError, complaint
from muonloom.roll_call import named

_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 1.0
# For a file of another machine to be seen.
_PATIENCE_S = 10.0
# How often a rank that writes looks whether others have failed, as a share of the limit and at most.
_LOOKS = 16
_LONGEST_LOOK_S = 2.0

# Size of a data file, and time of the last write.
_Sign = tuple[int, int]


class Meeting:
    """One rank's side of it.

    Args:
        path: of the checkpoint, the same directory on all ranks.
        nonce: of the save.
        rank: this one.
        num_ranks: how many there are.
        limit_s: for how long a rank may write nothing.
    """

    def __init__(
        self, path: Path, nonce: str, *, rank: int, num_ranks: int, limit_s: float
    ) -> None:
        self._path = path
        self._nonce = nonce
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._limit_s = limit_s
        self._look_s = min(_LONGEST_LOOK_S, limit_s / _LOOKS)
        self._looked = time.monotonic()
        self._signs: dict[int, tuple[_Sign, float]] = {}
        self._has_left = self._is_bound = False

    @property
    def part_names(self) -> list[str]:
        """The files in which all ranks but the first hand in."""
        return [self._name("part", rank) for rank in (*self._others, self._rank) if rank]

    def find_first(self) -> None:
        """Find the first rank's file, which is there by now.

        Raises:
            OSError: it is not seen here.
        """
        until = time.monotonic() + _PATIENCE_S
        while not (self._path / self._name("data", 0)).exists():
            if time.monotonic() > until:
                raise OSError(
                    complaint(
                        str(self._path),
                        got="a directory in which the files of rank 0 are not to be seen",
                        wanted="one file system for all ranks",
                        remedy="Save to a disk that they share.",
                    )
                )
            time.sleep(_FIRST_POLL_S)

    def check(self) -> None:
        """Look now and then whether another rank has failed.

        Raises:
            Exception: it has; see `Failure.elsewhere`.
        """
        if self._others and time.monotonic() > self._looked + self._look_s:
            self._looked = time.monotonic()
            self._refuse_failures(set(os.listdir(self._path)))

    def others_parts(self) -> list[Manifest]:
        """Wait, as the first rank, for all others; return their parts.

        Raises:
            LostRanksError: a rank has written nothing for too long.
            Exception: a rank has failed.
        """
        self._until(lambda there: not self._absent(there))
        return [read_manifest_file(self._path / self._name("part", rank)) for rank in self._others]

    def hand_in(self, part: Manifest) -> None:
        """Give the first rank this one's part, and wait until the checkpoint is there.

        Raises:
            LostRanksError: a rank has written nothing for too long.
            Exception: a rank has failed.
        """
        own = self._name("part", self._rank)
        write_whole(self._path / own, part.to_json().encode())
        self._is_bound = True
        try:
            self._until(lambda there: own not in there)
        except LostRanksError:
            if not self._is_saved():
                raise

    def _is_saved(self) -> bool:
        """Whether the checkpoint is there: the first rank may have been killed after the rename."""
        try:
            return self._nonce in (self._path / FILE_NAME).read_text(encoding="utf-8")
        except OSError:
            return False

    def close(self) -> None:
        """Tell the others, as the first rank, that the checkpoint is there."""
        for rank in self._others:
            with contextlib.suppress(OSError):
                (self._path / self._name("part", rank)).unlink(missing_ok=True)

    def leave(self, failure: BaseException | None) -> None:
        """Remove what this rank has written, and tell the others why; a second call does nothing.

        Args:
            failure: None: all of them know.
        """
        if self._has_left or self._is_bound:
            return  # once it has handed in, the first rank alone decides
        self._has_left = True
        with contextlib.suppress(OSError):
            for kind in ("data", "extra", "part"):
                for path in self._path.glob(self._name(kind, self._rank) + "*"):
                    path.unlink(missing_ok=True)
            if self._others and failure is not None:
                self._leave_mark(Failure.of(failure))
                self._remove_marks()
            self._path.rmdir()  # only where nothing else is in it

    # -- marks of failures --------------------------------------------------------------------------

    def _name(self, kind: str, rank: int) -> str:
        return saved_name(kind, self._nonce, rank)

    def _leave_mark(self, failure: Failure) -> None:
        mark = self._path / self._name("failed", self._rank)
        try:
            first_line = " ".join([failure.kind, *map(str, failure.lost)])
            write_whole(mark, f"{first_line}\n{failure.text}".encode())
        except OSError:
            mark.touch()  # a full disk has room for a name

    def _remove_marks(self) -> None:
        """Remove the marks where all ranks have left theirs: none needs to be told any more."""
        marks = [self._path / self._name("failed", rank) for rank in (*self._others, self._rank)]
        if all(mark.exists() for mark in marks):
            for mark in marks:
                mark.unlink(missing_ok=True)

    def _refuse_failures(self, there: set[str]) -> None:
        for rank in self._others:
            mark = self._name("failed", rank)
            if mark in there:
                self._is_bound = False
                raise self._failure_in(self._path / mark).elsewhere(rank)

    def _failure_in(self, mark: Path) -> Failure:
        first_line, _, text = mark.read_text(encoding="utf-8").partition("\n")
        if not text:
            return Failure.of(self._full())
        kind, *lost = first_line.split(" ")
        return Failure(kind=kind, text=text, lost=tuple(map(int, lost)))

    def _full(self) -> OSError:
        return OSError(
            complaint(
                str(self._path),
                got="a disk that did not even take the reason of a failure",
                wanted="a disk that takes the checkpoint",
                remedy="See that rank's output; the checkpoint before is untouched.",
            )
        )

    # -- waiting ------------------------------------------------------------------------------------

    def _until(self, is_over: Callable[[set[str]], bool]) -> None:
        poll_s = _FIRST_POLL_S
        self._signs.clear()
        while True:
            there = set(os.listdir(self._path))
            if is_over(there):
                return
            self._refuse_failures(there)
            self._refuse_silence(there)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S, self._look_s)

    def _absent(self, there: set[str]) -> list[int]:
        """Return, to the first rank, which others have not handed in."""
        return [rank for rank in self._others if self._name("part", rank) not in there]

    def _refuse_silence(self, there: set[str]) -> None:
        now = time.monotonic()
        if self._signs and now < self._looked + self._look_s:
            return
        self._looked = now
        if self._rank == 0:
            os.utime(self._path / self._name("data", 0))
        silent = []
        for rank in [0] if self._rank else self._absent(there):
            sign = self._sign(rank)
            if rank not in self._signs or self._signs[rank][0] != sign:
                self._signs[rank] = (sign, now)
            elif now > self._signs[rank][1] + self._limit_s:
                silent.append(rank)
        if silent:
            raise LostRanksError(
                complaint(
                    str(self._path),
                    got=f"nothing from {named(silent)} for {self._limit_s:g} s",
                    wanted="the data of all ranks",
                    remedy="See their output; the checkpoint before is untouched.",
                ),
                tuple(silent),
            )

    def _sign(self, rank: int) -> _Sign:
        try:
            found = (self._path / self._name("data", rank)).stat()
        except OSError:
            return (-1, 0)
        return (found.st_size, found.st_mtime_ns)
