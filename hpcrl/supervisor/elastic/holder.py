"""The batch process of a replica's own job (layout ``elastic``): holds its nodes for the run, as long as there is one.

::

    sbatch ──> holder: writes down job and nodes, waits
    supervisor, in the trainer's job ──srun --jobid──> guard ──> engine, on these nodes

It starts nothing itself. Slurm ends the steps of a job with its batch process, so that nothing outlives the holder.
It ends when the run has ended, and gives its nodes back when the trainer's job waits in the queue for too long. A
supervisor that is silent is not an ended run: then Slurm is asked about the trainer's job, and only its word counts.

If a supervisor died with its node, Slurm requeues the trainer's job unchanged: no process has asked Slurm to
avoid nodes, and the run's pending replicas could take the nodes that it needs. Holders on other nodes are still alive
and do both. A holder that begins while the trainer's job is pending returns its nodes at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.config.plan import Role
from hpcrl.errors import HpcrlError
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.elastic import HeldNodes, wanted_replicas
from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import HEARTBEAT_S, RunState, RunStatus
from hpcrl.slurm.exclude import nodes_to_exclude, stay_away
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.lookup import look_up, slurm_client_of
from hpcrl.slurm.replica_jobs import ReplicaJobs
from hpcrl.storage.trusted_paths import umask_of
from hpcrl.supervisor.recovery.nodes import may_ask, record_lost_nodes

_log = logging.getLogger(__name__)
_LOOK_S = 2.0
_SILENCE_S = 10 * HEARTBEAT_S
"""Seconds without a heartbeat after which the supervisor may be gone and Slurm is asked."""
_ASK_S = 15.0
"""Seconds between two requests to Slurm."""
_TELL_S = 5.0
"""Timeout in seconds of one try to keep the trainer's job away from nodes; it is repeated."""


class Holder:
    """Decides when the nodes are given back.

    Parameters
    ----------
    held:
        Nodes that this job holds.
    clock:
        Monotonic seconds.
    """

    def __init__(self, run: RunDir, held: HeldNodes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._held, self._clock = run, held, clock
        self._hold_s = run.plan().elastic.hold_s
        self._heartbeat: tuple[int, float] | None = None
        self._moved_at = self._asked_at = clock() - _SILENCE_S
        self._waiting_since: float | None = None
        self._met, self._made_way = False, False

    def why_end(self) -> str:
        """Return why the nodes are no longer needed; empty while they are."""
        record = RunRecord.read(self._run)
        if len(record.submissions) > self._held.submission:
            return "the run was submitted again"
        if self._held.replica >= wanted_replicas(self._run, self._run.plan()).get(self._held.role, 0):
            return "the run was scaled down" if self._supervisor_is_silent() else ""
        return self._why_run_ended() if self._supervisor_is_silent() else ""

    def _supervisor_is_silent(self) -> bool:
        """Return whether the run's directory shows no live supervisor.

        Clocks of nodes differ, so only changes of the heartbeat count, not its time.
        """
        status = RunStatus.read(self._run)
        now = self._clock()
        if status is not None and (status.attempt, status.heartbeat_s) != self._heartbeat:
            self._met = self._met or self._heartbeat is not None
            self._heartbeat, self._moved_at = (status.attempt, status.heartbeat_s), now
        alive = status is not None and status.state in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)
        if alive and now - self._moved_at < _SILENCE_S:
            self._waiting_since, self._made_way = None, False
            return False
        return True

    def _why_run_ended(self) -> str:
        now = self._clock()
        if now - self._asked_at < _ASK_S:
            return ""
        self._asked_at = now
        view = observe(self._run)
        if view.state.ended:
            return f"the run has ended: {view.state}"
        if view.job is not None and view.job.waiting:
            if not self._met:
                return "the trainer's job waits, and its nodes come first"
            self._make_way()
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if now - self._waiting_since > self._hold_s:
                return f"the trainer's job has waited for {now - self._waiting_since:.0f} s"
        return ""

    def _make_way(self) -> None:
        """Make way for the pending trainer's job, as a supervisor that died with its node could not.

        Tell Slurm which nodes that job is to avoid, and let the run's pending replicas start after it.
        """
        if self._made_way or not may_ask(self._run):
            return
        run, plan, submission = self._run, self._run.plan(), RunRecord.read(self._run).submissions[-1]
        client, main = slurm_client_of(submission), int(submission.job_id)
        writer = f"holder-{self._held.role}-{self._held.replica}"
        try:
            ReplicaJobs(run, plan=plan, client=client, number=self._held.submission).let_main_go_first(main)
            record_lost_nodes(run, plan, RunStatus.read(run), client, main, writer=writer)
            stay_away(plan, client, main, nodes_to_exclude(run, plan, client), within_s=_TELL_S)
        except (HpcrlError, OSError) as error:
            _log.warning("job %d, which waits, did not get all of its updates: %s", main, error)
        else:
            self._made_way = True


def held_from_env(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[RunDir, HeldNodes]:
    """Return the run and the held nodes from the batch script's arguments and environment."""
    run_dir, role, replica, submission = arguments
    held = HeldNodes(
        role=Role(role).value,
        replica=int(replica),
        submission=int(submission),
        job_id=int(environ["SLURM_JOB_ID"]),
        restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=expand_hostlist(environ["SLURM_JOB_NODELIST"]),
        since_s=time.time(),
    )
    return RunDir(Path(run_dir)), held


def _say_held(run: RunDir, held: HeldNodes, told: threading.Event) -> None:
    """Write down the held nodes, which only this job knows; retry if the filesystem fails for a moment."""
    while not told.is_set():
        try:
            held.write(run)
            return
        except OSError as error:
            _log.warning("the record of held nodes cannot be written, trying again in %g s: %s", _LOOK_S, error)
            told.wait(_LOOK_S)


def main() -> None:
    """Hold the nodes until the run no longer needs them, or Slurm wants them back."""
    start_logging("%(levelname)s holder: %(message)s")
    run, held = held_from_env(sys.argv[1:], os.environ)
    os.umask(umask_of(run.path))
    set_job_query(look_up)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    _say_held(run, held, told)
    _log.info("job %d holds %s for %s %d", held.job_id, ", ".join(held.nodes), held.role, held.replica)
    holder, why = Holder(run, held), ""
    while not told.is_set() and not why:
        told.wait(_LOOK_S)
        # a transient filesystem error, or a file that is being replaced on NFS, does not mean that the run has ended
        with contextlib.suppress(OSError, HpcrlError, msgspec.DecodeError):
            why = holder.why_end()
    _log.info("releasing the nodes: %s", why or "Slurm says so")
    with contextlib.suppress(OSError):
        held.remove(run)


if __name__ == "__main__":
    main()
