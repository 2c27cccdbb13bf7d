"""What is shown of a run that waits: for what, and nothing that is not so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from runs_testing import make_run, write_status, write_steps

from hpcrl.runs.exclusions import exclude
from hpcrl.runs.fleet import EngineView, Fleet, Replica, ReplicaState
from hpcrl.runs.job_facts import JobFact, set_job_query
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.run_progress import read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.fleet_table import fleet_document, fleet_table
from hpcrl.runs.views.liveview import render
from hpcrl.runs.views.usage import status_document
from hpcrl.runs.views.waiting import waiting_words


def text_of(shown: object) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[RunDir]:
    """A requeued run that has done steps, whose job waits."""
    run = make_run(tmp_path)
    record = RunRecord.read(run)
    submission = msgspec.structs.replace(record.submissions[0], executor="slurm", job_id="7")
    msgspec.structs.replace(record, submissions=[submission]).write(run)
    write_status(run, RunState.REQUEUED)
    write_steps(run, 10, total=40)
    fact = JobFact(job_id="7", state="PENDING", waiting=True, reason="Resources", usable_nodes=3)
    set_job_query(lambda submissions: {each.job_id: fact for each in submissions})
    yield run
    set_job_query(lambda submissions: {})


def test_no_estimate_of_the_end_while_nothing_is_done(waiting: RunDir) -> None:
    view, progress = observe(waiting), read_progress(waiting)
    assert view.state is RunState.REQUEUED
    assert progress.eta_s is not None
    engine = EngineView(role="engine", replica=0, version=10, tokens_per_s=77_777.0)
    fleet = Fleet(None, [Replica(role="engine", replica=0, state=ReplicaState.HEALTHY, why="", view=engine)])
    shown = text_of(render(view, progress, [], None, fleet))
    assert "Slurm job 7 PENDING: 3 usable" not in shown  # how many it needs is not known of a local plan
    assert "reason Resources" in shown
    assert " left" not in shown
    assert "77,777" not in shown
    assert json.loads(status_document(waiting))["progress"]["eta_s"] is None


def test_a_supervisor_that_died_with_its_node_could_not_say_which_to_avoid(waiting: RunDir) -> None:
    words = "before it could record nodes to avoid"
    assert words not in " ".join(observe(waiting).warnings)  # its last word was the requeue
    write_status(waiting, RunState.RUNNING)
    view = observe(waiting)
    assert view.state is RunState.REQUEUED
    shown = " ".join(text_of(render(view, read_progress(waiting), [], None, Fleet(None, []))).split())
    assert words in shown
    # somebody else has found out
    exclude(waiting, {"n1": "the node went down"}, attempt=view.attempt, now_s=time.time(), seconds=60.0)
    assert observe(waiting).warnings == []


def test_what_a_job_waits_for(waiting: RunDir) -> None:
    start_s = time.mktime((2030, 1, 2, 14, 20, 0, 0, 0, -1))
    job = JobFact(job_id="7", state="PENDING", waiting=True, reason="Resources", usable_nodes=3, start_s=start_s)
    view: RunView = msgspec.structs.replace(observe(waiting), nodes_needed=4)
    words = ": needs 4 nodes, 3 usable; reason Resources; Slurm expects 2030-01-02 14:20"
    assert waiting_words(view, job) == words
    view = msgspec.structs.replace(view, elastic=True)
    assert waiting_words(view, job) == f"{words}; its engines wait until it has its nodes"
    nothing = JobFact(job_id="7", state="PENDING", waiting=True, reason="None")
    assert waiting_words(msgspec.structs.replace(view, nodes_needed=0, elastic=False), nothing) == ""


def test_a_dead_engine_shows_no_rates() -> None:
    engine = EngineView(role="engine", replica=0, version=10, running=5, tokens_per_s=77_777.0)
    dead = Fleet(None, [Replica(role="engine", replica=0, state=ReplicaState.DEAD, why="failed", view=engine)])
    shown = text_of(fleet_table(dead))
    assert "failed" in shown
    assert "77,777" not in shown
    assert "?" not in shown.splitlines()[-1]
    (replica,) = fleet_document(dead)["replicas"]
    assert replica["tokens_per_s"] is None
