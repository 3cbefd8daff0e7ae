"""From parameter groups to a running engine: plan, schedule, slabs, backend, as the groups are now."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muonloom.assignment import Assignment
from muonloom.binding import Groups, plan_key, plan_of, sources_of, staged_states
from muonloom.config import HostPlacement, host_placement
from muonloom.device import Backend
from muonloom.dtensors import is_dtensor
from muonloom.engine import Engine
from muonloom.errors import complaint
from muonloom.host import Reservation, SlabStore
from muonloom.membership import Membership
from muonloom.plan import Exchange, Plan
from muonloom.schedule import Op, default_slot_bytes, resident_schedule, staged_schedule
from muonloom.segments import SnapshotTensor
from muonloom.snapshot import Snapshot
from muonloom.staging import Source
from muonloom.state import State, Store, device_state, kept_dtypes
from muonloom.weights import DeviceWeights

States = Mapping[Tensor, State]


class Assembly:
    """Keeps plan, engine and slabs in step with the groups.

    Attributes:
        host: how state is placed on the host; None in device placement.
        awaited: the parameters that hooks wait for, so that a step may return before they are written;
            None: steps return with all weights. The next `update` brings a change about.
        torn: names of parameters that a failed step left half written.

    Args:
        weights: where device weights are.
        placement: of `Muon`.
        ns_batch_bytes: of `Muon`.
        make_backend: what makes the streams of a device.
        membership: which ranks hold what.
    """

    def __init__(
        self,
        *,
        weights: DeviceWeights,
        placement: str | HostPlacement,
        ns_batch_bytes: int | str,
        make_backend: Callable[[torch.device], Backend],
        membership: Membership,
    ) -> None:
        self.host = host_placement(placement)
        self.awaited: frozenset[Tensor] | None = None
        self.torn: list[str] = []
        self._weights = weights
        self._membership = membership
        self._parking: SlabStore | None = None
        self._indices: dict[Tensor, int] = {}
        self._ns_batch_bytes = ns_batch_bytes
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._device = torch.device("cpu")
        self._slabs: SlabStore | None = None
        self._plan: Plan | None = None
        self._engine: Engine | None = None
        self._key: tuple[Any, ...] = ()
        self._mappings: tuple[Groups, Mapping[Tensor, Assignment], States] = ((), {}, {})
        self._slab_version = 0
        self._snapshot: Snapshot | None = None

    @property
    def splits_masters(self) -> bool:
        """See `muonloom.state.Store`, which this is."""
        return self.host is not None and self.host.master_layout == "split"

    def new(self, parameter: Tensor, key: str, dtype: torch.dtype, *, zero: bool = True) -> Tensor:
        """Return a tensor for the state `key` of `parameter`, where the placement has it."""
        if self._slabs is None:
            return device_state(self._weights.part(parameter), key, dtype)
        return self._slabs.new(parameter, key, dtype, zero=zero)

    def has_master(self, parameter: Tensor) -> bool:
        """See `DeviceWeights.has_master`."""
        return self._weights.has_master(parameter)

    def part(self, parameter: Tensor) -> Tensor:
        """See `DeviceWeights.part`."""
        return self._weights.part(parameter)

    @property
    def overlaps_forward(self) -> bool:
        """Whether a step may return before all weights are written."""
        return self.awaited is not None

    @property
    def plan(self) -> Plan:
        """The plan of one step."""
        assert self._plan is not None
        return self._plan

    @property
    def engine(self) -> Engine:
        """What runs it."""
        assert self._engine is not None
        return self._engine

    @property
    def device_bytes(self) -> tuple[int, int]:
        """The bytes of slots and of workspaces with rooms; none while all was given back."""
        engine = self._engine
        return (0, 0) if engine is None else (engine.slot_bytes, engine.workspace_bytes)

    @property
    def host_bytes(self) -> int:
        """The bytes of all slabs."""
        return sum(store.nbytes for store in (self._slabs, self._parking) if store is not None)

    def give_back(self) -> None:
        """Let go of slots, rooms, workspaces and events; the next `update` makes them again."""
        self.settle()
        self.finish_reading()
        self._engine = None

    def snapshot(self, tensors: Sequence[SnapshotTensor], extra_bytes: int | None) -> Snapshot:
        """Return the present state as a snapshot, which steps respect from now on.

        Args:
            tensors: of the state, their parameters numbered as the plan's.
            extra_bytes: room for copies; None: two slots of host placement, or what "auto" takes for them.
        """
        self.finish_reading()
        engine = self._engine
        if extra_bytes is None:
            slot_bytes = engine.schedule.slot_bytes if engine is not None else 0
            extra_bytes = 2 * (slot_bytes or default_slot_bytes(self._home))
        self._snapshot = Snapshot(
            tensors,
            None if engine is None else engine.schedule,
            is_staged=self.host is not None,
            backend=self._streams,
            extra_bytes=extra_bytes,
        )
        if engine is not None:
            engine.snapshot = self._snapshot
        return self._snapshot

    def finish_reading(self) -> None:
        """Wait until no save reads the state: somebody is about to change it other than by a step."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None
        if self._engine is not None:
            self._engine.snapshot = None

    @property
    def _home(self) -> torch.device:
        groups, _, _ = self._mappings
        return next((p.device for group in groups for p in group["params"]), self._device)

    @property
    def _streams(self) -> Backend:
        """The device's streams, also where no engine needs them."""
        return self._backend or self._make_backend(self._home)

    @property
    def parking(self) -> SlabStore:
        """Host memory for what lives on the device between releases; kept from one to the next."""
        if self._parking is None:
            backend = self._streams
            self._parking = SlabStore(pin=backend.pin, unpin=backend.unpin)
        return self._parking

    def is_on_host(self, parameter: Tensor, key: str, tensor: Tensor) -> bool:
        """Whether the state `key` is in host memory at present."""
        if self.host is not None:
            return True
        place = parking_key(key, tensor)
        return self._parking is not None and self._parking.holds(parameter, place, tensor)

    def update(
        self, groups: Groups, assignments: Mapping[Tensor, Assignment], states: States
    ) -> Engine:
        """Return the engine, made again where the groups or the iteration's options changed.

        Raises:
            ValueError: a matrix that is larger than a batch or a slot may be, or parameters on several
                devices in host placement; nothing was changed.
            MemoryError: the host has too little memory for the state; nothing was changed.
        """
        self._mappings = (groups, assignments, states)  # loading puts others in place of them
        key = (plan_key(groups, self._weights), self.overlaps_forward)
        if self._engine is None or key != self._key:
            with torch.inference_mode(False):  # what is made here outlives it
                self._build(groups, assignments, states)
            self._key = key
        return self.engine

    def prefetch(self) -> None:
        """Load ahead, once a step; again where somebody has written state since."""
        if self._slabs is None:
            return
        groups, _, states = self._mappings
        _adopt(groups, states, self._slabs)
        if self._slabs.version != self._slab_version:
            self.engine.forget()
            self._slab_version = self._slabs.version
        self.engine.prefetch()

    def wait_for(self, parameters: Iterable[Tensor]) -> None:
        """Have the caller's next operations wait for the weights of these, where they may be late."""
        if self._backend is not None and self._engine is not None:
            indices = (self._indices[p] for p in parameters if p in self._indices)
            self._engine.wait_for(indices)

    def wait_for_weights(self) -> None:
        """Have the caller's next operations wait for all weights, where they may be late."""
        if self.overlaps_forward and self._engine is not None:
            self._engine.wait_for_weights()

    def wait_for_unawaited(self) -> None:
        """Have the caller's next operations wait for weights that no hook waits for."""
        if self.awaited is not None:
            self.wait_for(tensor for tensor in self._indices if tensor not in self.awaited)

    def settle(self) -> None:
        """See `Engine.settle`."""
        if self._engine is not None:
            self._engine.settle()

    def quiesce(self) -> None:
        """Stop all movement before state is loaded, which is the cure for whatever has failed."""
        self.finish_reading()
        if self._engine is not None:
            with contextlib.suppress(Exception):
                self._engine.settle()
            self._engine.forget()

    def _build(
        self, groups: Groups, assignments: Mapping[Tensor, Assignment], states: States
    ) -> None:
        host = self.host
        self.finish_reading()
        self._check_alike(groups, assignments, states)
        if host is None:
            plan = plan_of(groups, assignments, self._weights, ns_batch_bytes=self._ns_batch_bytes)
            self._plan = plan
            self._engine = Engine(
                plan, resident_schedule(plan), torn=self.torn, ranks_of=self._membership.ranks
            )
            self._share_weights(groups, assignments)
            return
        slot_bytes = None if isinstance(host.slot_bytes, str) else host.slot_bytes
        plan = plan_of(
            groups,
            assignments,
            self._weights,
            ns_batch_bytes=self._ns_batch_bytes,
            slot_bytes=slot_bytes,
        )
        device = _one_device(groups, assignments)
        schedule = staged_schedule(
            plan,
            staged_states(groups, states, store=self),
            slot_bytes=host.slot_bytes,
            num_slots=host.num_slots,
            forward_order=self.overlaps_forward,
        )
        if self.splits_masters:
            _refuse_half_precision(assignments)
        if self._engine is not None:
            self._engine.settle()
        if self._backend is None:
            self._backend, self._device = self._make_backend(device), device
        if device != self._device:
            raise ValueError(
                complaint(
                    "params",
                    got=f"parameters that moved from {self._device} to {device}",
                    wanted="host memory to serve one device",
                    remedy="Move the model first, then build the optimizer.",
                )
            )
        if self._slabs is None:
            pin, unpin = self._backend.pin, self._backend.unpin
            self._slabs = SlabStore(pin=pin, unpin=unpin)
        self._slabs.reserve(
            _reservations(plan, groups, store=self),
            what="masters and momentum",
            later_bytes=0 if self._slabs.nbytes or not self.splits_masters else _half_bytes(groups),
        )
        _adopt(groups, states, self._slabs)
        self._plan, self._engine = plan, None  # the old slots go before the new ones come
        self._engine = Engine(
            plan,
            schedule,
            torn=self.torn,
            backend=self._backend,
            sources=partial(_sources, weakref.ref(self)),
            memory_of=self._slabs.memory_of,
            overlaps_forward=self.overlaps_forward,
            ranks_of=self._membership.ranks,
        )
        self._share_weights(groups, assignments)
        self._slab_version = self._slabs.version
        tensors = (tensor for group in groups for tensor in group["params"])
        self._indices = {tensor: index for index, tensor in enumerate(tensors)}

    def _check_alike(
        self, groups: Groups, assignments: Mapping[Tensor, Assignment], states: States
    ) -> None:
        """Have a matrix that passes a caller's limit refused by all ranks, not by its owner alone."""
        shared = [t for t, assignment in assignments.items() if assignment.share is not None]
        slot_bytes = None if self.host is None else self.host.slot_bytes
        limits_slots = isinstance(slot_bytes, int) and not any(map(is_dtensor, shared))
        if not shared or not (isinstance(self._ns_batch_bytes, int) or limits_slots):
            return
        limit = self._ns_batch_bytes
        plan = plan_of(groups, assignments, self._weights, ns_batch_bytes=limit, shared=False)
        if limits_slots and self.host is not None:
            staged_schedule(
                plan,
                staged_states(groups, states, store=self),
                slot_bytes=self.host.slot_bytes,
                num_slots=self.host.num_slots,
            )

    def _share_weights(self, groups: Groups, assignments: Mapping[Tensor, Assignment]) -> None:
        schedule = self.engine.schedule
        crossings = [
            index
            for index, task in enumerate(schedule.tasks)
            if task.op is Op.ORTHOGONALIZE and isinstance(schedule.works[task.work], Exchange)
        ]
        self.engine.sharing = self._membership.sharing(
            groups, assignments, ready=self.engine.ready, after=max(crossings, default=-1)
        )


