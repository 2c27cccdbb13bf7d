"""Result of a run that only evaluates: ``evaluation.json`` in its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.runs.rundir import RunDir


def result_path(run: RunDir) -> Path:
    """Return where the result is written when all samples are done."""
    return run.path / "evaluation.json"


def read_result(run: RunDir) -> dict[str, Any] | None:
    """Return the result of a run; None where there is none yet (RunDirError where it cannot be read)."""
    try:
        return msgspec.json.decode(result_path(run).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{result_path(run)} cannot be read: {error}") from error
