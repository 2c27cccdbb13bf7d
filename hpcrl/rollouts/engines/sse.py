"""Server-sent events out of a stream of bytes, in time that is linear in the bytes, however large one event is."""

from __future__ import annotations

__all__ = ["EventSplitter"]

_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class EventSplitter:
    """Cuts what arrives into events.

    What has been searched for the end of an event is not searched again, and bytes are moved when their event is whole:
    an event of 32 MiB arrives in hundreds of pieces.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that end in ``piece``, which follows what was fed before; ``[DONE]`` is left out."""
        buffer, begin = self._buffer, 0
        events: list[bytes] = []
        buffer += piece
        # the end of an event may lie half in the piece before
        while (end := buffer.find(_END, max(begin, self._searched - 1))) >= 0:
            if buffer.startswith(_DATA, begin):
                with memoryview(buffer) as view:
                    data = bytes(view[begin + len(_DATA) : end])
                if data != _DONE:
                    events.append(data)
            begin = self._searched = end + len(_END)
        del buffer[:begin]
        self._searched = len(buffer)
        return events
