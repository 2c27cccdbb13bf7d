"""Real processes through submitit: replicas that fail, hang or loop, and what the supervisor does about it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_testing import create, end_everything, processes_of, start, wait_ended, wait_for, wait_running

from hpcrl.config.layout import AttemptPolicy
from hpcrl.config.plan import WatchPolicy
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.contents import RunContents
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import Complaint
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, RunState
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.submit.submission import cancel, submit_attempt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RESTART = {"restart": "on-failure", "max_restarts": 2}
#: the floor is longer than a busy machine keeps a server from answering
QUICK = WatchPolicy(floor_s=5.0, ceiling_s=10.0)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A runs root; what a failed test leaves running is ended."""
    path = tmp_path / "runs"
    yield path
    for run_dir in path.iterdir() if path.is_dir() else ():
        end_everything(RunDir(run_dir))


def events(run: RunDir, kind: str) -> list[Event]:
    return read_events(run, kind=kind)


def wait_seen_alive(run: RunDir) -> None:
    """Wait until the watchdog has an answer of the engine, without which it does not judge it.

    The second question follows the first answer.
    """
    asked = run.path / "asked.txt"
    wait_for(lambda: asked.exists() and asked.read_text().count("/metrics") > 1, 30, "questions of the watchdog")


def engine(run: RunDir) -> ComponentStatus:
    return observe(run).components[0]


@pytest.mark.parametrize("victim", ["pid", "guard_pid"])
def test_a_killed_engine_is_started_again_in_its_place(root: Path, victim: str) -> None:
    run = start(root, engine_policy=RESTART)
    before = wait_running(run).components[0]
    os.kill(getattr(before, victim), signal.SIGKILL)
    wait_for(lambda: engine(run).restarts == 1 and engine(run).state is ComponentState.READY, 30, "the restart")
    after = engine(run)
    assert observe(run).state is RunState.RUNNING
    assert after.port == before.port
    assert after.pid != before.pid
    assert "SIGKILL" in after.last_failure or "guard" in after.last_failure
    log = (run.path / after.log).read_text()
    assert log.count("engine behaves: serve") == 2
    assert "==== restart 1 of engine 0, " in log
    assert events(run, "component.restarting")[0].data["restart"] == 1
    # nothing of the first life is left beside the second: controller, supervisor, 2 guards, 2 roles, 3 escapees each
    wait_for(lambda: len(processes_of(run)) == 12, 10, "the first life to be gone")
    assert "restarted" in " ".join(c.what for c in diagnose(run).consequences)
    cancel(run, user="somebody")
    view = wait_ended(run)
    assert view.cause is not None
    assert view.cause.kind is CauseKind.CANCELLED


def test_an_engine_with_wrong_weights_is_restarted_and_then_its_own_cause(root: Path) -> None:
    """What the orchestrator says about an engine whose proof has failed."""
    why = "computes with other weights than those of version 2, which it reports to serve: 1 of 3 tensors differ"
    run = start(root, engine_policy={"restart": "on-failure", "max_restarts": 1})
    wait_running(run)

    def complain() -> None:
        complaint = Complaint(time_s=time.time(), role="engine", replica=0, message=why, wrong_weights=True)
        complaint.write(run, 1)

    complain()
    wait_for(lambda: engine(run).restarts == 1 and engine(run).state is ComponentState.READY, 30, "the restart")
    (restarted,) = events(run, "component.restarting")
    assert (restarted.data["cause_kind"], why in restarted.data["cause"]) == ("wrong_weights", True)
    complain()
    view = wait_ended(run)
    assert (view.state, view.cause and view.cause.kind) == (RunState.FAILED, CauseKind.WRONG_WEIGHTS)
    assert view.cause is not None
    assert view.cause.message.startswith(f"engine 0 {why}")
    assert "hpcrl resume" in diagnose(run).hint


def test_an_engine_that_fails_again_and_again_ends_the_run(root: Path) -> None:
    run = start(root, engine="crash-soon", engine_policy=RESTART, start_timeout_s=20.0)
    wait_for(lambda: observe(run).state.ended, 60, "the end")
    view = wait_ended(run)
    assert view.state is RunState.FAILED
    assert view.cause is not None
    assert view.cause.message == "engine 0 exited with code 3; it was restarted 2 times and failed again"
    assert [e.data["pause_s"] for e in events(run, "component.restarting")] == [1.0, 2.0]
    assert diagnose(run).last_words[-1] == "ZeroDivisionError: stand-in"


def test_the_run_continues_without_an_engine_that_is_not_critical(root: Path) -> None:
    policy = {"restart": "on-failure", "max_restarts": 0, "critical": False}
    run = start(root, replicas=2, engine_policy=policy)
    first, second, _ = wait_running(run).components
    os.kill(first.pid or 0, signal.SIGKILL)
    wait_for(lambda: engine(run).state is ComponentState.FAILED, 20, "the loss")
    time.sleep(1.0)
    assert observe(run).state is RunState.RUNNING
    os.kill(second.pid or 0, signal.SIGKILL)
    view = wait_ended(run)
    assert view.cause is not None
    assert view.cause.message == "engine 1 was killed by SIGKILL"


