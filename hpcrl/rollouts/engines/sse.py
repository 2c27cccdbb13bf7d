"""Server-sent events out of a stream of bytes, in time that is linear in the bytes, however large one event is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["EventSplitter", "Pieces"]

_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_LARGE_BYTES = 1 << 18


class Pieces:
    """A large event as it has arrived: to join its pieces takes long, and is for a thread to do."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts, self._size = parts, sum(map(len, parts))

    def __len__(self) -> int:
        return self._size

    def joined(self) -> memoryview:
        """All of it. Copied piece by piece, so that the interpreter may turn to the event loop in between."""
        whole, end = np.empty(self._size, np.uint8), 0
        for part in self._parts:
            whole[end : end + len(part)] = np.frombuffer(part, np.uint8)
            end += len(part)
        return whole.data


class EventSplitter:
    """Cuts what arrives into events. Nothing is searched twice, and bytes of a large event are not moved."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Of the event that has not ended, none of them empty."""

    def feed(self, piece: bytes) -> list[bytes | Pieces]:
        """Data of the events that end in ``piece``, which follows what was fed before; ``[DONE]`` is left out."""
        events: list[bytes | Pieces] = []
        start = 0
        if self._parts and self._parts[-1].endswith(b"\n") and piece.startswith(b"\n"):
            # the end of an event lies half in the piece before
            self._parts[-1] = self._parts[-1][:-1]
            self._end(events)
            start = 1
        # one byte is found ten times as fast as two: most pieces of a large event have no line end
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
        # of parts that are not empty, so many have all of the prefix
        head = b"".join(parts[:count])
        if not head.startswith(_DATA):
            return
        head = head[len(_DATA) :]
        if parts[count:]:
            events.append(Pieces([head, *parts[count:]]))
        elif head != _DONE:
            events.append(head)
