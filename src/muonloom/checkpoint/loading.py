"""`load`: a checkpoint into a model and an optimizer, however these place, cut and group what they have."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muonloom.checkpoint.handle import wait_for_last
from muonloom.checkpoint.manifest import Manifest, SavedTensor
from muonloom.checkpoint.options import refuse_other_optimizer, restore_groups
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.checkpoint.storage import load_boxes
from muonloom.checkpoint.targets import (
    MasterTarget,
    NearMasterTarget,
    PassingTarget,
    PlainTarget,
    Target,
)
from muonloom.errors import CheckpointError, complaint
from muonloom.hollow import is_hollow, is_released
from muonloom.model_tensors import names_by_tensor, owners
from muonloom.optimizer import Muon
from muonloom.ranks import this_rank
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
        ``{"step": …, "extra": …}``, the latter as this rank saved it.

    Raises:
        CheckpointError: the checkpoint is damaged, unfinished, of another version, or of another model; the
            file or parameter is named, and nothing was changed (but see `verify`).
        ValueError: a bad option.
        RuntimeError: the optimizer is released.
    """
    _check_options(optimizer, verify)
    if optimizer is not None:
        wait_for_last(optimizer)
        optimizer._check_loadable()
    reader = CheckpointReader(path)
    job = _Job(reader, model, optimizer, weights_only=weights_only)
    job.check()
    if verify == "full":
        reader.check_all(job.wanted)
    extra = reader.extra(this_rank())
    job.run(check=verify == "manifest")
    return {"step": reader.manifest.step, "extra": extra}


class _Job:
    """One load: which tensors go where."""

    def __init__(
        self,
        reader: CheckpointReader,
        model: nn.Module,
        optimizer: Muon | None,
        *,
        weights_only: bool,
    ) -> None:
        self._reader = reader
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

    @property
    def wanted(self) -> list[str]:
        """The keys of all tensors that will be read."""
        return [*self._weights, *self._states]

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
        """Raise where the checkpoint is of another model, or holds what is not finite."""
        for key, tensor in self._weights.items():
            self._check_weight(key, tensor)
        for key in self._manifest.tensors:
            if key.startswith("model.") and key not in self._weights:
                raise _of_another(key.removeprefix("model."), "a saved tensor that the model lacks")
        if self._optimizer is not None:
            self._check_parameters(self._optimizer)
        for key in (*self._held, *self._states):
            if not all(piece.block.finite for piece in self._reader.pieces(key)):
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
        saved = self._reader.tensor(key)
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
                raise _of_another(name, "saved state of a parameter that the optimizer lacks")
            needed = state_dtypes(groups[name], has_master=False).keys() - {"step"}
            if keys != needed:
                raise _of_another(name, f"the saved state {sorted(keys)}, not {sorted(needed)}")

    # -- loading ------------------------------------------------------------------------------------

    def run(self, *, check: bool) -> None:
        """Read everything into its place."""
        if self._optimizer is None:
            with lasting():
                load_boxes(self._reader, {k: self._target(k) for k in self.wanted}, check=check)
            return
        with self._optimizer._loading():
            if not self._weights_only:
                params = self._held.values()
                self._old = {param: self._optimizer._forget_state(param) for param in params}
                restore_groups(self._optimizer, self._names, self._manifest)
            load_boxes(self._reader, {k: self._target(k) for k in self.wanted}, check=check)
            if not self._weights_only:
                self._take_steps(self._optimizer)
            self._optimizer._prune()
        if self._weights_only:
            _log.warning(
                "Muon: took the weights of %s alone: momentum, AdamW's moments and options stay as they "
                "were",
                self._reader.path,
            )
        elif self._manifest.ns_batch_bytes != self._optimizer._ns_batch_bytes():
            _log.warning(
                "Muon: ns_batch_bytes was %r when %s was saved, and is %r: bits may differ from here on",
                self._manifest.ns_batch_bytes,
                self._reader.path,
                self._optimizer._ns_batch_bytes(),
            )

    def _take_steps(self, optimizer: Muon) -> None:
        for param in self._held.values():
            saved = self._manifest.parameters.get(self._names[param])
            if saved is not None and saved.step is not None:
                group = self._groups[param]
                target = optimizer._state_target(param, "step", group, self._old[param])
                target.fill_(saved.step)

    def _target(self, key: str) -> Target:
        saved = self._reader.tensor(key)
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
        return PlainTarget(tensor.detach())

    def _held_target(self, optimizer: Muon, param: Tensor, key: str, saved: SavedTensor) -> Target:
        """Return what takes the weight of a parameter of the optimizer, or its master."""
        if saved.dtype != torch.float32:
            return PassingTarget(saved.shape, saved.dtype, partial(optimizer._take_weight, param))
        known = self._manifest.parameters.get(key.removeprefix("model."))
        is_settled = known is not None and known.dtype == "bfloat16"
        if optimizer._is_near(param):
            return NearMasterTarget(optimizer, param, is_settled=is_settled)
        if optimizer._has_low_half(param):
            return PassingTarget(saved.shape, saved.dtype, partial(optimizer._take_master, param))
        return MasterTarget(optimizer, param, is_settled=is_settled)

    def _give_to_module(self, param: Tensor, values: Tensor) -> None:
        """Have the module take a weight that is not in its parameter: an expert engine's."""
        for found, module, name in owners(self._model):
            if found is param:
                module.load_state_dict({name: values}, strict=False)
                return


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
