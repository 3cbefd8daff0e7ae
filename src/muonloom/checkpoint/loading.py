"""`load`: a checkpoint into a model and an optimizer, however these place, cut and group what they have."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.checkpoint.handle import wait_for_last
from muonloom.checkpoint.manifest import Manifest, SavedTensor
from muonloom.checkpoint.options import refuse_other_optimizer, restore_groups
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.checkpoint.sharded import gather_back, held_box
from muonloom.checkpoint.storage import load_boxes
from muonloom.checkpoint.targets import (
    MasterTarget,
    NearMasterTarget,
    PassingTarget,
    PlainTarget,
    Target,
)
from muonloom.checkpoint.together import all_or_none, ask
from muonloom.dtensors import local_part
from muonloom.errors import CheckpointError, complaint
from muonloom.hollow import is_hollow, is_released
from muonloom.model_tensors import names_by_tensor, owners
from muonloom.optimizer import Muon
from muonloom.ranks import this_rank
from muonloom.roll_call import named
from muonloom.sharding import Box
from muonloom.state import State, lasting, state_dtypes

_log = logging.getLogger("muonloom")

_VERIFY = ("full", "manifest")


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Muon | None = None,
    weights_only: bool = False,
    verify: str = "full",
) -> dict[str, Any]:
    """Load a checkpoint into `model` and `optimizer`.

    These may differ from what was saved in placement, master layout, writers and engines, momentum's dtype,
    `heads_per_block` and the arrangement of parameter groups. A group whose parameters were saved with
    different values of an option keeps its own, and a warning says so. `momentum_dtype` stays as it is.

    All ranks call it, also for a model alone. The number of ranks and how these share out what there is
    may differ, too: each reads its part. All of them load, or none.

    Args:
        path: of a finished checkpoint.
        model: gets weights and buffers, in its own dtypes.
        optimizer: gets masters, state and group options; it must not be released. None: the model alone.
        weights_only: have the optimizer take its masters alone, exactly; momentum, moments and options
            stay as they are, and a warning says so.
        verify: ``"full"`` checks all bytes before anything is changed. ``"manifest"`` checks them as they
            are loaded, in less time; where they are damaged, weights and state are then unusable, and the
            optimizer refuses to step until a good load.

    Returns:
        ``{"step": …, "extra": …}``, the latter as this rank saved it; where there were fewer ranks, they
        are taken in turn.

    Raises:
        CheckpointError: the checkpoint is damaged, unfinished, of another version, or of another model; the
            file or parameter is named, and nothing was changed (but see `verify`).
        ValueError: a bad option.
        RuntimeError: the optimizer is released.
        LostRanksError: a rank does not take part.
    """

    def prepare() -> _Job:
        _check_options(optimizer, verify)
        if optimizer is not None:
            wait_for_last(optimizer)
            optimizer._check_loadable()
        gather_back(model)
        job = _Job(CheckpointReader(path), model, optimizer, weights_only=weights_only)
        job.check()
        if verify == "full":
            job.reader.check_all(job.boxes)
        job.extra = job.reader.extra(this_rank())
        return job

    job, findings = ask(prepare, _Job.finding)
    _refuse_differences(findings)
    job.run(check=verify == "manifest")
    return {"step": job.reader.manifest.step, "extra": job.extra}


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What one rank has found in the checkpoint.

    Attributes:
        step: of it.
        save: what differs where checkpoints do.
        unknown: keys of tensors that the rank has no place for.
    """

    step: int
    save: tuple[str, ...]
    unknown: frozenset[str]


