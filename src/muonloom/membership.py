"""This rank among those that train the same model: what it does of each parameter, and whom it asks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from muonloom.bits import bits
from muonloom.bound import Bound
from muonloom.collectives import Ranks, Traffic, agree, ranks_of
from muonloom.config import AdamWOptions, MuonOptions
from muonloom.consensus import Consensus, Member
from muonloom.dtensors import boxes, is_dtensor, local_part, mesh_ranks
from muonloom.groups import Assignment
from muonloom.guard import Verdict, inspect_gradients
from muonloom.ownership import Candidate, Ledger
from muonloom.ranks import num_ranks, this_rank
from muonloom.sharding import Box, whole_box
from muonloom.sharing import GroupSharing, SharedWeight, WeightSharing, bytes_of_row
from muonloom.weights import DeviceWeights

Ids = tuple[int, ...]

# Of each weight, when ranks meet: those that were not made equal differ in all of them.
_COMPARED_WORDS = 64


class Membership:
    """Knows which ranks hold each parameter.

    Args:
        weights: where device weights are.
        common: a line of what is no option of a group, and must be equal on all ranks.
    """

    def __init__(self, weights: DeviceWeights, *, common: str) -> None:
        self._weights = weights
        self._common = common
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

    def add(self, tensor: Tensor, process_group: Any) -> None:
        """Take note of who holds a parameter: a DTensor's mesh, or the ranks of a group."""
        self._forget_groups()
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

    def _forget_groups(self) -> None:
        self._consensus, self._held_by = None, None
        self._weighed.clear()

    def ids(self, tensor: Tensor) -> Ids:
        """Return the ranks that hold a parameter, as `torch.distributed` numbers them."""
        return self._ids[tensor]

    def share_out(
        self, assignments: dict[Tensor, Assignment], *, claimed: Container[Tensor]
    ) -> None:
        """Decide what this rank does of the parameters that it has not decided on yet.

        What a writer fills is not shared out: each rank that holds it writes all of it.

        Args:
            assignments: of all parameters; get shares.
            claimed: parameters that get a writer.
        """
        fresh = [
            tensor
            for tensor, assignment in assignments.items()
            if assignment.share is None
            and len(self._ids.get(tensor, ())) > 1
            and (is_dtensor(tensor) or (tensor.ndim and tensor not in claimed))
        ]
        candidates = [self._candidate(tensor, assignments[tensor]) for tensor in fresh]
        for tensor, share in zip(fresh, self._ledger.share(candidates), strict=True):
            assignments[tensor] = replace(assignments[tensor], share=share)
            if not is_dtensor(tensor):
                self._weights.update_rows(tensor, share.holding.own.rows)

    def _candidate(self, tensor: Tensor, assignment: Assignment) -> Candidate:
        ids = self._ids[tensor]
        held = _all_of(assignment.shape, len(ids))
        return Candidate(
            shape=assignment.shape,
            spec=assignment.spec,
            ranks=ids,
            position=ids.index(this_rank()),
            weights=boxes(tensor, assignment.name) if is_dtensor(tensor) else held,
            is_dtensor=is_dtensor(tensor),
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
            self._held_by = sorted(set(self._ids.values()), key=lambda ids: (-len(ids), ids))
        return self._held_by

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a part in anything."""
        return all(len(ids) == 1 for ids in self._all_ids())

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
        if self._ids[tensor] == control.ranks.ranks:
            return self._held_as(tensor, assignment)
        return f"{assignment.name}: {assignment.algorithm}; {tensor.dtype}"

    def _held_as(self, tensor: Tensor, assignment: Assignment) -> str:
        share, owned = assignment.share, ""
        if share is not None:
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
            if ids == together:
                first, *others = self._lines(groups, assignments)
                lines = [first] + [
                    line + self._weights_of(tensor) if self._ids[tensor] == ids else line
                    for tensor, line in zip(tensors, others, strict=True)
                ]
            else:
                mine = [tensor for tensor in tensors if self._ids[tensor] == ids]
                lines = [self._held_as(t, assignments[t]) + self._weights_of(t) for t in mine]
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

    # -- weights that all ranks hold ----------------------------------------------------------------

    def sharing(
        self,
        groups: Sequence[Mapping[str, Any]],
        assignments: Mapping[Tensor, Assignment],
        *,
        ready: Mapping[int, int],
        after: int = -1,
    ) -> WeightSharing | None:
        """Return what gives updated weights to those who did not update them; None: all did.

        Args:
            groups: the optimizer's.
            assignments: what was decided for each parameter.
            ready: by parameter, the task after which this rank's part is updated.
            after: the last task that is an exchange; -1: there is none.
        """
        tensors = [tensor for group in groups for tensor in group["params"]]
        by_ranks: dict[Ids, list[tuple[Any, SharedWeight]]] = {}
        first_turn: dict[Any, int] = {}
        index_of = {tensor: index for index, tensor in enumerate(tensors)}
        rows: dict[int, tuple[tuple[int, int, int], ...]] = {}
        for turn, (tensor, assignment) in enumerate(assignments.items()):
            share = assignment.share
            if share is None or is_dtensor(tensor):
                continue
            states = share.holding.states  # many parameters have theirs in common
            if id(states) not in rows:
                rows[id(states)] = tuple((p, *b.rows) for p, b in enumerate(states) if b.numel)
            # Equal shapes are updated together, so that they are ready together.
            kind = (assignment.algorithm, assignment.shape)
            weight = SharedWeight(
                parameter=index_of[tensor],
                rows=rows[id(states)],
                row_bytes=bytes_of_row(assignment.shape, tensor.element_size()),
            )
            order = (first_turn.setdefault(kind, turn), turn)
            by_ranks.setdefault(share.holding.ranks, []).append((order, weight))
        shared = [
            GroupSharing(
                self.ranks(ids),
                [weight for _, weight in sorted(found, key=lambda pair: pair[0])],
                ready=ready,
                device=tensors[found[0][1].parameter].device,
                weight_of=lambda index: tensors[index].detach(),
            )
            for ids, found in sorted(by_ranks.items())
        ]
        return WeightSharing(shared, after=after) if shared else None


@lru_cache(maxsize=4096)
def _all_of(shape: tuple[int, ...], num_ranks: int) -> tuple[Box, ...]:
    return (whole_box(shape),) * num_ranks


def _options(group: Mapping[str, Any]) -> str:
    options = (MuonOptions if group["algorithm"] == "muon" else AdamWOptions).of(group)
    known = {**group, **dataclasses.asdict(options)}
    wanted = {name for name in group if name.startswith("ns_")} | {"eps", "momentum_dtype"}
    return "; ".join(f"{name}={known[name]}" for name in sorted(wanted | vars(options).keys()))
