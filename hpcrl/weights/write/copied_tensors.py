"""Safetensors file of tensors of other files, copied by the byte under other names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.weights.read.model_files import ModelFiles, StoredBlock, safetensors_dtype

_COPY_BYTES = 16 << 20


def write_copied_tensors(path: Path, tensors: Mapping[str, StoredBlock], files: ModelFiles | None = None) -> None:
    """Write ``tensors``, each by its new name, into the new file ``path``, on disk on return.

    Parameters
    ----------
    files:
        Readers of matrices of experts that are stored stacked, by their names in ``tensors``.

    Raises
    ------
    UsageError
        A file ends before its tensors do.
    OSError
        The filesystem refused.
    """
    head, end = {}, 0
    for name, block in tensors.items():
        offsets = [end, end + block.nbytes]
        head[name] = {"dtype": safetensors_dtype(block.dtype), "shape": list(block.shape), "data_offsets": offsets}
        end += block.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **head}).encode()
    # data begins at a multiple of eight bytes
    text += b" " * (-len(text) % 8)
    with path.open("xb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for name, block in tensors.items():
            if block.stacked is not None:
                assert files is not None, name
                target.write(files.read(name, (0, 0), block.shape))
                continue
            with block.file.open("rb") as source:
                source.seek(block.offset)
                left = block.nbytes
                while left:
                    data = source.read(min(_COPY_BYTES, left))
                    if not data:
                        raise UsageError(f"{block.file} ends before its tensors do: it was not copied whole")
                    target.write(data)
                    left -= len(data)
        target.flush()
        os.fsync(target.fileno())
