"""State of a first run, as a file: the next call continues from it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import UsageError
from hpcrl.storage.files import decode_versioned, write_json

STATE_FILE = "state.json"
FORMAT_VERSION = 1


class StageStatus(StrEnum):
    """Status with which a stage ended."""

    OK = "ok"
    WARNING = "warning"
    """The stage passed with warnings."""
    STOPPED = "stopped"
    """The stage found an error."""
    INTERRUPTED = "interrupted"
    """A signal ended the command meanwhile."""
    LEFT_OUT = "left out"
    """``--from`` named a later stage, and this one had not passed."""

    @property
    def passed(self) -> bool:
        """Return whether the next stage may begin."""
        return self in (StageStatus.OK, StageStatus.WARNING)


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one stage.

    Attributes
    ----------
    digest:
        Digest of the inputs of the stage; a different digest makes the stage run again. Empty where it was not
        computed.
    profile:
        SHA-256 of the profile's resolved values; empty before it could be read.
    started_at_s:
        Seconds since the epoch.
    seconds:
        Duration of the stage.
    summary:
        Result in one line.
    warnings:
        Findings that need attention, one sentence each.
    facts:
        Numbers and names that the stage found, for the report and for later stages; JSON.
    message:
        Reason why the stage stopped, with hints; empty where it passed.
    ways_on:
        Commands that continue the first run, in their order; empty where the stage passed.
    """

    status: StageStatus
    digest: str = ""
    profile: str = ""
    started_at_s: float = 0.0
    seconds: float = 0.0
    summary: str = ""
    warnings: list[str] = []
    facts: dict[str, Any] = {}
    message: str = ""
    ways_on: list[str] = []


class FirstRunState(msgspec.Struct, kw_only=True):
    """All stages of a site.

    Attributes
    ----------
    cluster:
        Name or file of the profile, as the command was given it.
    stages:
        By name of the stage; those that were never begun are missing.
    open_run:
        Directory of a run that was about to be submitted, until it has ended; empty where there is none.
    """

    format_version: int = FORMAT_VERSION
    cluster: str
    stages: dict[str, StageRecord] = {}
    open_run: str = ""

    @classmethod
    def read(cls, directory: Path, cluster: str) -> FirstRunState:
        """Read the state of a directory; an empty one where there is none.

        Raises
        ------
        UsageError
            It is of another profile, or cannot be read.
        """
        path = directory / STATE_FILE
        try:
            state = decode_versioned(path.read_bytes(), cls, FORMAT_VERSION)
        except FileNotFoundError:
            return cls(cluster=cluster)
        except (ValueError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(f"{path} cannot be read: {error}\n    hint: remove it, and start again") from error
        if state.cluster != cluster:
            raise UsageError(
                f"{path} is of the first run on {state.cluster}, not on {cluster}\n    hint: take another --directory"
            )
        return state

    def write(self, directory: Path) -> None:
        """Write the state; a reader sees all of it, or that of before."""
        write_json(directory / STATE_FILE, self)
