"""Optimizer state: made empty, and taken from a saved dictionary without losing its precision."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from muonloom.config import is_number
from muonloom.dtensors import is_dtensor, local_part, mesh_ranks
from muonloom.errors import complaint
from muonloom.hollow import is_released
from muonloom.layout import canonical_name

State = dict[str, Tensor]

MASTER_KEYS = ("master_weight", "master_low")
STATE_KEYS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}
"""The two forms of a master: whole, or what the BF16 weight lacks."""


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Have tensors made that outlive an inference mode of the caller's, without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class StateByParameter(defaultdict[Tensor, State]):
    """What `torch.optim.Optimizer.state` is: true where a step, or a load, has made state.

    Masters that were made when a writer was registered do not count: torch's tools for distributed
    checkpoints have all state made where there is none, and take it to be whole where there is some.
    """

    def __init__(self, states: Mapping[Tensor, State] = MappingProxyType({})) -> None:
        super().__init__(dict, states)

    def __bool__(self) -> bool:
        return any(state.keys() - set(MASTER_KEYS) for state in self.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return StateByParameter, (dict(self),)


class Store(Protocol):
    """Where state tensors come from."""

    @property
    def splits_masters(self) -> bool:
        """Whether a BF16 parameter's master is kept as what its weight lacks (`master_low`)."""

    def has_master(self, parameter: Tensor) -> bool:
        """Whether the FP32 master of `parameter` is not the parameter itself."""

    def part(self, parameter: Tensor) -> Tensor:
        """Return what of `parameter` this rank updates."""

    def new(self, parameter: Tensor, key: str, dtype: torch.dtype, *, zero: bool = True) -> Tensor:
        """Return a tensor for the state `key` of `parameter`; without `zero`, of any content."""


def drop_master(state: State) -> None:
    """Have a state without a master, of either form."""
    for key in MASTER_KEYS:
        state.pop(key, None)


def device_state(part: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """Return zeros where a (part of a) parameter is, in its own memory format."""
    shape = () if key == "step" else tuple(part.shape)
    if is_released(part) or key == "step":
        return torch.zeros(shape, dtype=dtype, device=part.device)
    like = part.detach()
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)


def ensure_state(
    parameter: Tensor, state: State, group: Mapping[str, Any], *, store: Store
) -> None:
    """Add what is missing of the state of `parameter`, as zeros; masters are not made here."""
    for key, dtype in state_dtypes(group, has_master=False).items():
        if key not in state:
            state[key] = store.new(parameter, key, dtype)


def state_dtypes(group: Mapping[str, Any], *, has_master: bool) -> dict[str, torch.dtype]:
    """Return the keys that the state of a parameter has, with their dtypes."""
    is_muon = group["algorithm"] == "muon"
    dtype = group["momentum_dtype"] if is_muon else torch.float32
    dtypes = dict.fromkeys(STATE_KEYS[group["algorithm"]], dtype)
    if has_master:
        dtypes["master_weight"] = torch.float32
    return dtypes


def kept_dtypes(
    parameter: Tensor, group: Mapping[str, Any], *, store: Store
) -> dict[str, torch.dtype]:
    """Return what is really kept: a split BF16 parameter's master as what its weight lacks."""
    dtypes = state_dtypes(group, has_master=store.has_master(parameter))
    if store.splits_masters and parameter.dtype == torch.bfloat16:
        del dtypes["master_weight"]
        dtypes["master_low"] = torch.int16
    return dtypes