def test_cancel_while_an_engine_waits_for_its_restart(root: Path) -> None:
    run = start(root, engine="crash", engine_policy={"restart": "on-failure", "max_restarts": 9})
    wait_for(lambda: bool(observe(run).components) and engine(run).state is ComponentState.RESTARTING, 30, "a failure")
    assert cancel(run, user="somebody").state is RunState.CANCELLED
    wait_ended(run)


def test_a_stopped_engine_is_found_dumped_and_started_again(root: Path) -> None:
    run = start(root, engine="serve-noted", engine_policy=RESTART, watch=QUICK)
    before = wait_running(run).components[0]
    wait_seen_alive(run)
    os.kill(before.pid or 0, signal.SIGSTOP)
    wait_for(lambda: engine(run).restarts == 1 and engine(run).state is ComponentState.READY, 60, "the restart")
    (hung,) = events(run, "component.hung")
    assert f"stopped by a signal: pid {before.pid}" in hung.data["problem"]
    text = (run.path / hung.data["dumps"][0]).read_text()
    assert f"pid {before.pid}" in text
    assert "stand_ins.py" in "".join(hung.data["frames"]), text
    cancel(run, user="somebody")
    wait_ended(run)


def test_an_engine_that_continues_after_the_alarm_is_left_alone(root: Path) -> None:
    run = start(root, engine="serve-noted", engine_policy=RESTART, watch=WatchPolicy(floor_s=6.0, ceiling_s=60.0))
    before = wait_running(run).components[0]
    wait_seen_alive(run)
    os.kill(before.pid or 0, signal.SIGSTOP)
    # the first sign of the alarm: the event follows when stacks were taken, and at once after it the second look
    wait_for((run.attempt_dir(1) / "dumps").is_dir, 60, "the alarm")
    os.kill(before.pid or 0, signal.SIGCONT)
    wait_for(lambda: bool(events(run, "component.hung")), 30, "the stacks")
    wait_for(lambda: bool(events(run, "component.went_on")), 30, "the second look")
    assert (engine(run).pid, engine(run).restarts) == (before.pid, 0)
    assert "seemed to hang" in " ".join(c.what for c in diagnose(run).consequences)
    cancel(run, user="somebody")
    wait_ended(run)


def test_a_role_in_an_endless_loop_is_found_and_named_with_its_stack(root: Path) -> None:
    run = start(root, trainer="spin", watch=QUICK)
    wait_for(lambda: observe(run).state.ended, 60, "the end")
    view = wait_ended(run)
    assert view.cause is not None
    assert view.cause.kind is CauseKind.HUNG
    assert view.cause.message.startswith("trainer 0 hangs: no progress for ")
    diagnosis = diagnose(run)
    assert diagnosis.log == "attempts/0001/dumps/trainer-0.txt"
    assert any("main (" in line and "stand_ins.py" in line for line in diagnosis.last_words), diagnosis.last_words


def test_a_failure_is_retried_while_attempts_make_progress(root: Path) -> None:
    retries = AttemptPolicy(max_attempts=9, max_without_progress=3, retries=5)
    run = start(root, trainer="checkpoint", attempts=retries)
    wait_for(lambda: observe(run).state.ended, 60, "the end")
    view = wait_ended(run)
    # two attempts made a checkpoint, the third did not
    assert (view.state, view.attempt) == (RunState.FAILED, 3)
    assert view.cause is not None
    assert view.cause.message == "trainer 0 failed: ValueError: attempt 3 failed"
    assert [event.attempt for event in events(run, "attempt.retried")] == [1, 2]
    assert diagnose(run).earlier[1] == "FAILED: trainer 0 failed: ValueError: attempt 1 failed"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, as a scratch of nodes has: names of sockets must fit into 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_what_a_killed_engine_left_is_removed(root: Path, scratch: Path) -> None:
    run = create(root, engine="leave", engine_policy=RESTART)
    plan = run.plan().model_copy(update={"scratch": str(scratch)})
    run.plan_path.write_text(plan.model_dump_json())
    run_id = RunRecord.read(run).run_id
    shm = Path(f"/dev/shm/psm_{run_id[:8]}")
    # another run's, and one that an attempt before left here
    other = scratch / "hpcrl-ffffffffffff" / "1-engine-0"
    other.mkdir(parents=True)
    old = scratch / f"hpcrl-{run_id[:12]}" / "0-engine-0"
    old.mkdir(parents=True)
    (old / "socket").touch()
    submit_attempt(RunContents.read(run))
    wait_running(run)
    own = scratch / f"hpcrl-{run_id[:12]}" / "1-engine-0"
    wait_for((own / "shared-memory.json").is_file, 20, "the guard to look at shared memory")
    assert (own / "ipc").is_socket()
    assert not old.exists()
    (cleaned,) = events(run, "guard.cleaned")
    assert cleaned.data["removed"] == [str(old / "socket")]
    assert shm.exists()
    os.kill(engine(run).pid or 0, signal.SIGKILL)
    wait_for(lambda: engine(run).restarts == 1 and engine(run).state is ComponentState.READY, 30, "the restart")
    assert shm.exists()  # that of the second life
    cancel(run, user="somebody")
    wait_ended(run)
    assert not shm.exists()
    assert not own.exists()
    assert other.exists()
