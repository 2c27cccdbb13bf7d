"""What readers of runs are told of jobs: one question about many, whose they are, and what a silent Slurm leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm, job, sacct_row

from hpcrl.runs.record import Submission
from hpcrl.slurm import lookup
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.lookup import slurm_client_of
from hpcrl.slurm.watch import JobWatcher

#: as they are where nobody changes them
INTERVAL_S, WAITING_INTERVAL_S = lookup._INTERVAL_S, lookup._WAITING_INTERVAL_S


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm) -> None:
    """Ask `slurm` at each look, as a command that has just begun; its clock is that of all."""
    for name in ("_watchers", "_watched", "_nodes"):
        monkeypatch.setattr(lookup, name, {})
    monkeypatch.setattr(lookup, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(lookup, "_WAITING_INTERVAL_S", 0.0)
    monkeypatch.setattr(lookup, "time", SimpleNamespace(monotonic=slurm.clock))
    monkeypatch.setattr(lookup, "slurm_client_of", lambda submission, timeout_s: slurm.client())


def submission(job_id: int, **more: Any) -> Submission:
    fields = {"submitted_at_s": 0.0, "executor": "slurm", "folder": "", "after_attempt": 0}
    return Submission(**{**fields, "job_id": str(job_id), **more})


def test_a_reused_job_number_is_not_our_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a site loses its state, numbers begin again."""
    slurm.queue = {7: job(7, "RUNNING", UserID="1234")}
    states = {}
    for owner in (1234, 1235, None):
        monkeypatch.setattr(lookup, "_watchers", {})
        monkeypatch.setattr(lookup, "_watched", {})
        fact = lookup.look_up([submission(7, user_id=owner)])["7"]
        states[owner] = (fact.state, fact.gone, fact.holding)
    assert states == {1234: ("RUNNING", False, True), 1235: ("UNKNOWN", True, False), None: ("RUNNING", False, True)}


def asked(slurm: FakeSlurm, command: str) -> int:
    return sum(call[0] == command for call in slurm.calls)


def with_nodes(slurm: FakeSlurm, *nodes: tuple[str, str, str]) -> None:
    """Give Slurm nodes: name, state and partitions."""
    text = "".join(f"NodeName={name} State={state} Partitions={parts}\n" for name, state, parts in nodes)
    slurm.scontrol = lambda argv: CommandResult(0, text, "")  # type: ignore[attr-defined]


def test_facts_are_what_slurm_says_of_the_job(slurm: FakeSlurm) -> None:
    cells = {"NodeList": "n[1-2]", "StartTime": "1000", "EndTime": "5000", "RestartCnt": "3", "Reason": "None"}
    slurm.queue = {1: job(1, "RUNNING", **cells), 2: job(2, "FAILED", Reason="NonZeroExitCode")}
    facts = lookup.look_up([submission(1), submission(2)])
    running, failed = facts["1"], facts["2"]
    assert (running.job_id, running.state, running.nodes, running.restarts) == ("1", "RUNNING", ["n1", "n2"], 3)
    assert (running.waiting, running.holding, running.ended, running.gone) == (False, True, False, False)
    assert (running.start_s, running.end_s, running.warning, running.usable_nodes) == (1000.0, 5000.0, "", None)
    assert (failed.job_id, failed.state, failed.reason) == ("2", "FAILED", "NonZeroExitCode")
    assert (failed.waiting, failed.holding, failed.ended, failed.gone) == (False, False, True, False)
    assert asked(slurm, "squeue") == 1
    assert asked(slurm, "scontrol") == 0, "nodes matter only to jobs that wait"


