"""What is decided for each parameter: its algorithm, how it is cut, and what this rank does of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muonloom.dtensors import is_dtensor, local_part
from muonloom.errors import complaint
from muonloom.layout import BlockSpec, Layout, Rule
from muonloom.ownership import Share
from muonloom.sharding import Sharding

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where one parameter goes, and how it is cut; `spec` is None for AdamW.

    `share` is what this rank does of it; None: everything. `is_piece` tells that the tensor is a plain
    piece of the parameter, whose `shape` is that of the whole.
    """

    name: str
    kind: str
    algorithm: str
    shape: tuple[int, ...]
    spec: BlockSpec | None
    share: Share | None = None
    is_piece: bool = False

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of the tensor that the optimizer was given."""
        if not self.is_piece:
            return self.shape
        assert self.share is not None
        holding = self.share.holding
        return holding.weights[holding.position].sizes

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return self.shape if self.share is None else self.share.shape

    @property
    def part_spec(self) -> BlockSpec | None:
        """How this rank's part is cut."""
        return self.spec if self.share is None else self.share.spec


def assign(
    members: Sequence[tuple[str | None, Tensor]],
    *,
    layout: Layout | None,
    algorithm: str | None,
    first: int,
    pieces: Mapping[str, tuple[int, ...]],
) -> list[Assignment]:
    """Decide for each parameter of one group which algorithm updates it.

    Args:
        members: canonical names and tensors.
        layout: the model's layout, or None: named parameters go by their shapes.
        algorithm: what the group asks for, or None.
        first: the position of the first one, to name unnamed parameters in errors.
        pieces: by name, of tensors that are pieces of a parameter: the shape of the whole.

    Raises:
        ValueError: a parameter is unusable, unnamed where a name is needed, missing in the layout, of
            another shape than there, or asked to be what it cannot be.
    """
    for position, (name, tensor) in enumerate(members, start=first):
        _check_tensor(name or f"params[{position}]", tensor)
    if any(name is None for name, _ in members):
        return [
            _assign_unnamed(f"params[{position}]", tensor, layout=layout, algorithm=algorithm)
            for position, (_, tensor) in enumerate(members, start=first)
        ]
    explicit = layout is not None
    if layout is None:
        named = [(str(name), tensor) for name, tensor in members]
        shapes = {name: pieces.get(name) or _known_shape(name, t) for name, t in named}
        layout = Layout.from_shapes(shapes)
    return [
        _assign_named(
            str(name),
            tensor,
            layout=layout,
            explicit=explicit,
            algorithm=algorithm,
            whole=pieces.get(str(name)),
        )
        for name, tensor in members
    ]


