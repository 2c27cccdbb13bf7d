"""Writing safetensors shards: hashed while written, fsynced, without a copy of the shard in memory.

The layout (8 bytes of header length, JSON header, data) is that of the safetensors project, so vLLM and
transformers read our shards as they are. We write it ourselves because its own writer gives no hash,
no fsync and no streaming.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.storage.files import FileRecord
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES
from hpcrl.weights.format.manifest import CHUNK_BYTES, TensorRecord, chunk_digests


class TensorBytes(NamedTuple):
    """Tensor to write: its raw little-endian bytes in C order, without a copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def safetensors_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], *, align: int) -> bytes:
    """Return the head of a shard: length and JSON, padded so that the data begins at a multiple of ``align``.

    The padding is spaces.

    Parameters
    ----------
    tensors:
        Name, dtype and shape of each tensor, in the order of their data.
    align:
        A multiple of 8, in bytes.

    Raises
    ------
    ValueError
        A dtype is unknown.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        size = tensor_size(name, dtype, shape)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype][0],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def tensor_size(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor (ValueError where a shard cannot hold the dtype)."""
    if dtype not in SAFETENSORS_DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype}, which a shard cannot hold")
    return _size(dtype, shape)


@lru_cache(maxsize=1 << 12)
def _size(dtype: str, shape: tuple[int, ...]) -> int:
    # cached, because a model has many tensors and few shapes
    return SAFETENSORS_DTYPES[dtype][1] * math.prod(shape)


def write_shard(path: Path, tensors: Sequence[TensorBytes]) -> tuple[FileRecord, dict[str, TensorRecord]]:
    """Write one shard by one writer, and fsync it.

    Returns
    -------
    tuple
        The record of the file and of each tensor in it (`hpcrl.weights.format.manifest`), hashed while writing.

    Raises
    ------
    ValueError
        A dtype is unknown or a tensor's bytes do not fit its shape.
    OSError
        The filesystem refused (ENOSPC, EDQUOT, EIO …); a partial file may remain in the staging directory.
    """
    for tensor in tensors:
        expected = tensor_size(tensor.name, tensor.dtype, tensor.shape)
        if tensor.data.nbytes != expected:
            raise ValueError(f"tensor {tensor.name!r} has {tensor.data.nbytes} bytes, its shape {expected}")
    # readers map the data; keep it aligned
    head = safetensors_header([(t.name, t.dtype, t.shape) for t in tensors], align=8)
    offset = len(head)
    records: dict[str, TensorRecord] = {}
    with path.open("xb") as stream:
        stream.write(head)
        for tensor in tensors:
            stream.write(tensor.data)
            records[tensor.name] = TensorRecord(
                dtype=tensor.dtype,
                shape=tensor.shape,
                file=path.name,
                offset=offset,
                bytes=tensor.data.nbytes,
                xxh3_128=chunk_digests(tensor.data, CHUNK_BYTES),
            )
            offset += tensor.data.nbytes
        stream.flush()
        os.fsync(stream.fileno())
    # a file's hash covers its head; the tensors have their own (a file without tensors is all head)
    return FileRecord(bytes=offset, xxh3_128=chunk_digests(head, CHUNK_BYTES)), records
