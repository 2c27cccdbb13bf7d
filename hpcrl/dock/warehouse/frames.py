"""Protocol between the server of a warehouse and a reader on another node: binary frames over TCP.

A reader sends a `Request` and gets an `Answer`, each in MessagePack behind its length (4 bytes, big-endian); the bytes
of the block follow an answer that has any. A connection serves one request after the other.
"""

from __future__ import annotations

import struct

import msgspec

HEAD = struct.Struct(">I")
LONGEST = 4096
"""Bytes of a request or an answer."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A part of a block.

    Attributes
    ----------
    authorization:
        Value of the HTTP header of this name; empty without a token.
    key:
        Name of the block.
    offset, length:
        Within it, in bytes.
    """

    authorization: str
    key: str
    offset: int
    length: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Result of a request.

    Attributes
    ----------
    status:
        200; 401 or 403 as in `hpcrl.network.auth.Gate`; 404: the bytes do not exist; 400: the request is invalid.
    message:
        Reason of a failure.
    """

    status: int
    message: str = ""


def frame(message: Request | Answer) -> bytes:
    """Return the encoded message, preceded by its length."""
    data = msgspec.msgpack.encode(message)
    return HEAD.pack(len(data)) + data
