"""A submit reads nothing back from the run directory that it has just written."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervisor_testing import make_cluster, make_plan, make_recipe

from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.submit.new_run import submit_new
from hpcrl.submit.submission import cancel, create_run

READERS = ((RunRecord, "read"), (RunDir, "plan"), (RunDir, "recipe"), (RunDir, "cluster"))


def test_a_new_run_is_handed_over_without_a_look_into_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*args: object) -> None:
        raise AssertionError("the run directory was read by those who had just been handed what is in it")

    with monkeypatch.context() as blind:
        for owner, name in READERS:
            blind.setattr(owner, name, look)
        made = create_run(make_recipe(), make_cluster(), make_plan(tmp_path / "run-1"))  # type: ignore[arg-type]
        submission = submit_new(made)
    try:
        assert RunRecord.read(made.run).submissions == [submission], "and it is on record"
        assert RunRecord.read(made.run).run_id == made.record.run_id
    finally:
        cancel(made.run, user="test")
