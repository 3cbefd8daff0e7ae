"""The layout of a model: one rule for every parameter, and a table to read it by."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from muonloom.errors import complaint
from muonloom.layout.build import Override, Parameter, build_rules
from muonloom.layout.describe import HeadOptions
from muonloom.layout.model import family_of, model_parameters, model_type_of, unwrapped
from muonloom.layout.rules import Algorithm, Rule, canonical_name

_MAX_GUESSES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Parameters that differ in the numbers of their names alone."""

    kind: str
    count: int
    shape: tuple[int, ...]
    algorithm: Algorithm
    matrices: tuple[tuple[tuple[int, int], int], ...]
    """(logical shape, how many) in one parameter."""
    reason: str
    guessed: bool

    @property
    def parameters(self) -> int:
        """Elements of all parameters of this kind."""
        return self.count * math.prod(self.shape)

    @property
    def matrices_text(self) -> str:
        """`64 x (448, 512)`, one term for each distinct shape; `-` for AdamW."""
        terms = (f"{number} x {shape}" for shape, number in self.matrices)
        return " + ".join(terms) or "-"


class Layout(Mapping[str, Rule]):
    """Immutable mapping from canonical parameter names to rules.

    Made by `from_model` or `from_shapes`. Wrapper prefixes in a name that is looked up are ignored;
    `print(layout)` shows one line for each kind of parameter.
    """

    __slots__ = ("_rules",)

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules: dict[str, Rule] = {}
        for rule in rules:
            if rule.name in self._rules:
                raise ValueError(
                    complaint(
                        rule.name,
                        got="two parameters of this name",
                        wanted="one",
                        remedy="Names are compared without the prefixes that wrappers add.",
                    )
                )
            self._rules[rule.name] = rule

    def __getitem__(self, name: str) -> Rule:
        return self._rules[canonical_name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __str__(self) -> str:
        return _table(self.kinds())

    def __repr__(self) -> str:
        muon = sum(rule.algorithm == "muon" for rule in self._rules.values())
        return f"<Layout: {muon} parameters by Muon, {len(self) - muon} by AdamW>"

    def kinds(self) -> tuple[Kind, ...]:
        """One entry for each distinct (kind, shape, treatment), in the order of first appearance."""
        groups: dict[tuple[object, ...], list[Rule]] = {}
        for rule in self._rules.values():
            key = (rule.kind, rule.shape, rule.algorithm, rule.spec, rule.reason)
            groups.setdefault(key, []).append(rule)
        return tuple(
            Kind(
                kind=rules[0].kind,
                count=len(rules),
                shape=rules[0].shape,
                algorithm=rules[0].algorithm,
                matrices=tuple(Counter(rules[0].matrices).items()),
                reason=rules[0].reason,
                guessed=rules[0].guessed,
            )
            for rules in groups.values()
        )

    @classmethod
    def from_shapes(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        config: Any = None,
        heads_per_block: int | None = None,
        mla_components: bool = False,
        cut_output: bool = False,
        overrides: Mapping[str, Override] | None = None,
    ) -> Layout:
        """Decide from names and logical (unsharded) shapes; a 3-D shape is stacked experts.

        `config`, an object with `model_type` and the sizes as attributes, selects a family's table;
        without it `heads_per_block` is a `ValueError`. The rest as in `from_model`.
        """
        parameters = [
            Parameter(name=canonical_name(name), shape=tuple(int(size) for size in shape))
            for name, shape in shapes.items()
        ]
        rules = build_rules(
            parameters,
            family=family_of(None, config),
            model_type=model_type_of(config),
            options=HeadOptions(
                heads_per_block=heads_per_block,
                mla_components=mla_components,
                cut_output=cut_output,
            ),
            overrides=overrides or {},
        )
        return cls(rules)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        heads_per_block: int | None = None,
        mla_components: bool = False,
        cut_output: bool = False,
        overrides: Mapping[str, Override] | None = None,
    ) -> Layout:
        """Decide for every parameter of `model` (any device, meta too).

        `heads_per_block=None` keeps every attention projection whole; fused projections are cut
        into their logical parts in any case. `k` cuts the query, key and value projections, or the
        MLA up-projections, into blocks of `min(k, heads)` heads, which must divide the heads.
        `mla_components` cuts nope from rope rows and nope from value rows, `cut_output` the output
        projection by head columns. `overrides` maps a glob on the full canonical name (first match
        wins) to a `BlockSpec`, `"adamw"` or `"muon"`.

        Raises `ValueError`, naming the module, where a request does not fit. Warns once, with a
        list, where no table describes a parameter and name and shape had to decide.
        """
        inner = unwrapped(model)
        config = getattr(inner, "config", None)
        rules = build_rules(
            model_parameters(model),
            family=family_of(inner, config),
            model_type=model_type_of(config) or type(inner).__name__,
            options=HeadOptions(
                heads_per_block=heads_per_block,
                mla_components=mla_components,
                cut_output=cut_output,
            ),
            overrides=overrides or {},
        )
        layout = cls(rules)
        layout._warn_of_guesses(model_type_of(config) or type(inner).__name__)
        return layout

    def _warn_of_guesses(self, model_type: object) -> None:
        guesses = [kind for kind in self.kinds() if kind.guessed]
        if not guesses:
            return
        shown = [
            f"{kind.kind} {kind.shape} -> {kind.algorithm} ({kind.reason})"
            for kind in guesses[:_MAX_GUESSES_SHOWN]
        ]
        if len(guesses) > len(shown):
            shown.append(f"and {len(guesses) - len(shown)} more kinds")
        warnings.warn(
            complaint(
                "layout",
                got=f"a model of type {model_type!r} with parameters that no family table "
                f"describes: {'; '.join(shown)}",
                wanted="a table or overrides for these",
                remedy="Check them, and settle them by overrides= or register_family().",
            ),
            stacklevel=3,
        )


def _table(kinds: Sequence[Kind]) -> str:
    header = ("parameter", "count", "shape", "algorithm", "matrices in each", "why")
    rows = [
        (
            kind.kind,
            str(kind.count),
            str(kind.shape),
            kind.algorithm,
            kind.matrices_text,
            kind.reason + (" (guessed)" if kind.guessed else ""),
        )
        for kind in kinds
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, tuple("-" * width for width in widths), *rows)
    )
    return "\n".join(lines)
