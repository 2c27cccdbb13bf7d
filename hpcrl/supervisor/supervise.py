"""The batch process of a run: attempt after attempt, as long as it has its job, and the requeue after that."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext

from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError, RunDirError, RunFailedError
from hpcrl.network.ports import HeldPorts
from hpcrl.processes.daemon_threads import run_process
from hpcrl.reporting.log_format import start_logging
from hpcrl.reporting.log_thread import log_in_thread
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.group_access import shared_group
from hpcrl.runs.start.privacy import protect
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError, SlurmUnavailableError
from hpcrl.slurm.exclude import nodes_to_exclude, stay_away
from hpcrl.slurm.in_job import InJob, plan_inside
from hpcrl.slurm.job_nodes import JobNodes
from hpcrl.slurm.launch_arguments import hosts_from_env
from hpcrl.slurm.replica_jobs import ReplicaJobs, cancel_replicas
from hpcrl.storage.retry import retry_transient
from hpcrl.storage.trusted_paths import umask_of
from hpcrl.supervisor.elastic.keeper import ElasticReplicas
from hpcrl.supervisor.launch.replica_launcher import LocalLauncher
from hpcrl.supervisor.launch.step_launcher import StepLauncher
from hpcrl.supervisor.recovery.batch_node_watch import BatchNodeWatch
from hpcrl.supervisor.recovery.nodes import record_lost_nodes
from hpcrl.supervisor.supervisor import Supervisor

_log = logging.getLogger(__name__)
_READ_PATIENCE_S = 60.0
"""Timeout in seconds for reading what an attempt needs of its run."""
_ASK_AGAIN_S = 5.0
_FIND_NODES_S = 5.0
"""Timeout in seconds of the search for nodes that the requeued job is to avoid."""
_KILLED_WITHIN_S = 120.0
"""Seconds to wait for Slurm to end the job that it requeues, which ends the supervisor."""


def supervise(run: RunDir, submission: int, in_job: InJob | None) -> str:
    """See `hpcrl.supervisor.job.Supervise`."""
    start_logging("%(levelname)s %(name)s: %(message)s")
    log_in_thread()

    def read() -> tuple[Plan, RunRecord, RunStatus | None]:
        protect(run, shared_group(run) or run.cluster().files.group)
        os.umask(umask_of(run.path))
        return run.plan(), RunRecord.read(run), RunStatus.read(run)

    plan, record, status = retry_transient(read, limit_s=_READ_PATIENCE_S, what="reading the run")
    # Slurm has one batch process per job, so the status is that of the attempt before the requeue
    requeued = in_job is None and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    if in_job is not None:
        plan = plan_inside(plan, in_job, now_s=time.time())
    if status is not None and not requeued and not status.state.ended and status.supervisor_alive(time.time()):
        raise RunDirError(f"{run.name} is supervised by pid {status.supervisor.pid} on {status.supervisor.host}")
    if requeued:
        record_lost_nodes(run, plan, status, SlurmClient(), int(os.environ["SLURM_JOB_ID"]), writer="supervisor")
    spares = plan.layout.spares and in_job is None
    nodes = JobNodes(plan, os.environ, SlurmClient()) if spares else None
    if requeued and _begins_on_excluded_node(run, plan, nodes):
        _requeue(run, plan, submission)
        return RunState.REQUEUED.value
    with BatchNodeWatch(run, plan, nodes, os.environ) if nodes is not None else nullcontext():
        state, cause = run_process(
            _attempts(run, plan, record.run_id, submission, inside=in_job is not None, nodes=nodes)
        )
    if plan.layout.kind == "elastic" and state is not RunState.REQUEUED:
        cancel_replicas(SlurmClient(), record.run_id)
    if cause is not None and cause.kind in (CauseKind.NO_PROGRESS, CauseKind.NOTHING_TO_RESTORE):
        raise SystemExit(cause.kind.exit_code)
    message = "" if cause is None else cause.message
    if state is not RunState.COMPLETED:
        raise RunFailedError(f"{run.name}: {state}: {message}")
    return state.value


async def _attempts(
    run: RunDir, plan: Plan, run_id: str, submission: int, *, inside: bool, nodes: JobNodes | None
) -> tuple[RunState, Cause | None]:
    """Run one attempt after the other, as long as the job is the supervisor's."""
    started, held = time.monotonic(), HeldPorts()
    while True:
        supervisor = _supervisor(run, plan, run_id, submission, started, held=held, inside=inside, nodes=nodes)
        end = await supervisor.run()
        if end[0] is RunState.REQUEUED:
            # before the loop is closed, which waits for threads that Slurm or the filesystem may block
            _requeue(run, plan, submission)
        if not supervisor.again:  # no await before the next supervisor handles signals, so that none is lost
            return end


