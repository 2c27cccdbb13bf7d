"""Files of tasks are a part of what a run trains on: same path and other rows is another experiment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import yaml
from runs_testing import make_run

from hpcrl.analysis.comparison.differences import equal_settings, find_differences
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start import task_files
from hpcrl.runs.start.snapshot import changes_since_submit, keep_snapshot, read_snapshot, take_snapshot
from hpcrl.runs.start.task_files import data_states


def submitted(root: Path, name: str, rows: Path, held_out: Path) -> RunDir:
    """A run as a submit leaves it, whose questions are in files."""
    run = make_run(root, name)
    recipe = yaml.safe_load(run.recipe_path.read_text())
    questions = {"name": "q", "kind": "dataset", "path": str(rows), "held_out_path": str(held_out)}
    recipe["environments"] = [questions | {"rewards": [{"kind": "exact"}]}]
    run.recipe_path.write_text(yaml.safe_dump(recipe))
    keep_snapshot(run, take_snapshot(run, run.recipe(), run.plan(), with_data=True))
    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n')
    return path


def test_runs_of_other_rows_are_no_replicates(tmp_path: Path, rows: Path) -> None:
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    (held_out / "a.jsonl").write_text("{}\n")
    runs = [submitted(tmp_path / "runs", name, rows, held_out) for name in ("one", "two")]
    assert equal_settings(runs) == [[0, 1]]
    rows.write_text('{"prompt": "1+1", "answer": "3"}\n')  # the same size
    runs.append(submitted(tmp_path / "runs", "three", rows, held_out))
    (held_out / "a.jsonl").rename(held_out / "b.jsonl")
    runs.append(submitted(tmp_path / "runs", "four", rows, held_out))
    assert equal_settings(runs) == [[0, 1], [2], [3]]
    found = {each.key: each.values for each in find_differences(runs)}
    first, _, third, fourth = found[f"data.{rows}"]
    assert first != third == fourth
    assert len(set(found[f"data.{held_out}"])) == 2
    # rows are compared between runs, not at each attempt, which would read them again
    rows.write_text("")
    assert changes_since_submit(runs[0]) == []


def test_runs_whose_rows_were_not_read_are_no_replicates(tmp_path: Path, rows: Path) -> None:
    runs = [submitted(tmp_path / "runs", name, rows, tmp_path / "missing") for name in ("one", "two")]
    kept = read_snapshot(runs[0])
    assert kept is not None
    assert kept.data[str(tmp_path / "missing")] == ""
    assert equal_settings(runs) == [[0], [1]]


def test_a_filesystem_that_hangs_does_not_hang_a_submit(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # opening a pipe that nobody writes to hangs, as a mount does
    os.mkfifo(tmp_path / "pipe")
    run = submitted(tmp_path / "runs", "one", rows, rows)
    recipe = run.recipe()
    (environment,) = recipe.environments
    hung = environment.model_copy(update={"held_out_path": str(tmp_path / "pipe")})
    found = data_states(recipe.model_copy(update={"environments": (hung,)}), longest_s=3.0)
    assert found[str(rows)].startswith("sha256:")
    assert found[str(tmp_path / "pipe")] == ""
    (thread,) = [each for each in threading.enumerate() if each.name == "files of tasks"]
    assert thread.daemon
    (tmp_path / "pipe").open("wb").close()
    thread.join()


def test_large_files_are_known_by_size_and_time(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = submitted(tmp_path / "runs", "one", rows, rows).recipe()
    whole = data_states(recipe)[str(rows)]
    monkeypatch.setattr(task_files, "MOST_BYTES", 5)
    os.utime(rows, (1000, 1000))
    assert data_states(recipe) == {str(rows): f"{rows.stat().st_size} bytes, changed at 1000.000000"}
    assert whole.startswith("sha256:")
