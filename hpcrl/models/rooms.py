"""How large the rooms of pinned memory are in which inputs of layers wait: of trainers and in plans."""

from __future__ import annotations

__all__ = ["room_bytes"]


def room_bytes(size: int) -> int:
    """The least multiple of a sixteenth of the next power of two with room for ``size`` bytes.

    So tensors that are a little larger than those before fit into the same rooms.
    """
    step = max(1, (1 << max(0, size - 1).bit_length()) // 16)
    return -(-size // step) * step
