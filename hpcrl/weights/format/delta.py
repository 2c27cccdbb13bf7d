"""Changes of a chunk against its parent, element by element (needs numpy). Format in docs/handoff.md.

After an optimizer step at the learning rates of reinforcement learning most bfloat16 elements are what they were,
but nearly every block holds some that are not: whole blocks would save nothing. What changes moves by few units in
the last place, so an element costs two bytes: how many unchanged ones lie before it, and by how much its bits,
taken as an integer, moved. The few that moved far are listed with their value.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import HandoffError

_HEADER = struct.Struct("<IBxxxII")
"""Chunk number, encoding, near elements, far elements (raw: length and 0)."""
_SPARSE, _RAW = 0, 1
_MAX_GAP = 255

_Words = NDArray[np.unsignedinteger[Any]]


def _words(data: memoryview | bytes | bytearray, width: int) -> _Words:
    return np.frombuffer(data, dtype=np.dtype(f"<u{width}"))


def encode_chunk(number: int, old: memoryview, new: memoryview, width: int) -> bytes:
    """Return the record that turns the bytes ``old`` of a chunk into ``new``; empty where they are equal.

    Parameters
    ----------
    number:
        Number of the chunk in its tensor.
    old, new:
        Equally long.
    width:
        Bytes of an element.
    """
    before, after = _words(old, width), _words(new, width)
    positions = np.flatnonzero(before != after)
    if not len(positions):
        return b""
    # a difference modulo 2^bits, folded so that small steps of either sign are small numbers
    moved = (after[positions] - before[positions]).view(np.dtype(f"<i{width}"))
    folded = ((moved << 1) ^ (moved >> (8 * width - 1))).view(before.dtype)
    is_near = folded <= 255
    near, far = positions[is_near], positions[~is_near]
    gaps, steps = _fill_gaps(np.diff(near, prepend=-1) - 1, folded[is_near].astype(np.uint8))
    size = 2 * len(gaps) + (4 + width) * len(far)
    if size >= new.nbytes:
        return _HEADER.pack(number, _RAW, new.nbytes, 0) + bytes(new)
    return b"".join(
        (
            _HEADER.pack(number, _SPARSE, len(gaps), len(far)),
            gaps.tobytes(),
            steps.tobytes(),
            far.astype("<u4").tobytes(),
            after[far].tobytes(),
        )
    )


def _fill_gaps(gaps: NDArray[np.int64], steps: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return gaps as bytes.

    A gap that is too long is bridged by entries that skip 255 elements and change the next one by 0.
    """
    bridges = gaps // (_MAX_GAP + 1)
    if not bridges.any():
        return gaps.astype(np.uint8), steps
    ends = np.cumsum(bridges + 1)
    all_gaps = np.full(int(ends[-1]), _MAX_GAP, np.uint8)
    all_steps = np.zeros(int(ends[-1]), np.uint8)
    all_gaps[ends - 1] = gaps % (_MAX_GAP + 1)
    all_steps[ends - 1] = steps
    return all_gaps, all_steps


def iter_records(data: bytes | memoryview, width: int) -> list[tuple[int, memoryview]]:
    """Return the records of a piece: chunk number, and the record as `apply_chunk` takes it.

    Raises
    ------
    HandoffError
        The piece does not end where its last record does.
    """
    view, records = memoryview(data), []
    while view.nbytes:
        if view.nbytes < _HEADER.size:
            raise HandoffError("a record of a delta is torn")
        number, encoding, near, far = _HEADER.unpack_from(view)
        if encoding not in (_SPARSE, _RAW):
            raise HandoffError(f"a record of a delta has the unknown encoding {encoding}")
        size = _HEADER.size + (near if encoding == _RAW else 2 * near + (4 + width) * far)
        if view.nbytes < size:
            raise HandoffError("a record of a delta is torn")
        records.append((number, view[:size]))
        view = view[size:]
    return records


def apply_chunk(record: memoryview, chunk: memoryview, width: int) -> None:
    """Change the bytes of a ``chunk`` of the parent, in place, into those of the version of the delta.

    It must be done once: differences are added. The hash of the result tells whether it was.

    Raises
    ------
    HandoffError
        The record does not fit the chunk.
    """
    _, encoding, near, far = _HEADER.unpack_from(record)
    body = record[_HEADER.size :]
    if encoding == _RAW:
        if near != chunk.nbytes:
            raise HandoffError("a whole chunk of a delta has another length than the parent's")
        chunk[:] = body
        return
    words = _words(chunk, width)
    positions = np.cumsum(np.frombuffer(body[:near], np.uint8).astype(np.int64) + 1) - 1
    folded = np.frombuffer(body[near : 2 * near], np.uint8).astype(words.dtype)
    far_positions = np.frombuffer(body[2 * near : 2 * near + 4 * far], "<u4")
    if max(positions.max(initial=-1), far_positions.max(initial=0)) >= len(words):
        raise HandoffError("a record of a delta changes elements behind the end of its chunk")
    words[positions] += (folded >> 1) ^ (~(folded & 1) + words.dtype.type(1))
    words[far_positions] = _words(body[2 * near + 4 * far :], width)
