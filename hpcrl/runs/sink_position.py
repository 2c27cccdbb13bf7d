"""The file with what a sink was given of a run, in the run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.runs.rundir import RunDir


class SinkPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last step and the last evaluated version that a sink was given."""

    last_step: int
    last_version: int = -1


def position_path(run: RunDir, name: str) -> Path:
    """Return the file with the last step that a sink was given."""
    return run.sinks_dir / f"{name}.json"


def read_position(run: RunDir, name: str) -> SinkPosition | None:
    """Return what a sink was given; None where it was given nothing, or where that cannot be read."""
    try:
        return msgspec.json.decode(position_path(run, name).read_bytes(), type=SinkPosition)
    except (OSError, msgspec.DecodeError):
        return None