def parking_key(key: str, tensor: Tensor) -> str:
    """Return the key under which `Assembly.parking` keeps a tensor: another dtype needs another place."""
    return key if key == "step" else f"{key}, {tensor.dtype}"


def _sources(assembly: weakref.ref[Assembly]) -> list[Source]:
    """Read the mappings as they are now; by a weak reference, so that `del` gives slabs back at once."""
    alive = assembly()
    assert alive is not None
    return sources_of(*alive._mappings)


def _adopt(groups: Groups, states: States, slabs: SlabStore) -> None:
    """Move state that came from elsewhere (a caller, a copy of an optimizer) into the slabs."""
    for parameter in (tensor for group in groups for tensor in group["params"]):
        state = states.get(parameter, {})  # never makes an entry, as [] would
        for key, tensor in state.items():
            # What has no place belongs to a writer that a copy of the optimizer does not have.
            if slabs.has_place(parameter, key) and not slabs.holds(parameter, key, tensor):
                state[key] = slabs.place(parameter, key).copy_(tensor)


def _one_device(groups: Groups, assignments: Mapping[Tensor, Assignment]) -> torch.device:
    tensors = [tensor for group in groups for tensor in group["params"]]
    home = tensors[0].device if tensors else torch.device("cpu")
    for tensor in tensors:
        if tensor.device != home:
            raise ValueError(
                complaint(
                    assignments[tensor].name,
                    got=f"a parameter on {tensor.device}, and others on {home}",
                    wanted="all on one device for host placement",
                    remedy='Use one optimizer a device, or placement="device".',
                )
            )
    return home


