"""`hpcrl site first-run`: stages in order, what stops it, what is kept, and the report."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.bringup import limit_stages
from hpcrl.bringup.limit_stages import time_limit, without_interruption
from hpcrl.bringup.records import STATE_FILE, FirstRunState, StageStatus
from hpcrl.bringup.stage import BringupStage, FirstRunRequest, Outcome, SiteBench, StageStoppedError
from hpcrl.bringup.stage_runner import FirstRunEnd, FirstRunResult, first_run
from hpcrl.bringup.stages import STAGES
from hpcrl.errors import DeadlineError, HpcrlError, UsageError

NAMES = [stage.name for stage in STAGES]


class Trial:
    """A first run of stages that do nothing, on a profile of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "first run"
        self.profile = tmp_path / "mine.yaml"
        self.profile.write_text("extends: devcluster\nname: mine\n")
        self.calls: list[str] = []
        self.said: list[str] = []
        self.faults: dict[str, BaseException] = {}
        self.options: dict[str, Any] = {}

    def stages(self) -> list[BringupStage]:
        return [
            BringupStage(name=name, what=name, run=self._stage(name), limit_s=60, inputs=self._inputs) for name in NAMES
        ]

    def _inputs(self, bench: SiteBench) -> Any:
        return self.options

    def _stage(self, name: str) -> Callable[[SiteBench], Outcome]:
        def run(bench: SiteBench) -> Outcome:
            self.calls.append(name)
            if name in self.faults:
                raise self.faults[name]
            return Outcome(summary=f"{name} is good", facts={"found": name})

        return run

    def run(self, **options: Any) -> FirstRunResult:
        self.calls.clear()
        self.said.clear()
        request = FirstRunRequest(
            cluster=str(self.profile), directory=self.directory, cwd=self.profile.parent, environ={}, command="again"
        )
        return first_run(request, say=self.said.append, stages=self.stages(), **options)

    def report(self) -> Any:
        return json.loads((self.directory / "report.json").read_text())

    def statuses(self) -> list[str]:
        return [row["status"] for row in self.report()["stages"]]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_stages_run_in_order_and_the_report_says_what_they_found(trial: Trial) -> None:
    result = trial.run()
    assert result == FirstRunResult(FirstRunEnd.PASSED, "run", trial.directory / "report.md")
    assert result.end.exit_code == 0
    assert trial.calls == NAMES == ["init", "check", "check-job", "plan", "probe", "run"]
    report = trial.report()
    assert report["result"] == "passed"
    assert len(report["profile_sha256"]) == 64
    assert report["versions"]["hpcrl"]
    assert [row["facts"] for row in report["stages"]] == [{"found": name} for name in NAMES]
    text = result.report.read_text()
    assert "# First run on " in text
    assert "| check-job | ok |" in text
    assert report["profile_sha256"] in text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fault",
    [
        StageStoppedError("the moon is full\n    hint: wait", commands=["hpcrl wait"]),
        HpcrlError("the moon is full\n    hint: wait"),
        OSError(28, "No space left on device", "the moon is full"),
    ],
    ids=["stopped", "hpcrl", "os"],
)
def test_it_stops_at_the_first_fault_and_continues_there(trial: Trial, name: str, fault: Exception) -> None:
    trial.faults = {name: fault}
    result = trial.run()
    assert (result.end, result.stage, result.end.exit_code) == (FirstRunEnd.STOPPED, name, 1)
    number = NAMES.index(name)
    assert trial.calls == NAMES[: number + 1]
    assert trial.statuses() == ["ok"] * number + ["stopped"] + ["not begun"] * (len(NAMES) - number - 1)
    report = trial.report()
    assert report["result"] == "not passed"
    row = report["stages"][number]
    assert "moon is full" in row["message"]
    assert row["ways_on"][-1] == "again"
    assert report["next"] == row["ways_on"]
    assert any("continue: again" in line for line in trial.said)
    trial.faults = {}
    assert trial.run().end is FirstRunEnd.PASSED
    assert trial.calls == NAMES[number:]
    assert trial.statuses() == ["ok"] * len(NAMES)


