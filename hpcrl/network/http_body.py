"""Reads bodies of HTTP answers with a maximum size, before memory is used for them.

aiohttp reads a body without a limit, also one that a few bytes of gzip expand to. `http.client` trusts a peer's
lengths: it allocates the size of a ``Content-Length``, fails with `ValueError`, `OverflowError` or `MemoryError` on
invalid sizes of chunks, and accepts a truncated body if it is read in pieces.
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

_PIECE = 1 << 20


def read_body(answer: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Return the whole body of an answer.

    Memory is allocated for received bytes only, whatever length the answer declares.

    Raises
    ------
    http.client.HTTPException
        It is longer than ``max_bytes``, was cut, or its lengths cannot be read.
    OSError
        The connection broke, or was silent for too long.
    """
    said, body = answer.length, bytearray()
    if said is not None and said > max_bytes:
        raise http.client.HTTPException(f"an answer of {said} bytes is longer than {max_bytes}")
    try:
        while piece := answer.read(_PIECE):
            body += piece
            if len(body) > max_bytes:
                raise http.client.HTTPException(f"an answer is longer than {max_bytes} bytes")
    except (ValueError, OverflowError, MemoryError) as error:
        raise http.client.HTTPException(f"the length of an answer cannot be read: {error}") from error
    if said is not None and len(body) < said:
        raise http.client.IncompleteRead(b"", said - len(body))
    return bytes(body)


async def receive_body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the whole body of an answer that aiohttp receives; ValueError where it is longer than ``max_bytes``."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise ValueError(f"an answer is longer than {max_bytes} bytes")
    return bytes(body)
