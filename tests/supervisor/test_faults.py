"""Real processes through submitit: every way a run can end, each with its cause and nothing left behind.

The roles are stand-ins with grandchildren that ignore SIGTERM, leave their session, lose their parent, or drop
the run's mark from their environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_testing import (
    LIMIT_S,
    create,
    end_everything,
    processes_of,
    start,
    wait_ended,
    wait_for,
    wait_running,
)

from hpcrl.config.layout import AttemptPolicy
from hpcrl.errors import RunDirError
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.contents import RunContents
from hpcrl.runs.events import read_events
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.submit.submission import cancel, end_leftovers, prepare_resume, submit_attempt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A runs root with an unpleasant name; what a failed test leaves running is ended."""
    path = tmp_path / 'it\'s a "runs" $HOME {port} root'
    yield path
    for run_dir in path.iterdir() if path.is_dir() else ():
        end_everything(RunDir(run_dir))


def pid_of(view: RunView, who: str) -> int:
    engine, trainer = view.components[0], view.components[-1]
    pids = {"engine": engine.pid, "trainer": trainer.pid, "engine guard": engine.guard_pid, "supervisor": view.pid}
    pid = pids[who]
    assert pid is not None
    return pid


def kinds(run: RunDir) -> list[str]:
    return [event.kind for event in read_events(run)]


# -- ends without a fault ------------------------------------------------------------------------------------------


def test_a_clean_trainer_end_completes_the_run(root: Path) -> None:
    run = start(root, trainer="finish", replicas=2)
    view = wait_ended(run)
    assert view.state is RunState.COMPLETED
    assert view.cause is None
    assert {c.state for c in view.components} == {ComponentState.EXITED}
    engines_ready = max(c.ready_at_s or 0 for c in view.components[:2])
    assert (view.components[2].started_at_s or 0) >= engines_ready
    ports = [c.port for c in view.components]
    assert len(set(ports)) == 3
    assert Endpoints.read(run, 1).urls == {
        "engine": [f"http://127.0.0.1:{port}" for port in ports[:2]],
        "trainer": [f"http://127.0.0.1:{ports[2]}"],
    }
    assert (run.path / "attempts/0001/logs/engine/1-0.log").read_text() == "engine behaves: serve\n"
    with pytest.raises(RunDirError, match="nothing to resume"):
        prepare_resume(run)


@pytest.mark.parametrize("on_change", ["warn", "stop"])
def test_an_attempt_that_would_run_something_else_says_so(root: Path, on_change: str) -> None:
    run = create(root, trainer="finish", attempts=AttemptPolicy(on_change=on_change))
    with run.recipe_path.open("a") as recipe:
        recipe.write("# changed in the queue\n")
    submit_attempt(RunContents.read(run))
    view = wait_ended(run)
    (event,) = read_events(run, kind="attempt.changed")
    assert event.data["changes"] == ["recipe.yaml of the run was changed by hand"]
    if on_change == "warn":
        assert view.state is RunState.COMPLETED
    else:
        assert view.cause is not None
        assert (view.state, view.cause.kind) == (RunState.FAILED, CauseKind.CHANGED)
        assert kinds(run).count("component.state") == 0
        assert "hpcrl resume RUN --accept-changes" in diagnose(run).hint
    assert any("changed by hand" in consequence.what for consequence in diagnose(run).consequences)


def test_cancel_ends_the_run_in_order(root: Path) -> None:
    run = start(root)
    wait_running(run)
    assert cancel(run, user="somebody").state is RunState.CANCELLED
    view = wait_ended(run, LIMIT_S)
    assert view.cause is not None
    assert (view.cause.kind, view.cause.message) == (CauseKind.CANCELLED, "cancelled by somebody")
    stopping = [e.data["role"] for e in read_events(run) if e.data.get("state") == "STOPPING" and "role" in e.data]
    assert stopping == ["trainer", "engine"]
    with pytest.raises(RunDirError, match="has ended already"):
        cancel(run, user="somebody")


def test_cancel_before_the_supervisor_wrote_a_word(root: Path) -> None:
    run = start(root)
    assert observe(run).state is RunState.SUBMITTED
    assert cancel(run, user="somebody").state is RunState.CANCELLED
    wait_ended(run)


