"""People are told of a run once, whatever happens to its supervisor, and no server that they use holds it up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notice_lab import Posted, posted
from outlets_lab import EventBoard, outlets, until, write_steps
from patience import patience
from supervisor_testing import create, end_everything, wait_ended, wait_for, wait_running

from hpcrl.config.outlets import NotifierConfig
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.contents import RunContents
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.notice_claims import Claims
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.submit.submission import cancel, prepare_resume, submit_attempt

EVENTS = ("completed", "failed", "cancelled", "requeued", "stalled", "best", "disk", "drops")


@pytest.fixture
def server() -> Iterator[Posted]:
    with posted() as found:
        yield found


def webhook(server: Posted, *, timeout_s: float = 30.0, **more: Any) -> NotifierConfig:
    parameters = {"url": server.url, **more.pop("parameters", {})}
    fields: dict[str, Any] = {"name": "hook", "notifier": "webhook", "events": EVENTS, **more}
    return NotifierConfig(parameters=parameters, timeout_s=timeout_s * patience(), **fields)


def failed(message: str = "trainer 0 failed: no memory") -> Cause:
    return Cause(kind=CauseKind.EXIT, time_s=time.time(), message=message)


async def test_facts_arrive_while_the_run_runs(server: Posted, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    told = outlets(run, board, notify=(webhook(server),))
    await told.start()
    await until((run.sinks_dir / "notices/hook/.since").exists, "the process")
    writer = EventWriter(run, attempt=1, writer="orchestrator-0")
    for version, reward in ((0, 0.25), (10, 0.5)):
        writer.emit("evaluation", version=version, reward=reward)
    writer.close()
    write_steps(run, range(1, 4))
    await until(lambda: server.bodies, "the best held-out reward")
    await told.notify(RunState.FAILED, failed(), left_s=None)
    best, end = server.bodies
    assert best["title"] == "hpcrl: run run-1 has its best held-out reward: 0.5 at version 10"
    assert best["why"][1] == "the best before was 0.25 at version 0"
    assert (end["event"], end["title"], end["step"]) == ("failed", "hpcrl: run run-1 failed at step 3", 3)
    assert end["why"][0] == "trainer 0 failed: no memory"
    assert len(end["why"]) == 3
    assert [event.data["notice"] for event in read_events(run, kind="notify.sent")] == ["best-000010", "failed-0001"]
    assert board.events == []


async def test_a_hung_server_ends_with_its_time(server: Posted, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    server.answers = [0] * 9
    told = outlets(run, board, notify=(webhook(server, parameters={"timeout_s": 0.5}),))
    await told.start()
    await told.notify(RunState.COMPLETED, None, left_s=None)
    (event,) = read_events(run, kind="notify.failed")
    assert event.data["error"] == "it was sent, and not answered: it took too long"
    assert event.data["unknown"] is True
    # it may have arrived: neither this nor a later attempt repeats it
    assert len(server.bodies) == 1
    assert Claims(run, "hook").known()["completed-0001"].outcome == "unknown"
    assert any("a message of hook was not sent" in each.what for each in diagnose(run).consequences)
    assert told.pids() == set()


async def test_there_is_no_time_where_slurm_ends_us(server: Posted, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    server.answers = [0] * 9
    told = outlets(run, board, notify=(webhook(server, parameters={"timeout_s": 600.0}, timeout_s=600.0),))
    await told.start()
    await told.notify(RunState.FAILED, failed(), left_s=1.0)
    assert [kind for kind, _ in board.events] == ["notify.failed"]
    assert told.pids() == set()


async def test_a_messenger_that_dies_is_started_again(server: Posted, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    told = outlets(run, board, notify=(webhook(server),))
    await told.start()
    await until((run.sinks_dir / "notices/hook/.since").exists, "the process")
    (first,) = told.pids()
    os.kill(first, signal.SIGKILL)
    await until(lambda: told.pids() not in (set(), {first}), "another process")
    assert [kind for kind, _ in board.events] == ["notify.failed"]
    await told.notify(RunState.FAILED, failed(), left_s=None)
    assert [body["event"] for body in server.bodies] == ["failed"]


async def test_an_attempt_that_never_began_is_reported(server: Posted, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    told = outlets(run, board, notify=(webhook(server),))
    await told.notify(RunState.FAILED, failed("it would run other code"), left_s=None)
    assert [body["why"][0] for body in server.bodies] == ["it would run other code"]


async def test_a_requeue_is_reported_by_this_attempt_or_the_next(server: Posted, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    first = outlets(run, board, notify=(webhook(server),))
    await first.start()
    await until((run.sinks_dir / "notices/hook/.since").exists, "the process")
    writer = EventWriter(run, attempt=1, writer="supervisor")
    writer.emit("run.state", state="REQUEUED", cause="the time limit comes")
    writer.close()
    # no time at all: the next attempt says it
    await first.notify(RunState.REQUEUED, None, left_s=0.0)
    run.start_attempt()
    second = outlets(run, board, notify=(webhook(server),), attempt=2)
    await second.start()
    await until(lambda: server.bodies, "the word of the requeue")
    await second.notify(RunState.COMPLETED, None, left_s=None)
    assert [(body["event"], body["attempt"]) for body in server.bodies] == [("requeued", 1), ("completed", 2)]


@pytest.fixture
def submitted(server: Posted, tmp_path: Path) -> Iterator[RunDir]:
    run = create(tmp_path / "runs", trainer="work")
    plan = run.plan().model_copy(update={"notify": (webhook(server),)})
    run.plan_path.write_text(plan.model_dump_json())
    submit_attempt(RunContents.read(run))
    yield run
    end_everything(run)


def test_a_killed_supervisor_is_reported_once(server: Posted, submitted: RunDir) -> None:
    run = submitted
    wait_running(run)
    wait_for((run.sinks_dir / "notices/hook/.since").exists, 20, "the process of the notifiers")
    status = RunStatus.read(run)
    assert status is not None
    os.kill(status.supervisor.pid, signal.SIGKILL)
    wait_ended(run)
    wait_for(lambda: server.bodies, 30, "the word that the supervisor is gone")
    (lost,) = server.bodies
    assert (lost["event"], lost["attempt"]) == ("failed", 1)
    assert "lost attempt 1" in lost["title"]
    assert lost["why"][0].startswith("the supervisor (pid ")
    assert lost["why"][2].startswith("hpcrl resume ")
    assert len(lost["why"]) == 3
    # the next attempt says nothing of it again, but how it ends itself
    prepare_resume(run)
    submit_attempt(RunContents.read(run))
    wait_for(lambda: len(run.attempts()) == 2, 20, "the second attempt")
    wait_running(run)
    cancel(run, user="somebody")
    wait_ended(run)
    wait_for(lambda: len(server.bodies) == 2, 30, "the end of the second attempt")
    assert (server.bodies[1]["event"], server.bodies[1]["attempt"]) == ("cancelled", 2)
    assert len({body["id"] for body in server.bodies}) == 2
