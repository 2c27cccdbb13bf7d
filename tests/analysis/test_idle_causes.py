"""A page says what the trainer waited for, as ``hpcrl why --slow`` does, and its seconds add up to the waits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from runs_testing import START_S, make_run, step_record, write_event
from slow_runs import Pace, play

from hpcrl.analysis.bounds.rollout_states import TimeHolder
from hpcrl.analysis.bounds.step_waits import StepWaits
from hpcrl.analysis.page.idle_seconds import waiting_causes
from hpcrl.analysis.series import read_history
from hpcrl.runs.consumed import step_name
from hpcrl.runs.events import read_events
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


def test_steps_of_all_parts_of_a_long_run_are_read(tmp_path: Path) -> None:
    run = play(tmp_path, "long", Pace(tool=3.0, steps=100))
    for step in range(77, 101):
        (run.rollouts_dir / f"step-{step:06d}.jsonl").unlink()
    found, waited_s = causes_of(run)
    (unknown_s,) = [seconds for name, seconds in found.items() if "not on record" in name]
    assert 0.1 * waited_s < unknown_s < 0.4 * waited_s


def test_an_update_that_ends_after_the_wait_counts_as_far_as_it_lies_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record = msgspec.structs.replace(
        step_record(1), time_s=START_S + 40.0, phases_s={"wait_batch": 10.0, "other": 30.0}
    )
    run.rollouts_dir.mkdir()
    # the only rollout begins when the wait is over
    line = {"environment": "words", "seconds": 5.0, "ended_s": START_S + 25.0, "turns": [[1, 1, 0.0, 5.0, 0, 0]]}
    (run.rollouts_dir / step_name(1)).write_text(json.dumps(line) + "\n")
    for end, seconds in ((4.0, 1.0), (16.0, 9.0), (60.0, 2.0)):
        facts = {"engine": "engine-0", "version": 0, "seconds": seconds, "pause_s": 0.0}
        write_event(run, "engine.weights_updated", time_s=START_S + end, writer="orchestrator-0", **facts)
    parts = StepWaits(run, run.recipe(), read_events(run)).parts(record)
    assert parts == {(TimeHolder.HAND_OFF, ""): pytest.approx(4.0), (TimeHolder.ADMISSION, ""): pytest.approx(6.0)}


def test_waits_without_rollouts_on_record_have_an_unknown_cause(tmp_path: Path) -> None:
    run = play(tmp_path, "bare", Pace(tool=3.0))
    shutil.rmtree(run.rollouts_dir)
    found, waited_s = causes_of(run)
    assert found["the times of their requests are not on record"] > 0.5 * waited_s
    assert sum(found.values()) == pytest.approx(waited_s, rel=1e-6)