def test_a_role_that_ignores_sigterm_is_killed(root: Path) -> None:
    run = start(root, engine="serve-stubborn", trainer="finish")
    view = wait_ended(run)
    assert view.state is RunState.COMPLETED
    assert view.components[0].signal == signal.SIGKILL


# -- kill -9 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "state", "sentence"),
    [
        ("engine", RunState.FAILED, "engine 0 was killed by SIGKILL"),
        ("trainer", RunState.FAILED, "trainer 0 was killed by SIGKILL"),
        ("engine guard", RunState.FAILED, "engine 0 was lost: its guard (pid {pid}) was killed, and the role with it"),
        ("supervisor", RunState.LOST, "the supervisor (pid {pid} on "),
    ],
)
def test_kill_9(root: Path, who: str, state: RunState, sentence: str) -> None:
    run = start(root)
    view = wait_running(run)
    assert len(processes_of(run)) == 12, "controller, supervisor, 2 guards, 2 roles and 3 escapees of each"
    pid = pid_of(view, who)
    os.kill(pid, signal.SIGKILL)
    view = wait_ended(run, LIMIT_S)
    diagnosis = diagnose(run)
    assert diagnosis.state is state
    assert diagnosis.sentence.startswith(sentence.format(pid=pid))
    assert diagnosis.ways_on[0].startswith(f"hpcrl resume {run.name}")
    if who == "supervisor":
        assert kinds(run).count("guard.supervisor_lost") == 2
        assert {c.state for c in view.components} == {ComponentState.LOST}


def test_kill_9_of_the_submitit_controller(root: Path) -> None:
    run = start(root)
    wait_running(run)
    os.kill(int(RunRecord.read(run).submissions[-1].job_id), signal.SIGKILL)
    wait_ended(run, LIMIT_S)
    diagnosis = diagnose(run)
    assert diagnosis.state is RunState.FAILED
    assert "the submitit controller" in diagnosis.sentence


def test_kill_9_of_supervisor_and_one_guard_at_once(root: Path) -> None:
    """The guard that is left finds the orphans of the other by the run's mark."""
    run = start(root)
    view = wait_running(run)
    unmarked = [p for p in processes_of(run) if p not in processes_of(run, marked_only=True)]
    assert len(unmarked) == 2
    for who in ("supervisor", "engine guard"):
        os.kill(pid_of(view, who), signal.SIGKILL)
    wait_for(lambda: not processes_of(run, marked_only=True), LIMIT_S, "marked processes to go")
    assert diagnose(run).state is RunState.LOST
    end_everything(run)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"engine": "hang", "start_timeout_s": 0.7}, CauseKind.START_TIMEOUT, "engine 0 was not ready after 0.7 s"),
        ({"engine": "crash"}, CauseKind.EXIT, "engine 0 exited with code 3"),
        ({"engine": "early-serve"}, CauseKind.EARLY_EXIT, "engine 0 exited with code 0, but the run was not over"),
        ({"trainer": "record"}, CauseKind.ERROR, "trainer 0 failed: ValueError: the loss is not finite"),
        ({"trainer": "record-and-hang"}, CauseKind.ERROR, "trainer 0 failed: ValueError: the loss is not finite"),
        ({"time_limit_s": 1.0}, CauseKind.TIME_LIMIT, "the run took longer than its limit"),
    ],
)
def test_a_failure_names_its_cause(root: Path, changes: dict[str, object], kind: CauseKind, sentence: str) -> None:
    run = start(root, **changes)
    view = wait_ended(run)
    assert view.state is RunState.FAILED
    assert view.cause is not None
    assert view.cause.kind is kind
    assert view.cause.message.startswith(sentence)


def test_a_command_that_does_not_exist(root: Path) -> None:
    run = create(root)
    plan = run.plan()
    engine = plan.groups[0].model_copy(update={"command": ("/no/such program",)})
    run.plan_path.write_text(plan.model_copy(update={"groups": (engine, plan.groups[1])}).model_dump_json())
    submit_attempt(RunContents.read(run))
    view = wait_ended(run)
    assert view.cause is not None
    assert view.cause.kind is CauseKind.SPAWN
    assert "No such file" in view.cause.message


def test_the_log_of_a_crash_is_shown(root: Path) -> None:
    run = start(root, engine="crash")
    wait_ended(run)
    diagnosis = diagnose(run)
    assert diagnosis.last_words[-1] == "ZeroDivisionError: stand-in"
    assert diagnosis.log == "attempts/0001/logs/engine/0-0.log"
    assert diagnosis.resume_step is None


