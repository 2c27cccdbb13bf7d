"""Runs whose files cannot be read: the list names each with the reason, and shows the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_testing import Hpcrl, make_run, write_status, write_steps

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.listing import list_rows, unreadable_reason

GOOD = ("after", "before")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that can be read, and four that cannot, each for another reason."""
    root = tmp_path / "runs"
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(root))
    runs = {name: make_run(root, name) for name in (*GOOD, "torn", "newer", "status", "metrics")}
    for run in runs.values():
        write_status(run, RunState.COMPLETED)
        write_steps(run, 2)
    torn = runs["torn"].record_path
    torn.write_bytes(torn.read_bytes()[:100])
    record = json.loads(runs["newer"].record_path.read_bytes())
    runs["newer"].record_path.write_text(json.dumps(record | {"format_version": 99}))
    runs["status"].status_path.write_text("[]")
    # also root, who may read every file, cannot read this one
    metrics = runs["metrics"].metrics_dir / "0001.jsonl"
    metrics.unlink()
    metrics.mkdir()
    return root


@pytest.mark.parametrize("options", [[], ["--json"], ["--state", "COMPLETED"]])
def test_ls_names_what_it_leaves_out_and_lists_the_others(root: Path, hpcrl: Hpcrl, options: list[str]) -> None:
    code, out, err = hpcrl("ls", *options)
    assert code == 0
    if "--json" in options:
        assert sorted(row["name"] for row in json.loads(out)["runs"]) == sorted(GOOD)
    else:
        assert sorted(line.split()[0] for line in out.splitlines()[1:]) == sorted(GOOD)
    lines = {line.partition(" ")[0]: line for line in err.splitlines()}
    assert len(err.splitlines()) == len(lines) == 4
    assert lines["torn"].startswith(f"torn is left out: {root}/torn/run.json cannot be read: ")
    assert lines["newer"].startswith(f"newer is left out: {root}/newer/run.json has format 99, this hpcrl reads ")
    assert lines["status"].startswith(f"status is left out: {root}/status/status.json cannot be read: ")
    assert "Is a directory" in lines["metrics"]


def test_ls_of_unreadable_runs_alone_does_not_deny_them(root: Path, hpcrl: Hpcrl) -> None:
    for name in GOOD:
        (root / name / "run.json").write_text("")
    code, out, err = hpcrl("ls")
    assert (code, out) == (0, "")
    assert len(err.splitlines()) == 6
    assert "there is no run" not in err


def test_readable_and_removed_runs_have_no_reason(root: Path) -> None:
    assert unreadable_reason(RunDir(root / GOOD[0])) == ""
    assert unreadable_reason(RunDir(root / "removed")) == ""
    named: list[str] = []
    rows = list_rows(
        [RunDir(root / name) for name in ("removed", *GOOD)], left_out=lambda run, why: named.append(run.name)
    )
    assert ([row.name for row in rows], named) == ([*GOOD], [])


def test_callers_that_ask_for_no_reasons_get_the_readable_runs(root: Path) -> None:
    rows = list_rows([RunDir(path) for path in sorted(root.iterdir())])
    assert sorted(row.name for row in rows) == sorted(GOOD)
