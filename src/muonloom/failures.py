"""What a step left behind that nobody may go on from, as errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from muonloom.errors import complaint


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return names[0] + more


def refuse_failed_iterations(names: Sequence[str]) -> None:
    """Raise a FloatingPointError if there are parameters whose iteration was not finite."""
    if names:
        raise FloatingPointError(
            complaint(
                _first(names),
                got="a non-finite result of the Newton–Schulz iteration",
                wanted="finite numbers from finite gradients and momentum",
                remedy="Its weight, master and momentum were kept; other matrices were updated.",
            )
        )


def refuse_overflow(weights: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise a FloatingPointError if a weight holds an infinity; a large sum of squares is no fault."""
    for name, weight in ((name, tensor) for name, found in weights.items() for tensor in found):
        # FP8 has no infinity, and its writers saturate.
        if weight.element_size() == torch.bfloat16.itemsize and bool(torch.isinf(weight).any()):
            raise FloatingPointError(
                complaint(
                    name,
                    got=f"a master that {weight.dtype} rounds to infinity",
                    wanted="weights that stay finite",
                    remedy="Its master is whole: lower it by apply_to_masters(), and the rate.",
                )
            )


def refuse_torn(names: Sequence[str]) -> None:
    """Raise a RuntimeError if a failed step, or load, left weights or state half written."""
    if names:
        raise RuntimeError(
            complaint(
                _first(names),
                got="a weight that a failed step or load left half written",
                wanted="whole weights and state",
                remedy="Load the model and this optimizer from a checkpoint.",
            )
        )


def refuse_released(names: Iterable[str], what: str) -> None:
    """Raise a RuntimeError if there are parameters whose device memory was given back."""
    found = list(names)
    if found:
        raise RuntimeError(
            complaint(
                _first(found),
                got=f"{what} while it is released",
                wanted="its weight and the optimizer's memory on the device",
                remedy="Call resume() first.",
            )
        )


def storage_given_up(name: str, *, wanted: str) -> ValueError:
    """Return the error for a tensor without storage that nothing in the optimizer stands for."""
    return ValueError(
        complaint(
            name,
            got="storage that was given up, and neither a master nor a copy in the optimizer",
            wanted=wanted,
            remedy="Bring it back first.",
        )
    )


def refuse_unusable(name: str, weight: Tensor, shape: Sequence[int]) -> None:
    """Raise a ValueError if a master cannot be made from a weight: it is misshapen or not finite."""
    misshapen = tuple(weight.shape) != tuple(shape)
    if misshapen or not bool(torch.isfinite(weight).all()):
        raise ValueError(
            complaint(
                name,
                got=f"a weight shaped {tuple(weight.shape)}"
                if misshapen
                else "a weight with a NaN or an infinity",
                wanted=f"finite numbers, shaped {tuple(shape)}, for its master",
                remedy="Load the weights again.",
            )
        )
