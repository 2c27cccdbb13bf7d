"""Watches the supervisor's own node, of a job that Slurm does not end with a lost node (``job.spare_nodes``).

::

    supervisor ──srun──> one task on another node of the job: requeues the job when the supervisor's node is gone

Slurm keeps a job with ``--no-kill`` as long as it has a node, also where its batch process went with another one: it
would hold its nodes until the time limit. The task asks Slurm only while the supervisor's heartbeat is silent, and only
Slurm's answer counts. Slurm ends it with the job.

The task must outlive its ``srun``, which is on the supervisor's node. An ``srun`` that is asked to end cancels its
step, and a second process of it does so when the first one is killed. So both are killed at once when the task runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError
from hpcrl.processes.interpreter import module_command
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import HEARTBEAT_S, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.exclude import nodes_to_exclude, stay_away
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.job_nodes import JobNodes
from hpcrl.slurm.launch_arguments import Allocation, launch_on_nodes, step_environment
from hpcrl.slurm.lookup import slurm_client_of
from hpcrl.slurm.states import JobState, parse_state
from hpcrl.storage.trusted_paths import umask_of
from hpcrl.supervisor.recovery.nodes import record_lost_nodes

_log = logging.getLogger(__name__)
_MODULE = "hpcrl.supervisor.recovery.batch_node_watch"
_LOOK_S = 2.0
_SILENCE_S = 10 * HEARTBEAT_S
"""Seconds without a heartbeat after which Slurm is asked."""
_ASK_S = 10.0
"""Seconds between two requests to Slurm."""
_AGAIN_S = 2.0
"""Seconds until the task is started again, on another node where its node was lost."""
_START_S = 120.0
"""Timeout in seconds for its start."""
_END_S = 10.0
_RUNS = b"watching\n"
_TELL_S = 10.0


class BatchNodeWatch:
    """The task, as the supervisor starts it: a context manager for the time of the job.

    Parameters
    ----------
    nodes:
        Nodes of the job.
    environ:
        Environment of the batch process.

    Attributes
    ----------
    node:
        Node on which the task runs; empty before its start.
    """

    def __init__(self, run: RunDir, plan: Plan, nodes: JobNodes, environ: Mapping[str, str]) -> None:
        self._run, self._plan, self._nodes, self._environ = run, plan, nodes, environ
        self._here = environ.get("SLURMD_NODENAME", "")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="watch of the batch node", daemon=True)
        self._srun: subprocess.Popen[bytes] | None = None
        self.node = ""

    def __enter__(self) -> BatchNodeWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if (srun := self._srun) is not None:  # its step does not begin
            _kill_all(srun)
        self._thread.join(_END_S)

    def _keep(self) -> None:
        while self._here and not self._closing.is_set():
            if not self.node or self.node in self._nodes.lost:
                place = self._nodes.other_than(self._here)
                self.node = "" if place is None or not self._start(*place) else place[1]
            self._closing.wait(_AGAIN_S)

    def _start(self, component: int, node: str) -> bool:
        """Start the task on a node; return whether it runs."""
        command = module_command(
            sys.executable, _MODULE, str(self._run.path), self._environ["SLURM_JOB_ID"], self._here
        )
        launch = launch_on_nodes(self._plan, component, Allocation((node,)), command=command)
        try:
            srun = subprocess.Popen(
                launch.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=step_environment(self._environ),
                start_new_session=True,
            )
        except OSError as error:
            _log.warning("no task watches the supervisor's node: %s", error)
            return False
        self._srun = srun
        if self._closing.is_set():
            _kill_all(srun)
        self._nodes.own_pids.add(srun.pid)
        late = threading.Timer(_START_S, _kill_all, [srun])
        late.daemon = True  # the supervisor does not wait for it
        late.start()
        assert srun.stdout is not None
        with srun.stdout as output:
            runs = output.readline() == _RUNS
        late.cancel()
        self._srun = None
        _kill_all(srun)
        srun.wait()
        self._nodes.own_pids.discard(srun.pid)
        return runs


def _kill_all(srun: subprocess.Popen[bytes]) -> None:
    """Kill ``srun`` and its second process together."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(srun.pid, signal.SIGKILL)


class LostBatchNode:
    """Decides whether the supervisor is gone with its node.

    Parameters
    ----------
    job_id, node:
        The job, and the node of its batch process.
    """

    def __init__(self, run: RunDir, client: SlurmClient, job_id: int, node: str) -> None:
        self._run, self._client, self._job_id, self._node = run, client, job_id, node
        self._heartbeat: tuple[int, float] | None = None
        self._moved_at = time.monotonic()

    def is_silent(self, now: float) -> bool:
        """Return whether the supervisor's heartbeat has not changed for long, at a monotonic time."""
        status = RunStatus.read(self._run)
        heartbeat = None if status is None else (status.attempt, status.heartbeat_s)
        if heartbeat != self._heartbeat:
            self._heartbeat, self._moved_at = heartbeat, now
        return now - self._moved_at >= _SILENCE_S

    def is_lost(self) -> bool:
        """Ask Slurm; return whether the job runs without the node of its batch process.

        Raises
        ------
        SlurmError
            It does not answer.
        """
        records = self._client.details(self._job_id)
        running = [record for record in records if parse_state(record.get("JobState", "")) is JobState.RUNNING]
        has = {node for record in running for node in expand_hostlist(record.get("NodeList", ""))}
        if not has:
            return False
        return self._node not in has or any(node.down for node in self._client.nodes([self._node]))


def requeue_without_supervisor(run: RunDir, client: SlurmClient, job_id: int) -> None:
    """Requeue the job, or end it where it may not be requeued, and let the next attempt avoid the lost node.

    Raises
    ------
    SlurmError
        Slurm refuses, or does not answer.
    """
    plan = run.plan()
    try:
        record_lost_nodes(run, plan, RunStatus.read(run), client, job_id, writer="batch-node-watch")
    except OSError as error:
        # a full disk must not let the job hold its nodes; the next attempt finds lost nodes itself
        _log.warning("the lost node could not be recorded: %s", error)
    if not plan.attempts.requeue:
        client.cancel(job_id)
        return
    nodes = nodes_to_exclude(run, plan, client)
    client.requeue(job_id)
    stay_away(plan, client, job_id, nodes, within_s=_TELL_S)


def _write_to_file(path: Path) -> None:
    """Let this process write to a file from now on: nothing takes its output when ``srun`` is gone."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)


def main() -> None:
    """Watch until the job ends: Slurm ends this step with it."""
    start_logging("%(levelname)s batch node watch: %(message)s")
    run, job_id, node = RunDir(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    os.umask(umask_of(run.path))
    client = slurm_client_of(RunRecord.read(run).submissions[-1])
    lost, asked_at = LostBatchNode(run, client, job_id, node), float("-inf")
    # last: a task that ends before this is started again; its end after this is not seen
    sys.stdout.buffer.write(_RUNS)
    sys.stdout.buffer.flush()
    _write_to_file(run.path / "submitit" / "batch_node_watch.log")
    while True:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        # what fails for a moment is tried again
        try:
            if not lost.is_silent(now) or now - asked_at < _ASK_S:
                continue
            asked_at = now
            if lost.is_lost():
                _log.warning("the node of the supervisor, %s, is lost: the job goes back into the queue", node)
                # the requeue ends this step, too; the list of nodes must be set before SIGKILL
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                requeue_without_supervisor(run, client, job_id)
                return
        except (HpcrlError, OSError, ValueError) as error:
            _log.warning("Slurm was not asked about the supervisor's node: %s", error)


if __name__ == "__main__":
    main()
