"""Steps that never begin, guards that cannot be reached, and little time until Slurm ends the job."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from supervisor_testing import create

from hpcrl.config.plan import FileProbe, Plan, Role
from hpcrl.network.credentials import Credentials
from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import RUN_ID_VARIABLE
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.exclusions import exclude
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.supervisor import supervise
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.attempt.drain import Drain
from hpcrl.supervisor.attempt.ending import Ending
from hpcrl.supervisor.attempt.replica import ReplicaRunner
from hpcrl.supervisor.attempt.signal_handler import SignalHandler
from hpcrl.supervisor.launch.readiness import Prober
from hpcrl.supervisor.launch.replica_launcher import Address, LocalLauncher
from hpcrl.supervisor.process.guarded import GuardedProcess, ProcessSpec, guard_command, start_guarded
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
#: starts nothing, reads nothing, says nothing: srun while the nodes are busy, or a guard on a node that is cut off
_SILENT = [sys.executable, "-c", _DEAF]
_SLEEP = "import time; time.sleep(600)"


class SilentLauncher(LocalLauncher):
    """Starts a replica whose guards never say a word."""

    in_step = True

    async def start(self, spec: ProcessSpec) -> GuardedProcess:
        return await start_guarded(_SILENT, spec, env=os.environ)


def spec(tmp_path: Path, role: str, *, in_step: bool = False) -> ProcessSpec:
    return ProcessSpec(
        role=role,
        replica=0,
        attempt=1,
        command=[sys.executable, "-c", _SLEEP],
        env={**os.environ, RUN_ID_VARIABLE: "short-time"},
        cwd=str(tmp_path),
        logs=[str(tmp_path / f"{role}.log")],
        grace_s=5.0,
        events_path=str(tmp_path / "events.jsonl"),
        events_writer="guard",
        in_step=in_step,
    )


class Scene:
    """An attempt with its board; replicas are what a test puts into it."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.path = tmp_path
        self.run = create(tmp_path / "runs", **changes)
        self.plan: Plan = self.run.plan()
        self.board = StatusWriter(self.run, run_id="r", attempt=self.run.start_attempt())
        self.components: list[Component] = []

    def component(self, role: Role) -> Component:
        component = Component(
            self.plan.group(role), 0, address=Address("127.0.0.1", 1), log="log", on_change=lambda _: None
        )
        self.components.append(component)
        return component

    async def running(self, role: Role, argv: Sequence[str]) -> Component:
        component = self.component(role)
        process = await start_guarded(argv, spec(self.path, role.value), env=os.environ)
        component.starting(process)
        if argv is not _SILENT:
            await process.started()
        component.ready()
        return component

    def drain(self) -> Drain:
        return Drain(
            self.run,
            run_id="short-time",
            plan=self.plan,
            launcher=LocalLauncher(),
            board=self.board,
            components=self.components,
            drives={},
            hurry=asyncio.Event(),
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in read_events(self.run)]


async def test_the_deadline_of_a_start_counts_from_the_launch(tmp_path: Path) -> None:
    scene = Scene(tmp_path, start_timeout_s=1.0)
    replicas = ReplicaRunner(
        scene.run,
        run_id="r",
        attempt=1,
        plan=scene.plan,
        launcher=SilentLauncher(),
        board=scene.board,
        on_node_down=lambda *_: None,
    )
    component = scene.component(Role.ENGINE)
    end = await asyncio.wait_for(replicas.run(component), 60)
    assert end.cause is not None
    assert end.cause.kind is CauseKind.START_TIMEOUT
    assert "engine 0 did not begin: srun has not started it after 1 s" in end.cause.message
    assert component.process is not None
    assert await component.process.gone() == []
    assert procfs.read_process(component.process.guard_pid) is None
    scene.board.close()


async def test_what_never_began_is_stopped_without_waiting_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start_guarded(_SILENT, spec(tmp_path, "engine", in_step=True), env=os.environ)
    process.stop(3600.0)
    assert await asyncio.wait_for(process.gone(), 60) == []
    assert await process.started() is None


