"""Sizes of the pinned buffers in which inputs of layers wait, for trainers and plans."""

from __future__ import annotations


def room_bytes(size: int) -> int:
    """Return the size of a buffer for ``size`` bytes: the next multiple of a sixteenth of the next power of two.

    So tensors that are a little larger than earlier ones fit into the same buffers.
    """
    step = max(1, (1 << max(0, size - 1).bit_length()) // 16)
    return -(-size // step) * step
