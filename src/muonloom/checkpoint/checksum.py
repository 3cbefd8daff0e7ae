"""Checksums of blocks of bytes, at the speed of memory.

A block is read as 64-bit little-endian words in rows of 8191, padded with zeros to whole words. Its
checksum is the 128-bit BLAKE2b digest of the sums of all columns modulo 2⁶⁴: a change that is not seen has
to leave each of them as it was. 8191 is prime, so that pages that changed places are seen: within 32 MiB no
distance of whole pages is one of whole rows. Digests of all bytes, and zlib's CRC-32, are several times
slower. It guards against accidents, not against forgery.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_COLUMNS = 8191
_WORD_BYTES = 8
_ROW_BYTES = _WORD_BYTES * _COLUMNS


def checksum(data: Tensor) -> str:
    """Return the checksum of 1-D uint8 `data` on the CPU, as 32 hexadecimal digits."""
    num_words = -(-data.numel() // _WORD_BYTES)
    sums = bytearray(_WORD_BYTES * min(num_words, _COLUMNS))
    whole = data.numel() // _ROW_BYTES * _ROW_BYTES
    if whole:
        body = data[:whole]
        if body.data_ptr() % _WORD_BYTES:
            body = body.clone()  # words must be aligned
        columns = torch.frombuffer(sums, dtype=torch.int64)
        torch.sum(body.view(torch.int64).view(-1, _COLUMNS), 0, out=columns)
    if whole < data.numel():
        columns = torch.frombuffer(sums, dtype=torch.int64)
        last = torch.zeros(columns.numel() * _WORD_BYTES, dtype=torch.uint8, device="cpu")
        last[: data.numel() - whole] = data[whole:]
        columns += last.view(torch.int64)
    return hashlib.blake2b(sums, digest_size=16).hexdigest()
