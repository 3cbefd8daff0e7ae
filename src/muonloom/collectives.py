"""What ranks give one another, counted; a rank that does not take part is an error that names it."""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from muonloom.agreement import difference
from muonloom.default_group import default_group, roll, this_rank, vote
from muonloom.errors import complaint
from muonloom.roll_call import named, named_losses

_PATIENCE_S = 1.0  # a wait longer than this asks whether others have given up
# NCCL's watchdog ends the process at the timeout, so that there would be no error.
_WATCHDOG_S = 5.0
_DEFAULT_TIMEOUT_S = 1800.0


@dataclass(kw_only=True)
class Traffic:
    """What this rank gave others.

    Attributes:
        collectives: exchanges and gathers that could have a payload; control messages are none.
        payload_bytes: what left this rank, once for each rank that got it; its own share not counted.
        control_bytes: of small messages and objects, each counted once, however many ranks get it.
        control_messages: how many of those.
    """

    collectives: int = 0
    payload_bytes: int = 0
    control_bytes: int = 0
    control_messages: int = 0


class Pending:
    """A collective on its way. Tensors that it reads and writes are kept until `wait`."""

    def __init__(
        self,
        ranks: Ranks,
        what: str,
        calls: Sequence[Callable[[], Any]],
        *,
        device: torch.device,
        kept: Sequence[Tensor],
    ) -> None:
        self._ranks = ranks
        self._what = what
        self._device = device
        self._kept = kept
        self._began = time.monotonic()
        with ranks.named_losses(what, self._began):
            self._works = [call() for call in calls]

    def wait(self, *, on_host: bool = False) -> None:
        """Order the caller's stream behind the result; on the CPU, and with `on_host`, be there.

        Raises:
            LostRanksError: a rank does not take part.
        """
        with self._ranks.named_losses(self._what, self._began):
            for work in self._works:
                self._ranks.await_work(work, self._device, began=self._began, on_host=on_host)
        self._works, self._kept = [], ()


