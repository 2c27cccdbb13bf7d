"""Read the files of offline runs of W&B.

A file ``run-ID.wandb`` has seven bytes of its own and then records in the log format of LevelDB
(https://github.com/google/leveldb/blob/main/doc/log_format.md); each is a ``Record`` of W&B's protocol buffers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD_BYTES = 7
_BLOCK_BYTES = 32 << 10
_RECORD_HEAD = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def history_values(path: Path, key: str, messages: Any) -> list[float]:
    """Return the values of a metric in a file, in its order; a record that is cut at the end is left out.

    Parameters
    ----------
    messages:
        The module ``wandb.proto.wandb_internal_pb2``.
    """
    values = []
    for data in wandb_records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values += [float(json.loads(item.value_json)) for item in record.history.item if key in item.nested_key]
    return values


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Go through the records of a file, up to one that is cut."""
    position, whole = _HEAD_BYTES, b""
    while position + _RECORD_HEAD.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _RECORD_HEAD.size:  # no head fits: the rest of the block is empty
            position += left
            continue
        _, length, kind = _RECORD_HEAD.unpack_from(data, position)
        start = position + _RECORD_HEAD.size
        if kind == 0 or start + length > len(data):
            return
        position = start + length
        whole = data[start:position] if kind in (_FULL, _FIRST) else whole + data[start:position]
        if kind in (_FULL, _LAST):
            yield whole
