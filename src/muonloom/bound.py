"""One parameter and its tensors, as a step sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from muonloom.config import AdamWOptions, MuonOptions
from muonloom.layout import BlockSpec, MatrixView
from muonloom.plan import Run
from muonloom.writers import Writer


@dataclass(kw_only=True)
class Bound:
    """One parameter and its tensors for one step.

    Attributes:
        name: canonical name.
        weight: the device weight, or where a writer has it, the parameter.
        gradient: shaped as `weight`, or None: the parameter stays as it is.
        state: the optimizer's state of this parameter.
        options: its group's numbers.
        spec: how it is cut; None for an AdamW parameter.
        parameter: what the caller has.
        writer: writes the device weight; None: it is `weight`.
    """

    name: str
    weight: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    options: MuonOptions | AdamWOptions
    spec: BlockSpec | None
    parameter: Tensor
    writer: Writer | None = None


def cut(views: Sequence[MatrixView], run: Run) -> Tensor:
    """Return the part of a parameter's views that a run covers."""
    tensor = views[run.view].tensor
    return tensor[run.first : run.first + run.count] if run.batched else tensor
