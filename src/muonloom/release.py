"""Give the device back between updates, and bring everything back exactly."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from muonloom.assembly import parking_key
from muonloom.dtensors import local_part
from muonloom.failures import refuse_released, refuse_torn
from muonloom.hollow import hollow_, is_hollow, is_released, whole_
from muonloom.host import Reservation
from muonloom.leaving import (
    REMEDY,
    Leaving,
    by_engine,
    called_first,
    drop_gradient,
    exposed_buffers,
    refuse_dtensors,
    restore_gradient,
    sharers,
    tensors_of,
)
from muonloom.residency import MasterAccess
from muonloom.state import device_state, lasting, storage_bytes

_log = logging.getLogger("muonloom")


@dataclass(frozen=True, kw_only=True)
class ReleaseReport:
    """What `Muon.release` did.

    Attributes:
        device_bytes: given back, of what `Muon.memory` counts.
        kept_gradients: names of parameters whose gradient is part of a larger storage (a reducer's bucket).
        kept_weights: names of tensors that share their storage with more than was released, and of buffers
            that DDP around the model may send round.
    """

    device_bytes: int
    kept_gradients: tuple[str, ...]
    kept_weights: tuple[str, ...]


class DeviceRelease(MasterAccess):
    """The part of `Muon` that gives device memory back."""

    # What has no storage now: by parameter of the optimizer, or by tensor of a model.
    _gone: dict[Tensor, Leaving]
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
        gradients = [(t.grad, getattr(t, "main_grad", None)) for t in tensors]
        slots, workspace = self._assembly.device_bytes
        reports = [e.memory() for e in self._weights.engines if hasattr(e, "memory")]
        workspace += sum(report.get("device_workspace", 0) for report in reports)
        return {
            "host_state": self._assembly.host_bytes + self._guest_bytes(),
            "device_state": storage_bytes(state),
            "device_slots": slots,
            "device_workspace": workspace,
            "device_weights": storage_bytes([*map(local_part, tensors), *weights]),
            "gradients": storage_bytes(
                local_part(g) for pair in gradients for g in pair if g is not None
            ),
        }

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
            model: whose buffers and other parameters, on the same device, go with the weights; also those
                of another optimizer, which has to be released first or not at all. Of a model in DDP give
                the wrapper: else buffers stay, since its forward sends them round before all else.

        Raises:
            ValueError: a parameter is not the optimizer's, or a weight is a DTensor; nothing was changed.
            StaleMasterError: a weight was written from outside, and would not come back so.
            MemoryError: the host cannot hold what no master does; nothing was given back.
            RuntimeError: a failed step left a weight half written.
        """
        self.drain()
        refuse_torn(self._assembly.torn)
        chosen = self._chosen(params)
        self._assembly.finish_reading()
        with lasting():
            return self._release(chosen, model if weights else None, weights=weights)

    def _release(
        self, chosen: Mapping[Tensor, str], model: nn.Module | None, *, weights: bool
    ) -> ReleaseReport:
        leaving: dict[Tensor, Leaving] = {}
        exposed: dict[Tensor, str] = {}
        if weights:
            present = {p: name for p, name in chosen.items() if p not in self._gone}
            exposed = exposed_buffers(model)
            others = {t: name for t, name in self._others(model).items() if t not in exposed}
            refuse_dtensors({**present, **others})
            self._check_weights(present)
            leaving |= {p: self._leaving(p, name) for p, name in present.items()}
            leaving |= {
                tensor: Leaving(name=name, emptied=(tensor,), kept=(tensor,))
                for tensor, name in others.items()
            }
        kept_weights = sharers(leaving, self._known_tensors(model))
        leaving = {p: found for p, found in leaving.items() if found.name not in kept_weights}
        states = {p: s for p, s in self.state.items() if p in chosen}
        copies = self._copies(states, leaving)
        before = self._device_bytes()
        self._forget_step()
        self._assembly.give_back()
        kept_gradients = tuple(name for p, name in chosen.items() if not drop_gradient(p, name))
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
            self._sentries += [
                module.register_forward_pre_hook(sentry, prepend=True)
                for module in called_first(model)
            ]
        unfinished = {
            p: found
            for p, found in self._gone.items()
            if p in chosen and not self._is_empty(p, found)
        }
        self._gone.update(leaving)
        for found in leaving.values():
            for tensor in found.kept:
                self._weights.park(tensor, copies[tensor])
        for engine, own in by_engine(unfinished | leaving):
            engine.release(own)
        for found in (*unfinished.values(), *leaving.values()):
            for tensor in found.emptied:
                hollow_(tensor, found.name, REMEDY)
        if any(param.device.type != "cpu" for param in chosen):
            torch.accelerator.empty_cache()
        report = ReleaseReport(
            device_bytes=before - self._device_bytes(),
            kept_gradients=kept_gradients,
            kept_weights=(*kept_weights, *exposed.values()),
        )
        _log.info("Muon: released %d bytes of the device", report.device_bytes)
        return report

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
        self._assembly.finish_reading()
        with lasting():
            for param in chosen:
                restore_gradient(param)
                if param not in back:
                    self._bring_state(param)
            try:
                for engine, own in by_engine(back):
                    engine.resume(own)
                self._weights.renew_writers()
                for owner, found in back.items():
                    self._fill(owner, found)
                    del self._gone[owner]
            except BaseException:
                unfilled = {owner: found for owner, found in back.items() if owner in self._gone}
                for engine, own in by_engine(unfilled):
                    with contextlib.suppress(Exception):
                        engine.release(own)
                raise
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

    def _leaving(self, param: Tensor, name: str) -> Leaving:
        """Decide what becomes of the tensors behind one parameter."""
        engine = self._weights.engine(param)
        holders = tuple(t for t in self._weights.tensors(param) if t is not param)
        own = () if is_released(param) else (param,)
        emptied = own if engine is not None else (*own, *holders)
        if (
            "master_weight" not in self.state.get(param, {})
            or self._assignments[param].share is not None
        ):  # nothing here describes all of it
            return Leaving(name=name, emptied=emptied, kept=(*own, *holders), engine=engine)
        # What a writer fills, and a parameter that nothing else fills, comes back from the master.
        plain = self._weights.writer(param) is None
        written = plain or any(tensor is param for tensor in self._weights.tensors(param))
        return Leaving(name=name, emptied=emptied, kept=() if written else own, engine=engine)

    def _others(self, model: nn.Module | None) -> dict[Tensor, str]:
        """Return the model's tensors that are not the optimizer's, on its device."""
        devices = {param.device for param in self._assignments}
        return {
            tensor: name
            for tensor, name in tensors_of(model).items()
            if tensor not in self._assignments
            and tensor.device in devices
            and tensor.numel()
            and not is_hollow(tensor)
            and not is_released(tensor)
        }

    def _known_tensors(self, model: nn.Module | None) -> list[Tensor]:
        holders = [t for param in self._assignments for t in self._weights.tensors(param)]
        return [*self._assignments, *holders, *tensors_of(model)]

    def _copies(
        self, states: Mapping[Tensor, Mapping[str, Tensor]], leaving: Mapping[Tensor, Leaving]
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
        later = sum(tensor.nbytes for tensor in passing)
        store.reserve(reservations, what="released weights and state", later_bytes=later)
        places = {t: store.place(t, parking_key("weight", t)) for t, own in kept.items() if own}
        return places | {t: torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in passing}

    def _guest_bytes(self) -> int:
        """Return the host memory that a model's tensors take, which has no lasting place."""
        guests = (f.kept for owner, f in self._gone.items() if owner not in self._assignments)
        return sum(tensor.nbytes for kept in guests for tensor in kept)

    def _device_bytes(self) -> int:
        return sum(n for place, n in self.memory().items() if place != "host_state")

    # -- going and coming ---------------------------------------------------------------------------

    def _is_empty(self, owner: Tensor, found: Leaving) -> bool:
        """Whether an earlier release came to its end for one parameter."""
        return all(map(is_released, (*found.emptied, *self._weights.tensors(owner))))

    def _fill(self, owner: Tensor, found: Leaving) -> None:
        """Bring one parameter back; should that fail, nothing of undefined content can be read."""
        try:
            for tensor in found.emptied:
                whole_(tensor)
            for tensor in found.kept:
                copy = self._weights.parked_copy(tensor)
                assert copy is not None
                tensor.copy_(copy, non_blocking=copy.is_pinned())
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
                hollow_(tensor, found.name, REMEDY)
            raise
        for tensor in found.kept:
            self._weights.unpark(tensor)

    def _bring_state(self, param: Tensor) -> None:
        state = self.state.get(param, {})
        for key, tensor in state.items():
            if self._assembly.host is None and self._assembly.is_on_host(param, key, tensor):
                home = device_state(self._weights.part(param), key, tensor.dtype)
                state[key] = home.copy_(tensor, non_blocking=True)


def _refuse_forward(optimizer: weakref.ref[DeviceRelease], *_: object) -> None:
    alive = optimizer()
    if alive is not None:
        names = [*alive._released.values(), *(found.name for found in alive._gone.values())]
        refuse_released(dict.fromkeys(names), "a forward pass")
