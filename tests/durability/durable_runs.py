"""The files of a run directory: what is recorded of them, and what must hold after a cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from power_cut import Cut, marks_of
from recording import mark
from runs_testing import GONE, START_S, step_record

from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.config.cluster import LocalCluster, PathsConfig
from hpcrl.config.plan import FileProbe, Plan, Role, RoleGroup, RolePolicy
from hpcrl.config.recipe import ModelConfig, Recipe, TrainerConfig, WordsEnv
from hpcrl.network.credentials import TOKEN_FILE, read_token
from hpcrl.runs.elastic import Wanted
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.metrics import MetricsWriter, read_metrics
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import keep_snapshot, read_snapshot, take_snapshot
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.submit.submission import create_run

STEPS = 3


def life(root: Path) -> None:
    """A run is made and handed over; an attempt runs and dies, the next one goes on."""
    run = _make(root / "runs")
    mark(["made"])
    submission = Submission(
        submitted_at_s=START_S + 1, executor="local", job_id="1", folder="/f", after_attempt=0, process=GONE
    )
    RunRecord.read(run).with_submission(submission).write(run)
    mark(["submitted", 1])
    keep_snapshot(run, take_snapshot(run, run.recipe(), run.plan()))  # as a resume does
    Wanted.ask(run, {"engine": 2}, user="somebody")
    mark(["resumed"])
    for number in (1, 2):
        attempt = run.start_attempt()
        mark(["attempt", attempt])
        _status(run, attempt, RunState.RUNNING)
        mark(["status", attempt])
        metrics, events = MetricsWriter(run, attempt), EventWriter(run, attempt=attempt, writer="trainer-0")
        decision = RestoreDecision(step=number, verified="content", seconds=0.5, skipped=[])
        decision.write(run.attempt_dir(attempt) / "restore.json")
        mark(["decided", attempt])
        for step in range(1, STEPS + 1):
            metrics.write(step_record(STEPS * (number - 1) + step, attempt=attempt))
            events.emit("step", step=step)
        metrics.close()
        events.close()
    _status(run, 2, RunState.COMPLETED)
    mark(["ended"])


def _status(run: RunDir, attempt: int, state: RunState) -> None:
    RunStatus(
        run_id="f" * 32, attempt=attempt, state=state, supervisor=GONE, started_at_s=START_S, heartbeat_s=START_S
    ).write(run)


def _make(runs_root: Path) -> RunDir:
    recipe = Recipe(
        name="words",
        model=ModelConfig(path="/model"),
        environments=(WordsEnv(name="words", kind="words"),),
        trainer=TrainerConfig(steps=40),
    )
    cluster = LocalCluster(name="local", kind="local", paths=PathsConfig(runs_root=str(runs_root)))
    trainer = RoleGroup(
        role=Role.TRAINER,
        ready=FileProbe(),
        policy=RolePolicy(stop_timeout_s=5.0),
        replicas=1,
        ranks=1,
        command=("true",),
        start_timeout_s=60.0,
    )
    plan = Plan(
        run="run-1",
        recipe="words",
        cluster="local",
        run_dir=runs_root / "run-1",
        groups=(trainer,),
        first_port=20000,
        last_port=20009,
        time_limit_s=3600.0,
    )
    return create_run(recipe, cluster, plan).run


def judge(root: Path, cut: Cut, other: Path) -> Iterator[str]:
    """Whoever looks first; then the next attempt."""
    del other
    run = RunDir(root / "runs" / "run-1")
    if not run.path.exists():
        if list(marks_of(cut, "made")):
            yield "the run had been made and is gone"
        return
    yield from _configuration(run, cut)
    status = RunStatus.read(run)
    expected = max((int(str(number)) for (number,) in marks_of(cut, "status")), default=0)
    if expected and (status is None or status.attempt < expected):
        yield f"status.json is older than attempt {expected}: {status}"
    if list(marks_of(cut, "ended")) and (status is None or status.state is not RunState.COMPLETED):
        yield f"the end of the run is gone: {status}"
    begun = [int(str(number)) for (number,) in marks_of(cut, "attempt")]
    if lost := sorted(set(begun) - set(run.attempts())):
        yield f"attempts {lost} are gone, there are {run.attempts()}"
    for (attempt,) in marks_of(cut, "decided"):
        decision = RestoreDecision.find(run.attempt_dir(int(str(attempt))) / "restore.json")
        if decision is None or decision.step != attempt:
            yield f"what attempt {attempt} restores is gone: {decision}"
    yield from _logs(run)
    following = run.start_attempt()
    if following <= max(begun, default=0):
        yield f"the next attempt gets the number of an older one, {following}"
    metrics, events = MetricsWriter(run, following), EventWriter(run, attempt=following, writer="trainer-0")
    metrics.write(step_record(99, attempt=following))
    events.emit("step", step=99)
    metrics.close()
    events.close()
    if 99 not in [record.step for record in read_metrics(run)]:
        yield "the next attempt's step cannot be read"
    if 99 not in [event.data["step"] for event in read_events(run)]:
        yield "the next attempt's event cannot be read"
    yield from _logs(run)


def _configuration(run: RunDir, cut: Cut) -> Iterator[str]:
    """What was resolved at submit, and to whom the run was handed over."""
    if (run.recipe().name, run.cluster().name, run.plan().run) != ("words", "local", "run-1"):
        yield "the configuration is not what was written"
    read_token(run.path / TOKEN_FILE)
    if read_snapshot(run) is None:
        yield "what the run was made of is gone"
    if list(marks_of(cut, "resumed")) and not (run.snapshots_dir / "0002" / "snapshot.json").is_file():
        yield "what the run was resumed with is gone"
    if list(marks_of(cut, "resumed")) and Wanted.read(run) is None:
        yield "the replicas that somebody asked for are forgotten"
    handed_over = len(RunRecord.read(run).submissions)
    if handed_over < len(list(marks_of(cut, "submitted"))):
        yield "run.json does not know to whom the run was handed over"


def _logs(run: RunDir) -> Iterator[str]:
    """What is read of logs was written like that."""
    for record in read_metrics(run):
        if msgspec.structs.replace(step_record(record.step, attempt=record.attempt)) != record:
            yield f"a step that nobody wrote: {record}"
    for event in read_events(run):
        if event.kind != "step" or event.data["step"] not in (*range(1, STEPS + 1), 99):
            yield f"an event that nobody wrote: {event}"