class _Job:
    """One load: which tensors go where.

    Attributes:
        reader: of the checkpoint.
        boxes: which part of each tensor will be read.
        extra: what the caller gave.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        model: nn.Module,
        optimizer: Muon | None,
        *,
        weights_only: bool,
    ) -> None:
        self.reader = reader
        self.extra: Any = None
        self._manifest: Manifest = reader.manifest
        self._model = model
        self._optimizer = optimizer
        self._weights_only = weights_only
        self._names = {
            tensor: self._saved_name(found) for tensor, found in names_by_tensor(model).items()
        }
        self._weights = {f"model.{name}": tensor for tensor, name in self._names.items()}
        self._held: dict[str, Tensor] = {}
        self._states: dict[str, tuple[Tensor, str]] = {}
        if optimizer is not None:
            self._held = {
                f"model.{self._names[param]}": param
                for param in optimizer._assignments
                if param in self._names
            }
            if not weights_only:
                self._states = dict(self._saved_states())
        self._old: dict[Tensor, State] = {}
        self._groups = {} if optimizer is None else optimizer._groups_by_parameter()
        self.boxes = {key: self._box(tensor, key) for key, tensor in self._weights.items()}
        self.boxes |= {key: self._box(param, key) for key, (param, _) in self._states.items()}

    def _box(self, tensor: Tensor, key: str) -> Box:
        if self._optimizer is not None and tensor in self._groups:
            return self._optimizer._own_box(tensor)
        return held_box(tensor, key.removeprefix("model."))

    def finding(self) -> _Finding:
        """Return what the other ranks are told."""
        known = {self._names[param] for param in self._held.values()}
        unknown = {
            key
            for key in self._manifest.tensors
            if key.startswith("model.") and key not in self._weights
        }
        if self._optimizer is not None and not self._weights_only:
            unknown |= {f"optimizer.{name}" for name in self._saved_keys() if name not in known}
        return _Finding(
            step=self._manifest.step,
            save=tuple(sorted(self._manifest.files)[:1]),
            unknown=frozenset(unknown),
        )

    def _saved_name(self, names: Iterable[str]) -> str:
        """Return the name that a tensor was saved under, of all that it has here."""
        found = [self._manifest.aliases.get(name, name) for name in names]
        saved = (name for name in found if f"model.{name}" in self._manifest.tensors)
        return next(saved, found[0])

    def _saved_states(self) -> Iterable[tuple[str, tuple[Tensor, str]]]:
        params = {self._names[param]: param for param in self._held.values()}
        for name, keys in self._saved_keys().items():
            if name in params:
                yield from (
                    (f"optimizer.{name}.{key}", (params[name], key)) for key in sorted(keys)
                )

    def _saved_keys(self) -> dict[str, set[str]]:
        """Return which state was saved, by names of parameters."""
        found: dict[str, set[str]] = {}
        for whole in self._manifest.tensors:
            if whole.startswith("optimizer."):
                name, _, key = whole.removeprefix("optimizer.").rpartition(".")
                found.setdefault(name, set()).add(key)
        return found

    # -- what is refused ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise where the checkpoint is of another model, or holds what is not finite.

        What this rank has no place for, another one may have: see `finding`.
        """
        for key, tensor in self._weights.items():
            self._check_weight(key, tensor)
        if self._optimizer is not None:
            self._check_parameters(self._optimizer)
        for key in (*self._held, *self._states):
            if not all(piece.block.finite for piece in self.reader.pieces(key)):
                raise CheckpointError(
                    complaint(
                        key,
                        got="a NaN or an infinity in the checkpoint",
                        wanted="finite weights and state",
                        remedy="Go back to an earlier checkpoint.",
                    )
                )

    def _check_weight(self, key: str, tensor: Tensor) -> None:
        name = key.removeprefix("model.")
        if key not in self._manifest.tensors:
            raise _of_another(name, "a tensor of the model that the checkpoint lacks")
        saved = self.reader.tensor(key)
        if saved.shape != tuple(tensor.shape):
            raise _of_another(name, f"a saved shape {saved.shape} for {tuple(tensor.shape)}")
        if saved.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise _of_another(name, f"saved {saved.dtype} for {tensor.dtype}")
        gone = is_hollow(tensor) or is_released(tensor)
        if gone and key not in self._held and not isinstance(tensor, nn.Parameter):
            raise _of_another(name, "a buffer whose storage was given up")

    def _check_parameters(self, optimizer: Muon) -> None:
        for param, known in optimizer._assignments.items():
            if param not in self._names:
                raise _of_another(known.name, "a parameter of the optimizer outside of the model")
        if self._weights_only:
            return
        groups = {self._names[param]: group for param, group in self._groups.items()}
        for name, saved in self._manifest.parameters.items():
            if name in groups and saved.algorithm != groups[name]["algorithm"]:
                own = groups[name]["algorithm"]
                raise _of_another(
                    name, f"state of {saved.algorithm} for a parameter that {own} updates"
                )
        for name, keys in self._saved_keys().items():
            if name not in groups:
                continue
            needed = state_dtypes(groups[name], has_master=False).keys() - {"step"}
            if keys != needed:
                raise _of_another(name, f"the saved state {sorted(keys)}, not {sorted(needed)}")

    # -- loading ------------------------------------------------------------------------------------

    def run(self, *, check: bool) -> None:
        """Read everything into its place, on all ranks or with an error on all."""
        if self._optimizer is None:
            with lasting(), all_or_none():
                self._read(check=check)
            return
        with self._optimizer._loading(), all_or_none():
            if not self._weights_only:
                params = self._held.values()
                self._old = {param: self._optimizer._forget_state(param) for param in params}
                restore_groups(self._optimizer, self._names, self._manifest)
            self._read(check=check)
            if not self._weights_only:
                self._take_steps(self._optimizer)
            self._optimizer._prune()
        if self._weights_only:
            _log.warning(
                "Muon: took the weights of %s alone: momentum, AdamW's moments and options stay as they "
                "were",
                self.reader.path,
            )
        elif self._manifest.ns_batch_bytes != self._optimizer._ns_batch_bytes():
            _log.warning(
                "Muon: ns_batch_bytes was %r when %s was saved, and is %r: bits may differ from here on",
                self._manifest.ns_batch_bytes,
                self.reader.path,
                self._optimizer._ns_batch_bytes(),
            )

    def _read(self, *, check: bool) -> None:
        targets = {key: self._target(key) for key in self.boxes}
        load_boxes(self.reader, targets, self.boxes, check=check)

    def _take_steps(self, optimizer: Muon) -> None:
        for param in self._held.values():
            saved = self._manifest.parameters.get(self._names[param])
            if saved is not None and saved.step is not None:
                group = self._groups[param]
                target = optimizer._state_target(param, "step", group, self._old[param])
                # Whoever has no part of it never counts.
                target.fill_(saved.step if optimizer._own_box(param).numel else 0.0)

    def _target(self, key: str) -> Target:
        saved = self.reader.tensor(key)
        if self._optimizer is not None and key in self._states:
            param, leaf = self._states[key]
            group = self._groups[param]
            return PlainTarget(self._optimizer._state_target(param, leaf, group, self._old[param]))
        if self._optimizer is not None and key in self._held:
            return self._held_target(self._optimizer, self._held[key], key, saved)
        tensor = self._weights[key]
        if is_released(tensor):
            give = partial(self._give_to_module, tensor)
            return PassingTarget(saved.shape, saved.dtype, give)
        return PlainTarget(local_part(tensor).detach())

    def _held_target(self, optimizer: Muon, param: Tensor, key: str, saved: SavedTensor) -> Target:
        """Return what takes the weight of a parameter of the optimizer, or its master."""
        sizes = self.boxes[key].sizes
        if saved.dtype != torch.float32:
            return PassingTarget(sizes, saved.dtype, partial(optimizer._take_weight, param))
        known = self._manifest.parameters.get(key.removeprefix("model."))
        is_settled = known is not None and known.dtype == "bfloat16"
        if optimizer._is_near(param):
            return NearMasterTarget(optimizer, param, is_settled=is_settled)
        if optimizer._has_low_half(param):
            return PassingTarget(sizes, saved.dtype, partial(optimizer._take_master, param))
        return MasterTarget(optimizer, param, is_settled=is_settled)

    def _give_to_module(self, param: Tensor, values: Tensor) -> None:
        """Have the module take a weight that is not in its parameter: an expert engine's."""
        for found, module, name in owners(self._model):
            if found is param:
                module.load_state_dict({name: values}, strict=False)
                return


