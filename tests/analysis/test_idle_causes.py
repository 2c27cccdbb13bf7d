"""A page says what the trainer waited for, as ``hpcrl why --slow`` does, and its seconds add up to the waits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from slow_runs import Pace, play

from hpcrl.analysis.page.idle_seconds import waiting_causes
from hpcrl.analysis.series import read_history
from hpcrl.runs.rundir import RunDir

CASES = {
    "they were at an engine, its queue included": Pace(reply=3.0),
    "they were in the code of an environment": Pace(tool=3.0),
    "they were in an environment whose tools run in sandboxes": Pace(tool=3.0, environment="calculator"),
    "they had their last reply, and no reward yet": Pace(judge=3.0),
    # synchronous: no rollout begins before engines have the version
    "a version was written or loaded": Pace(load=3.0, bound=0),
}


def causes_of(run: RunDir) -> tuple[dict[str, float], float]:
    """Return the causes of the waits of a run, and the seconds of these waits."""
    history = read_history(run)
    waited_s = sum(record.phases_s["wait_batch"] for record in history.records)
    return waiting_causes(history, [], run.recipe()), waited_s


@pytest.mark.parametrize("cause", sorted(CASES))
def test_the_slow_part_is_the_cause_of_most_waiting(tmp_path: Path, cause: str) -> None:
    found, waited_s = causes_of(play(tmp_path, "slow", CASES[cause]))
    assert sum(found.values()) == pytest.approx(waited_s, rel=1e-6)
    assert max(found, key=lambda name: found[name]) == cause, found
    assert found[cause] > 0.5 * waited_s


def test_some_steps_of_a_long_run_stand_for_the_others(tmp_path: Path) -> None:
    found, waited_s = causes_of(play(tmp_path, "long", Pace(tool=3.0, steps=100)))
    assert sum(found.values()) == pytest.approx(waited_s, rel=1e-6)
    (cause,) = [name for name in found if "in the code of an environment" in name]
    assert cause.startswith("they were in the code of an environment (as in 60 of ")
    assert found[cause] > 0.5 * waited_s


def test_waits_without_rollouts_on_record_have_an_unknown_cause(tmp_path: Path) -> None:
    run = play(tmp_path, "bare", Pace(tool=3.0))
    shutil.rmtree(run.rollouts_dir)
    found, waited_s = causes_of(run)
    assert found["the times of their requests are not on record"] > 0.5 * waited_s
    assert sum(found.values()) == pytest.approx(waited_s, rel=1e-6)
