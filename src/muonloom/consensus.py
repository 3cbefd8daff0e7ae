"""What ranks that step together have to agree on first, from one message of 64 bytes that each gives all.

Every decision is a function of all messages, so that all ranks decide alike: a difference is the same error
on each of them, one gradient that is not finite skips the step everywhere, and a parameter that has a
gradient on one rank counts as present on all that hold it.

Ranks need not have the same parameters (pipeline stages, experts): those that have are a *cohort*, and what
goes by the order of parameters is compared inside each.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muonloom.collectives import Ranks, agree, ranks_of
from muonloom.guard import Verdict, inspect_gradients
from muonloom.ranks import this_rank

MESSAGE_BYTES = 64
_WORDS = MESSAGE_BYTES // 8


@dataclass(frozen=True, kw_only=True)
class Member:
    """One parameter, as this rank brings it along.

    Attributes:
        name: canonical.
        gradient: of this rank's part, or None.
        ranks: that hold it, as `torch.distributed` numbers them.
        weight: what share of its squares is this rank's to add up.
    """

    name: str
    gradient: Tensor | None
    ranks: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Word:
    """The integers of one rank's message."""

    plan: int
    present: int
    error: int
    offender: int
    has_state: int
    squares: float
    failed_before: int
    moved: int
    cohort: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Word:
        """Read what a rank wrote."""
        plan, present, flags, offender, cohort, squares, failed_before, moved = numbers
        value = struct.unpack("d", struct.pack("q", squares))[0]
        error, has_state = flags & 1, flags >> 1
        return cls(plan, present, error, offender, has_state, value, failed_before, moved, cohort)


