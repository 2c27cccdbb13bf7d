"""The batch process of a run: attempt after attempt, as long as it has its job, and the requeue after that."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

from hpcrl.config.plan import Plan
from hpcrl.daemon_threads import run_process
from hpcrl.errors import HpcrlError, RunDirError, RunFailedError
from hpcrl.log_format import start_logging
from hpcrl.log_thread import log_in_thread
from hpcrl.ours import umask_of
from hpcrl.passing import patiently
from hpcrl.ports import HeldPorts
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.privacy import protect
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError, SlurmUnavailableError
from hpcrl.slurm.exclude import nodes_to_exclude, stay_away
from hpcrl.slurm.in_job import InJob, plan_inside
from hpcrl.slurm.launch_arguments import allocations_from_env
from hpcrl.slurm.replica_jobs import ReplicaJobs, cancel_replicas
from hpcrl.supervisor.elastic.keeper import ElasticReplicas
from hpcrl.supervisor.launch.replica_launcher import LocalLauncher
from hpcrl.supervisor.launch.step_launcher import StepLauncher
from hpcrl.supervisor.policy.nodes import record_lost_nodes
from hpcrl.supervisor.supervisor import Supervisor

__all__ = ["supervise"]

_log = logging.getLogger(__name__)
_READ_PATIENCE_S = 60.0
"""How long an attempt tries to read what it is of."""
_ASK_AGAIN_S = 5.0
_FIND_NODES_S = 5.0
"""How long the requeue waits to be told which nodes it is to avoid."""
_KILLED_WITHIN_S = 120.0
"""Slurm ends the job that it requeues, us with it."""


def supervise(run: RunDir, submission: int, in_job: InJob | None) -> str:
    """See `hpcrl.supervisor.job.Supervise`."""
    start_logging("%(levelname)s %(name)s: %(message)s")
    log_in_thread()

    def read() -> tuple[Plan, RunRecord, RunStatus | None]:
        protect(run, run.cluster().files.group)
        os.umask(umask_of(run.path))
        return run.plan(), RunRecord.read(run), RunStatus.read(run)

    plan, record, status = patiently(read, limit_s=_READ_PATIENCE_S, what="reading the run")
    # Slurm has one batch process a job: what the status says is of the attempt before the requeue
    requeued = in_job is None and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    if in_job is not None:
        plan = plan_inside(plan, in_job, now_s=time.time())
    if status is not None and not requeued and not status.state.ended and status.supervisor_alive(time.time()):
        raise RunDirError(f"{run.name} is supervised by pid {status.supervisor.pid} on {status.supervisor.host}")
    if requeued:
        record_lost_nodes(run, plan, status, SlurmClient(), int(os.environ["SLURM_JOB_ID"]), writer="supervisor")
    if requeued and _begins_on_excluded_node(run, plan):
        _requeue(run, plan, submission)
        return RunState.REQUEUED.value
    state, cause = run_process(_attempts(run, plan, record.run_id, submission, inside=in_job is not None))
    if plan.layout.kind == "elastic" and state is not RunState.REQUEUED:
        cancel_replicas(SlurmClient(), record.run_id)
    if cause is not None and cause.kind in (CauseKind.NO_PROGRESS, CauseKind.NOTHING_TO_RESTORE):
        raise SystemExit(cause.kind.exit_code)
    message = "" if cause is None else cause.message
    if state is not RunState.COMPLETED:
        raise RunFailedError(f"{run.name}: {state}: {message}")
    return state.value


async def _attempts(
    run: RunDir, plan: Plan, run_id: str, submission: int, *, inside: bool
) -> tuple[RunState, Cause | None]:
    """One attempt after the other, as long as the job is ours."""
    started, held = time.monotonic(), HeldPorts()
    while True:
        supervisor = _supervisor(run, plan, run_id, submission, started, held=held, inside=inside)
        end = await supervisor.run()
        if end[0] is RunState.REQUEUED:
            # before the loop is closed: that waits for threads, which Slurm or the filesystem may keep
            _requeue(run, plan, submission)
        if not supervisor.again:  # no await until the next one listens to signals: none is lost
            return end


def _supervisor(
    run: RunDir, plan: Plan, run_id: str, submission: int, started: float, *, held: HeldPorts, inside: bool
) -> Supervisor:
    if plan.layout.kind == "local":
        return Supervisor(run, run_id=run_id, plan=plan, launcher=LocalLauncher(held), started=started)
    steps = StepLauncher(run.cluster(), inside=inside, held=held)
    elastic = None
    if plan.layout.kind == "elastic":
        jobs = ReplicaJobs(run, plan=plan, client=SlurmClient(), number=submission)

        def elastic(crew: Supervisor) -> ElasticReplicas:
            return ElasticReplicas(run, plan, jobs=jobs, launcher=steps, crew=crew)

    return Supervisor(run, run_id=run_id, plan=plan, launcher=steps, started=started, elastic=elastic)


def _begins_on_excluded_node(run: RunDir, plan: Plan) -> bool:
    """Whether Slurm gave us a node to avoid, where it could have been told: once a node and attempt.

    That happens where the supervisor before died with its node, before it could tell Slurm.
    """
    if not plan.attempts.requeue or not read_exclusions(run, now_s=time.time()):
        return False
    mine = {host for allocation in allocations_from_env(plan, os.environ).values() for host in allocation.hosts}
    avoided = sorted(mine & set(nodes_to_exclude(run, plan, SlurmClient())))
    tried = {name for event in read_events(run, kind="nodes.avoided") for name in event.data["nodes"]}
    if not avoided or tried & set(avoided):
        return False
    events = EventWriter(run, attempt=(run.attempts() or [0])[-1], writer="supervisor")
    events.emit("nodes.avoided", nodes=avoided)
    events.close()
    return True


def _requeue(run: RunDir, plan: Plan, submission: int) -> None:
    """Put our job back into the queue, however long Slurm takes to answer: the time limit ends us otherwise."""
    client, job_id = SlurmClient(), int(os.environ["SLURM_JOB_ID"])
    # Slurm's SIGTERM follows the requeue at once, to us and to the commands that we run (they inherit the mask). What
    # is left to do fits into the time until its SIGKILL, the more surely the less must be asked first
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())  # other threads do not have the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    # found before, where Slurm answers at once: the requeue waits for nothing
    finding = ThreadPoolExecutor(max_workers=1).submit(nodes_to_exclude, run, plan, client)
    wait([finding], timeout=_FIND_NODES_S)
    while True:
        try:
            client.requeue(job_id)
            break
        except SlurmUnavailableError as error:
            _log.warning("the requeue got no answer, asking again: %s", error)
            time.sleep(_ASK_AGAIN_S)
        except SlurmError as error:
            # Slurm itself was faster: a node went down. While its processes end, squeue calls the job COMPLETING
            job = client.jobs([job_id]).get(job_id)
            if "job is pending" in str(error).lower() or (job is not None and job.state.waiting):
                break
            raise RunFailedError(f"Slurm does not requeue job {job_id}: {error}") from error
    # the job waits now, also while we still end: the moment in which Slurm takes the list. And our nodes are not free
    # yet: replicas that wait for theirs could take them, and would then wait for a trainer that cannot begin
    if plan.layout.kind == "elastic":
        try:
            ReplicaJobs(run, plan=plan, client=client, number=submission).let_main_go_first(job_id)
        except (HpcrlError, OSError) as error:
            _log.warning("replicas that wait are not told to let the trainer begin first: %s", error)
    try:
        stay_away(plan, client, job_id, finding.result(), within_s=_KILLED_WITHIN_S / 4)
    except (HpcrlError, OSError) as error:
        # the next attempt sees by itself that it begins on such a node
        _log.warning("the job is not told which nodes to avoid: %s", error)
    # die of the SIGTERM now, if it came: while we live the job is COMPLETING, and the next attempt does not begin
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if told.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_KILLED_WITHIN_S)
