"""Start of an attempt: decided once, by the trainer, and recorded for the orchestrator and for people."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared


class SkippedEntry(msgspec.Struct, frozen=True):
    """An entry that could not be used, and why."""

    step: int
    reason: str


class RestoreDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint entry that an attempt restores, stored in ``attempts/NNNN/restore.json``.

    The decision is made once for all roles. Two roles that searched separately could choose different entries, because
    a read error may be transient and an entry may be removed.

    Attributes
    ----------
    step:
        Step of the entry; None where the run starts from the beginning.
    verified:
        Way in which entries were compared with their manifests: every byte, or sizes only.
    seconds:
        Time the comparison took.
    skipped:
        Newer entries that were skipped, newest first.
    refused:
        Reason why the attempt loads neither a checkpoint nor the start model; empty where it starts.
    asked:
        Request of a person (``--from-scratch``, ``--from-step 10``); empty where there was none.
    saved_by:
        Attempt that saved the entry; None without one.
    put_aside:
        Steps of entries that were put aside for that request.
    """

    step: int | None
    verified: Literal["content", "sizes"]
    seconds: float
    skipped: list[SkippedEntry]
    refused: str = ""
    asked: str = ""
    saved_by: int | None = None
    put_aside: list[int] = []

    def write(self, path: Path) -> None:
        """Write it; durable on return."""
        write_json(path, self)

    @classmethod
    def find(cls, path: Path) -> RestoreDecision | None:
        """Read it; None where it is not there yet."""
        # a listing, because an NFS client may remember for a minute that a name did not exist
        if path.name not in os.listdir(path.parent):
            return None
        return msgspec.json.decode(path.read_bytes(), type=prepared(cls))
