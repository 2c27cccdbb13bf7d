"""What is said between the server of a warehouse and a reader on another node: binary frames over TCP.

A reader sends a `Request` and gets an `Answer`, each in MessagePack behind its length (4 bytes, big-endian); the bytes
of the block follow an answer that has any. A connection serves one request after the other.
"""

from __future__ import annotations

import struct

import msgspec

__all__ = ["HEAD", "LONGEST", "Answer", "Request", "frame"]

HEAD = struct.Struct(">I")
LONGEST = 4096
"""Bytes of a request or an answer."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A part of a block.

    Attributes
    ----------
    authorization:
        As the HTTP header of this name; empty where there is no token.
    key:
        Of the block.
    offset, length:
        Within it, in bytes.
    """

    authorization: str
    key: str
    offset: int
    length: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request.

    Attributes
    ----------
    status:
        200; 401 or 403 as `hpcrl.gate.Gate` says; 404: there are no such bytes; 400: it is no request.
    message:
        Why not.
    """

    status: int
    message: str = ""


def frame(message: Request | Answer) -> bytes:
    """A message behind its length."""
    data = msgspec.msgpack.encode(message)
    return HEAD.pack(len(data)) + data