async def test_a_guard_that_cannot_be_reached_costs_the_time_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what is kept for the stage of the engine is enough for its guard to answer, also on a busy machine
    monkeypatch.setattr("hpcrl.supervisor.attempt.drain._LATER_S", 20.0)
    # alone it would take the grace and a minute more; and the trainer is stopped after it
    scene = Scene(tmp_path, stop_timeout_s=30.0)
    silent = await scene.running(Role.TRAINER, _SILENT)
    engine = await scene.running(Role.ENGINE, guard_command(sys.executable))
    assert silent.process is not None
    assert engine.process is not None
    await asyncio.wait_for(scene.drain().all(save_s=60.0, left_s=23.0), 60)
    # a killed process needs a processor to end; this one ends by nothing else
    assert await asyncio.wait_for(silent.process.gone(), 60) == []
    assert procfs.read_process(silent.process.guard_pid) is None
    end = await engine.process.ended()
    assert not end.guard_lost, "the engine was still stopped in order"
    scene.board.close()
    (cut,) = read_events(scene.run, kind="supervisor.cut_off")
    assert (cut.data["role"], cut.data["replica"]) == ("trainer", 0)


class _Drain:
    def __init__(self) -> None:
        self.asked: list[float | None] = []

    async def all(self, *, save_s: float, left_s: float | None = None) -> None:
        self.asked.append(left_s)


@pytest.mark.parametrize(
    ("left_s", "requeue", "asked"),
    [
        (None, False, [None]),
        (45.0, True, [33.0]),
        (10.0, True, []),  # there is no time for both: the requeue saves the night
        (30.0, False, [23.0]),
        (2.0, False, [1.0]),
    ],
)
async def test_the_drain_gets_the_time_that_is_left(
    tmp_path: Path, left_s: float | None, requeue: bool, asked: list[float | None]
) -> None:
    scene = Scene(tmp_path)
    state, drain = AttemptState(scene.board, clock=lambda: 0.0), _Drain()
    assert state.warn(left_s)
    state.saving = requeue
    state.leave("asked by Slurm") if requeue else state.complete()
    state.stop(None)
    ending = Ending(scene.run, plan=scene.plan, state=state, drain=cast(Drain, drain), board=scene.board)
    await ending.end_roles()
    assert drain.asked == asked
    again = ending.conclude(None)
    assert (state.state, again) == (RunState.REQUEUED if requeue else RunState.COMPLETED, False)
    await ending.last_words()
    assert ("supervisor.left_to_slurm" in scene.kinds()) == (not asked)


class _SlowSlurm:
    """Slurm answers questions about nodes only after it was asked for the requeue."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.late = False

    def nodes(self, *_: object) -> list[Any]:
        self.late = self.asked.wait(30)
        return []

    def requeue(self, job_id: int) -> None:
        self.asked.set()


def test_the_requeue_does_not_wait_for_a_list_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: RunDir = create(tmp_path / "runs")
    exclude(run, {"n1": "it went down"}, attempt=1, now_s=1e10, seconds=1e10)
    slurm = _SlowSlurm()
    monkeypatch.setattr(supervise, "SlurmClient", lambda: slurm)
    monkeypatch.setattr(supervise, "_FIND_NODES_S", 0.1)
    monkeypatch.setattr(supervise, "_KILLED_WITHIN_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    supervise._requeue(run, run.plan(), 1)
    assert slurm.asked.is_set()
    assert slurm.late, "the requeue was asked for first"


#: a supervisor with threads, to which Slurm sends SIGTERM as soon as it is asked for the requeue
_REQUEUED = """
import os, signal, sys, threading, time
from pathlib import Path
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor import supervise

