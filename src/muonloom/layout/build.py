"""From parameters, a family table and the caller's options to one rule for every parameter."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from muonloom.errors import complaint
from muonloom.layout.blocks import BlockSpec
from muonloom.layout.describe import Description, Dims, HeadOptions
from muonloom.layout.families import FamilyRule, family_names
from muonloom.layout.guess import Hints, guess, whole_by_shape
from muonloom.layout.rules import Rule, canonical_name

Override = BlockSpec | str

_ATTENTION_LIKE = re.compile(
    r"(^|\.)(q|k|v|qkv|query|key|value|query_key_value|c_attn|Wqkv|w[qkv](_b)?|[qkv]v?_(a_|b_)?proj"
    r"|kv_b_proj|q_b_proj|qkv_proj|to_[qkv]|in_proj)(_weight|\.weight)?$"
)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as the layout sees it: canonical name, logical shape, what its module tells."""

    name: str
    shape: tuple[int, ...]
    hints: Hints = field(default_factory=Hints)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A compiled table with the config that its sizes are read from."""

    model_type: str
    lines: tuple[FamilyRule, ...]
    dims: Dims


def build_rules(
    parameters: Sequence[Parameter],
    *,
    family: Family | None,
    model_type: object,
    options: HeadOptions,
    overrides: Mapping[str, Override],
) -> list[Rule]:
    """Decide for every parameter: override, vector, family table, then name and shape.

    Raises `ValueError`, naming the parameter, where a request cannot be met.
    """
    chosen = _Overrides(overrides, parameters)
    found = _Matches(family, [p for p in parameters if chosen.glob(p.name) is None])
    _check_options(found, parameters, options=options, model_type=model_type)
    rules = [
        chosen.rule(p, found, options) if chosen.glob(p.name) else found.rule(p, options)
        for p in parameters
    ]
    if options.heads_per_block is not None:
        _check_none_missed(rules, family)
    return rules


class _Overrides:
    """The caller's globs, first match first."""

    def __init__(self, overrides: Mapping[str, Override], parameters: Sequence[Parameter]) -> None:
        self._lines = {canonical_name(glob): what for glob, what in overrides.items()}
        for glob, what in self._lines.items():
            if not isinstance(what, BlockSpec) and what not in ("adamw", "muon"):
                raise TypeError(
                    complaint(
                        f"overrides[{glob!r}]",
                        got=repr(what),
                        wanted="a BlockSpec, 'adamw' or 'muon'",
                        remedy="Correct the override.",
                    )
                )
            if not any(_matcher(glob)(parameter.name) for parameter in parameters):
                raise ValueError(
                    complaint(
                        f"overrides[{glob!r}]",
                        got="no parameter of this name",
                        wanted="a glob that matches a full parameter name",
                        remedy="print(layout) shows the names; write '*' for what precedes.",
                    )
                )

    def glob(self, name: str) -> str | None:
        return next((glob for glob in self._lines if _matcher(glob)(name)), None)

    def rule(self, parameter: Parameter, found: _Matches, options: HeadOptions) -> Rule:
        glob = self.glob(parameter.name)
        assert glob is not None
        what = self._lines[glob]
        spec: BlockSpec | None = None
        if what != "adamw":
            spec = what if isinstance(what, BlockSpec) else found.muon_spec(parameter, options)
            if len(parameter.shape) < 2:
                raise ValueError(
                    complaint(
                        parameter.name,
                        got=f"Muon by override {glob!r} for shape {parameter.shape}",
                        wanted="at least two dimensions",
                        remedy="Scalars and vectors are updated by AdamW.",
                    )
                )
            spec.matrices(parameter.shape, name=parameter.name)
        return Rule(
            name=parameter.name,
            shape=parameter.shape,
            algorithm="adamw" if spec is None else "muon",
            spec=spec,
            reason=f"override {glob!r}",
        )


