"""Finding runs: by name, id, number of a job or path, from any directory."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from hpcrl.errors import RunDirError, UsageError
from hpcrl.runs.known import known_runs, remember
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir

__all__ = ["Roots", "all_runs", "check_name", "find_run", "list_runs", "newest_run", "reference"]


#: as `hpcrl.config.base.Name`
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RUN_ID = re.compile(r"[0-9a-f]{6,32}")

Roots = Callable[[], Iterable[Path]]
"""Further directories of runs, those of all profiles; only asked for where it is needed."""


def check_name(name: str) -> str:
    """``name`` itself if a run may be called so: it names directories, jobs and files.

    Raises
    ------
    UsageError
        It may not; the message says what names are made of.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run\n"
            "    hint: letters, digits, '.', '_' and '-', at most 63, the first a letter or a digit"
        )
    return name


def list_runs(root: Path) -> list[RunDir]:
    """Runs below ``root`` that we may read, newest first. A root that does not exist has none."""
    return _newest_first(_below(root))


def all_runs(root: Path | None, roots: Roots) -> list[RunDir]:
    """Runs that the user has anywhere, newest first, and those below ``root`` of others that may be read.

    Parameters
    ----------
    root:
        Where runs of this directory are; None: nowhere.
    roots:
        What of our own lies there and is not known yet is entered into the registry.
    """
    found = _rebuild(roots)
    for run in [] if root is None else _below(root, found):
        found.setdefault(str(run.path.resolve()), run)
    return _newest_first(found.values())


def newest_run(runs: list[RunDir], where: str) -> RunDir:
    """The first of ``runs``, which are sorted from the newest on.

    Parameters
    ----------
    where:
        Place of the list in words, for the message: ``below /shared/runs``.

    Raises
    ------
    RunDirError
        There is none.
    """
    if not runs:
        raise RunDirError(
            f"there is no run {where}\n"
            "    hint: start one: hpcrl submit RECIPE\n"
            "    hint: --runs-root DIRECTORY (or HPCRL_RUNS_ROOT) where runs are elsewhere"
        )
    return runs[0]


def find_run(name: str, root: Path, roots: Roots | None = None, *, chosen: bool = False) -> RunDir:
    """The run that ``name`` means: a path; a name, id or job number of one below ``root`` or that the user has.

    Parameters
    ----------
    root:
        Where runs of this directory are.
    roots:
        None: it must lie below ``root`` (or at the path). Else it is looked for in the registry, and where that does
        not know it, below these, too.
    chosen:
        The user has named ``root``: a run of it is meant, also where another one is called so.

    Raises
    ------
    RunDirError
        There is none; the message names runs with a similar name. Or there are several of this name; it names their
        directories. Or it is somebody else's, who lets nobody look.
    """
    if os.sep in name or name in (os.curdir, os.pardir):
        path = RunDir(Path(name).expanduser().resolve())
        if _is_run(path):
            return _noticed(path)
        _refuse_closed(path)
        raise RunDirError(f"there is no run in {path.path}\n    hint: hpcrl ls lists the runs")
    if chosen and name and _is_run(there := RunDir(root / name)):
        return _noticed(there)
    found = _by_name(name, root, anywhere=roots is not None)
    if not found and roots is not None:
        found = _by_number(name)
        if not found:
            _rebuild(roots)
            others = [RunDir(other / name) for other in roots()] if name else []
            found = _by_name(name, root, anywhere=True) or _by_number(name) or [r for r in others if _is_run(r)]
    if len(found) == 1:
        return _noticed(found[0])
    if found:
        ways = "".join(f"    hint: by its directory: {shlex.quote(str(run.path))}\n" for run in found)
        raise RunDirError(f"there are {len(found)} runs {name}; which one?\n{ways}".rstrip())
    if name:
        _refuse_closed(RunDir(root / name))
    known = [run.name for run in (list_runs(root) if roots is None else all_runs(root, tuple))]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [k for k in known if name and name in k][:3]
    hint = f"did you mean {' or '.join(dict.fromkeys(close))}?" if close else "hpcrl ls lists the runs"
    where = f" in {root}" if roots is None else f", neither in {root} nor in the directories of cluster profiles"
    raise RunDirError(f"there is no run {name}{where}\n    hint: {hint}")


def reference(run: RunDir) -> str:
    """How a command that is printed names a run so that it works from any directory: its name, or where another one
    is called so too, or the registry cannot know it, its directory."""
    path = run.path.resolve()
    if remember(run) and [other.path for _, other in known_runs(run.name)] == [path]:
        return run.name
    return shlex.quote(str(path))


def _by_name(name: str, root: Path, *, anywhere: bool) -> list[RunDir]:
    places = [RunDir(root / name)] if name else []
    if anywhere:
        places += [run for _, run in known_runs(name)]
    return [run for run in _distinct(places) if _is_run(run)] or [
        run for run in (RunDir(Path(name).resolve()),) if name and _is_run(run)
    ]


def _by_number(text: str) -> list[RunDir]:
    """Runs with this (beginning of an) id, or else with a job of this number."""
    if _RUN_ID.fullmatch(text) and (found := [run for run_id, run in known_runs() if run_id.startswith(text)]):
        return found
    return [run for _, run in known_runs() if text in _jobs_of(run)] if text.isdecimal() else []


def _jobs_of(run: RunDir) -> set[str]:
    try:
        submissions = RunRecord.read(run).submissions
    except RunDirError:
        return set()
    return {each.job_id if each.executor == "slurm" else each.in_job for each in submissions}


def _rebuild(roots: Roots) -> dict[str, RunDir]:
    """Enter the runs of our own below these directories; returns all of the user's, by their resolved paths."""
    found = {str(run.path): run for _, run in known_runs()}
    for root in roots():
        for run in _below(root, found):
            if remember(run):
                found[str(run.path.resolve())] = run
    return found


def _below(root: Path, found: Container[str] = ()) -> list[RunDir]:
    """What may be a run below ``root``, without the paths that were ``found`` before."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    # what is being staged is hidden, and becomes a run when it is renamed
    return [RunDir(root / name) for name in names if not name.startswith(".") and f"{root}/{name}" not in found]


def _noticed(run: RunDir) -> RunDir:
    remember(run)
    return run


def _is_run(run: RunDir) -> bool:
    try:
        return run.record_path.is_file()
    except OSError:  # nobody else may look into it
        return False


def _refuse_closed(run: RunDir) -> None:
    """Say that there is something, and whose, where nobody else may look into it (RunDirError)."""
    try:
        run.record_path.stat()
    except PermissionError:
        raise RunDirError(
            f"you may not look into {run.path}{_owner(run.path)}\n"
            "    hint: a run is its user's alone; `files: {group: NAME}` in the cluster profile lets a group read it"
        ) from None
    except OSError:
        return


def _owner(path: Path) -> str:
    """Whose a directory is, as the end of a sentence; empty where that cannot be seen."""
    try:
        return f", which is {path.owner()}'s"
    except (OSError, KeyError):
        return ""


def _distinct(runs: Iterable[RunDir]) -> list[RunDir]:
    return list({run.path.resolve(): run for run in runs}.values())


def _newest_first(runs: Iterable[RunDir]) -> list[RunDir]:
    """Sort those that are runs, the last submitted first."""
    dated = []
    for run in runs:
        try:
            if run.record_path.is_file():
                dated.append((run.plan_path.stat().st_mtime, run))
        except OSError:  # it has just gone, or nobody else may look into it
            continue
    return [run for _, run in sorted(dated, key=lambda each: each[0], reverse=True)]
