"""Registry of the user's runs, in any directory: one symbolic link per run in the user's state directory.

::

    $XDG_STATE_HOME/hpcrl/runs/<name>,<run id>  ->  the run directory       (~/.local/state by default)

A link is only a hint where to search. The identity of a run is in its ``run.json``: a link whose run is gone, or was
replaced by another one, is ignored, and a missing link is made again when the run is found. There is one file per run,
so that several login nodes with one home directory never write the same one.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.storage import lost_replies
from hpcrl.storage.msgspec_types import prepared


class _Identity(msgspec.Struct, frozen=True):
    """Fields that the registry reads of a ``run.json`` of any format."""

    run_id: str = ""


def state_directory() -> Path | None:
    """Return ``$XDG_STATE_HOME/hpcrl``; None where the user has no home."""
    given = os.environ.get("XDG_STATE_HOME")
    try:
        base = Path(given) if given and os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError:  # a user without an entry in the password database
        return None
    return base / "hpcrl"


def remember(run: RunDir, run_id: str | None = None) -> bool:
    """Enter a run of this user into the registry; return whether the registry knows it now.

    A home directory that cannot be written is not an error.

    Parameters
    ----------
    run_id:
        Its id, where the caller knows it; by default it is read.
    """
    run_id = run_id or own_run_id(run)
    directory = _links()
    if run_id is None or directory is None:
        return False
    link, target = directory / f"{run.name},{run_id}", str(run.path.resolve())
    try:
        if _target(link) == target:
            return True
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = directory / f".{uuid.uuid4().hex}"
        temporary.symlink_to(target)
        lost_replies.replace(temporary, link)
    except OSError:
        return False
    return True


def forget(run: RunDir) -> None:
    """Remove a run from the registry that is about to be removed, or was never created."""
    directory = _links()
    if directory is None:
        return
    for name in _entries(directory):
        link = directory / name
        if _target(link) == str(run.path.resolve()):
            with contextlib.suppress(OSError):
                link.unlink()


def known_runs(name: str | None = None) -> Iterator[tuple[str, RunDir]]:
    """Run id and directory of the runs that are there, in no order; with ``name`` only those of that name.

    A link whose run has gone is removed, unless the directory that it lay in is not there either: then a filesystem
    may be away.
    """
    directory = _links()
    if directory is None:
        return
    for entry in _entries(directory):
        run_name, _, run_id = entry.rpartition(",")
        if name is not None and run_name != name:
            continue
        target = _target(directory / entry)
        if target is None:
            continue
        run = RunDir(Path(target))
        if own_run_id(run) == run_id:
            yield run_id, run
        elif _is_gone(run):
            with contextlib.suppress(OSError):
                (directory / entry).unlink()


def own_run_id(run: RunDir) -> str | None:
    """Return the id of a run of this user; None where it is missing, unreadable, or another user's."""
    try:
        with run.record_path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_uid != os.geteuid():
                return None
            return msgspec.json.decode(stream.read(), type=prepared(_Identity)).run_id or None
    except (OSError, msgspec.DecodeError):
        return None


def _is_gone(run: RunDir) -> bool:
    """Return whether a readable directory no longer contains this run."""
    try:
        return run.record_path.is_file() or run.path.name not in os.listdir(run.path.parent)
    except OSError:
        return False


def _links() -> Path | None:
    base = state_directory()
    return None if base is None else base / "runs"


def _entries(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if not name.startswith(".")]
    except OSError:
        return []


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None
