"""Routed experts of an answer: kept in their encoded form, and decoded to one array in a thread.

An answer of 131,072 tokens of a large model has 79 MB of rows. A streamed answer has thousands of parts. Decoding the
rows of a part takes ten times as long as decoding its tokens, and an engine ends parts of all its requests at the same
time. So the event loop reads only the header of a part's rows, and all rows of an answer are decoded once, into their
place.
"""

from __future__ import annotations

import asyncio
import binascii
import io
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.network.routed_experts_reference import decoded_base64
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.storage.msgspec_types import decode_json

_T = TypeVar("_T")

LARGE_BYTES = 1 << 18
"""Minimum size in bytes for decoding in a thread: routed experts of some hundred tokens of a large model."""
_HEAD = 3 << 12
_MAX_LENGTH = 1 << 31
"""Maximum number of rows, of layers, and of experts per token."""
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_thread = DaemonExecutor(1, thread_name_prefix="answers")
"""One thread: several would decode no faster, and the event loop would wait for each of them in turn."""


async def beside_loop(call: Callable[[], _T], size: int) -> _T:
    """Call ``call`` and return its result, in a thread where ``size`` (bytes) is large."""
    if size < LARGE_BYTES:
        return call()
    return await asyncio.get_running_loop().run_in_executor(_thread, call)


class _Header(NamedTuple):
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    end: int


def _header(head: bytes) -> _Header:
    """Return the header of an ``.npy`` file.

    Raises
    ------
    ValueError
        The bytes are not an ``.npy`` header, or not one of routed experts.
    """
    start = 12 if head[6:7] == b"\x02" else 10
    return _parsed(head[: start + int.from_bytes(head[8:start], "little")])


@lru_cache(1024)
def _parsed(head: bytes) -> _Header:
    """Return the parsed header, cached: parts of an answer have the same header, and parsing one is slow."""
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"version {version} of the .npy format is not known")
        shape, fortran, dtype = _HEADERS[version](stream)
    except ValueError:
        raise
    except Exception as error:  # numpy reads the header as Python's text, and raises whatever Python's parser does
        raise ValueError(f"the header of an .npy file cannot be read: {type(error).__name__}: {error}") from error
    if len(shape) != 3 or fortran or dtype.kind not in "ui" or not all(0 <= length < _MAX_LENGTH for length in shape):
        raise ValueError(f"routed experts are whole numbers [rows, layers, experts a token], not {shape} of {dtype}")
    return _Header(shape, dtype, stream.tell())


def read_rows(payload: bytes | memoryview) -> NDArray[Any]:
    """Return the rows ``[rows, layers, experts_per_token]`` of an ``.npy`` file, as a read-only view.

    Raises
    ------
    ValueError
        The payload is not such a file, or has no such rows.
    """
    header = _header(bytes(payload[:_HEAD]))
    return np.frombuffer(payload, dtype=header.dtype, offset=header.end).reshape(header.shape)


class EncodedRows:
    """Rows as a JSON string of base64, of which the head was checked.

    Attributes
    ----------
    shape:
        ``[rows, layers, experts_per_token]``.
    dtype:
        Dtype of the rows.
    nbytes:
        Size of the text in bytes.
    """

    def __init__(self, quoted: memoryview) -> None:
        """Read the head (ValueError where it is that of no such rows)."""
        self._quoted, self.nbytes = quoted, len(quoted)
        try:
            head = binascii.a2b_base64(quoted[1 : 1 + min(_HEAD // 3 * 4, (len(quoted) - 2) // 4 * 4)])
            header = _header(head)
        except ValueError:  # JSON may write a slash with an escape
            header = _header(self._escaped()[:_HEAD])
        self.shape, self.dtype = header.shape, header.dtype
        # base64 is longer than its content, so a header that claims more rows is rejected before memory is allocated
        if math.prod(self.shape) * self.dtype.itemsize > self.nbytes:
            raise ValueError(f"{self.nbytes} bytes of base64 are too few for rows {self.shape} of {self.dtype}")

    def __len__(self) -> int:
        return self.shape[0]

    def decoded(self) -> NDArray[Any]:
        """Return the routed experts as a read-only view.

        Raises
        ------
        ValueError
            They are damaged.
        """
        try:
            return read_rows(decoded_base64(self._quoted[1:-1]))
        except binascii.Error:  # as above
            return read_rows(self._escaped())

    def _escaped(self) -> bytes:
        try:
            return decode_json(self._quoted, bytes)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error


Rows = NDArray[Any] | EncodedRows


def rows_bytes(pieces: Sequence[Rows | None]) -> int:
    """Return the total size of ``pieces`` in bytes."""
    return sum(piece.nbytes for piece in pieces if piece is not None)


def join_rows(pieces: Sequence[Rows | None]) -> NDArray[Any] | None:
    """Return the rows of some parts, in order; None where there are none.

    Raises
    ------
    ValueError
        They are damaged, or differ in layers or experts a token.
    """
    found = [piece for piece in pieces if piece is not None]
    if len(found) < 2:
        return next((_array(piece) for piece in found), None)
    if len({piece.shape[1:] for piece in found}) != 1:
        raise ValueError("parts of an answer differ in layers or experts a token")
    # engines of another version may count in another width
    dtype = np.result_type(*{piece.dtype for piece in found})
    rows, end = np.empty((sum(map(len, found)), *found[0].shape[1:]), dtype), 0
    for piece in found:
        rows[end : end + len(piece)] = _array(piece)
        end += len(piece)
    return rows


def _array(piece: Rows) -> NDArray[Any]:
    return piece.decoded() if isinstance(piece, EncodedRows) else piece
