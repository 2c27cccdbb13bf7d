"""What a first run has found so far, as a file: the state from which the next call goes on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import UsageError
from hpcrl.fs import decode_versioned, write_json

__all__ = ["FORMAT_VERSION", "STATE_FILE", "FirstRunState", "StageRecord", "StageStatus"]

STATE_FILE = "state.json"
FORMAT_VERSION = 1


class StageStatus(StrEnum):
    """How a stage ended."""

    OK = "ok"
    WARNING = "warning"
    """It passed, and there is something to look at."""
    STOPPED = "stopped"
    """It found something that is wrong."""
    INTERRUPTED = "interrupted"
    """Somebody ended the command meanwhile."""
    LEFT_OUT = "left out"
    """``--from`` named a later stage, and this one had not passed."""

    @property
    def passed(self) -> bool:
        """Whether the next stage may begin."""
        return self in (StageStatus.OK, StageStatus.WARNING)


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage went.

    Attributes
    ----------
    digest:
        Of what it depends on; another one means that it runs again. Empty where it was not computed.
    profile:
        SHA-256 of the profile's resolved values; empty before it could be read.
    started_at_s:
        Seconds since the epoch.
    seconds:
        How long it took.
    summary:
        What it found, in a line.
    warnings:
        What to look at, a finding each.
    facts:
        Numbers and names that it found, for the report and for later stages; JSON.
    message:
        Why it stopped, with hints; empty where it passed.
    ways_on:
        Commands that go on, in their order; empty where it passed.
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
            raise UsageError(f"{path} cannot be read: {error}\n    hint: remove it, and begin anew") from error
        if state.cluster != cluster:
            raise UsageError(
                f"{path} is of the first run on {state.cluster}, not on {cluster}\n    hint: take another --directory"
            )
        return state

    def write(self, directory: Path) -> None:
        """Write the state; a reader sees all of it, or that of before."""
        write_json(directory / STATE_FILE, self)
