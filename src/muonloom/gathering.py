"""Whole tensors on the host of every rank, put together from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonloom.collectives import Ranks
from muonloom.sharding import Box, row_box, whole_box


def gathered(
    read: Callable[[slice | None], Tensor],
    boxes: Sequence[Box],
    *,
    shape: Sequence[int],
    rows: slice | None,
    dtype: torch.dtype,
    ranks: Ranks,
    device: torch.device,
) -> Tensor:
    """Return rows of dimension 0 (None: all) of a tensor that is spread over ranks; all of them call it.

    Beside the result it takes the bytes of what this rank holds of it, once more all of it where parts are
    no rows, and on an accelerator all of it there.

    Args:
        read: returns these rows (None: all) of what this rank holds, counted from where that begins.
        boxes: by position, what each rank holds; those of two ranks are equal or apart.
        shape: of the whole tensor.
        rows: the same on all ranks.
        dtype: of the result.
        ranks: that hold it.
        device: where the tensor is, and messages may be.

    Raises:
        LostRanksError: a rank does not take part.
    """
    outer = _extent(shape, rows)
    pieces = _pieces(boxes, outer)
    whole = torch.empty(outer.sizes, dtype=dtype)
    near = ranks.served(device)
    nothing = torch.empty(0, dtype=torch.uint8, device=near)
    parts = [nothing if p is None else _memory_of(whole[p.slices], near) for p in pieces]
    own = parts[ranks.position]
    if own.numel():
        inside = outer.within(boxes[ranks.position])
        assert inside is not None
        values = read(slice(*inside.rows) if inside.sizes else None)
        own.view(dtype).view(values.shape).copy_(values)
    ranks.start_gather(parts, own).wait()
    for piece, part in zip(pieces, parts, strict=True):
        place = whole if piece is None else whole[piece.slices]
        if piece is not None and part.data_ptr() != place.data_ptr():
            place.copy_(part.view(dtype).view(place.shape))
    return whole


def _extent(shape: Sequence[int], rows: slice | None) -> Box:
    if rows is None or not shape:
        return whole_box(shape)
    start, stop, _ = rows.indices(shape[0])
    return row_box(shape, (start, max(start, stop)))


def _pieces(boxes: Sequence[Box], outer: Box) -> list[Box | None]:
    """Return by position what a rank gives of `outer`: of those that hold the same, the first does."""
    pieces: list[Box | None] = []
    seen: set[Box | None] = set()
    for box in boxes:
        piece = box.within(outer)
        pieces.append(None if piece in seen else piece)
        seen.add(piece)
    return pieces


def _memory_of(place: Tensor, near: torch.device) -> Tensor:
    """Return the bytes of `place` itself where a message may be there, else as many."""
    if near == place.device and place.is_contiguous():
        return place.view(-1).view(torch.uint8)
    return torch.empty(place.nbytes, dtype=torch.uint8, device=near)
