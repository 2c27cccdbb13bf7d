"""Writing safetensors shards: hashed while written, fsynced, without a copy of the shard in memory.

The layout (8 bytes of header length, JSON header, data) is that of the safetensors project, so vLLM and
transformers read our shards as they are. We write it ourselves because its own writer gives no hash,
no fsync and no streaming.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from hpcrl.fs import FileRecord

__all__ = ["SAFETENSORS_DTYPES", "TensorBytes", "TensorRecord", "write_shard"]

#: torch's dtype names (without ``torch.``) and the names safetensors gives them, with bytes per element
SAFETENSORS_DTYPES: dict[str, tuple[str, int]] = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
}


class TensorBytes(NamedTuple):
    """A tensor to write: its raw little-endian bytes in C order, with no copy made."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class TensorRecord(msgspec.Struct, frozen=True):
    """Where a tensor lies in a hand-off.

    Attributes
    ----------
    dtype:
        torch's name, for example ``bfloat16``.
    shape:
        Dimensions.
    file:
        Shard file.
    offset:
        First byte of the data from the start of the file.
    bytes:
        Length of the data.
    xxh3_128:
        Hash of the data.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int
    xxh3_128: str


def write_shard(path: Path, tensors: Sequence[TensorBytes]) -> tuple[FileRecord, dict[str, TensorRecord]]:
    """Write one shard and fsync it.

    Returns
    -------
    tuple
        The record of the file and of each tensor in it, both computed while writing.

    Raises
    ------
    ValueError
        A dtype is unknown or a tensor's bytes do not fit its shape.
    OSError
        The filesystem refused (ENOSPC, EDQUOT, EIO …); a partial file may remain in the staging directory.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"tensor {tensor.name!r} has dtype {tensor.dtype}, which a shard cannot hold")
        code, width = SAFETENSORS_DTYPES[tensor.dtype]
        expected = width
        for dim in tensor.shape:
            expected *= dim
        if tensor.data.nbytes != expected:
            raise ValueError(f"tensor {tensor.name!r} has {tensor.data.nbytes} bytes, its shape {expected}")
        header[tensor.name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + expected],
        }
        position += expected
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # readers map the data; keep it aligned
    prefix = len(text).to_bytes(8, "little") + text

    digest, offset = xxhash.xxh3_128(prefix), len(prefix)
    records: dict[str, TensorRecord] = {}
    with path.open("xb") as stream:
        stream.write(prefix)
        for tensor in tensors:
            stream.write(tensor.data)
            digest.update(tensor.data)
            records[tensor.name] = TensorRecord(
                dtype=tensor.dtype,
                shape=tensor.shape,
                file=path.name,
                offset=offset,
                bytes=tensor.data.nbytes,
                xxh3_128=xxhash.xxh3_128_hexdigest(tensor.data),
            )
            offset += tensor.data.nbytes
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(bytes=offset, xxh3_128=digest.hexdigest()), records
