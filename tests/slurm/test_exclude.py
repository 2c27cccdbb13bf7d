"""Nodes that the next job of a run stays away from, and how a job that waits is told."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from plans import plan_for

from hpcrl.config.plan import Plan
from hpcrl.runs.exclusions import exclude
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm import exclude as module
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.exclude import exclude_from_job, nodes_to_exclude, stay_away


def plan(*settings: str) -> Plan:
    return plan_for("quickstart", "devcluster", *settings)[0]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that would stay away from n1, which fell later, and from n2."""
    made = RunDir(tmp_path)
    now_s = time.time()
    exclude(made, {"n2": "no fan"}, attempt=1, now_s=now_s - 50.0, seconds=3600.0)
    exclude(made, {"n1": "no fan"}, attempt=2, now_s=now_s, seconds=3600.0)
    return made


def with_nodes(slurm: FakeSlurm, *nodes: tuple[str, str, str]) -> None:
    text = "".join(f"NodeName={name} State={state} Partitions={parts}\n" for name, state, parts in nodes)
    slurm.scontrol = lambda argv: CommandResult(0, text, "")  # type: ignore[attr-defined]


IDLE = [(f"n{i}", "IDLE", "gpu") for i in range(1, 6)]


@pytest.mark.parametrize(
    ("nodes", "excluded"),
    [
        (IDLE, ["n1", "n2"]),
        (IDLE[:4], ["n1", "n2"]),
        # two are needed: of three nodes one may be left out, the one that fell last
        (IDLE[:3], ["n1"]),
        (IDLE[:2], []),
        # nodes that cannot be used, or are of another partition, are not left for the run
        ([*IDLE[:3], ("n4", "DOWN", "gpu")], ["n1"]),
        ([*IDLE[:3], ("n4", "IDLE", "cpu")], ["n1"]),
        ([*IDLE[:3], ("n4", "ALLOCATED", "cpu,gpu")], ["n1", "n2"]),
        # Slurm refuses a name that it does not know
        ([IDLE[0], *IDLE[2:]], ["n1"]),
    ],
)
def test_as_many_are_left_out_as_leave_enough(
    run: RunDir, slurm: FakeSlurm, nodes: list[tuple[str, str, str]], excluded: list[str]
) -> None:
    with_nodes(slurm, *nodes)
    assert nodes_to_exclude(run, plan(), slurm.client()) == excluded


def test_all_jobs_of_a_run_are_counted(run: RunDir, slurm: FakeSlurm) -> None:
    """A trainer of one node and four replicas of one: five nodes are needed."""
    elastic = plan("job.layout=elastic", "engine.replicas=4")
    for count, excluded in ((5, []), (6, ["n1"]), (7, ["n1", "n2"])):
        with_nodes(slurm, *((f"n{i}", "IDLE", "gpu") for i in range(1, count + 1)))
        assert nodes_to_exclude(run, elastic, slurm.client()) == excluded


def test_where_no_node_fell_slurm_is_not_asked(tmp_path: Path, slurm: FakeSlurm) -> None:
    assert nodes_to_exclude(RunDir(tmp_path), plan(), slurm.client()) == []
    assert slurm.calls == []


def test_where_slurm_does_not_say_what_is_left_nothing_is_left_out(
    run: RunDir, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.away = True
    assert nodes_to_exclude(run, plan(), slurm.client()) == []
    assert "no nodes are excluded" in caplog.text


class Job:
    """A job that can be changed from some moment on; time passes while one waits."""

    def __init__(self, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, *, waits_from_s: float) -> None:
        self.slurm, self.waits_from_s = slurm, waits_from_s
        slurm.scontrol = self.scontrol  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=slurm.clock, sleep=slurm.sleep))

    def scontrol(self, argv: list[str]) -> CommandResult:
        if self.slurm.now < self.waits_from_s:
            return self.slurm.error("slurm_update error: Job is no longer pending execution")
        return CommandResult(0, "", "")


@pytest.mark.parametrize(("waits_from_s", "told"), [(0.0, True), (3.0, True), (5.0, True), (7.0, False), (1e9, False)])
def test_a_job_about_to_wait_gets_its_exclusions_until_it_waits(
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waits_from_s: float,
    told: bool,
) -> None:
    Job(slurm, monkeypatch, waits_from_s=waits_from_s)
    assert exclude_from_job(slurm.client(), 93, ["n1", "n2"], components=1, within_s=5.0) is told
    assert slurm.calls[-1] == ["scontrol", "update", "JobId=93", "ExcNodeList=n1,n2"]
    assert slurm.now == (waits_from_s if told else 6.0)
    assert ("job 93 keeps its nodes n1,n2" in caplog.text) is not told


def test_no_nodes_are_no_question(slurm: FakeSlurm) -> None:
    assert exclude_from_job(slurm.client(), 93, [], components=1, within_s=5.0)
    assert slurm.calls == []


@pytest.mark.parametrize(("layout", "names"), [("hetjob", ["93+0", "93+1"]), ("single", ["93"]), ("elastic", ["93"])])
def test_every_component_of_a_job_stays_away(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, layout: str, names: list[str]
) -> None:
    """In the layout elastic the others are jobs of their own."""
    Job(slurm, monkeypatch, waits_from_s=0.0)
    stay_away(plan(f"job.layout={layout}"), slurm.client(), 93, ["n1"], within_s=5.0)
    assert [call[2] for call in slurm.calls] == [f"JobId={name}" for name in names]


def test_a_job_that_keeps_its_nodes_is_not_an_error(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Job(slurm, monkeypatch, waits_from_s=1e9)
    stay_away(plan(), slurm.client(), 93, ["n1"], within_s=2.0)
    assert slurm.now == 3.0
    assert "job 93 keeps its nodes" in caplog.text