class Slurm:
    def requeue(self, job_id):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        print("asked", flush=True)

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
supervise.SlurmClient = Slurm
supervise.nodes_to_exclude = lambda *_: ["n1"]
supervise.stay_away = lambda plan, client, job_id, nodes, *, within_s: print("stays away from", *nodes, flush=True)
run = RunDir(Path(sys.argv[1]))
supervise._requeue(run, run.plan(), 1)
print("lived on", flush=True)
"""


def test_slurms_answer_to_the_requeue_comes_after_the_last_words(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    done = subprocess.run(
        [sys.executable, "-c", _REQUEUED, str(run.path)],
        env={**os.environ, "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines() == ["asked", "stays away from n1"], done.stderr
    assert done.returncode == -signal.SIGTERM


async def test_a_directory_that_cannot_be_listed_is_listed_again(tmp_path: Path) -> None:
    directory = tmp_path / "ready"
    directory.write_text("in the way")
    scene = Scene(tmp_path)
    prober = Prober(
        FileProbe(),
        address=Address("127.0.0.1", 1),
        ready_file=directory / "trainer-0.json",
        credentials=Credentials.of_run(scene.run.path),
    )
    waiting = asyncio.create_task(prober.wait())
    while "as far as can be seen" not in prober.problem:
        assert not waiting.done()
        await asyncio.sleep(0.01)
    directory.unlink()
    directory.mkdir()
    (directory / "trainer-0.json").touch()
    await asyncio.wait_for(waiting, 30)


@pytest.mark.parametrize(
    ("by", "torn", "words", "hurries"),
    [
        ("me", False, "cancelled by me", False),  # hpcrl sends the signal alone
        ("", False, "cancelled by SIGTERM to the supervisor", True),  # Slurm's SIGKILL follows
        ("me", True, "cancelled by SIGTERM to the supervisor", True),
    ],
)
async def test_who_cancels_decides_how_long_the_end_may_take(
    tmp_path: Path, by: str, torn: bool, words: str, hurries: bool
) -> None:
    scene = Scene(tmp_path)
    submission = Submission(submitted_at_s=0.0, executor="slurm", job_id="7", folder="/f", after_attempt=0)
    record = RunRecord.read(scene.run).with_submission(submission)
    record.with_cancel(by, 1.0).write(scene.run)
    if torn:
        scene.run.record_path.write_bytes(b"torn")
    state = AttemptState(scene.board)
    notices = SignalHandler(
        scene.run,
        attempt=1,
        plan=scene.plan,
        board=scene.board,
        components=[],
        state=state,
        on_bug=lambda task: None,
        in_step=True,
    )
    notices._cancel(signal.SIGTERM)
    assert state.is_decided(), "before anything else"
    assert state.ends == []
    await notices.settle()
    assert [(cause.kind, cause.message) for cause in state.ends] == [(CauseKind.CANCELLED, words)]
    assert (state.left_s is not None) == hurries
    assert state.asked_by_slurm == hurries
    notices._cancel(signal.SIGTERM)
    assert state.hurry.is_set()
    scene.board.close()


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (
            (CauseKind.PREEMPTED, "Slurm gives the nodes to another job (preemption)"),
            "Slurm gives the nodes to another",
        ),
        # what a requeue looks like while it is on its way, and where Slurm says nothing
        (
            (CauseKind.CANCELLED, "job 7 was ended by Slurm"),
            "Slurm warned that the job is about to end (its time limit, ",
        ),
        (None, "Slurm warned that the job is about to end (its time limit, or a preemption); no state was saved"),
    ],
)
async def test_a_requeued_attempt_says_what_it_was_warned_of(
    tmp_path: Path, taken: tuple[CauseKind, str] | None, words: str
) -> None:
    scene = Scene(tmp_path)
    attempts = scene.plan.attempts.model_copy(update={"requeue": True})
    state = AttemptState(scene.board)
    notices = SignalHandler(
        scene.run,
        attempt=1,
        plan=scene.plan.model_copy(update={"attempts": attempts}),
        board=scene.board,
        components=[],
        state=state,
        on_bug=lambda task: None,
        in_step=True,
        taken=lambda: taken,
    )
    notices._warned()
    await asyncio.wait_for(state.wait_decided(), 30)
    assert state.requeue
    assert state.why.startswith(words)
    scene.board.enter(RunState.REQUEUED, because=state.why)
    scene.board.close()
    # the next attempt has begun: `why` says how this one ended
    begun = StatusWriter(scene.run, run_id="r", attempt=2)
    begun.enter(RunState.RUNNING)
    begun.close()
    assert diagnose(scene.run).earlier[1].startswith(f"REQUEUED: {words}")
