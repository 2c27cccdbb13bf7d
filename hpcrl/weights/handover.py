"""From the trainer to engines of the same node, layer by layer: what both sides must agree on.

The ranks of the trainer write one layer into memory that they share with the engines, each rank its own part; the
engines copy it, and the next layer takes its place. The memory has no name in a filesystem (``memfd_create``): others
open it by the process that made it, and it is gone with the last process that has it, however that one ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.storage.msgspec_types import prepared

_NAME = "hpcrl-layer"
_PATH = re.compile(r"(/proc/\d+/fd/\d+)#([0-9a-f]+)")


class SharedTensor(msgspec.Struct, frozen=True):
    """Parameter or buffer of the model, whole, in C order.

    Attributes
    ----------
    name:
        Name in the model that trainer and engine both build (`hpcrl.modeling`).
    dtype:
        Name of a torch dtype.
    offset:
        Offset in the memory, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HandoverLayer(msgspec.Struct, frozen=True):
    """Tensors that are handed over together.

    Attributes
    ----------
    memory:
        Path by `SharedMemory.path`.
    tensors:
        Tensors in this memory.
    """

    memory: str
    tensors: list[SharedTensor]


def decode_layer(data: bytes) -> HandoverLayer:
    """Return a layer from its JSON.

    Raises
    ------
    HandoffError
        The data is not a layer.
    """
    try:
        return msgspec.json.decode(data, type=prepared(HandoverLayer))
    except msgspec.DecodeError as error:
        raise HandoffError(f"the message is not a layer: {error}") from error


class SharedMemory:
    """Memory that processes of one node share.

    Attributes
    ----------
    path:
        By which another process opens it, for as long as the one that made it has it; never that of another memory.
    data:
        The bytes; they can be written.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self.path = descriptor, path
        self.data = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Create zeroed memory of ``size`` bytes.

        Raises
        ------
        OSError
            The machine has not enough memory.
        """
        # numbers of descriptors are reused
        own = secrets.token_hex(8)
        descriptor = os.memfd_create(f"{_NAME}-{own}")
        os.ftruncate(descriptor, size)
        return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}#{own}")

    @classmethod
    def open(cls, path: str) -> SharedMemory:
        """Open memory that another process made.

        Raises
        ------
        HandoffError
            It is none, or cannot be seen from here.
        """
        if (match := _PATH.fullmatch(path)) is None:
            raise HandoffError(f"{path!r} is not shared memory of a process")
        link, own = match.groups()
        try:
            if not os.readlink(link).startswith(f"/memfd:{_NAME}-{own}"):
                raise HandoffError(f"{path} is not memory for layers any more")
            descriptor = os.open(link, os.O_RDWR)
        except OSError as error:
            raise HandoffError(
                f"the memory of the trainer, {path}, cannot be opened: {error}\n"
                "    hint: colocated engines run on the trainer's node, as the same user, and see its processes"
            ) from error
        return cls(descriptor, path)

    def close(self) -> None:
        """Release the memory."""
        # views of the bytes stay valid until then
        with contextlib.suppress(BufferError):
            self.data.close()
        os.close(self._descriptor)
