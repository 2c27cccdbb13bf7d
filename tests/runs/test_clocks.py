"""Failures of nodes whose clocks differ: ordered by one clock, and a word where that is unknown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from runs_testing import make_run

from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind, choose_cause
from hpcrl.runs.clocks import Clocks, NodeClock
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.role import Complaint, FailureRecord, RoleContext
from hpcrl.runs.rundir import RunDir

AHEAD_S = 3.1
CLOCKS = Clocks({"n1": NodeClock(AHEAD_S, 0.2), "n2": NodeClock(-0.05, 0.1), "n3": NodeClock(-7.0, 0.01)})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path, steps=10)
    (run.attempt_dir(1) / "failures").mkdir(parents=True, exist_ok=True)
    Clocks.path(run, 1).write_bytes(CLOCKS.encode())
    return run


def fails_on(node: str, role: str, time_s: float, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role fails there at a moment of the supervisor's clock, and writes what its node takes for the time."""
    monkeypatch.setenv("SLURMD_NODENAME", node)
    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.runs.role.time.time", lambda: time_s + CLOCKS.nodes[node].ahead_s)
        RoleContext(run, attempt=1, role=role, replica=0, rank=0).record_failure(ValueError(f"{role} broke"))


def end(role: str, time_s: float, node: str) -> Cause:
    return Cause(kind=CauseKind.EXIT, time_s=time_s, message=f"{role} ended", role=role, replica=0, node=node)


def test_the_first_failure_is_found_by_one_clock(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_on("n1", "trainer", 1000.0, run, monkeypatch)
    fails_on("n3", "engine", 1002.0, run, monkeypatch)  # by its own clock 10 s before the trainer
    records = FailureRecord.read_all(run, 1)
    assert [(r.role, r.node, round(r.time_s, 3)) for r in records] == [("trainer", "n1", 1000), ("engine", "n3", 1002)]
    cause = choose_cause([end("orchestrator", 1003.0, "n2")], records, CLOCKS)
    assert cause is not None
    assert (cause.role, cause.doubt) == ("trainer", "")


def test_what_clocks_cannot_tell_is_reported(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_on("n1", "trainer", 1000.0, run, monkeypatch)
    fails_on("n2", "engine", 1000.2, run, monkeypatch)
    cause = choose_cause([], FailureRecord.read_all(run, 1), CLOCKS)
    assert cause is not None
    assert (cause.role, cause.doubt) == (
        "trainer",
        "the clocks of n1 and n2 differ by 3.1 s ± 0.3 s: whether trainer 0 or engine 0 failed first is unknown",
    )


@pytest.mark.parametrize(
    ("other", "secondary"),
    [
        (end("engine", 1000.4, "n2"), False),  # further away than both clocks may be wrong
        (end("engine", 1000.1, "n1"), False),  # by the same clock
        (end("engine", 1000.1, "n2"), True),  # a consequence, whatever its time
    ],
)
def test_there_is_no_doubt_without_a_rival(other: Cause, secondary: bool) -> None:
    rival = msgspec.structs.replace(other, secondary=secondary)
    cause = choose_cause([end("trainer", 1000.0, "n1"), rival], [], CLOCKS)
    assert cause is not None
    assert (cause.role, cause.doubt) == ("trainer", "")


def test_events_and_complaints_are_read_by_the_supervisors_clock(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, moment_s in (("n3", 2002.0), ("n1", 2000.0), ("n2", 2001.0)):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        with monkeypatch.context() as patch:
            patch.setattr("hpcrl.runs.events.time.time", lambda t=moment_s, n=node: t + CLOCKS.nodes[n].ahead_s)
            writer = EventWriter(run, attempt=1, writer=f"of-{node}")
            writer.emit("test.moment")
            writer.close()
    found = [(event.node, round(event.time_s, 0)) for event in read_events(run, kind="test.moment")]
    # the clock of n2 may be right: its time is left alone
    assert found == [("n1", 2000.0), ("n2", 2001.0), ("n3", 2002.0)]
    Complaint(time_s=2000.0 + AHEAD_S, role="engine", replica=1, message="is stale", node="n1").write(run, 1)
    reports.flush(5.0)
    assert [round(c.time_s, 3) for c in Complaint.read_all(run, 1)] == [2000.0]


def test_times_stay_as_they_are_where_clocks_were_not_measured(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    Clocks.path(run, 1).unlink()
    fails_on("n1", "trainer", 1000.0, run, monkeypatch)
    assert [r.time_s for r in FailureRecord.read_all(run, 1)] == [1000.0 + AHEAD_S]


def test_the_clock_that_is_far_off_is_named() -> None:
    assert sorted(CLOCKS.far) == ["n1", "n3"]
    assert str(CLOCKS.compared("n1", "")) == "3.1 s ± 0.2 s"
