"""Server-sent events out of a stream of bytes, in time that is linear in the bytes, however large one event is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_LARGE_BYTES = 1 << 18


class Pieces:
    """Large event in the pieces in which it arrived: joining takes long and belongs in a thread."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts, self._size = parts, sum(map(len, parts))

    def __len__(self) -> int:
        return self._size

    def joined(self) -> memoryview:
        """Return the joined event, copied piece by piece, so that the event loop can run in between."""
        whole, end = np.empty(self._size, np.uint8), 0
        for part in self._parts:
            whole[end : end + len(part)] = np.frombuffer(part, np.uint8)
            end += len(part)
        return whole.data


class EventSplitter:
    """Splits a byte stream into events. No byte is searched twice, and bytes of a large event are not moved."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Of the event that has not ended, none of them empty."""

    def feed(self, piece: bytes) -> list[bytes | Pieces]:
        """Return the data of the events that end in ``piece``, which follows what was fed before.

        ``[DONE]`` is left out.
        """
        events: list[bytes | Pieces] = []
        start = 0
        if self._parts and self._parts[-1].endswith(b"\n") and piece.startswith(b"\n"):
            # the end of an event is split between the previous piece and this one
            self._parts[-1] = self._parts[-1][:-1]
            self._end(events)
            start = 1
        # searching one byte is ten times as fast as two, and most pieces of a large event have no line end
        while piece.find(b"\n", start) >= 0 and (end := piece.find(_END, start)) >= 0:
            self._parts.append(piece[start:end])
            self._end(events)
            start = end + len(_END)
        if start < len(piece):
            self._parts.append(piece[start:])
        return events

    def _end(self, events: list[bytes | Pieces]) -> None:
        parts, self._parts = self._parts, []
        count = len(_DATA) + 1
        if sum(map(len, parts)) < _LARGE_BYTES:
            count = len(parts)
        # parts are not empty, so the first `count` of them contain the whole prefix
        head = b"".join(parts[:count])
        if not head.startswith(_DATA):
            return
        head = head[len(_DATA) :]
        if parts[count:]:
            events.append(Pieces([head, *parts[count:]]))
        elif head != _DONE:
            events.append(head)