def test_all_jobs_that_were_ever_asked_about_share_one_question(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_INTERVAL_S", 1e9)
    slurm.queue = {i: job(i, "RUNNING") for i in (1, 2)}
    assert lookup.look_up([submission(1)])["1"].state == "RUNNING"
    assert set(lookup.look_up([submission(2)])) == {"1", "2"}
    assert [call[3] for call in slurm.calls] == ["--jobs=1", "--jobs=1,2"]
    slurm.queue = {i: job(i, "COMPLETED") for i in (1, 2)}
    assert lookup.look_up([submission(1)])["1"].state == "RUNNING"
    assert asked(slurm, "squeue") == 2, "there was an answer to that just now"
    lookup.ask_soon()
    assert lookup.look_up([submission(1)])["1"].state == "COMPLETED"


def test_a_job_whose_components_are_not_all_known_has_not_ended(slurm: FakeSlurm) -> None:
    slurm.history = sacct_row("7+0", "7", "COMPLETED")
    assert lookup.look_up([submission(7, components=2)])["7"].state == "UNKNOWN"
    slurm.history = "\n".join([sacct_row("7+0", "7", "COMPLETED"), sacct_row("7+1", "8", "COMPLETED")])
    assert lookup.look_up([submission(7, components=2)])["7"].state == "COMPLETED"


@pytest.mark.parametrize(("state", "gone"), [("RUNNING", False), ("NODE_FAIL", True)])
def test_a_job_that_slurm_has_forgotten(slurm: FakeSlurm, state: str, gone: bool) -> None:
    """One that had ended, and was not started again, is over; one that ran may be there all the same."""
    slurm.queue, slurm.accounting = {1: job(1, state)}, False
    lookup.look_up([submission(1)])
    slurm.queue = {}
    fact = lookup.look_up([submission(1)])["1"]
    assert (fact.state, fact.gone, fact.warning) == ("UNKNOWN", gone, "Slurm does not know job 1")


def test_a_job_that_slurm_never_knew_is_gone_where_slurm_answers(slurm: FakeSlurm) -> None:
    slurm.accounting = False
    fact = lookup.look_up([submission(1)])["1"]
    assert (fact.job_id, fact.state, fact.gone, fact.warning) == ("1", "UNKNOWN", True, "Slurm does not know job 1")
    slurm.away = True
    fact = lookup.look_up([submission(2)])["2"]
    assert (fact.state, fact.gone) == ("UNKNOWN", False)
    assert fact.warning.startswith("Slurm has not answered")


def test_a_slurm_that_cannot_be_asked_is_a_warning_without_its_hint(slurm: FakeSlurm) -> None:
    slurm.squeue = lambda argv: slurm.error("squeue: error: Access denied\nsecond line")  # type: ignore[method-assign]
    facts = lookup.look_up([submission(1), submission(2)])
    assert {job_id: (fact.job_id, fact.state) for job_id, fact in facts.items()} == {
        "1": ("1", "UNKNOWN"),
        "2": ("2", "UNKNOWN"),
    }
    warnings = {fact.warning for fact in facts.values()}
    assert len(warnings) == 1
    (warning,) = warnings
    assert "squeue" in warning
    assert "\n" not in warning
    assert not any(fact.gone or fact.waiting or fact.holding or fact.ended for fact in facts.values())


def test_each_cluster_is_asked_about_its_own_jobs(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be asked leaves the others alone."""
    here, there, broken = slurm, FakeSlurm(), FakeSlurm()
    here.queue, there.queue = {1: job(1, "RUNNING")}, {5: job(5, "FAILED")}
    broken.squeue = lambda argv: broken.error("squeue: error: Access denied")  # type: ignore[method-assign]
    by_place = {("", ""): here, ("/etc/there.conf", ""): there, ("", "broken"): broken}
    monkeypatch.setattr(
        lookup, "slurm_client_of", lambda own, timeout_s: by_place[own.slurm_conf, own.slurm_cluster or ""].client()
    )
    facts = lookup.look_up(
        [submission(9, slurm_cluster="broken"), submission(1), submission(5, slurm_conf="/etc/there.conf")]
    )
    assert {job_id: fact.state for job_id, fact in facts.items()} == {"1": "RUNNING", "5": "FAILED", "9": "UNKNOWN"}
    assert [call[3] for call in here.calls + there.calls + broken.calls] == ["--jobs=1", "--jobs=5", "--jobs=9"]


def test_the_status_of_a_waiting_job_shows_available_nodes(slurm: FakeSlurm) -> None:
    slurm.queue = {
        1: job(1, "PENDING", Partition="gpu", Reason="Resources"),
        2: job(2, "PENDING", Partition="cpu,gpu"),
        3: job(3, "PENDING", Partition="old"),
        4: job(4, "RUNNING", Partition="gpu"),
        5: job(5, "PENDING", leader=5, Partition="gpu"),
        6: job(6, "PENDING", leader=5, Partition="cpu"),
    }
    with_nodes(
        slurm,
        ("g1", "IDLE", "gpu"),
        ("g2", "ALLOCATED", "gpu,all"),
        ("both", "IDLE", "cpu,gpu"),
        ("c1", "IDLE", "cpu"),
        ("broken", "DOWN", "gpu"),
        ("kept", "IDLE+DRAIN", "gpu"),
        ("other", "IDLE", "all"),
    )
    facts = lookup.look_up([submission(i) for i in (1, 2, 3, 4, 5)])
    assert {job_id: fact.usable_nodes for job_id, fact in facts.items()} == {"1": 3, "2": 4, "3": 0, "4": None, "5": 4}
    assert (facts["1"].state, facts["1"].waiting, facts["1"].reason) == ("PENDING", True, "Resources")
    assert (facts["4"].state, facts["4"].holding) == ("RUNNING", True)


def test_nodes_are_asked_about_every_twenty_seconds(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "PENDING", Partition="gpu")}
    seen = []
    for now, node in ((0.0, "IDLE"), (20.0, "DOWN"), (20.5, "DOWN"), (40.5, "IDLE"), (40.6, "IDLE")):
        slurm.now = now
        with_nodes(slurm, ("g1", node, "gpu"))
        seen.append((lookup.look_up([submission(1)])["1"].usable_nodes, asked(slurm, "scontrol")))
    assert seen == [(1, 1), (1, 1), (0, 2), (0, 2), (1, 3)]


def test_a_slurm_that_does_not_tell_its_nodes_is_asked_again_later(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "PENDING", Partition="gpu")}
    slurm.scontrol = lambda argv: slurm.error("Access denied")  # type: ignore[attr-defined]
    for now, questions in ((0.0, 1), (19.0, 1), (21.0, 2)):
        slurm.now = now
        fact = lookup.look_up([submission(1)])["1"]
        assert (fact.state, fact.waiting, fact.usable_nodes) == ("PENDING", True, None)
        assert asked(slurm, "scontrol") == questions


def test_nodes_of_one_cluster_are_not_those_of_another(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    other = FakeSlurm()
    slurm.queue, other.queue = {1: job(1, "PENDING", Partition="gpu")}, {2: job(2, "PENDING", Partition="gpu")}
    with_nodes(slurm, ("g1", "IDLE", "gpu"))
    with_nodes(other, ("h1", "IDLE", "gpu"), ("h2", "IDLE", "gpu"))
    monkeypatch.setattr(
        lookup, "slurm_client_of", lambda own, timeout_s: (other if own.slurm_cluster else slurm).client()
    )
    facts = lookup.look_up([submission(1), submission(2, slurm_cluster="other")])
    assert {job_id: fact.usable_nodes for job_id, fact in facts.items()} == {"1": 1, "2": 2}


def test_a_run_is_looked_up_in_the_slurm_that_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Mapping[str, str], float]] = []

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        seen.append((env, timeout_s))
        return CommandResult(0, "", "")

    monkeypatch.setenv("SLURM_CONF", "/etc/mine.conf")
    monkeypatch.setenv("SLURM_CLUSTERS", "mine")
    for conf, cluster, expected in (
        ("/etc/s.conf", "beta", ("/etc/s.conf", "beta")),
        ("/etc/s.conf", None, ("/etc/s.conf", "mine")),
        ("", "beta", ("/etc/mine.conf", "beta")),
        ("", None, ("/etc/mine.conf", "mine")),
    ):
        client = slurm_client_of(submission(1, slurm_conf=conf, slurm_cluster=cluster), timeout_s=7.0)
        assert client.conf == (Path(conf) if conf else None)
        client._run_command = run
        client.config()
        env, timeout_s = seen[-1]
        assert (env["SLURM_CONF"], env["SLURM_CLUSTERS"], timeout_s) == (*expected, 7.0)


@pytest.mark.parametrize(("state", "pause_s"), [("RUNNING", 2.0), ("PENDING", 10.0)])
def test_a_command_that_follows_a_run_asks_every_two_seconds_and_of_what_waits_every_ten(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, state: str, pause_s: float
) -> None:
    monkeypatch.setattr(lookup, "_INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr(lookup, "_WAITING_INTERVAL_S", WAITING_INTERVAL_S)
    monkeypatch.setattr(lookup, "JobWatcher", partial(JobWatcher, clock=slurm.clock))
    slurm.queue = {1: job(1, state)}
    with_nodes(slurm)
    for now, questions in ((0.0, 1), (pause_s - 0.1, 1), (pause_s + 0.1, 2), (2 * pause_s, 2)):
        slurm.now = now
        lookup.look_up([submission(1)])
        assert asked(slurm, "squeue") == questions


def test_reading_commands_wait_at_most_ten_seconds_for_slurm(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: set[float] = set()

    def client(own: Submission, timeout_s: float) -> SlurmClient:
        waits.add(timeout_s)
        return slurm.client()

    monkeypatch.setattr(lookup, "slurm_client_of", client)
    slurm.queue = {1: job(1, "PENDING")}
    with_nodes(slurm)
    lookup.look_up([submission(1)])
    assert waits == {10.0}
