"""Output of a program: its beginning and its end within a maximum size."""

from __future__ import annotations


class ProgramOutput:
    """Keeps the first and the last bytes of a stream.

    Attributes
    ----------
    total:
        Bytes that were added.
    """

    def __init__(self, max_bytes: int) -> None:
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()
        self._head_size = max_bytes - max_bytes // 2
        self._tail_size = max_bytes // 2

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self.total += len(data)
        if missing := self._head_size - len(self._head):
            self._head += data[:missing]
            data = data[missing:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_size + 4096:
            self._cut()

    @property
    def truncated(self) -> bool:
        """Return whether bytes are missing in the middle."""
        return self.total > self._head_size + self._tail_size

    def content(self) -> bytes:
        """Return what was kept."""
        self._cut()
        return bytes(self._head + self._tail)

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_size)]
