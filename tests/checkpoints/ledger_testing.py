"""What the tests of the ledger share: entries without a trainer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import xxhash

from hpcrl.checkpoints import CheckpointEntry, CheckpointWriter
from hpcrl.storage.files import FileRecord, fsync_dir


def save(root: Path, step: int, text: str = "weights", attempt: int = 1) -> CheckpointEntry:
    """An entry of a new writer."""
    return save_as(CheckpointWriter.claim(root, attempt), step, text)


def save_as(
    writer: CheckpointWriter, step: int, text: str = "weights", *, files: int = 1, lost_bytes: int = 0
) -> CheckpointEntry:
    """An entry whose ``files`` trainer files hold ``text``, the first ``lost_bytes`` shorter than it should be."""
    try:
        records = write_files(writer.stage(step), f"{text} {step}".encode(), files, lost_bytes)
        return writer.commit(
            step=step,
            world_size=1,
            files=records,
            orchestrator_state=f"rollouts {step}".encode(),
            started_at_s=time.time(),
        )
    except BaseException:
        writer.discard(step)
        raise


def write_files(staged: Path, data: bytes, files: int, lost_bytes: int = 0) -> dict[str, FileRecord]:
    """What the ranks of a trainer do: write, fsync, and say what was written."""
    records = {}
    for i in range(files):
        name = f"trainer/{i}.distcp"
        with (staged / name).open("wb") as stream:
            stream.write(data[lost_bytes:])
            stream.flush()
            os.fsync(stream.fileno())
        records[name] = FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))
    fsync_dir(staged / "trainer")
    return records


def hidden(root: Path) -> list[str]:
    """What lies in the directories of writers."""
    return sorted(str(path.relative_to(root)) for path in root.glob(".*/*"))