def _supervisor(
    run: RunDir,
    plan: Plan,
    run_id: str,
    submission: int,
    started: float,
    *,
    held: HeldPorts,
    inside: bool,
    nodes: JobNodes | None,
) -> Supervisor:
    if plan.layout.kind == "local":
        return Supervisor(run, run_id=run_id, plan=plan, launcher=LocalLauncher(held), started=started)
    steps = StepLauncher(run.cluster(), inside=inside, held=held, nodes=nodes)
    elastic = None
    if plan.layout.kind == "elastic":
        jobs = ReplicaJobs(run, plan=plan, client=SlurmClient(), number=submission)

        def elastic(crew: Supervisor) -> ElasticReplicas:
            return ElasticReplicas(run, plan, jobs=jobs, launcher=steps, crew=crew)

    return Supervisor(run, run_id=run_id, plan=plan, launcher=steps, started=started, elastic=elastic)


def _begins_on_excluded_node(run: RunDir, plan: Plan, nodes: JobNodes | None) -> bool:
    """Return whether Slurm gave this job a node to avoid and can be asked for another; once per node and run.

    That happens if the previous supervisor died with its node before it could inform Slurm. Spare nodes replace such a
    node without another requeue.
    """
    if not plan.attempts.requeue or not read_exclusions(run, now_s=time.time()):
        return False
    mine = {host for hosts in hosts_from_env(plan, os.environ).values() for host in hosts}
    avoided = sorted(mine & set(nodes_to_exclude(run, plan, SlurmClient())))
    if nodes is not None and nodes.enough_without(avoided):
        nodes.lose(dict.fromkeys(avoided, "the run avoids it: it failed before"))
        nodes.take_news()  # the list that it is from has it
        return False
    tried = {name for event in read_events(run, kind="nodes.avoided") for name in event.data["nodes"]}
    if not avoided or tried & set(avoided):
        return False
    events = EventWriter(run, attempt=(run.attempts() or [0])[-1], writer="supervisor")
    events.emit("nodes.avoided", nodes=avoided)
    events.close()
    return True


def _requeue(run: RunDir, plan: Plan, submission: int) -> None:
    """Requeue the supervisor's job, however long Slurm takes to answer: otherwise the time limit ends it."""
    client, job_id = SlurmClient(), int(os.environ["SLURM_JOB_ID"])
    # Slurm's SIGTERM follows the requeue at once, to this process and to the commands that it runs (they inherit the
    # mask). The remaining work must fit before its SIGKILL, so as much as possible is asked before the requeue
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())  # other threads do not have the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    # found before the requeue, if Slurm answers at once; a slow answer must not delay it
    finding = ThreadPoolExecutor(max_workers=1).submit(nodes_to_exclude, run, plan, client)
    wait([finding], timeout=_FIND_NODES_S)
    while True:
        try:
            client.requeue(job_id)
            break
        except SlurmUnavailableError as error:
            _log.warning("the requeue got no answer, trying again: %s", error)
            time.sleep(_ASK_AGAIN_S)
        except SlurmError as error:
            # Slurm itself was faster: a node went down. While its processes end, squeue calls the job COMPLETING
            job = client.jobs([job_id]).get(job_id)
            if "job is pending" in str(error).lower() or (job is not None and job.state.waiting):
                break
            raise RunFailedError(f"Slurm does not requeue job {job_id}: {error}") from error
    # the job is pending now, although this process is still ending: only now Slurm takes the list. And its nodes are
    # not free yet: pending replicas could take them, and would then wait for a trainer that cannot begin
    if plan.layout.kind == "elastic":
        try:
            ReplicaJobs(run, plan=plan, client=client, number=submission).let_main_go_first(job_id)
        except (HpcrlError, OSError) as error:
            _log.warning("waiting replicas could not be ordered behind the trainer: %s", error)
    try:
        stay_away(plan, client, job_id, finding.result(), within_s=_KILLED_WITHIN_S / 4)
    except (HpcrlError, OSError) as error:
        # the next attempt detects itself that it began on such a node
        _log.warning("the nodes to avoid could not be set on the job: %s", error)
    # take a pending SIGTERM now: while this process lives the job is COMPLETING, and the next attempt cannot begin
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if told.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_KILLED_WITHIN_S)