def portable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Write the dtypes in a state dictionary's groups as names: distributed savers know no dtypes."""
    groups = [
        {k: _dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], *, store: Store
) -> tuple[dict[str, Any], list[tuple[Tensor, State]]]:
    """Order a saved dictionary as `groups` are, by name where both sides have names.

    Returns:
        The dictionary in that order, and each parameter with its saved state.

    Raises:
        ValueError: other groups, names, algorithms, keys or shapes, or a non-finite value; nothing
            was changed.
    """
    if not {"state", "param_groups"} <= saved.keys():
        raise ValueError(
            complaint(
                "state_dict",
                got=f"a dictionary with the keys {sorted(map(str, saved))}",
                wanted="'state' and 'param_groups'",
                remedy="Pass what state_dict() returned.",
            )
        )
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            complaint(
                "param_groups",
                got=f"{len(saved_groups)} saved groups",
                wanted=f"{len(groups)}, as this optimizer has",
                remedy="Build the optimizer with the same groups.",
            )
        )
    ordered, pairs = [], []
    for i, (theirs, ours) in enumerate(zip(saved_groups, groups, strict=True)):
        ids, names = _ordered_ids(f"param_groups[{i}]", theirs, ours)
        # Options that the saved run did not know stay as they are here; how momentum is stored is this
        # optimizer's own choice.
        entry = {**ours, **theirs, "params": ids, "momentum_dtype": ours["momentum_dtype"]}
        if isinstance(entry["ns_compute_dtype"], str):
            name = entry["ns_compute_dtype"]
            entry["ns_compute_dtype"] = getattr(torch, name, name)
        entry.pop("param_names", None)
        if "param_names" in ours:
            entry["param_names"] = names
        ordered.append(entry)
        for saved_id, name, parameter in zip(ids, names, ours["params"], strict=True):
            state = saved["state"].get(saved_id, {})
            options = {**ours, **entry, "params": None}
            known = state_dtypes(options, has_master=store.has_master(parameter))
            # Torch's flattened form has an empty dictionary where nothing was saved.
            state = {k: v for k, v in state.items() if k not in known or not _is_nothing(v)}
            _refuse_flat_split(name, state)
            _check_state(name, parameter, state, known.keys())
            pairs.append((parameter, state))
    return {**saved, "param_groups": ordered}, pairs


