"""Durable files, as the ledger's thread writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import PayloadWriter

Block = list[bytes | memoryview]


class Disk:
    """Blocks of numbers in files of one writer."""

    def __init__(self, directory: Path, writer: int = 1) -> None:
        directory.mkdir()
        self.directory, self._writer = directory, PayloadWriter(directory, writer)

    def write(self, seed: int, numbers: int = 5000) -> tuple[PayloadPlace, Block]:
        block = encode_columns(b"", {"numbers": np.random.default_rng(seed).integers(0, 99, numbers, dtype=np.int64)})
        return self._writer.write([block])[0], block
