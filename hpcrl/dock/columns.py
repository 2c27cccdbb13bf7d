"""A block of columns: the arrays of one rollout as bytes that are read without being parsed.

::

    hpcrlcol  format(u32)  header length(u32)  header (MessagePack)  padding  column  padding  column ...

The header names each column with its dtype, shape and place; a column begins at a multiple of 64 bytes, so that what
reads a block in memory, or maps a file, has arrays without a copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.storage.msgspec_types import decode_msgpack

_MAGIC, _FORMAT, _ALIGN = b"hpcrlcol", 1, 64
_PREFIX = struct.Struct("<8sII")


class _Column(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From where the first column begins."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    about: bytes
    columns: list[_Column]


def encode_columns(about: bytes, arrays: Mapping[str, NDArray[Any]]) -> list[bytes | memoryview]:
    """Return the pieces of a block, to be written one after the other; contiguous arrays are not copied.

    Parameters
    ----------
    about:
        Encoded data of the rollout that are not arrays.
    arrays:
        Arrays by name, of any shapes and of dtypes without objects. They may not change before the pieces are written.

    Raises
    ------
    ValueError
        An array has objects.
    """
    columns: list[_Column] = []
    body: list[bytes | memoryview] = []
    end = 0
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"column {name} has objects, not numbers")
        gap = -end % _ALIGN
        columns.append(_Column(name, array.dtype.str, array.shape, end + gap))
        body += [bytes(gap), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]
        end += gap + array.nbytes
    header = msgspec.msgpack.encode(_Header(about, columns))
    head = _PREFIX.pack(_MAGIC, _FORMAT, len(header)) + header
    return [head, bytes(-len(head) % _ALIGN), *body]


def decode_columns(block: bytes | memoryview) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """Return the arguments of `encode_columns`; the arrays are read-only views into ``block``.

    Raises
    ------
    ValueError
        It is not such a block, has another format, or is truncated.
    """
    view = memoryview(block).toreadonly()
    if view.nbytes < _PREFIX.size or bytes(view[:8]) != _MAGIC:
        raise ValueError("it does not begin like a block of columns")
    _, found, length = _PREFIX.unpack(view[: _PREFIX.size])
    if found != _FORMAT:
        raise ValueError(f"a block of columns of format {found}, this hpcrl reads {_FORMAT}")
    begin = _PREFIX.size + length
    try:
        header = decode_msgpack(view[_PREFIX.size : begin], _Header)
    except msgspec.DecodeError as error:
        raise ValueError(f"the header of a block of columns cannot be read: {error}") from error
    begin += -begin % _ALIGN
    arrays = {}
    for column in header.columns:
        try:
            dtype, start = np.dtype(column.dtype), begin + column.offset
            count = math.prod(column.shape)
            if min(column.offset, 0, *column.shape) < 0:
                raise ValueError("it has a negative size")
            if start + count * dtype.itemsize > view.nbytes:
                raise ValueError("the block ends within it")
            arrays[column.name] = np.frombuffer(view, dtype=dtype, count=count, offset=start).reshape(column.shape)
        except (TypeError, ValueError, OverflowError, SyntaxError) as error:
            raise ValueError(f"column {column.name} of a block of columns cannot be read: {error}") from error
    return header.about, arrays
