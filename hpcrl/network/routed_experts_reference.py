"""References to rows of routed experts that an engine has kept; an answer carries one instead of the rows.

Rows are hundreds of bytes per token, and a router copies text. So a client that asks an hpcrl engine for experts
declares that it fetches them (`FIELD`, a field of the request that other engines ignore), and finds in
``routed_experts`` of the answer, or of each part of one, a `RowsReference` in place of base64. The rows are an ``.npy``
file at the engine's `PATH`, raw bytes that are given once.
"""

from __future__ import annotations

import binascii
import hashlib

import msgspec

FIELD = "rows_by_reference"
"""Field of a request: true if the client fetches rows."""
UNWANTED = "rows_unwanted"
"""Field of a request in addition to `FIELD`: true if the rows will not be fetched, so that none are kept."""
PATH = "/hpcrl/rows"
"""``GET`` with the name as the parameter ``name``; 404 if there are none. ``late=1``: they may still arrive."""
_PIECE = 1 << 18
"""Characters of base64 that are decoded at a time: a multiple of four."""


class RowsReference(msgspec.Struct, frozen=True):
    """Rows that an engine has kept.

    Attributes
    ----------
    engine:
        ``host:port`` by which the request reached the engine.
    name:
        Name of the rows at that engine.
    num_bytes, digest:
        Size and digest (`digest_of`) of the file.
    """

    engine: str
    name: str
    num_bytes: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """Return a 128-bit digest of ``data`` in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decoded_base64(text: bytes | memoryview) -> memoryview:
    """Decode the bytes of routed experts that arrive as base64 (`binascii.Error` if it is not plain base64).

    It decodes in pieces: one call for tens of megabytes would hold the interpreter, and so block the event loop.
    """
    data, end = bytearray(3 * (len(text) // 4 + 1)), 0
    for start in range(0, len(text), _PIECE):
        piece = binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
        data[end : end + len(piece)] = piece
        end += len(piece)
    return memoryview(data)[:end].toreadonly()