class Ranks:
    """A process group, and what went over it.

    Args:
        group: None: the default group, or this process alone where there is none.
        alone: whether this rank has nothing to do with the others.

    Attributes:
        ranks: of the group, in its order, as `torch.distributed` numbers all processes.
        position: of this rank in `ranks`.
        size: how many they are.
        traffic: what this rank gave the others so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self._given = None if group is default_group() else group
        if alone or default_group() is None:
            self.ranks: tuple[int, ...] = (this_rank(),)
        else:
            self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self.position = self.ranks.index(this_rank())
        self.size = len(self.ranks)
        self.traffic = Traffic()
        if self.size > 1:
            roll()  # counts default groups, as all ranks do

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        # Groups live as long as they are referred to; the default one is not ours to keep alive.
        found = default_group() if self._given is None else self._given
        assert found is not None
        return found

    @property
    def timeout_s(self) -> float:
        """After how many seconds a collective fails that a rank does not take part in."""
        try:
            timeout: timedelta = self._backend(self.served(torch.device("cpu"))).options._timeout
        except (AttributeError, RuntimeError):
            return _DEFAULT_TIMEOUT_S
        return timeout.total_seconds()

    # -- collectives --------------------------------------------------------------------------------

    def gather_small(self, message: Tensor) -> Tensor:
        """Return what all ranks gave; a control message. The host waits for it.

        Args:
            message: uint8 (n,) on any device, n equal on all ranks.

        Returns:
            uint8 (size, n), by position, on the message's device.

        Raises:
            LostRanksError: a rank does not take part.
        """
        if self.size == 1 or not message.numel():
            return message.expand(self.size, -1).clone()
        self.traffic.control_messages += 1
        self.traffic.control_bytes += message.numel()
        device = self.served(message.device)
        own = message.contiguous().to(device)
        gathered = own.new_empty((self.size, message.numel()))
        self._start(
            "a control message",
            lambda: dist.all_gather(list(gathered), own, group=self.group, async_op=True),
            device=device,
            kept=(own, gathered),
        ).wait(on_host=True)
        return gathered.to(message.device)

    def gather_objects(self, thing: object) -> list[Any]:
        """Return what all ranks gave, by position; control messages.

        Args:
            thing: whatever can be pickled.

        Raises:
            LostRanksError: a rank does not take part.
        """
        if self.size == 1:
            return [thing]
        data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64).view(torch.uint8)
        lengths = self.gather_small(length).view(torch.int64).flatten().tolist()
        padded = data.new_zeros(max(lengths))
        padded[: data.numel()] = data
        gathered = self.gather_small(padded)
        return [
            pickle.loads(ctypes.string_at(row.data_ptr(), length))
            for row, length in zip(gathered, lengths, strict=True)
        ]

    def exchange(
        self,
        received: Tensor,
        receive_sizes: Sequence[int],
        sent: Tensor,
        send_sizes: Sequence[int],
    ) -> None:
        """Send each rank its message, and get one from each; then the caller's stream sees them.

        Args:
            received: uint8 (sum(receive_sizes),), contiguous: messages by position; overwritten.
            receive_sizes: bytes from each rank; what that one sends.
            sent: uint8 (sum(send_sizes),), contiguous: messages by position.
            send_sizes: bytes for each rank.

        Raises:
            LostRanksError: a rank does not take part.
        """
        if self.size == 1:
            received.copy_(sent)
            return
        self._count(sum(send_sizes) - send_sizes[self.position])
        self._start(
            "an exchange",
            lambda: dist.all_to_all_single(
                received,
                sent,
                list(receive_sizes),
                list(send_sizes),
                group=self.group,
                async_op=True,
            ),
            device=sent.device,
            kept=(received, sent),
        ).wait()

    def start_gather(self, parts: Sequence[Tensor], own: Tensor) -> Pending:
        """Begin to fill all parts on all ranks, each from the rank that has it.

        Args:
            parts: by position, uint8 (n_r,), contiguous, with sizes that all ranks know; overwritten.
            own: uint8 (n_position,): this rank's part, or its content somewhere else.

        Returns:
            What to wait for before the parts are read, and before anything here is written.

        Raises:
            LostRanksError: a rank does not take part.
        """
        mine = parts[self.position]
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        calls: list[Callable[[], Any]] = []
        if self.size > 1 and any(part.numel() for part in parts):
            self._count(mine.numel() * (self.size - 1))
            calls = self._gathering(parts)
        return Pending(self, "a gather", calls, device=mine.device, kept=parts)

    def _gathering(self, parts: Sequence[Tensor]) -> list[Callable[[], Any]]:
        # Only NCCL gathers what differs in size. Padding would take as many times the memory as there
        # are ranks where one has everything. Broadcasts take none, and with gloo they are faster too.
        own = parts[self.position]
        if self._backend_name(own.device) == "nccl":
            return [lambda: dist.all_gather(list(parts), own, group=self.group, async_op=True)]

        def broadcast(part: Tensor, source: int) -> Callable[[], Any]:
            return lambda: dist.broadcast(part, src=source, group=self.group, async_op=True)

        return [
            broadcast(part, source)
            for part, source in zip(parts, self.ranks, strict=True)
            if part.numel()
        ]

    def _start(
        self,
        what: str,
        call: Callable[[], Any],
        *,
        device: torch.device,
        kept: Sequence[Tensor],
    ) -> Pending:
        return Pending(self, what, [call], device=device, kept=kept)

    def _count(self, payload_bytes: int) -> None:
        self.traffic.collectives += 1
        self.traffic.payload_bytes += payload_bytes

    # -- backends -----------------------------------------------------------------------------------

    def served(self, device: torch.device) -> torch.device:
        """Return the device itself, or one that the group has a backend for."""
        types = [served.type for served in self.group._device_types]
        return device if device.type in types else torch.device(types[0])

    def _backend(self, device: torch.device) -> Any:
        return self.group._get_backend(device)

    def _backend_name(self, device: torch.device) -> str:
        return str(self._backend(device).name())

    # -- ranks that do not take part ----------------------------------------------------------------

    def await_work(self, work: Any, device: torch.device, *, began: float, on_host: bool) -> None:
        """Wait for a backend's work, as long as others do."""
        if self._backend_name(device) == "gloo":
            while not _is_done(work, _PATIENCE_S):
                self._refuse_if_called()
        elif on_host:
            # A stream's host waits for nothing, and the watchdog of the backend tells no one.
            timeout_s = self.timeout_s
            until = began + timeout_s - min(_WATCHDOG_S, timeout_s / 2)
            asked = time.monotonic()
            while not work.is_completed():
                now = time.monotonic()
                if now > until:
                    raise RuntimeError("no answer")
                if now > asked + _PATIENCE_S:
                    asked = now
                    self._refuse_if_called()
                time.sleep(0)
        work.wait()

    def _refuse_if_called(self) -> None:
        if roll().is_called():
            raise RuntimeError("another rank has given up")

    def named_losses(self, what: str, began: float) -> AbstractContextManager[None]:
        """Make one error of all ways in which backends fail; see `roll_call.named_losses`."""
        return named_losses(
            roll, self.ranks, what=what, began=began, timeout_s=lambda: self.timeout_s
        )