def test_what_has_passed_is_run_again_with_another_profile_or_other_inputs(trial: Trial) -> None:
    trial.run()
    trial.run()
    assert trial.calls == []
    assert any("passed on" in line for line in trial.said)
    trial.profile.write_text("extends: devcluster\nname: mine\nlimits: {time_limit_h: 2}\n")
    trial.run()
    assert trial.calls == NAMES
    # a comment is not another profile
    trial.profile.write_text("# mine\nextends: devcluster\nname: mine\nlimits: {time_limit_h: 2}\n")
    trial.run()
    assert trial.calls == []
    trial.options = {"nodes": 3}
    trial.run()
    assert trial.calls == NAMES
    trial.run(again=True)
    assert trial.calls == NAMES


def test_a_profile_that_changes_while_a_stage_runs_is_another_one(trial: Trial) -> None:
    stages = trial.stages()
    quick = stages[2].run

    def edited(bench: SiteBench) -> Outcome:
        trial.profile.write_text("extends: devcluster\nname: mine\nlimits: {time_limit_h: 3}\n")
        return quick(bench)

    stages[2] = dataclasses.replace(stages[2], run=edited)
    request = FirstRunRequest(cluster=str(trial.profile), directory=trial.directory, cwd=Path.cwd(), environ={})
    assert first_run(request, say=trial.said.append, stages=stages).end is FirstRunEnd.PASSED
    trial.run()
    # those before had seen the old one, too; those behind it the new one
    assert trial.calls == ["init", "check", "check-job"]


def test_from_a_stage_leaves_out_what_has_not_passed_and_says_so(trial: Trial) -> None:
    trial.faults = {"check-job": HpcrlError("a switch is broken")}
    trial.run()
    result = trial.run(begin="plan")
    assert result.end is FirstRunEnd.PASSED
    assert trial.calls == ["plan", "probe", "run"]
    assert trial.statuses() == ["ok", "ok", "left out", "ok", "ok", "ok"]
    assert trial.report()["left_out"] == ["check-job"]
    assert "Not checked, because of `--from`: check-job." in result.report.read_text()
    # the next call does not take it for passed
    trial.faults = {}
    trial.run()
    assert trial.calls == ["check-job"]


def test_an_unknown_stage_is_refused_before_anything_is_written(trial: Trial) -> None:
    with pytest.raises(UsageError, match=r"no stage 'moon'\n    hint: init, check, check-job, plan, probe, run"):
        trial.run(begin="moon")
    assert not trial.directory.exists()


def test_ctrl_c_keeps_what_has_passed(trial: Trial) -> None:
    trial.faults = {"probe": KeyboardInterrupt()}
    result = trial.run()
    assert (result.end, result.stage, result.end.exit_code) == (FirstRunEnd.INTERRUPTED, "probe", 130)
    assert trial.statuses() == ["ok", "ok", "ok", "ok", "interrupted", "not begun"]
    assert trial.report()["next"] == ["again"]
    assert "continue: again" in trial.said[-1]
    trial.faults = {}
    trial.run()
    assert trial.calls == ["probe", "run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_session_is_an_interruption(trial: Trial, number: signal.Signals) -> None:
    stages = trial.stages()

    def killed(bench: SiteBench) -> Outcome:
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError

    stages[2] = BringupStage(name="check-job", what="", run=killed, limit_s=60)
    before = signal.getsignal(number)
    request = FirstRunRequest(cluster=str(trial.profile), directory=trial.directory, cwd=Path.cwd(), environ={})
    result = first_run(request, say=trial.said.append, stages=stages)
    assert (result.end, result.stage) == (FirstRunEnd.INTERRUPTED, "check-job")
    assert signal.getsignal(number) is before


def test_a_defect_of_hpcrl_is_on_record_and_not_hidden(trial: Trial) -> None:
    trial.faults = {"plan": ZeroDivisionError("by zero")}
    with pytest.raises(ZeroDivisionError):
        trial.run()
    assert trial.report()["stages"][3]["summary"] == "ZeroDivisionError: by zero"
    assert trial.statuses()[3] == "stopped"


def test_a_stage_that_takes_too_long_is_ended(trial: Trial) -> None:
    stages = trial.stages()
    stages[1] = BringupStage(name="check", what="", run=lambda bench: time.sleep(60), limit_s=0.2)  # type: ignore[arg-type,return-value]
    request = FirstRunRequest(cluster=str(trial.profile), directory=trial.directory, cwd=Path.cwd(), environ={})
    result = first_run(request, say=trial.said.append, stages=stages)
    assert (result.end, result.stage) == (FirstRunEnd.STOPPED, "check")
    assert "the stage check did not end within 0.2 s" in trial.report()["stages"][1]["message"]


def test_a_time_limit_leaves_an_outer_one_as_it_was() -> None:
    def inner_first() -> None:
        with time_limit(0.3, "the outer"):
            with time_limit(60, "the inner"):
                pass
            time.sleep(60)

    with pytest.raises(DeadlineError, match="the outer"):
        inner_first()


def test_a_time_limit_that_is_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_stages, "_AGAIN_S", 0.1)
    swallowed = []

    def swallow() -> None:
        with time_limit(0.1, "it"):
            try:
                time.sleep(60)
            except DeadlineError as error:
                swallowed.append(error)
            time.sleep(60)

    with pytest.raises(DeadlineError):
        swallow()
    assert swallowed


