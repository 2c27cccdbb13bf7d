"""Binary answers and requests between hpcrl's own engine and orchestrator, in place of vLLM's JSON.

A client that reads frames declares it (``Accept: application/vnd.hpcrl.answer``); a server that does not know them
answers in JSON. A frame is the length of its content as eight bytes, little-endian, and a msgpack map with the fields
of vLLM's answer, or of an event of it. In its choices ``token_ids`` are the bytes of int32, ``logprobs`` those of
float64 (only of the sampled tokens), and ``routed_experts`` an ``.npy`` file: nothing is text or copied to be read.

An engine that answers in frames takes requests (``Content-Type: application/vnd.hpcrl.request``) that are one frame:
the fields of vLLM's request, with ``token_ids`` as above.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MEDIA_TYPE = "application/vnd.hpcrl.answer"
REQUEST_TYPE = "application/vnd.hpcrl.request"
_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(value: Any) -> bytearray:
    """Return one frame."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(value, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return frame


def only_frame(data: bytes) -> memoryview:
    """Return the content of ``data``, which must be exactly one frame (ValueError otherwise), without a copy."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"a frame begins with its length in {_LENGTH.size} bytes, and here are {len(data)}")
    (length,) = _LENGTH.unpack_from(data)
    content = memoryview(data)[_LENGTH.size :]
    if length != len(content):
        raise ValueError(f"a frame of {length} bytes has {len(content)}")
    return content


class FrameSplitter:
    """Cuts what arrives into frames; each byte is moved once."""

    def __init__(self, max_bytes: int) -> None:
        """Begin; a frame whose length exceeds ``max_bytes`` is refused before memory is allocated for it."""
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._frame: bytearray | None = None
        self._filled = 0

    def feed(self, piece: bytes) -> list[memoryview]:
        """Return the contents of the frames that end in ``piece``, which follows what was fed before, read-only.

        Raises
        ------
        ValueError
            A frame is too long.
        """
        frames: list[memoryview] = []
        rest = memoryview(piece)
        while True:
            if self._frame is None:
                missing = _LENGTH.size - len(self._head)
                self._head += rest[:missing]
                rest = rest[missing:]
                if len(self._head) < _LENGTH.size:
                    return frames
                (length,) = _LENGTH.unpack(self._head)
                if length > self._max_bytes:
                    raise ValueError(f"a frame of {length} bytes is longer than the {self._max_bytes} it may have")
                self._frame, self._filled = bytearray(length), 0
                self._head.clear()
            count = min(len(self._frame) - self._filled, len(rest))
            self._frame[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled < len(self._frame):
                return frames
            frames.append(memoryview(self._frame).toreadonly())
            self._frame = None
