"""One rule a parameter: which algorithm updates it, how it is cut, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from muonloom.layout.blocks import BlockSpec

Algorithm = Literal["muon", "adamw"]

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_GROUPED = re.compile(r"^(weight|bias)\d+$")


def canonical_name(name: str) -> str:
    """Strip the prefixes that DDP, FSDP, `torch.compile` and checkpoint wrappers add to names."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in WRAPPERS) or name


def kind_of(name: str) -> str:
    """Replace the numbers in a name: `layers.3.mlp.weight` is of the kind `layers.*.mlp.weight`.

    So are those of grouped experts, which are a parameter each: `weight12` is of the kind `weight*`.
    """
    parts = (_GROUPED.sub(r"\1*", part) for part in name.split("."))
    return ".".join("*" if part.isdigit() else part for part in parts)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is done with one parameter.

    `name` is canonical and `shape` logical (unsharded). `spec` is None exactly where `algorithm`
    is "adamw". `guessed` tells that neither a family table nor the caller decided.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    spec: BlockSpec | None
    reason: str
    guessed: bool = False

    @property
    def kind(self) -> str:
        """The name with its numbers replaced by `*`."""
        return kind_of(self.name)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Logical (out, in) shape of every matrix; empty for AdamW."""
        return () if self.spec is None else self.spec.matrices(self.shape, name=self.name)
