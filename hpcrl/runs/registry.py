"""Finding runs: by name below a runs root, or by path."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from hpcrl.errors import RunDirError, UsageError
from hpcrl.runs.rundir import RunDir

__all__ = ["check_name", "find_run", "list_runs", "newest_run"]


#: as `hpcrl.config.base.Name`
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str) -> str:
    """``name`` itself if a run may be called so (UsageError otherwise)."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run\n"
            "    hint: letters, digits, '.', '_' and '-', at most 63, the first a letter or a digit"
        )
    return name


def list_runs(root: Path) -> list[RunDir]:
    """Runs below ``root``, newest first. A root that does not exist has none."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    runs = []
    for name in names:
        run = RunDir(root / name)
        # what is being staged is hidden, and becomes a run when it is renamed
        if not name.startswith(".") and run.record_path.is_file():
            runs.append(run)
    return sorted(runs, key=lambda run: run.plan_path.stat().st_mtime, reverse=True)


def newest_run(root: Path) -> RunDir:
    """The run that was submitted last (RunDirError where there is none)."""
    runs = list_runs(root)
    if not runs:
        raise RunDirError(
            f"there is no run in {root}\n"
            "    hint: start one: hpcrl submit RECIPE\n"
            "    hint: --runs-root DIRECTORY (or HPCRL_RUNS_ROOT) where runs are elsewhere"
        )
    return runs[0]


def find_run(name: str, root: Path) -> RunDir:
    """The run called ``name`` below ``root``, or at the path ``name``.

    Raises
    ------
    RunDirError
        There is none; the message names runs with a similar name.
    """
    candidates = [root / name] if os.sep not in name else []
    for path in (*candidates, Path(name).expanduser()):
        run = RunDir(path.resolve())
        if run.record_path.is_file():
            return run
    known = [run.name for run in list_runs(root)]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [k for k in known if name and name in k][:3]
    hint = f"did you mean {' or '.join(close)}?" if close else "hpcrl ls lists the runs"
    raise RunDirError(f"there is no run {name} in {root}\n    hint: {hint}")