def whole_shapes(
    members: Iterable[tuple[str | None, Tensor]], sharding: Mapping[str, Sharding]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters that other ranks hold pieces of, too.

    Raises:
        ValueError: a tensor cannot be such a piece.
    """
    found = {}
    for name, tensor in members:
        own = None if name is None else sharding.get(name)
        if name is None or own is None or own.process_group is None:
            continue
        if is_dtensor(tensor) or not 0 <= own.dim < tensor.ndim:
            raise ValueError(
                complaint(
                    name,
                    got=f"sharding along dimension {own.dim} of a {type(tensor).__name__} of shape "
                    f"{tuple(tensor.shape)}",
                    wanted="a plain tensor, and a dimension that it has",
                    remedy="Correct sharding=; DTensors say themselves how they lie.",
                )
            )
        found[name] = own.whole_shape(tensor.shape, dist.get_world_size(own.process_group))
    return found


def refuse_unknown(sharding: Mapping[str, Sharding], known: Iterable[Assignment]) -> None:
    """Raise a ValueError for a name in `sharding` that no parameter has."""
    unknown = sharding.keys() - {assignment.name for assignment in known}
    if unknown:
        raise ValueError(
            complaint(
                "sharding",
                got=f"{min(unknown)!r}, which no parameter is called",
                wanted="names of parameters, without the prefixes of wrappers",
                remedy="Pass named parameters, and their names here.",
            )
        )


def _known_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    if tuple(tensor.shape) != (0,):
        return tuple(tensor.shape)
    raise ValueError(
        complaint(
            name,
            got="shape (0,), which may stand for a sharded or released parameter",
            wanted="its logical shape",
            remedy="Pass a layout= made from the whole model.",
        )
    )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            complaint(
                name,
                got=f"dtype {tensor.dtype}",
                wanted="float32, bfloat16 or float16",
                remedy="Masters are FP32: convert the parameter, or leave it to another optimizer.",
            )
        )
    if local_part(tensor).layout is not torch.strided:
        raise ValueError(
            complaint(
                name, got=f"{tensor.layout}", wanted="a dense tensor", remedy="Use to_dense()."
            )
        )
    held = local_part(tensor)
    if any(size > 1 and held.stride(dim) == 0 for dim, size in enumerate(held.shape)):
        raise ValueError(
            complaint(
                name,
                got=f"strides {tensor.stride()}, where elements share memory",
                wanted="an element of its own for each index",
                remedy="Use .contiguous() or .clone() before making it a parameter.",
            )
        )


def _assign_unnamed(
    name: str, tensor: Tensor, *, layout: Layout | None, algorithm: str | None
) -> Assignment:
    shape = tuple(tensor.shape)
    if algorithm == "adamw":
        return Assignment(name=name, kind="unnamed", algorithm="adamw", shape=shape, spec=None)
    if layout is None and tensor.ndim == 2:
        spec = BlockSpec.whole()
        return Assignment(name=name, kind="unnamed", algorithm="muon", shape=shape, spec=spec)
    raise ValueError(
        complaint(
            name,
            got=f"an unnamed parameter of shape {shape}"
            + (" beside a layout, which goes by names" if layout is not None else ""),
            wanted="a name, because only matrices can do without",
            remedy="Pass model.named_parameters() instead of model.parameters().",
        )
    )


def _assign_named(
    name: str,
    tensor: Tensor,
    *,
    layout: Layout,
    explicit: bool,
    algorithm: str | None,
    whole: tuple[int, ...] | None,
) -> Assignment:
    rule = rule_for(name, whole or tuple(tensor.shape), layout)
    chosen = algorithm or rule.algorithm
    if chosen != rule.algorithm:
        if explicit:
            raise ValueError(
                complaint(
                    name,
                    got=f"algorithm={algorithm!r} in its group",
                    wanted=f"{rule.algorithm!r}, as the layout says ({rule.reason})",
                    remedy="Move the parameter, or change the layout by overrides=.",
                )
            )
        if chosen == "muon" and tensor.ndim < 2:
            raise ValueError(
                complaint(
                    name,
                    got=f"algorithm='muon' for shape {tuple(tensor.shape)}",
                    wanted="a parameter with at least two dimensions",
                    remedy="Move it to a group with algorithm='adamw'.",
                )
            )
    spec = None
    if chosen == "muon":
        spec = rule.spec or _spec_by_rank(tensor)
    return Assignment(
        name=name,
        kind=rule.kind,
        algorithm=chosen,
        shape=rule.shape,
        spec=spec,
        is_piece=whole is not None,
    )


def _spec_by_rank(tensor: Tensor) -> BlockSpec:
    if tensor.ndim == 2:
        return BlockSpec.whole()
    return BlockSpec.stacked(BlockSpec.whole()) if tensor.ndim == 3 else BlockSpec.conv()


def rule_for(name: str, shape: tuple[int, ...], layout: Layout) -> Rule:
    """Return what a layout says of a parameter of this (whole) shape; see `assign` for what is raised."""
    if name not in layout:
        if len(shape) >= 2:
            raise ValueError(
                complaint(
                    name,
                    got=f"a parameter of shape {shape} that the layout lacks",
                    wanted="the names of the model that the layout was made from",
                    remedy="Make the layout from this model, or name it in overrides=.",
                )
            )
        return next(iter(Layout.from_shapes({name: shape}).values()))
    rule = layout[name]
    if rule.shape != shape:
        raise ValueError(
            complaint(
                name,
                got=f"shape {shape}",
                wanted=f"{rule.shape}, as in the layout",
                remedy="Make the layout from this model; a sharded or released parameter is refused.",
            )
        )
    return rule
