"""`muonloom inspect`: what Muon would do with a model, from its configuration alone.

The model is built on the meta device, so that size does not matter; no weight is read, no network
is used and no code of the model's directory is run.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muonloom.layout import Kind, Layout
from muonloom.meta_models import bad, build_on_meta, make_config, parse_file, read_fields

_FLOAT32_BYTES = 4
_FILE_WIDTH = 160
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The layout options that `Layout.from_model` takes, as given on a command line or in TOML.

    Attributes:
        state: of a TOML's `[optim]`, what decides the bytes of state.
    """

    heads_per_block: int | None = None
    mla_components: bool = False
    cut_output: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)
    state: StateSettings = field(default_factory=lambda: StateSettings())


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """Bytes an element of what an option may halve.

    Attributes:
        momentum_bytes: 4, or 2 in BF16.
        master_bytes: of a parameter that is not FP32: 4, or 2 where the master is split.
    """

    momentum_bytes: int = _FLOAT32_BYTES
    master_bytes: int = _FLOAT32_BYTES

    @classmethod
    def of(cls, optim: Mapping[str, Any]) -> StateSettings:
        """Read a checked `[optim]` table."""
        on_host = optim.get("placement") == "host"
        split = on_host and optim.get("host", {}).get("master_layout") == "split"
        half = _FLOAT32_BYTES // 2
        return cls(
            momentum_bytes=half if optim.get("momentum_dtype") == "bfloat16" else _FLOAT32_BYTES,
            master_bytes=half if split else _FLOAT32_BYTES,
        )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over a model; bytes are those of optimizer state, weights and gradients not included."""

    parameters: int
    muon_parameters: int
    adamw_parameters: int
    tensors: int
    matrices: int
    master_bytes: int
    momentum_bytes: int
    adamw_bytes: int
    split_masters: bool = False

    @property
    def state_bytes(self) -> int:
        """Masters where parameters are not FP32, Muon's momentum, both AdamW moments."""
        return self.master_bytes + self.momentum_bytes + self.adamw_bytes


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A model's layout, as data."""

    source: str
    model_type: str
    dtypes: tuple[str, ...]
    kinds: tuple[Kind, ...]
    shapes: tuple[tuple[tuple[int, int], int], ...]
    """Logical (out, in) shape of matrices and how many the model has, most first."""
    totals: Totals
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps` takes."""
        return {
            "source": self.source,
            "model_type": self.model_type,
            "dtypes": list(self.dtypes),
            "totals": {**asdict(self.totals), "state_bytes": self.totals.state_bytes},
            "shapes": [{"shape": list(shape), "matrices": count} for shape, count in self.shapes],
            "kinds": [_kind_json(kind) for kind in self.kinds],
            "notes": list(self.notes),
        }


def _kind_json(kind: Kind) -> dict[str, Any]:
    return {
        "kind": kind.kind,
        "count": kind.count,
        "shape": list(kind.shape),
        "parameters": kind.parameters,
        "algorithm": kind.algorithm,
        "matrices": [{"shape": list(shape), "count": count} for shape, count in kind.matrices],
        "reason": kind.reason,
        "guessed": kind.guessed,
    }


def inspect_model(target: Path | str | Any, *, settings: HeadSettings | None = None) -> Inspection:
    """Lay out a model without its weights.

    Args:
        target: a model directory, a config.json, a training TOML (its `[model]`, and its `[optim]`
            where `settings` leaves an option at its default), or a Transformers config object.
        settings: layout options.

    Raises:
        ConfigError: a path or a config that makes no model.
        ValueError: layout options that do not fit the model.
    """
    settings = settings or HeadSettings()
    source = type(target).__name__
    if isinstance(target, Path | str):
        source = str(target)
        fields, settings = _read(Path(target), settings)
        target = make_config(fields, source)
    model = build_on_meta(target, source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layout = Layout.from_model(
            model,
            heads_per_block=settings.heads_per_block,
            mla_components=settings.mla_components,
            cut_output=settings.cut_output,
            overrides=settings.overrides,
        )
    parameters = list(model.parameters())
    return Inspection(
        source=source,
        model_type=target.model_type,
        dtypes=tuple(dict.fromkeys(_dtype_name(parameter.dtype) for parameter in parameters)),
        kinds=layout.kinds(),
        shapes=_count_shapes(layout.kinds()),
        totals=_total(model, layout, settings.state),
        notes=tuple(str(warning.message) for warning in caught),
    )


def run_inspect(
    target: Path,
    *,
    heads_per_block: int | None = None,
    mla_components: bool = False,
    cut_output: bool = False,
    as_json: bool = False,
) -> None:
    """Print the inspection of `target` to standard output: a table, or JSON. Raises as above."""
    inspection = inspect_model(
        target,
        settings=HeadSettings(
            heads_per_block=heads_per_block, mla_components=mla_components, cut_output=cut_output
        ),
    )
    if as_json:
        print(json.dumps(inspection.to_json(), indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(render_table(inspection))
    console.print(render_totals(inspection), markup=False, highlight=False)


def render_table(inspection: Inspection) -> Any:
    """Return a rich table with one row for each kind of parameter."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{inspection.source} ({inspection.model_type})"), box=SIMPLE_HEAD)
    table.add_column("parameter", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("shape")
    table.add_column("algorithm")
    table.add_column("matrices in each")
    table.add_column("why")
    heading = ""
    for kind in inspection.kinds:
        stack, _, name = kind.kind.partition(".*.")
        if name and stack != heading:
            table.add_row(escape(f"{stack}.*"))
        heading = stack if name else ""
        table.add_row(
            escape(f"  {name}" if name else stack),
            str(kind.count),
            str(kind.shape),
            kind.algorithm,
            kind.matrices_text,
            escape(kind.reason + (" (guessed)" if kind.guessed else "")),
        )
    return table


def render_totals(inspection: Inspection) -> str:
    """Return the lines below the table: parameters, matrices, state bytes, notes."""
    totals = inspection.totals
    lines = [
        f"parameters    {totals.parameters:,} in {totals.tensors:,} tensors "
        f"({', '.join(inspection.dtypes)}): {totals.muon_parameters:,} by Muon, "
        f"{totals.adamw_parameters:,} by AdamW",
        f"matrices      {totals.matrices:,} of {len(inspection.shapes)} shapes",
        f"state bytes   {totals.state_bytes:,} ({_size(totals.state_bytes)}): "
        f"{'split' if totals.split_masters else 'FP32'} masters "
        f"{_size(totals.master_bytes)}, Muon momentum {_size(totals.momentum_bytes)}, AdamW moments "
        f"{_size(totals.adamw_bytes)}",
        *inspection.notes,
    ]
    return "\n".join(lines)


def _size(count: int) -> str:
    """Return bytes in the largest binary unit that leaves at least 1."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:,.2f} {_UNITS[power]}" if power else f"{count} B"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count_shapes(kinds: tuple[Kind, ...]) -> tuple[tuple[tuple[int, int], int], ...]:
    counts: Counter[tuple[int, int]] = Counter()
    for kind in kinds:
        for shape, number in kind.matrices:
            counts[shape] += number * kind.count
    return tuple(counts.most_common())


def _total(model: nn.Module, layout: Layout, state: StateSettings) -> Totals:
    muon = adamw = masters = tensors = 0
    for name, parameter in model.named_parameters():
        tensors += 1
        if layout[name].algorithm == "muon":
            muon += parameter.numel()
        else:
            adamw += parameter.numel()
        if parameter.dtype != torch.float32:
            masters += parameter.numel()
    return Totals(
        parameters=muon + adamw,
        muon_parameters=muon,
        adamw_parameters=adamw,
        tensors=tensors,
        matrices=sum(count for _, count in _count_shapes(layout.kinds())),
        master_bytes=state.master_bytes * masters,
        split_masters=state.master_bytes < _FLOAT32_BYTES,
        momentum_bytes=state.momentum_bytes * muon,
        adamw_bytes=2 * _FLOAT32_BYTES * adamw,
    )


def _read(path: Path, settings: HeadSettings) -> tuple[dict[str, Any], HeadSettings]:
    """Return the fields of a model's config, and the settings with a TOML's own filled in."""
    if path.is_dir() or path.suffix != ".toml":
        return read_fields(path), settings
    table = parse_file(path, tomllib.loads, "a training TOML")
    model, optim = table.get("model", {}), table.get("optim", {})
    config = model.get("config", model.get("directory"))
    if isinstance(config, str):
        config = read_fields(Path(config))
    if not isinstance(config, dict):
        raise bad(f"{path}: model", "no config and no directory", "one of the two")
    dtype = {"dtype": model["dtype"]} if "dtype" in model else {}
    return {**config, **dtype}, _merge(settings, optim)


def _merge(settings: HeadSettings, optim: Mapping[str, Any]) -> HeadSettings:
    state = StateSettings.of(optim)
    if optim.get("algorithm") == "adamw":
        return HeadSettings(overrides={"*": "adamw"}, state=state)
    return HeadSettings(
        state=state,
        heads_per_block=settings.heads_per_block or optim.get("heads_per_block"),
        mla_components=settings.mla_components or bool(optim.get("mla_components")),
        cut_output=settings.cut_output or bool(optim.get("cut_output")),
        overrides=settings.overrides or optim.get("overrides", {}),
    )
