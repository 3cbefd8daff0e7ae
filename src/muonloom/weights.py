"""Device weights: a parameter's own storage, or what its writer fills in place of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from muonloom.bfloat16_writer import BFloat16Writer
from muonloom.bits import rounds_to
from muonloom.cuts import write_atoms
from muonloom.dtensors import local_part
from muonloom.errors import complaint
from muonloom.hollow import hollow_reason, is_hollow, is_released
from muonloom.layout import BlockSpec
from muonloom.writers import ExpertEngine, Writer

# What one piece of a rewrite takes on the device, where masters come from elsewhere.
_PIECE_BYTES = 64 << 20


@dataclass(kw_only=True)
class _Entry:
    """One parameter's writer, and where it was last seen to write.

    `stops` are the rows of dimension 0 at which its write atoms end.
    """

    name: str
    writer: Writer
    storage: object
    engine: ExpertEngine | None
    stops: tuple[int, ...]
    addresses: tuple[int, ...] = ()


class DeviceWeights:
    """Knows for each parameter where its device weight is, and reads and writes it."""

    def __init__(self) -> None:
        self._entries: dict[Tensor, _Entry] = {}
        self._claims: dict[int, Tensor] = {}  # by identity of writers and of their storage
        self._engines: list[ExpertEngine] = []
        self._parked: dict[Tensor, Tensor] = {}
        self._rows: dict[Tensor, tuple[int, int]] = {}

    @property
    def engines(self) -> tuple[ExpertEngine, ...]:
        """The engines that are bound."""
        return tuple(self._engines)

    # -- registration -------------------------------------------------------------------------------

    def register(
        self,
        parameter: Tensor,
        writer: Writer,
        *,
        name: str,
        spec: BlockSpec | None,
        engine: ExpertEngine | None = None,
    ) -> None:
        """Have `writer` write the device weight of `parameter` from now on, in place of a former one.

        Raises:
            ValueError: it cannot: the parameter has a writer of an engine, the writer writes another
                parameter or nothing that could stand in for released storage, or a write atom has matrices
                that are not updated together; nothing was changed.
        """
        if not isinstance(writer, Writer):
            raise TypeError(
                complaint(
                    name,
                    got=f"a {type(writer).__name__}",
                    wanted="a writer, with storage, write() and read()",
                    remedy="See muonloom.Writer.",
                )
            )
        known = self._entries.get(parameter)
        other = known is not None and known.writer is not writer and known.engine is not engine
        if known is not None and other and _still_holds(known.engine, parameter):
            raise ValueError(
                complaint(
                    name,
                    got="a second writer",
                    wanted="one, of an engine or of yours",
                    remedy="Bind one of two engines, and register no writer for what an engine holds.",
                )
            )
        if known is not None and known.writer is writer and engine is None:
            engine = known.engine
        self._refuse_shared(parameter, writer, name)
        if is_released(parameter) and writer.storage is None:
            raise ValueError(
                complaint(
                    name,
                    got="released storage and a writer without storage",
                    wanted="a writer whose storage stands in for it",
                    remedy="Give the writer tensors, or bring the parameter's storage back.",
                )
            )
        stops = _atom_stops(parameter, writer, spec, name)
        if hasattr(writer, "prepare") and (known is None or known.writer is not writer):
            writer.prepare(parameter)
        self._entries[parameter] = _Entry(
            name=name, writer=writer, storage=writer.storage, engine=engine, stops=stops
        )
        self._entries[parameter].addresses = self._addresses(parameter)
        self._claims.update(dict.fromkeys(_identities(writer), parameter))

    def _refuse_shared(self, parameter: Tensor, writer: Writer, name: str) -> None:
        for thing in _identities(writer):
            other = self._claims.get(thing, parameter)
            if other is not parameter and other in self._entries:
                raise ValueError(
                    complaint(
                        name,
                        got=f"the writer of {self._entries[other].name}",
                        wanted="a writer of its own",
                        remedy="Make one writer a parameter.",
                    )
                )

    def registered(self) -> dict[Tensor, _Entry]:
        """Return what is registered, for `put_back`."""
        return dict(self._entries)

    def put_back(self, registered: dict[Tensor, _Entry]) -> None:
        """Have registered what was."""
        self._entries = registered
        self._claims = {i: p for p, e in registered.items() for i in _identities(e.writer)}

    def park(self, tensor: Tensor, copy: Tensor) -> None:
        """Read `tensor` from this copy on the host while its own storage is given up."""
        self._parked[tensor] = copy

    def parked(self, parameter: Tensor) -> Tensor | None:
        """Return the copy that is read in place of the weight of `parameter`, or None."""
        return self._parked.get(self._holder(parameter))

    def parked_copy(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of this very tensor, or None."""
        return self._parked.get(tensor)

    def unpark(self, tensor: Tensor) -> None:
        """Read `tensor` itself again."""
        self._parked.pop(tensor, None)

    def bind(self, engine: ExpertEngine) -> None:
        """Remember an engine whose writers were registered."""
        if not any(known is engine for known in self._engines):
            self._engines.append(engine)

    def rebind(self, parameter: Tensor) -> None:
        """Accept the storage that the writer of `parameter` has now."""
        entry = self._entries.get(parameter)
        if entry is not None:
            entry.storage = entry.writer.storage
            entry.addresses = self._addresses(parameter)

    def renew_writers(self) -> None:
        """Take the writers that engines have now."""
        for engine in self._engines:
            for parameter, writer in _held(engine):
                entry = self._entries.get(parameter)
                if entry is not None and entry.engine is engine:
                    entry.writer = writer

    # -- where it is --------------------------------------------------------------------------------

    def update_rows(self, parameter: Tensor, rows: tuple[int, int]) -> None:
        """Have this rank update these rows of dimension 0 alone; other ranks update the others."""
        self._rows[parameter] = rows

    def updated_rows(self, parameter: Tensor) -> slice:
        """Return the rows of dimension 0 that this rank updates; all of a scalar."""
        length = 1 if parameter.ndim == 0 else local_part(parameter).shape[0]
        return slice(*self._rows.get(parameter, (0, length)))

    def part(self, parameter: Tensor) -> Tensor:
        """Return what of a parameter's storage this rank updates: for one rank, the parameter."""
        return self.own_rows(parameter, local_part(parameter))

    def own_rows(self, parameter: Tensor, held: Tensor) -> Tensor:
        """Return of a tensor shaped as a parameter's storage what this rank updates."""
        rows = self._rows.get(parameter)
        return held if rows is None else held.detach()[slice(*rows)]

    def writer(self, parameter: Tensor) -> Writer | None:
        """Return the writer of `parameter`, or None."""
        entry = self._entries.get(parameter)
        return None if entry is None else entry.writer

    def engine(self, parameter: Tensor) -> ExpertEngine | None:
        """Return the engine whose writer `parameter` has, or None."""
        entry = self._entries.get(parameter)
        return None if entry is None else entry.engine

    def block_rows(self, parameter: Tensor) -> int:
        """Return how many rows of dimension 0 are written together; 0 without a writer."""
        writer = self.writer(parameter)
        return 0 if writer is None else _rows_per_block(parameter, writer)

    def has_master(self, parameter: Tensor) -> bool:
        """Whether the FP32 master of `parameter` is not the parameter itself."""
        return parameter.dtype != torch.float32 or parameter in self._entries

    def tensors(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that hold the device weight, as far as is known."""
        writer = self.writer(parameter)
        if writer is None:
            return (local_part(parameter),)
        return writer.tensors() if hasattr(writer, "tensors") else ()

    def watched(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors by which a write from outside is noticed: of weights that can be compared."""
        writer = self.writer(parameter)
        if writer is None:
            return (self.part(parameter),)
        return self.tensors(parameter) if hasattr(writer, "agrees") else ()

    def stored(self, parameter: Tensor) -> Tensor:
        """Return what holds this rank's part as plain floats: of a BF16 writer, or of the parameter."""
        holder = self._holder(parameter)
        return self.own_rows(parameter, self._parked.get(holder, holder))

    def _holder(self, parameter: Tensor) -> Tensor:
        writer = self.writer(parameter)
        data = writer.data if isinstance(writer, BFloat16Writer) else None
        return local_part(parameter) if data is None else data

    def check(self, names: Mapping[Tensor, str]) -> None:
        """Raise where a device weight is not where it was.

        Raises:
            RuntimeError: storage was given up and no writer stands in for it, or a writer writes elsewhere
                than it did.
        """
        held: dict[Tensor, Writer] = {}
        for engine in self._engines:
            held.update(_held(engine))
        for parameter, name in names.items():
            entry = self._entries.get(parameter)
            if entry is None or entry.storage is None:
                _require_storage(parameter, name)
            if entry is None:
                continue
            current = entry.writer if entry.engine is None else held.get(parameter)
            gone = current is None or current.storage is not entry.storage
            if gone or self._addresses(parameter) != entry.addresses:
                what, remedy = "in another place", "Call rebind() for it where it moved on purpose."
                if current is None:
                    what = "that its engine holds no more"
                    remedy = "Bind the engine that holds it, or build a new optimizer."
                raise RuntimeError(
                    complaint(
                        name,
                        got=f"a writer's storage {what}",
                        wanted="the storage that was registered",
                        remedy=remedy,
                    )
                )

    def _addresses(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors(parameter))

    # -- what it is ---------------------------------------------------------------------------------

    def source(self, parameter: Tensor) -> Tensor:
        """Return what the first master is made from: the writer's own source, the parameter, the weight."""
        writer = self.writer(parameter)
        if writer is not None and hasattr(writer, "take_source"):
            source: Tensor | None = writer.take_source(parameter)
            if source is not None:
                return source
        return self.read(parameter) if is_released(parameter) else self.part(parameter).detach()

    def return_source(self, parameter: Tensor, source: Tensor) -> None:
        """Give a source back of which no master could be made."""
        writer = self.writer(parameter)
        if writer is not None and hasattr(writer, "set_source"):
            writer.set_source(source)

    def read(self, parameter: Tensor) -> Tensor:
        """Return the weight as floats, shaped as `parameter`."""
        writer = self.writer(parameter)
        if writer is None or isinstance(writer, BFloat16Writer):
            return self.stored(parameter).detach()
        return writer.read(parameter)

    def agrees(self, parameter: Tensor, master: Tensor) -> bool:
        """Whether the weight has the very bytes that `master` gives; True where nobody can tell."""
        writer = self.writer(parameter)
        if writer is None:
            return rounds_to(master, self.part(parameter).detach())
        return not hasattr(writer, "agrees") or bool(writer.agrees(parameter, master))

    def write(self, parameter: Tensor, master: Tensor) -> None:
        """Write the whole weight from its master, on the caller's stream, in pieces where that is far."""
        writer = self.writer(parameter)
        for rows in self._pieces(parameter, master):
            values = master if master.ndim == 0 else master[rows]
            if writer is not None:
                near = values.to(parameter.device, torch.float32, non_blocking=True)
                insist(partial(writer.write, parameter, near.contiguous(), rows))
            elif master.device == parameter.device:
                self.part(parameter).detach().copy_(values)
            else:
                target = self.part(parameter).detach()
                near = values.to(
                    parameter.device, non_blocking=True
                )  # cast there: 4 bytes on the way
                (target if target.ndim == 0 else target[rows]).copy_(near)

    def _pieces(self, parameter: Tensor, master: Tensor) -> Iterator[slice]:
        length = 1 if master.ndim == 0 else master.shape[0]
        entry = self._entries.get(parameter)
        start = last = 0
        if master.device != parameter.device and length:
            row_bytes = torch.float32.itemsize * (master.numel() // length)
            for stop in range(1, length + 1) if entry is None else entry.stops:
                if last > start and (stop - start) * row_bytes > _PIECE_BYTES:
                    yield slice(start, last)
                    start = last
                last = stop
        yield slice(start, length)


def insist(write: Callable[[], object]) -> None:
    """Repeat a write that was cut short: the master is whole."""
    try:
        write()
    except Exception:
        write()


def collect_writers(
    engines: Iterable[ExpertEngine], names: Mapping[Tensor, str]
) -> dict[Tensor, tuple[ExpertEngine, Writer]]:
    """Return the writers of the parameters named, of all engines.

    Raises:
        ValueError: two engines, or two writers of one, claim a parameter.
    """
    found: dict[Tensor, tuple[ExpertEngine, Writer]] = {}
    for engine in engines:
        for parameter, writer in _held(engine):
            if parameter not in names:
                continue
            first, known = found.setdefault(parameter, (engine, writer))
            if first is not engine or known is not writer:
                raise ValueError(
                    complaint(
                        names[parameter],
                        got="two engines or writers that claim it",
                        wanted="one",
                        remedy="Remove or rebuild one of them.",
                    )
                )
    return found


def _identities(writer: Writer) -> list[int]:
    return [id(thing) for thing in (writer, writer.storage) if thing is not None]


def _still_holds(engine: ExpertEngine | None, parameter: Tensor) -> bool:
    return engine is None or any(held is parameter for held, _ in _held(engine))


def _held(engine: ExpertEngine) -> Iterable[tuple[Tensor, Writer]]:
    return engine.named_writers()


def _require_storage(parameter: Tensor, name: str) -> None:
    if is_released(parameter):
        remedy = "Register its writer or bind its engine, or bring the storage back."
        raise RuntimeError(
            complaint(
                name,
                got="released storage, and no writer that stands in for it",
                wanted="a weight to write, or a registered writer",
                remedy=hollow_reason(parameter) if is_hollow(parameter) else remedy,
            )
        )


def _rows_per_block(parameter: Tensor, writer: Writer) -> int:
    return int(writer.rows_per_block(parameter)) if hasattr(writer, "rows_per_block") else 1


def _atom_stops(
    parameter: Tensor, writer: Writer, spec: BlockSpec | None, name: str
) -> tuple[int, ...]:
    block = _rows_per_block(parameter, writer)
    if block < 1:
        raise ValueError(
            complaint(
                name,
                got=f"a writer with {block} rows a block",
                wanted="at least 1",
                remedy="Correct its rows_per_block().",
            )
        )
    if spec is None:
        length = 1 if parameter.ndim == 0 else parameter.shape[0]
        return (*range(block, length, block), length)
    views = write_atoms(spec, parameter.shape, block, name=name)
    return tuple(sorted(atom.rows[1] for atoms in views for atom in atoms))