def _refuse_differences(findings: Sequence[_Finding]) -> None:
    """Raise where ranks read different checkpoints, or nobody has a place for a saved tensor."""
    steps = {finding.save: finding.step for finding in findings}
    if len(steps) > 1:
        told = [
            f"step {finding.step} on {named([rank])}"
            for rank, finding in enumerate(findings)
            if finding is next(other for other in findings if other.save == finding.save)
        ]
        raise CheckpointError(
            complaint(
                "path",
                got="; ".join(told),
                wanted="one checkpoint on all ranks",
                remedy="Have one rank choose it, and tell the others.",
            )
        )
    unknown = frozenset.intersection(*(finding.unknown for finding in findings))
    for kind, what in (
        ("model.", "a saved tensor that the model lacks"),
        ("optimizer.", "saved state of a parameter that the optimizer lacks"),
    ):
        found = sorted(key for key in unknown if key.startswith(kind))
        if found:
            raise _of_another(found[0].removeprefix(kind), what)


def _of_another(name: str, got: str) -> CheckpointError:
    return CheckpointError(
        complaint(
            name,
            got=got,
            wanted="the checkpoint of this very model",
            remedy="Build model and optimizer as they were, or load with weights_only=True what fits.",
        )
    )


def _check_options(optimizer: object, verify: object) -> None:
    if optimizer is not None:
        refuse_other_optimizer(optimizer)
    if verify not in _VERIFY:
        raise ValueError(
            complaint(
                "verify",
                got=repr(verify),
                wanted=" or ".join(map(repr, _VERIFY)),
                remedy='Leave it out for "full".',
            )
        )
