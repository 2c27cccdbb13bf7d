"""What an attempt begins with: decided once, by the trainer, and written down for the orchestrator and for people."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.decoding import prepared
from hpcrl.fs import write_json

__all__ = ["RestoreDecision", "SkippedEntry"]


class SkippedEntry(msgspec.Struct, frozen=True):
    """An entry that could not be used, and why."""

    step: int
    reason: str


class RestoreDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Which entry an attempt restores. ``attempts/NNNN/restore.json``.

    Two roles that each looked for the newest good entry could find different ones: an error while reading may pass,
    an entry may go. So one decides.

    Attributes
    ----------
    step:
        Of the entry; None where the run starts from the beginning.
    verified:
        How entries were compared with their manifests: every byte, or sizes only.
    seconds:
        Time the comparison took.
    skipped:
        Newer entries, newest first.
    refused:
        Why the attempt begins with nothing at all, neither a checkpoint nor the start model; empty where it begins.
    asked:
        What a person asked for (``--from-scratch``, ``--from-step 10``); empty where nobody did.
    saved_by:
        Attempt that saved the entry; None without one.
    put_aside:
        Steps of entries that were put aside for that.
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