def _is_done(work: Any, patience_s: float) -> bool:
    """Wait for a work of gloo; False: it goes on."""
    try:
        work.wait(timedelta(seconds=patience_s))
    except RuntimeError:
        # It raises the same where the work failed and where patience did.
        return bool(work.is_completed())
    return True


# -- groups by their ranks ------------------------------------------------------------------------------

# By default group, since they go with it.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Ranks]] = WeakKeyDictionary()


def ranks_of(ranks: Sequence[int]) -> Ranks:
    """Return the group of just these ranks; made at the first call, which all of them make.

    Args:
        ranks: as `torch.distributed` numbers all processes, ascending.

    Raises:
        ValueError: torch cannot make the group by these ranks alone; on all of them.
        LostRanksError: a rank does not make the call.
    """
    key = tuple(ranks)
    assert key == tuple(sorted(set(key)))  # as torch numbers the positions in a new group
    if key == (this_rank(),):
        return Ranks(alone=True)
    default = default_group()
    assert default is not None
    groups = _made.setdefault(default, {})
    if key not in groups:
        everyone = Ranks()
        groups[key] = everyone if key == everyone.ranks else Ranks(_new_group(key, everyone))
    return groups[key]


def _new_group(ranks: tuple[int, ...], everyone: Ranks) -> dist.ProcessGroup:
    what, began, timeout_s = "the making of a group", time.monotonic(), everyone.timeout_s
    with named_losses(roll, ranks, what=what, began=began, timeout_s=lambda: timeout_s):
        # torch names the group after its ranks and the number of groups that a rank has made before:
        # where that differs, ranks would wait for each other under different names.
        count = str(len(dist.distributed_c10d._world.pg_names))
        plans = vote("group", ranks, timeout_s).plans(count, lambda: [f"process_group: {count}"])
        if not plans:
            timeout = timedelta(seconds=timeout_s)
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=True
            )
            return group
    counts = ", ".join(f"{plan.digest} on {named(plan.ranks)}" for plan in plans)
    raise ValueError(
        complaint(
            "process_group",
            got=f"other groups made before that of {named(ranks)}: {counts}",
            wanted="as many groups on each of its ranks",
            remedy="Make it by torch.distributed.new_group on all ranks, and pass it as process_group.",
        )
    )


def agree(digest: str, describe: Callable[[], list[str]], ranks: Ranks) -> None:
    """Return once all ranks have come with the same digest.

    Ranks count their calls for each set of ranks, so all of them have to make the same ones.

    Args:
        digest: of what has to be the same.
        describe: returns it as lines, one a parameter, each led by its name and a colon; called where
            digests differ.
        ranks: whose.

    Raises:
        ValueError: digests differ; the same error on all ranks, with the first line that differs.
        LostRanksError: a rank does not come within the group's timeout.
    """
    if ranks.size == 1:
        return
    with ranks.named_losses("the comparison of plans", time.monotonic()):
        plans = vote("plan", ranks.ranks, ranks.timeout_s).plans(digest, describe)
    if plans:
        raise ValueError(difference(plans))
