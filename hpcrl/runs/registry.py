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

#: as `hpcrl.config.base.Name`
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RUN_ID = re.compile(r"[0-9a-f]{6,32}")

Roots = Callable[[], Iterable[Path]]
"""Returns further directories of runs, those of all profiles; called only where needed."""


def check_name(name: str) -> str:
    """Return ``name`` if a run may have this name, which becomes a name of directories, jobs and files.

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
    """Return the readable runs below ``root``, newest first; none where ``root`` does not exist."""
    return _newest_first(_below(root))


def all_runs(root: Path | None, roots: Roots) -> list[RunDir]:
    """Return all runs of the user anywhere, and readable runs of others below ``root``, newest first.

    Parameters
    ----------
    root:
        Directory of runs; None: no directory.
    roots:
        Runs of the user below these that the registry does not know yet are entered into it.
    """
    found = _rebuild(roots)
    for run in [] if root is None else _below(root, found):
        found.setdefault(str(run.path.resolve()), run)
    return _newest_first(found.values())


def newest_run(runs: list[RunDir], where: str) -> RunDir:
    """Return the first of ``runs``, which are sorted newest first.

    Parameters
    ----------
    where:
        Place of the list in words, for the message: ``below /shared/runs``.

    Raises
    ------
    RunDirError
        The list is empty.
    """
    if not runs:
        raise RunDirError(
            f"there is no run {where}\n"
            "    hint: start one: hpcrl submit RECIPE\n"
            "    hint: --runs-root DIRECTORY (or HPCRL_RUNS_ROOT) where runs are elsewhere"
        )
    return runs[0]


def find_run(name: str, root: Path, roots: Roots | None = None, *, chosen: bool = False) -> RunDir:
    """Return the run that ``name`` identifies: by path, or by the name, id or job number of a run.

    Parameters
    ----------
    root:
        Directory of runs.
    roots:
        None: the run must lie below ``root`` (or at the path). Else it is searched in the registry, and then below
        these.
    chosen:
        The user has named ``root``: a run below it takes precedence over another one of this name.

    Raises
    ------
    RunDirError
        The run does not exist; the message names runs with a similar name. Or several have this name; the message names
        their directories. Or it belongs to another user and is not readable.
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
    """Return an argument that identifies a run in a printed command, valid in any directory.

    It is the name, or the directory where another run has this name, or the registry cannot know the run.
    """
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
    """Return runs whose id is or begins with ``text``, or else runs that have a job of this number."""
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
    """Enter the user's runs below these directories; return all of the user's, by their resolved paths."""
    found = {str(run.path): run for _, run in known_runs()}
    for root in roots():
        for run in _below(root, found):
            if remember(run):
                found[str(run.path.resolve())] = run
    return found


def _below(root: Path, found: Container[str] = ()) -> list[RunDir]:
    """Return candidates for runs below ``root``, without the paths in ``found``."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    # a run that is being staged is hidden until it is renamed
    return [RunDir(root / name) for name in names if not name.startswith(".") and f"{root}/{name}" not in found]


def _noticed(run: RunDir) -> RunDir:
    remember(run)
    return run


def _is_run(run: RunDir) -> bool:
    try:
        return run.record_path.is_file()
    except OSError:  # not readable for this user
        return False


def _refuse_closed(run: RunDir) -> None:
    """Raise RunDirError where a run exists and its owner does not permit other users to read it."""
    try:
        run.record_path.stat()
    except PermissionError:
        raise RunDirError(
            f"you may not read {run.path}{_owner(run.path)}\n"
            "    hint: a run is private to its user; the user can open it to a group: hpcrl share RUN --group NAME"
        ) from None
    except OSError:
        return


def _owner(path: Path) -> str:
    """Return the owner of a directory as the end of a sentence; empty where the owner is unknown."""
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
        except OSError:  # it was just removed, or is not readable for this user
            continue
    return [run for _, run in sorted(dated, key=lambda each: each[0], reverse=True)]
