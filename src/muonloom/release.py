"""Give the device back between updates, and bring everything back exactly."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from muonloom.assembly import parking_key
from muonloom.failures import refuse_released, refuse_torn
from muonloom.guard import gradient_of
from muonloom.hollow import hollow_, is_hollow, whole_
from muonloom.host import Reservation
from muonloom.layout.rules import canonical_name
from muonloom.residency import MasterAccess
from muonloom.state import device_state, storage_bytes
from muonloom.weights import is_released
from muonloom.writers import ExpertEngine

_log = logging.getLogger("muonloom")

_REMEDY = "Call resume() of its optimizer first."


@dataclass(frozen=True, kw_only=True)
class ReleaseReport:
    """What `Muon.release` did.

    Attributes:
        device_bytes: given back, of what `Muon.memory` counts.
        kept_gradients: names of parameters whose gradient is part of a larger storage (a reducer's bucket).
        kept_weights: names of tensors that share their storage with more than was released.
    """

    device_bytes: int
    kept_gradients: tuple[str, ...]
    kept_weights: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Leaving:
    """What becomes of the tensors behind one parameter, or of one tensor of a model.

    Attributes:
        emptied: whose storages are given up here.
        kept: that host memory has to hold meanwhile; what is in none of them is written from the master.
        engine: that gives up what holds the weight.
    """

    name: str
    emptied: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()
    engine: ExpertEngine | None = None


class DeviceRelease(MasterAccess):
    """The part of `Muon` that gives device memory back."""

    # What has no storage now: by parameter of the optimizer, or by tensor of a model.
    _gone: dict[Tensor, _Leaving]
    # Hooks on models whose own forward would not ask Python before it reads, as DDP's.
    _sentries: list[RemovableHandle]

    def _forget_step(self) -> None:
        """Keep of the last step plain numbers only."""
        raise AssertionError("the optimizer overrides this")

    def memory(self) -> dict[str, int]:
        """Return bytes by place, from the storages that exist now."""
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        weights = [found for tensor in tensors for found in self._weights.tensors(tensor)]
        state = [
            value
            for tensor, entry in self.state.items()
            for key, value in entry.items()
            if isinstance(value, Tensor) and not self._assembly.is_on_host(tensor, key, value)
        ]
        gradients = [gradient_of("gradient", tensor) for tensor in tensors]
        slots, workspace = self._assembly.device_bytes
        return {
            "host_state": self._assembly.host_bytes + self._guest_bytes(),
            "device_state": storage_bytes(state),
            "device_slots": slots,
            "device_workspace": workspace,
            "device_weights": storage_bytes([*tensors, *weights]),
            "gradients": storage_bytes([g for g in gradients if g is not None]),
        }

    @torch.no_grad()
    def release(
        self,
        params: Iterable[Tensor] | None = None,
        *,
        weights: bool = True,
        model: nn.Module | None = None,
    ) -> ReleaseReport:
        """Give device memory back: slots, workspace, gradients, state, and with `weights` the weights.

        Storages are resized to nothing; tensors stay the same objects. Until `resume`, whatever reads a
        weight that is gone (a forward pass, the model's ``state_dict`` and ``save_pretrained``, `step`)
        raises and names it; `get_full_parameter_master`, this optimizer's ``state_dict`` and
        `export_weights` work. A second call releases what is not yet released.

        Args:
            params: whose gradients, state and weights; None: of all.
            weights: whether weights go too. Those with a whole master are written from it by `resume`; the
                others wait in host memory.
            model: whose buffers and other parameters, on the same device, go too.

        Raises:
            ValueError: a parameter is not the optimizer's.
            StaleMasterError: a weight was written from outside, and would not come back so.
            MemoryError: the host cannot hold what no master does; nothing was given back.
            RuntimeError: a failed step left a weight half written.
        """
        self.drain()
        refuse_torn(self._assembly.torn)
        chosen = self._chosen(params)
        with _lasting():
            return self._release(chosen, model if weights else None, weights=weights)

    def _release(
        self, chosen: Mapping[Tensor, str], model: nn.Module | None, *, weights: bool
    ) -> ReleaseReport:
        leaving: dict[Tensor, _Leaving] = {}
        if weights:
            present = {p: name for p, name in chosen.items() if p not in self._gone}
            self._check_weights(present)
            leaving = {p: self._leaving(p, name) for p, name in present.items()}
            leaving |= {
                tensor: _Leaving(name=name, emptied=(tensor,), kept=(tensor,))
                for tensor, name in self._others(model).items()
            }
        kept_weights = _sharers(leaving, self._known_tensors(model))
        leaving = {p: found for p, found in leaving.items() if found.name not in kept_weights}
        states = {p: s for p, s in self.state.items() if p in chosen}
        copies = self._copies(states, leaving)
        before = self._device_bytes()
        self._forget_step()
        self._assembly.give_back()
        kept_gradients = tuple(name for p, name in chosen.items() if not _drop_gradient(p))
        self._released.update(chosen)
        for param, state in states.items():
            for key, tensor in state.items():
                if not self._assembly.is_on_host(param, key, tensor):
                    place = parking_key(key, tensor)
                    state[key] = self._assembly.parking.place(param, place).copy_(tensor)
        for tensor, copy in copies.items():
            copy.copy_(tensor)  # all of them first: they may share storage
        if model is not None and leaving:
            sentry = partial(_refuse_forward, weakref.ref(self))
            self._sentries.append(model.register_forward_pre_hook(sentry, prepend=True))
        for engine, own in _by_engine(leaving):
            engine.release(own)
        for owner, found in leaving.items():
            self._gone[owner] = found
            for tensor in found.kept:
                self._weights.park(tensor, copies[tensor])
            for tensor in found.emptied:
                hollow_(tensor, found.name, _REMEDY)
        if any(param.device.type != "cpu" for param in chosen):
            torch.accelerator.empty_cache()
        report = ReleaseReport(
            device_bytes=before - self._device_bytes(),
            kept_gradients=kept_gradients,
            kept_weights=kept_weights,
        )
        _log.info("Muon: released %d bytes of the device", report.device_bytes)
        return report

    @torch.no_grad()
    def resume(self, params: Iterable[Tensor] | None = None) -> None:
        """Bring back what `release` gave up: weights bit for bit as they were, each byte moved once.

        Gradients are not brought back. What was a model's comes back with the last of the parameters.

        Args:
            params: which of them; None: all. What is not released is left as it is.

        Raises:
            ValueError: a parameter is not the optimizer's.
        """
        chosen = [param for param in self._chosen(params) if param in self._released]
        back = {param: self._gone[param] for param in chosen if param in self._gone}
        if len(chosen) == len(self._released):
            back |= {tensor: found for tensor, found in self._gone.items() if tensor not in back}
        with _lasting():
            for engine, own in _by_engine(back):
                engine.resume(own)
            for param in chosen:
                if param not in back:
                    self._bring_state(param)
            for owner, found in back.items():
                self._fill(owner, found)
                del self._gone[owner]
            for param in chosen:
                del self._released[param]
        while self._sentries and not self._gone:
            self._sentries.pop().remove()

    def released_copy(self, tensor: Tensor) -> Tensor | None:
        """Return what host memory holds of a tensor that is released, not to be written; None: nothing.

        Also of a buffer or parameter that `release` took from a model. Masters hold the other weights.
        """
        return self._weights.parked_copy(tensor)

    # -- what goes ----------------------------------------------------------------------------------

    def _check_weights(self, names: Mapping[Tensor, str]) -> None:
        """Refuse weights that masters do not describe: they would come back as others."""
        self._weights.check(names)
        moved = self._masters.suspicion(names)
        if moved is not None and bool(moved):
            self._masters.doubt_changed(names)
        for param, name in names.items():
            self._masters.check(name, param, self.state.get(param, {}))

    def _leaving(self, param: Tensor, name: str) -> _Leaving:
        """Decide what becomes of the tensors behind one parameter."""
        engine = self._weights.engine(param)
        holders = tuple(t for t in self._weights.tensors(param) if t is not param)
        own = () if is_released(param) else (param,)
        emptied = own if engine is not None else (*own, *holders)
        if "master_weight" not in self.state.get(param, {}):
            return _Leaving(name=name, emptied=emptied, kept=(*own, *holders), engine=engine)
        # What a writer fills, and a parameter that nothing else fills, comes back from the master.
        plain = self._weights.writer(param) is None
        written = plain or any(tensor is param for tensor in self._weights.tensors(param))
        return _Leaving(name=name, emptied=emptied, kept=() if written else own, engine=engine)

    def _others(self, model: nn.Module | None) -> dict[Tensor, str]:
        """Return the model's tensors that are not the optimizer's, on its device."""
        devices = {param.device for param in self._assignments}
        return {
            tensor: name
            for tensor, name in _named_tensors(model).items()
            if tensor not in self._assignments
            and tensor.device in devices
            and tensor.numel()
            and not is_hollow(tensor)
            and not is_released(tensor)
        }

    def _known_tensors(self, model: nn.Module | None) -> list[Tensor]:
        holders = [t for param in self._assignments for t in self._weights.tensors(param)]
        return [*self._assignments, *holders, *_named_tensors(model)]

    def _copies(
        self, states: Mapping[Tensor, Mapping[str, Tensor]], leaving: Mapping[Tensor, _Leaving]
    ) -> dict[Tensor, Tensor]:
        """Have host memory for all that needs it; return the places of tensors that are kept."""
        store = self._assembly.parking
        kept = {t: p in self._assignments for p, found in leaving.items() for t in found.kept}
        wanted = [(tensor, "weight", tensor) for tensor, own in kept.items() if own]
        wanted += [
            (param, key, tensor)
            for param, state in states.items()
            for key, tensor in state.items()
            if key != "step" and not self._assembly.is_on_host(param, key, tensor)
        ]
        reservations = [
            Reservation(
                parameter=owner,
                key=parking_key(key, like),
                shape=tuple(like.shape),
                dtype=like.dtype,
            )
            for owner, key, like in wanted
        ]
        # A model may have other buffers each time: their places are not kept.
        passing = [tensor for tensor, own in kept.items() if not own]
        later = sum(tensor.numel() * tensor.element_size() for tensor in passing)
        store.reserve(reservations, what="released weights and state", later_bytes=later)
        places = {t: store.place(t, parking_key("weight", t)) for t, own in kept.items() if own}
        return places | {t: torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in passing}

    def _guest_bytes(self) -> int:
        """Return the host memory that a model's tensors take, which has no lasting place."""
        guests = (f.kept for owner, f in self._gone.items() if owner not in self._assignments)
        return sum(_bytes(tensor) for kept in guests for tensor in kept)

    def _device_bytes(self) -> int:
        return sum(n for place, n in self.memory().items() if place != "host_state")

    # -- going and coming ---------------------------------------------------------------------------

    def _fill(self, owner: Tensor, found: _Leaving) -> None:
        """Bring one parameter back; should that fail, nothing of undefined content can be read."""
        try:
            for tensor in found.emptied:
                whole_(tensor)
            for tensor in found.kept:
                copy = self._weights.parked_copy(tensor)
                assert copy is not None
                tensor.copy_(copy, non_blocking=True)
            if owner in self._released:
                self._bring_state(owner)
                self._weights.rebind(owner)
                state = self.state.get(owner, {})
                if "master_weight" in state:
                    self._masters.rewrite(owner, state["master_weight"])
                else:
                    self._masters.note([owner])
        except BaseException:
            for tensor in found.emptied:
                hollow_(tensor, found.name, _REMEDY)
            if found.engine is not None:
                with contextlib.suppress(Exception):
                    found.engine.release([owner])  # type: ignore[list-item]
            raise
        for tensor in found.kept:
            self._weights.unpark(tensor)

    def _bring_state(self, param: Tensor) -> None:
        state = self.state.get(param, {})
        for key, tensor in state.items():
            if self._assembly.host is None and self._assembly.is_on_host(param, key, tensor):
                home = device_state(param, key, tensor.dtype)
                state[key] = home.copy_(tensor, non_blocking=True)


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    """Have tensors made that outlive an inference mode of the caller's; leaving it turns gradients on."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _refuse_forward(optimizer: weakref.ref[DeviceRelease], *_: object) -> None:
    alive = optimizer()
    if alive is not None:
        refuse_released([found.name for found in alive._gone.values()], "a forward pass")


def _by_engine(
    leaving: Mapping[Tensor, _Leaving],
) -> Iterator[tuple[ExpertEngine, list[nn.Parameter]]]:
    for engine in dict.fromkeys(found.engine for found in leaving.values()):
        if engine is not None:
            own = [param for param, found in leaving.items() if found.engine is engine]
            yield engine, own  # type: ignore[misc]


def _named_tensors(model: nn.Module | None) -> dict[Tensor, str]:
    if model is None:
        return {}
    found = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: canonical_name(name) for name, tensor in found}


def _sharers(leaving: Mapping[Tensor, _Leaving], known: Iterable[Tensor]) -> tuple[str, ...]:
    """Return the names of tensors whose storage holds something else than what is to go."""
    going = {tensor: found.name for found in leaving.values() for tensor in found.emptied}
    bytes_of: dict[int, int] = {}
    for tensor in going:
        place = tensor.untyped_storage().data_ptr()
        bytes_of[place] = bytes_of.get(place, 0) + _bytes(tensor)
    staying = {t.untyped_storage().data_ptr() for t in known if t not in going} - {0}
    names: dict[str, None] = {}
    for tensor, name in going.items():
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        # One element in several places cannot be filled again element by element.
        expanded = _bytes(tensor) > storage.nbytes()
        if place in staying or expanded or bytes_of[place] < storage.nbytes():
            names[name] = None
    return tuple(names)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _drop_gradient(param: Tensor) -> bool:
    """Let go of a parameter's gradients; return whether all could go."""
    dropped = True
    for attribute in ("grad", "main_grad"):
        gradient = getattr(param, attribute, None)
        if gradient is None:
            continue
        shared = gradient.untyped_storage().nbytes() > _bytes(gradient)
        if shared or gradient._base is not None:
            dropped = False
        else:
            setattr(param, attribute, None)
    return dropped
