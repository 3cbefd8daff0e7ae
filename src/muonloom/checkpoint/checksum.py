"""Checksums of blocks of bytes, at the speed of memory.

A block is read as 64-bit little-endian words, padded with zeros to whole pages of 4 KiB. Its checksum is
the 128-bit BLAKE2b digest of the sums of all pages modulo 2⁶⁴, in order: a change that is not seen has to
leave each of them as it was. What is no longer than 32 KiB is digested itself. Digests of all bytes, and
zlib's CRC-32, are several times slower. It guards against accidents, not against forgery.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD_BYTES = 8
_PAGE_BYTES = 4096
_DIGESTED_BYTES = 8 * _PAGE_BYTES


def checksum(data: Tensor) -> str:
    """Return the checksum of 1-D uint8 `data` on the CPU, as 32 hexadecimal digits."""
    if data.numel() <= _DIGESTED_BYTES:
        room = bytearray(data.numel())
        if room:
            torch.frombuffer(room, dtype=torch.uint8).copy_(data)
        return _digest(room)
    whole, rest = divmod(data.numel(), _PAGE_BYTES)
    room = bytearray(_WORD_BYTES * (whole + (rest > 0)))
    sums = torch.frombuffer(room, dtype=torch.int64)
    body = data[: whole * _PAGE_BYTES]
    if body.data_ptr() % _WORD_BYTES:
        body = body.clone()  # words must be aligned
    torch.sum(body.view(torch.int64).view(whole, -1), 1, out=sums[:whole])
    if rest:
        last = torch.zeros(_PAGE_BYTES, dtype=torch.uint8, device="cpu")
        last[:rest] = data[whole * _PAGE_BYTES :]
        sums[whole] = last.view(torch.int64).sum()
    return _digest(room)


def _digest(data: bytearray) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