def _ordered_ids(
    owner: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[list[Any], list[str]]:
    ids = list(theirs.get("params", ()))
    if theirs.keys() <= {"params"}:
        raise ValueError(
            complaint(
                owner,
                got="a saved group without options",
                wanted="the options that it was saved with",
                remedy="Build the optimizer with the same groups, or save and load with "
                "StateDictOptions(flatten_optimizer_state_dict=True).",
            )
        )
    # torch.optim.Muon knows one algorithm, and does not say so.
    if theirs.get("algorithm", "muon") != ours["algorithm"]:
        raise ValueError(
            complaint(
                f"{owner}.algorithm",
                got=repr(theirs.get("algorithm", "muon")),
                wanted=repr(ours["algorithm"]),
                remedy="Build the optimizer with the layout that it was saved with.",
            )
        )
    if len(ids) != len(ours["params"]):
        raise ValueError(
            complaint(
                owner,
                got=f"{len(ids)} saved parameters",
                wanted=str(len(ours["params"])),
                remedy="Build the optimizer for the model that it was saved with.",
            )
        )
    saved_names, names = theirs.get("param_names"), ours.get("param_names")
    if ids and all(isinstance(saved_id, str) for saved_id in ids):
        # torch's tools for distributed checkpoints: names stand for numbers, in the order of this
        # optimizer, while `param_names` are of the group as it was saved.
        known = {canonical_name(saved_id) for saved_id in ids} == set(names or ())
        saved_names = ids if known else None
    if saved_names is None or names is None:
        return ids, list(names or [f"{owner}.params[{i}]" for i in range(len(ids))])
    saved_names = [canonical_name(name) for name in saved_names]
    if set(saved_names) != set(names):
        odd = sorted(set(saved_names) ^ set(names))[0]
        raise ValueError(
            complaint(
                odd,
                got="a parameter on one side only",
                wanted="the same names in the saved group and in this one",
                remedy="Build the optimizer for the model that it was saved with.",
            )
        )
    by_name = dict(zip(saved_names, ids, strict=True))
    return [by_name[name] for name in names], list(names)


def _refuse_flat_split(name: str, state: Mapping[str, Any]) -> None:
    """Refuse what torch's flattened form makes of split masters: it asks for the key that is kept."""
    if _is_nothing(state.get("master_low")):
        raise ValueError(
            complaint(
                name,
                got="torch's flattened form of a state dictionary, for split masters",
                wanted="one that is not flattened: it has no place for their whole masters",
                remedy="Use StateDictOptions(flatten_optimizer_state_dict=False), or "
                "muonloom.checkpoint.",
            )
        )


def _is_nothing(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _check_state(name: str, parameter: Tensor, state: Mapping[str, Any], known: Set[str]) -> None:
    needed = known - {"master_weight"}
    if state and not needed <= state.keys() and state.keys() & needed:
        raise ValueError(
            complaint(
                name,
                got=f"saved state without {sorted(needed - state.keys())}",
                wanted=f"all of {sorted(needed)}, or none",
                remedy="Load the state as it was saved.",
            )
        )
    for key, value in state.items():
        shape = () if key == "step" else tuple(parameter.shape)
        if key == "step" and is_number(value) and not isinstance(value, Tensor):
            continue  # as other tools save it
        if key not in known or not isinstance(value, Tensor) or tuple(value.shape) != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                complaint(
                    name,
                    got=f"saved {key} {got}",
                    wanted=f"{sorted(known)} of shape {tuple(parameter.shape)}"
                    + ("" if key in known else f" for a {parameter.dtype} parameter"),
                    remedy="Load the state of this very model.",
                )
            )
        _check_placement(name, key, parameter, value)
        # Of a DTensor this rank's part: the others look at theirs.
        if not bool(torch.isfinite(local_part(value)).all()):
            raise ValueError(
                complaint(
                    name,
                    got=f"a non-finite value in saved {key}",
                    wanted="finite state",
                    remedy="Go back to an earlier checkpoint.",
                )
            )


def _check_placement(name: str, key: str, parameter: Tensor, value: Tensor) -> None:
    """Refuse a DTensor that is not spread as the parameter is; a whole tensor is cut."""
    if not is_dtensor(value) or key == "step":
        return
    if is_dtensor(parameter) and (mesh_ranks(value), tuple(value.placements)) == (
        mesh_ranks(parameter),
        tuple(parameter.placements),
    ):
        return
    wanted = "a plain tensor"
    if is_dtensor(parameter):
        wanted = f"{tuple(parameter.placements)} on {parameter.device_mesh}"
    raise ValueError(
        complaint(
            name,
            got=f"saved {key} placed as {tuple(value.placements)} on {value.device_mesh}",
            wanted=f"{wanted}, as the parameter is",
            remedy="Call redistribute() or full_tensor() on it: whole tensors are cut here.",
        )
    )


def restored(
    parameter: Tensor,
    saved: Mapping[str, Any],
    old: State,
    group: Mapping[str, Any],
    *,
    store: Store,
) -> State:
    """Return the state in its own dtypes, in `old`'s tensors where they fit; but for the master.

    What is saved is of this rank's part alone.

    ``Optimizer.load_state_dict`` casts state to the parameter's dtype, which would round.
    """
    state: State = {key: value for key, value in old.items() if key in MASTER_KEYS}
    for key, dtype in state_dtypes(group, has_master=False).items():
        if key not in saved:
            continue
        target = old.get(key)
        if target is None or target.dtype != dtype:
            target = store.new(parameter, key, dtype, zero=False)
        state[key] = target.copy_(torch.as_tensor(saved[key]))
    return state


def planned_state_bytes(groups: Iterable[Mapping[str, Any]], *, store: Store) -> int:
    """Return the bytes of state once every parameter has had a gradient."""
    return sum(
        dtype.itemsize * (1 if key == "step" else store.part(tensor).numel())
        for group in groups
        for tensor in group["params"]
        for key, dtype in state_dtypes(group, has_master=store.has_master(tensor)).items()
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all distinct storages behind `tensors`."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