def short(text: str) -> int:
    """Return 63 bits that differ where texts do."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int(struct.unpack("q", digest)[0]) & (2**63 - 1)


class Consensus:
    """Asks all ranks of a group before each step.

    Args:
        ranks: that step together.
        device: of messages.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    @property
    def ranks(self) -> Ranks:
        """That step together."""
        return self._ranks

    def confirm(self, error: BaseException | None) -> None:
        """Raise on all ranks where one cannot go on; this rank raises its own error."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        words = self._gather(
            plan=0,
            present=0,
            error=0 if error is None else 1,
            squares=zero,
            offender=-1,
            flags=[_flag(None, self._device)] * 2,
        )
        self._refuse(words, error, "", list)

    def verdict(
        self,
        members: Sequence[Member],
        *,
        digest: str,
        cohort: int,
        describe: Callable[[], list[str]],
        failure: Tensor | None,
        moved: Tensor | None,
        error: BaseException | None,
        has_state: bool,
    ) -> tuple[Verdict, tuple[bool, ...]]:
        """Return what all ranks found, and which parameters have a gradient on some rank that holds them.

        Args:
            members: all parameters, in the plan's order.
            digest: of what must be equal on all ranks of a cohort: plan and options.
            cohort: a number that ranks with the same parameters have in common; 0: all have.
            describe: returns that as lines, for the error where it is not.
            failure: bool scalar: whether the last step left a matrix whose iteration was not finite.
            moved: bool scalar: whether weights seem to have been written from outside.
            error: what this rank cannot step for; raised here, after the others have been told.
            has_state: whether this rank has taken a step before.

        Raises:
            ValueError: ranks differ; the same on all of them.
            RuntimeError: another rank cannot step.
        """
        bits = [member.gradient is not None for member in members]
        squares = _squares(members, self._device)
        flags = [_flag(failure, self._device), _flag(moved, self._device)]
        words = self._gather(
            plan=short(digest),
            present=short("".join("01"[bit] for bit in bits)),
            error=0 if error is None else 1,
            squares=squares,
            offender=-1,
            flags=flags,
            has_state=has_state,
            cohort=cohort,
        )
        self._refuse(words, error, digest, describe)
        present = self._present(members, bits, words, cohort)
        verdict = self._judge(members, words)
        return verdict, present

    def _gather(
        self,
        *,
        plan: int,
        present: int,
        error: int,
        squares: Tensor,
        offender: int,
        flags: Sequence[Tensor],
        has_state: bool = False,
        cohort: int = 0,
    ) -> list[Word]:
        numbers = [plan, present, error + 2 * has_state, offender, cohort]
        known = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        words = torch.stack([*known, squares.view(torch.int64), *flags])
        gathered = self._ranks.gather_small(words.view(torch.uint8))
        rows = gathered.view(torch.int64).view(self._ranks.size, _WORDS).tolist()
        return [Word.of(row) for row in rows]

    def _refuse(
        self,
        words: Sequence[Word],
        error: BaseException | None,
        digest: str,
        describe: Callable[[], list[str]],
    ) -> None:
        if error is not None:
            raise error
        failed = [rank for rank, word in zip(self._ranks.ranks, words, strict=True) if word.error]
        if failed:
            raise RuntimeError(
                f"rank {failed[0]}: got an error there before the step; wanted all ranks to be able to "
                "take it. See the output of that rank; nothing was written."
            )
        for cohort in sorted({word.cohort for word in words}):
            alike = {
                rank: word.plan
                for rank, word in zip(self._ranks.ranks, words, strict=True)
                if word.cohort == cohort
            }
            if len(set(alike.values())) == 1:
                continue
            if this_rank() not in alike:
                raise ValueError(
                    f"ranks {sorted(alike)}: got different plans or options there; wanted the same. See "
                    "the output of these ranks; nothing was written."
                )
            agree(digest, describe, ranks_of(tuple(alike)))
            raise AssertionError("digests differ, and what they are made of does not")

    def _present(
        self, members: Sequence[Member], bits: Sequence[bool], words: Sequence[Word], cohort: int
    ) -> tuple[bool, ...]:
        """Return for each parameter whether some rank that holds it has a gradient."""
        cohorts = {word.cohort for word in words}
        if len({(word.cohort, word.present) for word in words}) == len(cohorts):
            return tuple(bits)
        if len(cohorts) == 1:
            packed = _pack(bits).to(self._device)
            rows = [bytes(row.tolist()) for row in self._ranks.gather_small(packed).cpu()]
        else:  # of other lengths
            rows = self._ranks.gather_objects(bytes(_pack(bits).tolist()))
        by_rank = {
            rank: _unpack(row, len(bits))
            for rank, row, word in zip(self._ranks.ranks, rows, words, strict=True)
            if word.cohort == cohort
        }
        return tuple(
            any(by_rank[rank][index] for rank in member.ranks)
            for index, member in enumerate(members)
        )

    def _judge(self, members: Sequence[Member], words: Sequence[Word]) -> Verdict:
        verdict = Verdict(
            grad_norm=math.sqrt(math.fsum(word.squares for word in words))
            if all(math.isfinite(word.squares) for word in words)
            else math.inf,
            offender=None,
            earlier_failure=any(word.failed_before for word in words),
            weights_moved=any(word.moved for word in words),
            has_state=any(word.has_state for word in words),
        )
        if verdict.grad_norm != 0 and math.isfinite(verdict.grad_norm):
            return verdict
        # Squares of finite FP32 numbers over- and underflow; all ranks come here, and look closer.
        own = inspect_gradients(
            [(str(i), m.gradient) for i, m in enumerate(members) if m.gradient is not None],
            failure=None,
            moved=None,
        )
        offender = -1 if own.offender is None else int(own.offender)
        exact = [
            m.weight * float(torch.linalg.vector_norm(m.gradient, dtype=torch.float64)) ** 2
            for m in members
            if m.gradient is not None and m.gradient.numel() and offender < 0
        ]
        closer = self._gather(
            plan=0,
            present=0,
            error=0,
            squares=torch.tensor(math.fsum(exact), dtype=torch.float64, device=self._device),
            offender=offender,
            flags=[_flag(None, self._device)] * 2,
        )
        guilty = [
            (word.offender, rank)
            for rank, word in zip(self._ranks.ranks, closer, strict=True)
            if word.offender >= 0
        ]
        if guilty:
            index, rank = min(guilty)
            if len({word.cohort for word in words}) == 1:
                name = members[index].name
            else:  # numbered otherwise here
                told = "" if offender < 0 else members[offender].name
                name = self._ranks.gather_objects(told)[self._ranks.ranks.index(rank)]
            return replace(verdict, grad_norm=math.nan, offender=name, offender_rank=rank)
        return replace(verdict, grad_norm=math.sqrt(math.fsum(word.squares for word in closer)))


def _squares(members: Sequence[Member], device: torch.device) -> Tensor:
    """Return this rank's FP64 sum of squares; not finite where a norm in FP32 is not."""
    filled = [m for m in members if m.gradient is not None and m.gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    gradients = [m.gradient for m in filled if m.gradient is not None]
    norms = torch.stack(
        [norm.to(device) for norm in torch._foreach_norm(gradients, 2.0, torch.float32)]
    )
    weights = torch.tensor([m.weight for m in filled], dtype=torch.float64, device=device)
    return (norms.to(torch.float64).square() * weights).sum()


def _flag(flag: Tensor | None, device: torch.device) -> Tensor:
    if flag is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return flag.to(device, torch.int64)


def _pack(bits: Sequence[bool]) -> Tensor:
    number = sum(1 << index for index, bit in enumerate(bits) if bit)
    data = number.to_bytes(max(1, -(-len(bits) // 8)), "little")  # a rank may have nothing
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(row: bytes, count: int) -> list[bool]:
    number = int.from_bytes(row, "little")
    return [bool(number >> index & 1) for index in range(count)]