def _refuse_half_precision(assignments: Mapping[Tensor, Assignment]) -> None:
    for tensor, assignment in assignments.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                complaint(
                    assignment.name,
                    got=f"a {tensor.dtype} parameter",
                    wanted='BF16 or FP32 for master_layout="split"',
                    remedy='Keep the model in BF16, or use master_layout="full".',
                )
            )


def _reservations(plan: Plan, groups: Groups, *, store: Store) -> Iterator[Reservation]:
    """Yield places for all state, in the order in which it is staged: neighbours move in one copy."""
    owners = [(group, tensor) for group in groups for tensor in group["params"]]
    works = [[part.parameter for part in work.parts] for work in plan.works]
    works.append(list(range(len(owners))))  # those without elements are in no work
    placed: set[int] = set()
    for found in works:
        fresh = [index for index in dict.fromkeys(found) if index not in placed]
        placed.update(fresh)
        dtypes = {i: kept_dtypes(owners[i][1], owners[i][0], store=store) for i in fresh}
        for key in dict.fromkeys(key for own in dtypes.values() for key in own if key != "step"):
            for index in fresh:
                if key in dtypes[index]:
                    tensor, dtype = owners[index][1], dtypes[index][key]
                    shape = tuple(store.part(tensor).shape)
                    yield Reservation(parameter=tensor, key=key, shape=shape, dtype=dtype)


def _half_bytes(groups: Groups) -> int:
    """Return what `release` will need to keep BF16 weights that are half of their masters."""
    tensors = (tensor for group in groups for tensor in group["params"])
    return sum(t.nbytes for t in tensors if t.dtype == torch.bfloat16)
