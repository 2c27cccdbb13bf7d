"""Sources of tasks: sets of hpcrl, rows of published data sets, and directories of Harbor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.swe.sources.columns import RowError, shown_value
from hpcrl.swe.sources.harbor import read_harbor
from hpcrl.swe.sources.r2e_gym import r2e_gym_task
from hpcrl.swe.sources.swe_bench import swe_bench_task, swe_smith_task
from hpcrl.swe.sources.table import read_table
from hpcrl.swe.task import SweTask, SweTaskError, check_task, read_tasks

__all__ = ["FORMATS", "LoadedTasks", "load_tasks"]

_ROWS: Mapping[str, Callable[[Mapping[str, Any], str], SweTask]] = {
    "swe-bench": swe_bench_task,
    "swe-gym": swe_bench_task,
    "swe-smith": swe_smith_task,
    "r2e-gym": r2e_gym_task,
}
FORMATS = ("hpcrl", *_ROWS, "harbor")
"""Formats that are read."""
_MAX_NAMED = 10
_TREE_SUFFIXES = ("", ".tar", ".tar.gz", ".tgz", ".tar.xz")


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """Tasks of a source.

    Attributes
    ----------
    tasks:
        The tasks.
    directory:
        Directory that paths of their trees are relative to.
    notes:
        Descriptions of rows that were left out, a sentence each.
    """

    tasks: list[SweTask]
    directory: Path
    notes: list[str] = field(default_factory=list)


def load_tasks(path: Path, kind: str = "hpcrl", *, trees: Path | None = None) -> LoadedTasks:
    """Read the tasks of a source.

    Parameters
    ----------
    kind:
        One of `FORMATS`.
    trees:
        Directory with the repositories of rows.

    Raises
    ------
    SweTaskError
        Nothing can be read, or tasks are wrong; the first ten are named.
    """
    if kind == "hpcrl":
        return LoadedTasks(list(read_tasks(path)), path.parent)
    if kind == "harbor":
        return LoadedTasks(read_harbor(path), path)
    if kind not in _ROWS:
        raise SweTaskError(f"{kind!r} is not a format of tasks\n    hint: there are {', '.join(FORMATS)}")
    if trees is None or not trees.is_dir():
        where = "is missing" if trees is None else f"names {trees}, which is not a directory"
        hint = "give a directory with a repository for each row: docs/swe.md"
        raise SweTaskError(f"rows of {kind} have no files, and `trees` {where}\n    hint: {hint}")
    return _load_rows(path, kind, trees)


def _load_rows(path: Path, kind: str, trees: Path) -> LoadedTasks:
    tasks: list[SweTask] = []
    problems: list[str] = []
    missing: list[str] = []
    other: list[str] = []
    seen: set[str] = set()
    for place, row in read_table(path):
        try:
            tree = _find_tree(row, trees)
            task = _ROWS[kind](row, tree)
            if task.id in seen:
                raise RowError(f"its id {task.id!r} is that of another row as well")
            seen.add(task.id)
            if not tree:
                missing.append(task.id)
                continue
            check_task(task)
            if foreign := [test for test in (*task.fail_to_pass, *task.pass_to_pass) if "::" not in test]:
                other.append(f"{task.id} with {shown_value(foreign[0])!r}")
                continue
            tasks.append(task)
        except UsageError as error:
            problems.append(f"  {path}, {place}: {error}")
            if len(problems) == _MAX_NAMED:
                break
    if problems:
        hint = f"are these rows of {kind}? `hpcrl swe ls` shows what can be read"
        raise SweTaskError("rows cannot be used:\n" + "\n".join(problems) + f"\n    hint: {hint}")
    if other and not tasks:
        hint = "rows whose tests run by pytest can be used"
        raise SweTaskError(f"{path} has no row with ids of pytest: {other[0]}, for example\n    hint: {hint}")
    if not tasks:
        what = f"{path} has no row with a repository in {trees}" if missing else f"{path} has no rows"
        example = f": {missing[0]}.tar, for example, does not exist" if missing else ""
        raise SweTaskError(f"{what}{example}\n    hint: docs/swe.md says how trees are named")
    notes = []
    if missing:
        notes.append(f"{len(missing)} rows have no repository in {trees}, and are left out: {missing[0]}, for example")
    if other:
        what = "have tests that are not named as pytest does, and are left out"
        notes.append(f"{len(other)} rows {what}: {other[0]}, for example")
    return LoadedTasks(tasks, trees, notes)


def _find_tree(row: Mapping[str, Any], trees: Path) -> str:
    """Return the name of the repository of a row in the directory of trees; empty where it is not there."""
    repository = str(row.get("repo") or row.get("repo_name") or "").replace("/", "__")
    commit = str(row.get("base_commit") or row.get("commit_hash") or "")
    names = [str(row.get("instance_id") or ""), f"{repository}@{commit}" if commit else "", repository]
    for name in names:
        # a row must not lead out of the directory
        if name and "/" not in name and name not in (".", ".."):
            for suffix in _TREE_SUFFIXES:
                if (trees / f"{name}{suffix}").exists():
                    return f"{name}{suffix}"
    return ""