def test_a_role_that_lost_its_peer_is_a_consequence(root: Path) -> None:
    run = start(root, trainer="peer-lost")
    view = wait_running(run)
    os.kill(pid_of(view, "engine"), signal.SIGKILL)
    wait_ended(run)
    diagnosis = diagnose(run)
    assert diagnosis.sentence == "engine 0 was killed by SIGKILL"


# -- resume --------------------------------------------------------------------------------------------------------


def test_resume_begins_a_new_attempt_and_ends_leftovers(root: Path) -> None:
    run = start(root)
    view = wait_running(run)
    with pytest.raises(RunDirError, match="is alive"):
        prepare_resume(run)
    # everything that could clean up dies at once: while one is killed, the others are stopped and see nothing of it;
    # only the roles' helpers are left
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (view.pid, *(c.guard_pid for c in view.components)):
            assert pid is not None
            os.kill(pid, number)
    wait_for(lambda: observe(run).state is RunState.LOST, LIMIT_S, "the loss to be seen")
    assert processes_of(run)
    assert prepare_resume(run).step is None
    assert end_leftovers(run) >= 4
    assert not processes_of(run, marked_only=True)
    submit_attempt(RunContents.read(run))
    wait_for(lambda: observe(run).attempt == 2, 20, "the second attempt")
    assert wait_running(run).attempt == 2
    os.kill(observe(run).pid or 0, signal.SIGTERM)
    view = wait_ended(run, marked_only=True)
    assert (view.state, view.attempts) == (RunState.CANCELLED, 2)
    assert diagnose(run).earlier[1].startswith("LOST")
    end_everything(run)


def test_a_second_supervisor_of_a_live_run_refuses(root: Path) -> None:
    run = start(root)
    pid = wait_running(run).pid
    submit_attempt(RunContents.read(run))
    folder = Path(RunRecord.read(run).submissions[-1].folder)
    job = RunRecord.read(run).submissions[-1].job_id
    error = folder / f"{job}_0_log.err"
    wait_for(lambda: error.is_file() and "is supervised by pid" in error.read_text(), 20, "the refusal")
    assert run.attempts() == [1]
    os.kill(pid or 0, signal.SIGTERM)
    wait_for(lambda: not processes_of(run), LIMIT_S, "the end")


# -- follow --------------------------------------------------------------------------------------------------------


def follow(run: RunDir) -> subprocess.Popen[str]:
    program = [sys.executable, str(Path(__file__).with_name("follow_stand_ins.py")), str(run.path)]
    # a session of its own, as a terminal gives it: Ctrl-C goes to its whole foreground group
    return subprocess.Popen(program, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def test_follow_ends_with_the_run(root: Path) -> None:
    run = create(root, trainer="finish")
    process = follow(run)
    out, talk = process.communicate(timeout=120)
    assert process.returncode == 0, talk
    assert "COMPLETED" in out
    assert "run-1 COMPLETED" in talk


def test_follow_of_a_failure_says_how_to_go_on(root: Path) -> None:
    process = follow(create(root, engine="crash"))
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "hpcrl why run-1" in talk


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_cancels(root: Path, times: int) -> None:
    engine = "serve-stubborn" if times == 2 else "serve"
    run = create(root, engine=engine, stop_timeout_s=0.5 if times == 1 else 600.0)
    process = follow(run)
    wait_for(lambda: observe(run).state is RunState.RUNNING, 20, "the run to start")
    ctrl_c(process)
    if times == 2:
        # it ignores SIGTERM, and has ten minutes
        wait_for(lambda: observe(run).components[0].state is ComponentState.STOPPING, 10, "the engine to be asked")
        ctrl_c(process)
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 130, talk
    view = wait_ended(run, LIMIT_S)
    assert view.state is RunState.CANCELLED


def test_nothing_is_left_when_a_follower_dies(root: Path) -> None:
    """The run goes on without the one who follows it, and can be cancelled."""
    run = create(root)
    process = follow(run)
    wait_for(lambda: observe(run).state is RunState.RUNNING, 20, "the run to start")
    process.kill()
    process.communicate()
    time.sleep(0.6)
    assert observe(run).state is RunState.RUNNING
    cancel(run, user="somebody")
    wait_ended(run)