class _Matches:
    """Which line of the family's table each parameter matches."""

    def __init__(self, family: Family | None, parameters: Sequence[Parameter]) -> None:
        self.family = family
        self._lines = {p.name: self._find(p) for p in parameters}
        self._shapes = {p.name: p.shape for p in parameters}

    def _find(self, parameter: Parameter) -> FamilyRule | None:
        if self.family is None or len(parameter.shape) < 2 or parameter.hints.integer:
            return None
        lines = self.family.lines
        return next((line for line in lines if _matcher(line.glob)(parameter.name)), None)

    def described(self) -> Iterator[tuple[str, tuple[int, ...], Description]]:
        """Names, shapes and descriptions of all parameters that the table gives to Muon."""
        for name, line in self._lines.items():
            if line is not None and line.description is not None:
                yield name, self._shapes[name], line.description

    def rule(self, parameter: Parameter, options: HeadOptions) -> Rule:
        line = self._lines[parameter.name]
        if line is None or self.family is None:
            return guess(parameter.name, parameter.shape, parameter.hints)
        spec, texts = None, [line.reason]
        if line.description is not None:
            spec = self._spec(parameter, line.description, options)
            texts.append(line.description.text(self.family.dims, options))
        return Rule(
            name=parameter.name,
            shape=parameter.shape,
            algorithm="adamw" if spec is None else "muon",
            spec=spec,
            reason="; ".join(text for text in texts if text) or f"family {self.family.model_type}",
        )

    def muon_spec(self, parameter: Parameter, options: HeadOptions) -> BlockSpec:
        """The table's spec where it has one, else by shape: what the override "muon" means."""
        line = self._find(parameter)
        if line is not None and line.description is not None:
            return self._spec(parameter, line.description, options)
        rule = guess(parameter.name, parameter.shape, parameter.hints)
        return rule.spec or whole_by_shape(parameter.shape)

    def _spec(
        self, parameter: Parameter, description: Description, options: HeadOptions
    ) -> BlockSpec:
        assert self.family is not None
        try:
            return _fit(description, self.family.dims, options, parameter.name, parameter.shape)
        except ValueError as error:
            whole = replace(options, heads_per_block=None, cut_output=False)
            if options.heads_per_block is not None and self._fits(
                description, whole, parameter.shape
            ):
                raise self._indivisible(parameter, description, options) from None
            leads = str(error).startswith(parameter.name)
            raise ValueError(str(error) if leads else f"{parameter.name}: {error}") from None

    def _fits(self, description: Description, options: HeadOptions, shape: tuple[int, ...]) -> bool:
        assert self.family is not None
        try:
            _fit(description, self.family.dims, options, "", shape)
        except ValueError:
            return False
        return True

    def _indivisible(
        self, parameter: Parameter, description: Description, options: HeadOptions
    ) -> ValueError:
        assert self.family is not None
        dims = self.family.dims
        cut = {(d, s): d.heads_of(dims) for _, s, d in self.described()}
        cut = {key: heads for key, heads in cut.items() if heads}
        most = max(max(heads) for heads in cut.values())
        works = [
            k
            for k in range(1, most + 1)
            if all(self._fits(d, replace(options, heads_per_block=k), s) for d, s in cut)
        ]
        heads = " and ".join(
            map(str, description.heads_of(dims) or description.output_heads_of(dims))
        )
        return ValueError(
            complaint(
                parameter.name,
                got=f"heads_per_block={options.heads_per_block} for {heads} heads",
                wanted="a number that divides the heads of every projection",
                remedy=f"For this model these work: {', '.join(map(str, works))}.",
            )
        )


def _fit(
    description: Description, dims: Dims, options: HeadOptions, name: str, shape: tuple[int, ...]
) -> BlockSpec:
    spec = description.spec(dims, options)
    spec.matrices(shape, name=name)
    return spec


@functools.lru_cache(maxsize=1024)
def _matcher(glob: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(fnmatch.translate(glob)).match


def _check_options(
    found: _Matches,
    parameters: Sequence[Parameter],
    *,
    options: HeadOptions,
    model_type: object,
) -> None:
    heads = options.heads_per_block
    if heads is not None and (not isinstance(heads, int) or isinstance(heads, bool) or heads < 1):
        raise ValueError(
            complaint(
                "heads_per_block",
                got=repr(heads),
                wanted="a whole number >= 1, or None",
                remedy="None keeps every attention projection whole.",
            )
        )
    if options.cut_output and heads is None:
        raise ValueError(
            complaint(
                "cut_output",
                got="True with heads_per_block=None",
                wanted="heads_per_block as well",
                remedy="It says how many heads share a block of columns.",
            )
        )
    asked = {
        "heads_per_block": heads is not None,
        "mla_components": options.mla_components,
        "cut_output": options.cut_output,
    }
    for option in (name for name, wanted in asked.items() if wanted):
        _check_matched(option, found, parameters, model_type)


def _check_matched(
    option: str, found: _Matches, parameters: Sequence[Parameter], model_type: object
) -> None:
    family = found.family
    if family is not None:
        uses: Mapping[str, Callable[[Description], object]] = {
            "heads_per_block": lambda d: d.heads_of(family.dims),
            "mla_components": lambda d: d.has_components,
            "cut_output": lambda d: d.output_heads_of(family.dims),
        }
        if any(uses[option](description) for _, _, description in found.described()):
            return
        raise ValueError(
            complaint(
                option,
                got=f"a model of type {family.model_type!r} with no module that it applies to",
                wanted="a module that the family's table describes by heads",
                remedy=f"Parameters are named like {_example(parameters)}; leave {option} out, "
                "or describe them with register_family().",
            )
        )
    raise ValueError(
        complaint(
            option,
            got=f"a model of unknown type {model_type!r}, with modules like {_example(parameters)}",
            wanted=f"one of {', '.join(family_names())}",
            remedy="Describe the model with register_family(), or cut by overrides alone.",
        )
    )


def _example(parameters: Sequence[Parameter]) -> str:
    names = [parameter.name for parameter in parameters if len(parameter.shape) >= 2]
    attention = [name for name in names if _ATTENTION_LIKE.search(name)]
    return repr((attention or names or ["(no matrix)"])[0])


def _check_none_missed(rules: Sequence[Rule], family: Family | None) -> None:
    for rule in rules:
        if rule.guessed and rule.algorithm == "muon" and _ATTENTION_LIKE.search(rule.name):
            assert family is not None
            raise ValueError(
                complaint(
                    rule.name,
                    got="heads_per_block for a module that the table of family "
                    f"{family.model_type!r} does not describe",
                    wanted="a decision how to cut it",
                    remedy=f"Say it by overrides, for instance {{{rule.kind!r}: 'muon'}} for one "
                    "whole matrix.",
                )
            )
