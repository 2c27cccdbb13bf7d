"""Finding runs by name and by path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs_testing import make_run

from hpcrl.errors import RunDirError, UsageError
from hpcrl.runs.registry import check_name, find_run, list_runs, newest_run


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "a", "c")):
        os.utime(make_run(tmp_path, name).plan_path, (1000 - age, 1000 - age))
    (tmp_path / "no run").mkdir()
    (tmp_path / ".staging-d-token").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["b", "a", "c"]
    assert newest_run(list_runs(tmp_path), "here").name == "b"


def test_a_root_that_does_not_exist_has_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere") == []
    with pytest.raises(RunDirError, match="hpcrl submit"):
        newest_run([], "in nowhere")


def test_by_name_by_path_and_by_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "a 'root'\nof two lines"
    run = make_run(root, "quick-1")
    assert find_run("quick-1", root).path == run.path
    assert find_run(str(run.path), tmp_path).path == run.path
    monkeypatch.chdir(run.path)
    assert find_run(".", tmp_path).path == run.path


@pytest.mark.parametrize(("asked", "hint"), [("quik-1", "did you mean quick-1?"), ("xyz", "hpcrl ls")])
def test_an_unknown_name_gets_a_hint(tmp_path: Path, asked: str, hint: str) -> None:
    make_run(tmp_path, "quick-1")
    with pytest.raises(RunDirError) as caught:
        find_run(asked, tmp_path)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a b", "-x", "a/b", "x" * 64, "ä"])
def test_a_name_that_is_not_a_safe_directory_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a run"):
        check_name(name)


def test_a_list_of_many_runs_reads_few_files_of_each_and_no_schema(tmp_path: Path) -> None:
    """What `ls` costs is what it opens and loads: on a shared filesystem each opened file is a question to a server."""
    for name in ("a", "b", "c"):
        make_run(tmp_path / "many", name)
    code = """
import collections, sys
opened = collections.Counter()
sys.addaudithook(lambda event, given: opened.update([str(given[0])]) if event == "open" else None)
sys.argv = ["hpcrl", "ls"]
from hpcrl.cli.main import main
try:
    main()
finally:
    print(sum("/many/" in path for path in opened.elements()), "hpcrl.config.recipe" in sys.modules)
"""
    here = {**os.environ, "HPCRL_RUNS_ROOT": str(tmp_path / "many"), "XDG_STATE_HOME": str(tmp_path / "state")}
    for _ in range(2):  # the first enters the runs into the registry
        out = subprocess.run(
            [sys.executable, "-c", code], env=here, cwd=tmp_path, capture_output=True, text=True, check=True
        )
    assert out.stdout.splitlines()[1].split()[0] == "c", out
    opened, schemas = out.stdout.split()[-2:]
    # run.json twice (is it ours; what is it), plan.json once, and status.json twice of a run that seems to have no end
    assert (int(opened), schemas) == (3 * 5, "False")
