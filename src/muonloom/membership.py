"""This rank among those that train the same model: what it does of each parameter, and whom it asks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonloom.assignment import Assignment
from muonloom.bits import bits
from muonloom.bound import Bound
from muonloom.collectives import Ranks, Traffic, agree, ranks_of
from muonloom.config import AdamWOptions, MuonOptions
from muonloom.consensus import Consensus, Member
from muonloom.dtensors import boxes, is_dtensor, local_part, mesh_ranks
from muonloom.guard import Verdict, inspect_gradients
from muonloom.layout import restricted, row_atoms, stitched
from muonloom.ownership import Candidate, Ledger
from muonloom.ranks import num_ranks, this_rank
from muonloom.sharding import Box, Sharding, whole_box
from muonloom.sharing import WeightSharing
from muonloom.weight_buckets import weight_sharing
from muonloom.weights import DeviceWeights

Ids = tuple[int, ...]

_CPU = torch.device("cpu")
_STEP: Ids = (-1,)  # the group that steps together, among others

# Of each weight, when ranks meet: those that were not made equal differ in all of them.
_COMPARED_WORDS = 64


class Membership:
    """Knows which ranks hold each parameter.

    Args:
        weights: where device weights are.
        common: a line of what is no option of a group, and must be equal on all ranks.
        step_group: the ranks that step together, where each may have parameters of its own; None: those
            that hold parameters, all of which have the same.
    """

    def __init__(self, weights: DeviceWeights, *, common: str, step_group: Any = None) -> None:
        self._weights = weights
        self._common = common
        self._step_group = step_group
        self._pieces: dict[Tensor, tuple[Sharding, Ids]] = {}
        self._cut: set[Tensor] = set()
        self._ledger = Ledger()
        self._ids: dict[Tensor, Ids] = {}
        self._groups: dict[Ids, Ranks] = {}
        self._sent_before: dict[Ids, Traffic] = {}
        self._given: dict[Ids, dist.ProcessGroup] = {}
        self._held_by: list[Ids] | None = None
        self._consensus: Consensus | None = None
        self._weighed: dict[Tensor, float] = {}
        self._met: set[Ids] = set()
        self._known: tuple[object, str] = (None, "")
        self._texts: dict[int, tuple[tuple[Box, ...], str]] = {}

    def add(self, tensor: Tensor, process_group: Any, *, sharding: Sharding | None = None) -> None:
        """Take note of who holds a parameter: a DTensor's mesh, or the ranks of a group."""
        self._forget_groups()
        if sharding is not None:
            cut = sharding.process_group
            ids = () if cut is None else tuple(dist.get_process_group_ranks(cut))
            self._pieces[tensor] = (sharding, ids)
            if cut is not None:
                self._given[ids] = cut
        if is_dtensor(tensor):
            self._ids[tensor] = mesh_ranks(tensor)
            if tensor.device_mesh.ndim == 1:
                self._given[self._ids[tensor]] = tensor.device_mesh.get_group()
            return
        if process_group is False or num_ranks() == 1:
            self._ids[tensor] = (this_rank(),)
            return
        group: Any = dist.group.WORLD if process_group is None else process_group
        self._ids[tensor] = tuple(dist.get_process_group_ranks(group))
        self._given[self._ids[tensor]] = group

    def forget(self, tensor: Tensor) -> None:
        """Know nothing of a parameter that could not be added after all."""
        self._forget_groups()
        self._ids.pop(tensor, None)
        self._pieces.pop(tensor, None)

    def _forget_groups(self) -> None:
        self._consensus, self._held_by = None, None
        self._weighed.clear()

    def ids(self, tensor: Tensor) -> Ids:
        """Return the ranks that hold a parameter, as `torch.distributed` numbers them."""
        return self._ids[tensor]

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether several ranks hold pieces of the parameter, by `Sharding`."""
        return len(self._pieces.get(tensor, (None, ()))[1]) > 1

    def share_out(
        self, assignments: dict[Tensor, Assignment], *, claimed: Container[Tensor]
    ) -> None:
        """Decide what this rank does of the parameters that it has not decided on yet.

        What a writer fills is not shared out: each rank that holds it writes all of it.

        Args:
            assignments: of all parameters; get shares.
            claimed: parameters that get a writer.
        """
        for tensor, assignment in assignments.items():
            if assignment.is_piece and assignment.share is None:
                assignments[tensor] = self._by_itself(tensor, assignment)
        self._cut = {tensor for tensor, each in assignments.items() if each.is_piece}
        fresh = [
            tensor
            for tensor, assignment in assignments.items()
            if assignment.share is None
            and (assignment.is_piece or len(self._ids.get(tensor, ())) > 1)
            and (
                is_dtensor(tensor) or assignment.is_piece or (tensor.ndim and tensor not in claimed)
            )
        ]
        self._forget_groups()
        candidates = [self._candidate(tensor, assignments[tensor]) for tensor in fresh]
        for tensor, share in zip(fresh, self._ledger.share(candidates), strict=True):
            assignments[tensor] = replace(assignments[tensor], share=share)
            if share.copies is not None:
                self._weights.update_rows(tensor, share.copies.own)

    def _by_itself(self, tensor: Tensor, assignment: Assignment) -> Assignment:
        """Return a piece that holds whole matrices, or elements of AdamW's, as a parameter of its own."""
        sharding, ids = self._pieces[tensor]
        spec, shape = assignment.spec, tuple(tensor.shape)
        if spec is not None:
            if sharding.dim:
                return assignment
            stops = {0, *(stop for _, stop in row_atoms(spec, assignment.shape))}
            held = sharding.boxes(shape, len(ids))
            if not all(stop in stops for box in held for stop in box.rows):
                return assignment
            rows = held[ids.index(this_rank())].rows
            spec = stitched((shape[0], restricted(spec, assignment.shape, rows)))
        return replace(assignment, shape=shape, spec=spec, is_piece=False)

    def _candidate(self, tensor: Tensor, assignment: Assignment) -> Candidate:
        ids = self._ids[tensor]
        sharding, cut = self._pieces.get(tensor, (Sharding(), ()))
        if assignment.is_piece:
            return Candidate(
                shape=assignment.shape,
                spec=assignment.spec,
                ranks=cut,
                position=cut.index(this_rank()),
                weights=_pieces_of(sharding.dim, tuple(tensor.shape), len(cut)),
                as_held=True,
                copies=ids,
                copy=ids.index(this_rank()),
                owner=sharding.owner,
            )
        held = _all_of(assignment.shape, len(ids))
        return Candidate(
            shape=assignment.shape,
            spec=assignment.spec,
            ranks=ids,
            position=ids.index(this_rank()),
            weights=boxes(tensor, assignment.name) if is_dtensor(tensor) else held,
            as_held=is_dtensor(tensor),
            owner=sharding.owner,
        )

    # -- whom to ask --------------------------------------------------------------------------------

    def ranks(self, ids: Ids) -> Ranks:
        """Return the group of these ranks."""
        if ids not in self._groups:
            given = self._given.get(ids)
            self._groups[ids] = ranks_of(ids) if given is None else Ranks(given)
            # Other optimizers may have sent something over it.
            self._sent_before[ids] = replace(self._groups[ids].traffic)
        return self._groups[ids]

    def traffic(self) -> tuple[int, int, int]:
        """Return collectives, payload bytes and control bytes so far."""
        pairs = [(group.traffic, self._sent_before[ids]) for ids, group in self._groups.items()]
        return (
            sum(now.collectives - then.collectives for now, then in pairs),
            sum(now.payload_bytes - then.payload_bytes for now, then in pairs),
            sum(now.control_bytes - then.control_bytes for now, then in pairs),
        )

    def control(self) -> Consensus | None:
        """Return those who step together: the largest group that holds all others, else everybody."""
        if self._step_group is not None:
            if self._consensus is None:
                # Another group of the same ranks may have another timeout.
                ranks = self._groups[_STEP] = Ranks(self._step_group)
                self._sent_before[_STEP] = replace(ranks.traffic)
                device = next((tensor.device for tensor in self._ids), _CPU)
                self._consensus = Consensus(ranks, device)
            return self._consensus if self._consensus.ranks.size > 1 else None
        found = self._all_ids()
        if not found or len(found[0]) == 1:
            return None
        if self._consensus is None:
            largest = set(found[0])
            together = all(largest >= set(ids) for ids in found)
            ids = found[0] if together else tuple(range(num_ranks()))
            device = next(local_part(tensor).device for tensor in self._ids)
            self._consensus = Consensus(self.ranks(ids), device)
        return self._consensus

    def _all_ids(self) -> list[Ids]:
        """Return who holds parameters: the largest group first."""
        if self._held_by is None:
            cut = {ids for tensor, (_, ids) in self._pieces.items() if tensor in self._cut}
            held = cut | set(self._ids.values())
            self._held_by = sorted(held, key=lambda ids: (-len(ids), ids))
        return self._held_by

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a part in anything."""
        return self.control() is None

    def verdict(
        self,
        bounds: Sequence[Bound | None],
        groups: Sequence[Mapping[str, Any]],
        assignments: Mapping[Tensor, Assignment],
        *,
        failure: Tensor | None,
        moved: Tensor | None,
        error: BaseException | None = None,
        has_state: bool = False,
    ) -> tuple[Verdict, tuple[bool, ...]]:
        """Return what the guard of all ranks says, and which parameters have a gradient somewhere.

        Raises:
            BaseException: `error`, after the others were told.
            ValueError: ranks differ in what they are about to do.
            RuntimeError: another rank cannot step.
        """
        control = self.control()
        if control is None:
            if error is not None:
                raise error
            pairs = [(b.name, b.gradient) for b in bounds if b is not None]
            found = [(name, gradient) for name, gradient in pairs if gradient is not None]
            verdict = inspect_gradients(found, failure=failure, moved=moved)
            return verdict, tuple(bound is not None for bound in bounds)

        def describe() -> list[str]:
            return list(self._lines(groups, assignments))

        self._meet(groups, assignments)
        return control.verdict(
            list(self._members(bounds, groups, assignments)),
            digest=self._digest(groups, assignments),
            cohort=0 if self._step_group is None else int(self._known[1][:15], 16),
            describe=describe,
            failure=failure,
            moved=moved,
            error=error,
            has_state=has_state,
        )

    def _digest(
        self, groups: Sequence[Mapping[str, Any]], assignments: Mapping[Tensor, Assignment]
    ) -> str:
        """Return what differs where `_lines` do; what cannot change from step to step is kept."""
        key = tuple(tuple(map(id, group["params"])) for group in groups)
        if self._known[0] != key:
            fixed = [self._fixed(t, assignments[t]) for group in groups for t in group["params"]]
            self._known = (key, hashlib.sha256("\n".join(fixed).encode()).hexdigest())
        options = "\n".join(map(_options, groups))
        whole = f"{self._common}\n{self._known[1]}\n{options}"
        return hashlib.sha256(whole.encode()).hexdigest()

    def _lines(
        self, groups: Sequence[Mapping[str, Any]], assignments: Mapping[Tensor, Assignment]
    ) -> Iterator[str]:
        """Yield what must be equal on all ranks that step together: a line, and one for each parameter."""
        yield self._common
        for group in groups:
            options = _options(group)
            for tensor in group["params"]:
                yield f"{self._fixed(tensor, assignments[tensor])}; {options}"

    def _fixed(self, tensor: Tensor, assignment: Assignment) -> str:
        control = self.control()
        assert control is not None
        if self._step_group is None and self._ids[tensor] == control.ranks.ranks:
            return self._held_as(tensor, assignment)
        return f"{assignment.name}: {assignment.algorithm}; {tensor.dtype}"

    def _held_as(self, tensor: Tensor, assignment: Assignment, *, pieces: bool = False) -> str:
        share, owned = assignment.share, ""
        if share is not None and assignment.is_piece and not pieces:
            assert share.copies is not None
            owned = str(share.copies.rows)
        elif share is not None:
            parts = (self._text_of(share.holding.weights), self._text_of(share.holding.states))
            owned = f"{parts} {[atom.owner for atom in share.atoms]}"
        return (
            f"{assignment.name}: {assignment.algorithm}; {assignment.shape}; {tensor.dtype}; "
            f"{assignment.spec}; shared as {hashlib.sha256(owned.encode()).hexdigest()[:16]}"
        )

    def _text_of(self, held: tuple[Box, ...]) -> str:
        """Return what differs where boxes do; most parameters have theirs in common, of all ranks each."""
        if id(held) not in self._texts:
            self._texts[id(held)] = (held, hashlib.sha256(repr(held).encode()).hexdigest())
        return self._texts[id(held)][1]

    def _meet(
        self, groups: Sequence[Mapping[str, Any]], assignments: Mapping[Tensor, Assignment]
    ) -> None:
        """Once, before the first message: find out whether others are there, and hold the same.

        Raises:
            ValueError: they hold something else; on all ranks.
            LostRanksError: some do not come.
        """
        control = self.control()
        assert control is not None
        tensors = [tensor for group in groups for tensor in group["params"]]
        together = control.ranks.ranks
        own = {ids for ids in self._all_ids() if len(ids) > 1}
        for ids in [together, *sorted(own - {together})]:
            if ids in self._met:
                continue
            if ids == together and self._step_group is None:
                first, *others = self._lines(groups, assignments)
                lines = [first] + [
                    line + self._weights_of(tensor) if self._ids[tensor] == ids else line
                    for tensor, line in zip(tensors, others, strict=True)
                ]
            else:
                mine = [tensor for tensor in tensors if self._ids[tensor] == ids]
                lines = [self._common] + [
                    self._held_as(t, assignments[t]) + self._weights_of(t) for t in mine
                ]
                lines += [
                    self._held_as(t, assignments[t], pieces=True)
                    for t in tensors
                    if assignments[t].is_piece and self._pieces[t][1] == ids
                ]
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            agree(digest, lines.copy, self.ranks(ids))
            self._met.add(ids)

    def _weights_of(self, tensor: Tensor) -> str:
        """Return some words of a weight that all ranks should have alike; nothing where they do not."""
        if is_dtensor(tensor) or self._weights.writer(tensor) is not None or not tensor.numel():
            return ""
        flat = tensor.detach().flatten()
        words = bits(flat[:: max(1, flat.numel() // _COMPARED_WORDS)].contiguous()).tolist()
        return f"; weights {hashlib.sha256(repr(words).encode()).hexdigest()[:16]}"

    def _members(
        self,
        bounds: Sequence[Bound | None],
        groups: Sequence[Mapping[str, Any]],
        assignments: Mapping[Tensor, Assignment],
    ) -> Iterator[Member]:
        control = self.control()
        assert control is not None
        tensors = [tensor for group in groups for tensor in group["params"]]
        for index, tensor in enumerate(tensors):
            bound = bounds[index] if bounds else None
            if tensor not in self._weighed:  # looks at all ranks' boxes
                self._weighed[tensor] = self._weight(tensor, assignments[tensor], control)
            yield Member(
                name=assignments[tensor].name,
                gradient=None if bound is None else bound.gradient,
                ranks=self._ids[tensor],
                weight=self._weighed[tensor],
            )

    def _weight(self, tensor: Tensor, assignment: Assignment, control: Consensus) -> float:
        """Return what share of the squares of its gradient is this rank's to add up."""
        same = float(len(self._ids[tensor]))
        if assignment.share is not None:
            states = assignment.share.holding.states
            own = assignment.share.holding.own
            same = 1 if own.numel == 0 else states.count(own)
        if is_dtensor(tensor):  # on several meshes, it is the same tensor on all of them
            same *= control.ranks.size / len(self._ids[tensor])
        return 1 / same

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Have all ranks raise where one of them does inside."""
        control = self.control()
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            if control is None:
                raise
            failure = error
        if control is not None:
            control.confirm(failure)

    def sharing(
        self,
        groups: Sequence[Mapping[str, Any]],
        assignments: Mapping[Tensor, Assignment],
        *,
        ready: Mapping[int, int],
        after: int = -1,
    ) -> WeightSharing | None:
        """Return what gives updated weights to those who did not update them; see `weight_sharing`."""
        tensors = [tensor for group in groups for tensor in group["params"]]
        return weight_sharing(tensors, assignments, self.ranks, ready=ready, after=after)


@lru_cache(maxsize=4096)
def _all_of(shape: tuple[int, ...], num_ranks: int) -> tuple[Box, ...]:
    return (whole_box(shape),) * num_ranks


@lru_cache(maxsize=4096)
def _pieces_of(dim: int, piece: tuple[int, ...], num_pieces: int) -> tuple[Box, ...]:
    return Sharding(dim=dim).boxes(piece, num_pieces)


def _options(group: Mapping[str, Any]) -> str:
    options = (MuonOptions if group["algorithm"] == "muon" else AdamWOptions).of(group)
    known = {**group, **dataclasses.asdict(options)}
    wanted = {name for name in group if name.startswith("ns_")} | {"eps", "momentum_dtype"}
    return "; ".join(f"{name}={known[name]}" for name in sorted(wanted | vars(options).keys()))
