"""Sweeps by `hpcrl.api`: the same as by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_lab import SweepLab

from hpcrl import api
from hpcrl.errors import ConfigError, RunDirError, UsageError
from hpcrl.runs.waiting import WaitTimeoutError

PROBE = {"job.payload": "probe"}
RATE = "trainer.optimizer.learning_rate"


def test_a_sweep_is_started_found_and_waited_for(lab: SweepLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", lab.env["PYTHONPATH"])
    sweep = api.submit_sweep("quickstart", "local", PROBE, grid={RATE: [1e-4, 2e-4]}, name="rates", root=lab.root)
    with pytest.raises(WaitTimeoutError, match="rates has not ended within 0 s"):
        sweep.wait(timeout_s=0.0)
    found = api.Sweep("rates", root=lab.root)
    assert found.path == sweep.path
    result = found.wait(timeout_s=200.0)
    assert result.counts == {"COMPLETED": 2}
    assert [row.values for row in result.members] == [{RATE: "0.0001"}, {RATE: "0.0002"}]
    assert [run.name for run in found.runs()] == ["rates-01", "rates-02"]
    assert [run.status().state for run in found.runs()] == ["COMPLETED"] * 2
    assert lab.json("sweep", "status", "rates")["counts"] == {"COMPLETED": 2}
    with pytest.raises(ConfigError, match="the run rates-01 exists"):
        api.submit_sweep("quickstart", "local", PROBE, seeds=2, name="rates", root=lab.root)


def test_what_makes_a_single_run_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    with pytest.raises(UsageError, match="needs a grid, samples or several seeds"):
        api.submit_sweep("quickstart", overrides=PROBE, root=root)
    with pytest.raises(ConfigError, match="learning_rat"):
        api.submit_sweep("quickstart", overrides=PROBE, grid={"trainer.optimizer.learning_rat": [1, 2]}, root=root)
    with pytest.raises(RunDirError, match="there is no sweep none"):
        api.Sweep("none", root=root)
    assert list(tmp_path.iterdir()) == []
