"""Where rows of experts are that an engine has kept: what an answer carries in place of them.

Rows are hundreds of bytes a token, and a router hands on text. So who asks an engine of ours for experts says that it
fetches them (`FIELD`, a field of the request that other engines do not know and leave unread), and finds in
``routed_experts`` of the answer, or of each part of one, a `RowsReference` in place of base64. The rows are an ``.npy``
file at the engine's `PATH`, raw bytes that are given once.
"""

from __future__ import annotations

import binascii
import hashlib

import msgspec

__all__ = ["FIELD", "PATH", "UNWANTED", "RowsReference", "decoded_base64", "digest_of"]

FIELD = "rows_by_reference"
"""Of a request: true."""
UNWANTED = "rows_unwanted"
"""Of a request beside `FIELD`: true where nobody will fetch them, so that the engine keeps none."""
PATH = "/hpcrl/rows"
"""``GET``, with the name as the parameter ``name``; 404 where there are none. ``late=1``: they may come just now."""
_PIECE = 1 << 18
"""Of base64: a multiple of four."""


class RowsReference(msgspec.Struct, frozen=True):
    """Rows that an engine has kept.

    Attributes
    ----------
    engine:
        ``host:port`` by which the request reached the engine.
    name:
        Of the rows, at that engine.
    num_bytes, digest:
        Of the file, the digest as `digest_of` makes it.
    """

    engine: str
    name: str
    num_bytes: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """What tells these bytes from others."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decoded_base64(text: bytes | memoryview) -> memoryview:
    """The bytes of rows that come as text (`binascii.Error` where it is no plain base64).

    A piece at a time: one call for tens of megabytes would keep the interpreter, and with it the event loop, from
    everything else for as long.
    """
    data, end = bytearray(3 * (len(text) // 4 + 1)), 0
    for start in range(0, len(text), _PIECE):
        piece = binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
        data[end : end + len(piece)] = piece
        end += len(piece)
    return memoryview(data)[:end].toreadonly()
