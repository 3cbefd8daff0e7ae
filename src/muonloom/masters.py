"""FP32 masters of parameters that are not FP32: made, checked against their weights, rebuilt, read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from muonloom.bits import bits
from muonloom.errors import StaleMasterError, complaint
from muonloom.math import join_, low_halves, settle_ties_
from muonloom.state import MASTER_KEYS, State, Store, drop_master
from muonloom.transfers import storage_order
from muonloom.weights import DeviceWeights

_SAMPLED_WORDS = 64
_SUMMED_WORDS = 1 << 20

# Version and address of each tensor that holds a weight.
_Mark = tuple[tuple[int, int], ...]

# No version of a weight: whoever meets it compares values.
_UNKNOWN: _Mark = ((-1, 0),)


class MasterBook:
    """Knows for each parameter which version of its weight the master describes.

    Versions and addresses tell of most writes from outside. Edits through ``.data`` leave no trace, so
    some words of every weight are kept on the device, and compared for all weights of it at once.

    Attributes:
        changes: counts what changed masters.
    """

    def __init__(self, store: Store, weights: DeviceWeights) -> None:
        self._store = store
        self._weights = weights
        self._versions: dict[Tensor, _Mark] = {}
        self._samples: dict[Tensor, tuple[Tensor, ...]] = {}
        self._expected: dict[Tensor, tuple[int, int]] = {}
        self.changes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Keep which weights agree with their masters; versions, addresses and writers are not a copy's."""
        certain = [
            parameter
            for parameter, mark in self._versions.items()
            if mark == self._mark(parameter) and self._weights.writer(parameter) is None
        ]
        return {"certain": certain, "expected": self._expected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take note of the weights of a copy."""
        self._versions, self._samples, self._expected = {}, {}, dict(state["expected"])
        self._weights = DeviceWeights()
        self.changes = 0
        self.note(state["certain"])

    def move_to(self, store: Store, weights: DeviceWeights) -> None:
        """Have masters made elsewhere, for weights that are elsewhere, from now on."""
        self._store, self._weights = store, weights

    def ensure(self, parameter: Tensor, state: State) -> None:
        """Make the master from the weight where one is needed and missing."""
        if self._weights.has_master(parameter) and not state.keys() & set(MASTER_KEYS):
            self.rebuild(parameter, state)

    def begin(self, name: str, parameter: Tensor, state: State) -> None:
        """Make the first master of a parameter that has just got a writer, from what that was made of.

        Raises:
            ValueError: that is not shaped as the parameter; no state was made.
        """
        source = self._weights.source(parameter).detach()
        shape = self._weights.part(parameter).shape
        if source.shape != shape:
            raise ValueError(
                complaint(
                    name,
                    got=f"a writer whose weight is shaped {tuple(source.shape)}",
                    wanted=f"{tuple(shape)}, as the parameter",
                    remedy="Give each parameter a writer of its own shape.",
                )
            )
        try:
            self._take(parameter, state, source)
        except BaseException:
            self._weights.return_source(parameter, source)
            raise
        self.accord(parameter, state)

    def accord(self, parameter: Tensor, state: State) -> None:
        """Write a weight that its writer holds again where its master gives other bytes; take note."""
        master = state.get("master_weight")
        if master is not None and not self._weights.agrees(parameter, master):
            self._weights.write(parameter, master)
        self.note([parameter])

    def rebuild(self, parameter: Tensor, state: State) -> None:
        """Take the master from the weight, in place where it exists; drop it where none is needed.

        An FP8 weight is written again where the master gives other bytes: a last bit of a scale.
        """
        self._take(parameter, state, self._weights.read(parameter))
        self.accord(parameter, state)

    def _take(self, parameter: Tensor, state: State, values: Tensor) -> None:
        self._expected.pop(parameter, None)
        if not self._weights.has_master(parameter):
            drop_master(state)
            self._versions.pop(parameter, None)
            self._samples.pop(parameter, None)
            return
        if self.is_split(parameter):
            self._kept(parameter, state, "master_low", torch.int16).zero_()
        else:
            self._kept(parameter, state, "master_weight", torch.float32).copy_(values)

    def restore(self, parameter: Tensor, state: State, master: Tensor | None) -> None:
        """Take a saved master; the weight that belongs to it may be loaded before or after.

        None, or a parameter that has no master, leaves the state without one.
        """
        self._expected.pop(parameter, None)
        self._samples.pop(parameter, None)
        self.changes += 1
        if master is None or not self._weights.has_master(parameter):
            drop_master(state)
            return
        if self.is_split(parameter):
            low = self._kept(parameter, state, "master_low", torch.int16)
            whole = master.detach().to("cpu", torch.float32, copy=True).contiguous()
            settle_ties_(whole)
            low_halves(whole, low)
            self._expected[parameter] = _checksum(whole.to(torch.bfloat16))
        else:
            whole = self._kept(parameter, state, "master_weight", torch.float32).copy_(master)
            if parameter.dtype == torch.bfloat16:
                settle_ties_(whole)
        self._versions[parameter] = _UNKNOWN

    def is_split(self, parameter: Tensor) -> bool:
        """Whether a master of `parameter` is kept as what its weight lacks."""
        return self._store.splits_masters and parameter.dtype == torch.bfloat16

    def place(self, parameter: Tensor, state: State) -> Tensor:
        """Return the place of the master, or of what the weight lacks of it; of any content."""
        if self.is_split(parameter):
            return self._kept(parameter, state, "master_low", torch.int16)
        return self._kept(parameter, state, "master_weight", torch.float32)

    def _kept(self, parameter: Tensor, state: State, key: str, dtype: torch.dtype) -> Tensor:
        if key not in state:
            state[key] = self._store.new(parameter, key, dtype, zero=False)
        return state[key]

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Take note of new masters, with which these weights agree."""
        self.changes += 1
        self._note(parameters)

    def _note(self, parameters: Iterable[Tensor]) -> None:
        """Remember that these weights agree with their masters now, and sample them."""
        for parameter in parameters:
            if self._weights.has_master(parameter):
                self._versions[parameter] = self._mark(parameter)
                tensors = self._weights.watched(parameter)
                self._samples[parameter] = tuple(_sample(tensor).clone() for tensor in tensors)
                self._expected.pop(parameter, None)

    def suspicion(self, parameters: Iterable[Tensor] | None = None) -> Tensor | None:
        """Return a bool scalar on the device: whether a sampled word of a weight has changed.

        It is read together with the guard's other numbers.

        Args:
            parameters: whose weights; None: all.

        Returns:
            None where there is nothing to compare.
        """
        pairs: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for parameter in self._samples if parameters is None else parameters:
            for now, sample in self._sampled(parameter):
                if now.shape != sample.shape or now.device != sample.device:
                    return torch.ones((), dtype=torch.bool, device=parameter.device)
                pairs.setdefault((now.device, now.dtype), []).append((now, sample))
        flags = [
            (torch.cat([now for now, _ in both]) != torch.cat([old for _, old in both])).any()
            for both in pairs.values()
        ]
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else None

    def _sampled(self, parameter: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield words of a weight as they are, and as they were."""
        tensors = self._weights.watched(parameter)
        for sample, tensor in zip(self._samples.get(parameter, ()), tensors, strict=False):
            yield _sample(tensor), sample

    def doubt_changed(self, parameters: Iterable[Tensor]) -> None:
        """Have the next `check` compare the values of those of which a sampled word has changed."""
        for parameter in parameters:
            for now, sample in self._sampled(parameter):
                if now.device != sample.device or not torch.equal(now, sample):
                    self.doubt(parameter)
                    break

    def is_certain(self, parameter: Tensor, state: State) -> bool:
        """Whether `check` will decide without comparing values."""
        if not self._weights.has_master(parameter) or not state.keys() & set(MASTER_KEYS):
            return True
        return self._versions.get(parameter) == self._mark(parameter)

    def _mark(self, parameter: Tensor) -> _Mark:
        """What changes when somebody writes the weight in place, or puts another storage under it."""
        tensors = self._weights.watched(parameter)
        return tuple((tensor._version, tensor.data_ptr()) for tensor in tensors)

    def doubt(self, parameter: Tensor) -> None:
        """Have the next `check` of a parameter compare its values."""
        if self._versions.get(parameter) is not None:
            self._versions[parameter] = _UNKNOWN
        self._samples.pop(parameter, None)

    def check(self, name: str, parameter: Tensor, state: State) -> None:
        """Raise where the weight was written from outside since the master was last in step with it.

        A write that left the very bits that the master rounds to (loading both from one checkpoint)
        is none. An edit through ``.data`` that misses every sampled word is not seen: call
        `refresh_masters` after it.
        """
        if not state.keys() & set(MASTER_KEYS):
            return
        if self._weights.has_master(parameter):
            if self.is_certain(parameter, state):
                return
            if self._agrees(parameter, state):
                self._note([parameter])
                return
        raise StaleMasterError(
            complaint(
                name,
                got=f"a {parameter.dtype} weight that was written outside the optimizer",
                wanted="the weight that its FP32 master rounds to",
                remedy="Call refresh_masters() after loading weights, before the next step.",
            )
        )

    def _agrees(self, parameter: Tensor, state: State) -> bool:
        """Whether the weight has the very bits that its master rounds to.

        A split master does not tell: only where it was loaded is there a sum of the weight that it had.
        """
        if not self._weights.part(parameter).numel():
            return True  # other ranks have all of it
        if "master_low" in state:
            return self._expected.get(parameter) == _checksum(
                self._weights.stored(parameter).detach()
            )
        return self._weights.agrees(parameter, state["master_weight"])

    def replace(self, parameter: Tensor, state: State, values: Tensor) -> None:
        """Give the master new values, and write the weight from them."""
        self.ensure(parameter, state)
        if parameter.dtype == torch.bfloat16:
            settle_ties_(values)
        if "master_weight" in state:
            state["master_weight"].copy_(values)
        elif "master_low" in state:
            low_halves(values.cpu(), state["master_low"])
        self.rewrite(parameter, values)

    def renew(self, parameter: Tensor, state: State, *, is_settled: bool) -> None:
        """Take a whole master that was written in place, and write the weight from it.

        Args:
            parameter: whose it is.
            state: holds it.
            is_settled: whether it was a BF16 weight's before, and so is off the ties.
        """
        master = state["master_weight"]
        if parameter.dtype == torch.bfloat16 and not is_settled:
            settle_ties_(master)
        self.rewrite(parameter, master)

    def rewrite(self, parameter: Tensor, master: Tensor) -> None:
        """Write the weight from its master, and remember that they agree."""
        self._weights.write(parameter, master)
        self.note([parameter])

    def whole(self, parameter: Tensor, state: State, rows: slice | None = None) -> Tensor:
        """Return the FP32 master: the state's or the parameter's own tensor, or a new one on the CPU.

        With `rows` of dimension 0 it is their part.
        """
        part = ... if rows is None else rows
        if "master_low" in state:
            low = state["master_low"][part]
            joined = torch.empty(low.shape, dtype=torch.float32, device="cpu")
            join_(self._weights.stored(parameter).detach()[part].cpu(), low, joined)
            return joined
        master = state.get("master_weight")
        master = self._weights.read(parameter) if master is None else master
        return master if rows is None else master[rows]


def edited_master(
    name: str, parameter: Tensor, master: Tensor, fn: Callable[[Tensor], Tensor | None]
) -> Tensor:
    """Return what `fn` makes of a copy of the master; raise a ValueError where that is unusable."""
    values = master.to(torch.float32, copy=True)
    shape = values.shape
    returned = fn(values)
    values = values if returned is None else returned
    usable = values.shape == shape and values.is_floating_point()
    if usable:
        values = values.to(torch.float32).contiguous()
        usable = bool(torch.isfinite(values).all())
        usable = usable and bool(torch.isfinite(values.to(parameter.dtype)).all())
    if not usable:
        raise ValueError(
            complaint(
                name,
                got=f"{values.dtype} of shape {tuple(values.shape)}, not finite in "
                f"{parameter.dtype} or misshapen",
                wanted=f"finite floats of shape {tuple(shape)}",
                remedy="Nothing was written; mend the function.",
            )
        )
    return values


def _checksum(weight: Tensor) -> tuple[int, int]:
    """Two sums over the words of a 16-bit tensor, the second of which sees their order."""
    plain = ordered = 0
    pieces = torch.split(bits(weight).reshape(-1), _SUMMED_WORDS)
    for start, words in enumerate(pieces):
        wide = words.to(torch.int64)
        places = torch.arange(1, wide.numel() + 1, device=wide.device)
        plain += int(wide.sum())
        ordered += (start + 1) * int((wide * places).sum())
    return plain, ordered


def _sample(weight: Tensor) -> Tensor:
    """Some words of a weight, spread over its storage; a view where that has no holes."""
    flat = bits(weight.detach()).permute(storage_order(weight)).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_WORDS)]