@pytest.mark.parametrize("threads", [0, 1])
def test_an_interruption_waits_for_the_end_of_a_submission(threads: int) -> None:
    """Also where the signal goes to another thread, in which it is not held back."""
    done, end = [], threading.Event()
    others = [threading.Thread(target=end.wait) for _ in range(threads)]
    for other in others:
        other.start()

    def submit() -> None:
        with without_interruption():
            os.kill(os.getpid(), signal.SIGINT)
            # a child would die of what is not held back
            held = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True, check=True)
            assert int(held.stdout.split()[1], 16) >> (signal.SIGINT - 1) & 1
            done.append("submitted")

    with pytest.raises(KeyboardInterrupt):
        submit()
    assert done == ["submitted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    end.set()
    for other in others:
        other.join()


def test_outside_of_the_main_thread_there_is_no_limit(trial: Trial) -> None:
    results: list[FirstRunResult] = []
    thread = threading.Thread(target=lambda: results.append(trial.run()))
    thread.start()
    thread.join()
    assert results[0].end is FirstRunEnd.PASSED


def test_two_calls_in_one_directory_are_one_too_many(trial: Trial) -> None:
    trial.directory.mkdir()
    with (trial.directory / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another first run is at work"):
            trial.run()
    assert trial.run().end is FirstRunEnd.PASSED


@pytest.mark.parametrize("text", ["", "{", '{"format_version": 99}', '{"format_version": 1}', "[]", "\x00" * 20])
def test_a_damaged_state_is_named(trial: Trial, text: str) -> None:
    trial.directory.mkdir()
    (trial.directory / STATE_FILE).write_text(text)
    with pytest.raises(UsageError, match=r"state\.json cannot be read(?s:.*)hint: remove it"):
        trial.run()


def test_the_state_of_another_site_is_not_taken(trial: Trial) -> None:
    trial.directory.mkdir()
    FirstRunState(cluster="theirs").write(trial.directory)
    with pytest.raises(UsageError, match=r"is of the first run on theirs, not on .*mine"):
        trial.run()


def test_only_what_passed_lends_its_facts(trial: Trial) -> None:
    trial.faults = {"check-job": StageStoppedError("no", facts={"gpus": {"gpu": 8}})}
    trial.run()
    state = FirstRunState.read(trial.directory, str(trial.profile))
    assert state.stages["check-job"].facts == {"gpus": {"gpu": 8}}
    request = FirstRunRequest(cluster=str(trial.profile), directory=trial.directory, cwd=Path.cwd(), environ={})
    bench = SiteBench(request, state, trial.said.append)
    assert bench.facts("check-job") == {}
    assert bench.facts("check") == {"found": "check"}
    assert state.stages["check-job"].status is StageStatus.STOPPED
