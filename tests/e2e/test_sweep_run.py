"""A sweep of real small runs: members learn, its table compares them, and the best is found."""

from __future__ import annotations

import pytest
from lab import SMALL_RUN, Lab

from hpcrl.runs.record import RunRecord
from hpcrl.runs.run_progress import read_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.sweeps.results import read_sweep_result
from hpcrl.sweeps.sweep_files import SweepDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_sweep_finds_the_setting_that_learns(lab: Lab) -> None:
    """A learning rate of nearly 0 learns nothing; both seeds of each are one setting."""
    settings = (f"model.path={lab.model}", *SMALL_RUN, "trainer.steps=3", "trainer.optimizer.schedule=constant")
    sets = [part for setting in settings for part in ("--set", setting)]
    grid = ("--grid", "trainer.optimizer.learning_rate=1e-9,1e-3", "--seeds", "2", "--max-running", "2")
    lab.hpcrl("submit", "quickstart", "--name", "s", *sets, *grid)
    waited = lab.hpcrl("sweep", "wait", "s")
    result = read_sweep_result(SweepDir.below(lab.runs_root, "s"))
    assert result.counts == {"COMPLETED": 4}
    runs = [RunDir(lab.runs_root / row.run) for row in result.members]
    for row, run in zip(result.members, runs, strict=True):
        newest = read_evaluations(run)[-1]
        assert (row.step, row.version) == (3, 3)
        assert (row.heldout, row.count) == (newest.reward, newest.count) == (newest.reward, 8)
        assert row.low is not None
        assert row.low <= newest.reward <= (row.high or 0.0)
        assert RunRecord.read(run).tags == ["s"]
    assert [setting.noise for setting in result.settings] == ["seeds", "seeds"]
    assert result.best is not None
    rewards = {row.run: row.heldout or 0.0 for row in result.members}
    means = {float(each.values["trainer.optimizer.learning_rate"]): each.heldout for each in result.settings}
    assert means == {
        1e-9: pytest.approx((rewards["s-01"] + rewards["s-02"]) / 2),
        1e-3: pytest.approx((rewards["s-03"] + rewards["s-04"]) / 2),
    }
    assert result.best.heldout == max(means.values())
    assert waited.stdout.startswith("best: learning_rate=")
    assert "2 seeds" in waited.stdout
    listed = {row["name"]: row for row in lab.json("ls", "--runs-root", str(lab.runs_root))["runs"]}
    assert {name: row["heldout"] for name, row in listed.items()} == rewards
    assert "held-out" in lab.hpcrl("ls").stdout
