"""The life of one replica: started, ready, ended; its policy decides whether it is started again there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path

import msgspec

from hpcrl.config.plan import Plan
from hpcrl.network.credentials import Credentials
from hpcrl.runs.cause import Cause, CauseKind, choose_cause
from hpcrl.runs.role import FailureRecord, ready_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.launch.commands import fill_placeholders, role_environment
from hpcrl.supervisor.launch.readiness import Prober
from hpcrl.supervisor.launch.replica_launcher import Launcher
from hpcrl.supervisor.process.guarded import End, ProcessSpec, RunningProcess
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.replicas.explain import explain_end
from hpcrl.supervisor.status.status_writer import StatusWriter

_DUMP_S = 30.0


class ReplicaEnd:
    """End of one start of a replica, to which its restart policy is then applied.

    Attributes
    ----------
    end:
        End of its process.
    cause:
        Cause of the end; None if it ended as expected, or was asked to.
    """

    def __init__(self, end: End, cause: Cause | None) -> None:
        self.end, self.cause = end, cause


class ReplicaRunner:
    """Starts replicas of one attempt, watches each until it ends, and explains why it did.

    It decides nothing about the run.

    Parameters
    ----------
    on_node_down:
        Called with nodes that were down when a replica on them ended.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        run_id: str,
        attempt: int,
        plan: Plan,
        launcher: Launcher,
        board: StatusWriter,
        on_node_down: Callable[[Component, list[str]], None],
    ) -> None:
        self._run, self._run_id, self._attempt = run, run_id, attempt
        self._plan, self._launcher, self._board, self._on_node_down = plan, launcher, board, on_node_down

    async def run(self, component: Component) -> ReplicaEnd:
        """Start a replica and wait for its end."""
        ready_file = ready_path(self._run, self._attempt, component.role.value, component.replica)
        await asyncio.to_thread(ready_file.unlink, missing_ok=True)  # of a start before
        launched = time.monotonic()  # the deadline of its start counts from here
        process = await self._launcher.start(self.spec(component))
        component.starting(process)
        ended = asyncio.create_task(process.ended())
        late = await self._began(component, process)
        if late is not None:
            process.cut_off()
        elif component.pid is not None:
            late = await self._became_ready(component, ended, launched)
            if late is not None:
                process.stop(component.group.policy.stop_timeout_s)
        component.end = end = await ended
        asked = component.stop_asked_at_s is not None
        if asked or (end.clean and component.group.policy.ends_run):
            component.ended(end, as_it_should=True)
            return ReplicaEnd(end, None)
        return ReplicaEnd(end, late or component.verdict or await self._explain(component, end))

    async def leave_nothing(self, component: Component) -> None:
        """Wait until the process of the last start is gone with all that it started: its memory is needed."""
        assert component.process is not None
        left = await component.process.gone()
        if left:
            self._board.emit("supervisor.left_behind", pids=left)

    @cached_property
    def _credentials(self) -> Credentials:
        # read once: a file that cannot be read for a moment must not make a restarting replica fail
        return Credentials.of_run(self._run.path, self._attempt)

    async def _explain(self, component: Component, end: End) -> Cause:
        """Return the first error that explains this end."""
        cause = explain_end(component, end, [Path(log) for log in self.spec(component).logs])
        records = [record for record in self.records(component) if record.time_s >= component.lives_since_s]
        first = choose_cause([cause], records) or cause
        if end.guard_lost and component.address.nodes:
            down = await asyncio.to_thread(self._launcher.failed_nodes, component.address.nodes)
            if down:
                self._on_node_down(component, down)
                message = f"{first.message}: node {', '.join(sorted(down))} went down"
                return msgspec.structs.replace(first, kind=CauseKind.NODE_FAIL, message=message)
        return first

    def records(self, component: Component) -> list[FailureRecord]:
        """Return the failure records that the replica's processes wrote in this attempt."""
        who = (component.role.value, component.replica)
        return [r for r in FailureRecord.read_all(self._run, self._attempt) if (r.role, r.replica) == who]

    async def _began(self, component: Component, process: RunningProcess) -> Cause | None:
        """Wait for its tasks to begin, or to fail to; the cause where neither came until the deadline."""
        limit_s = component.group.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                component.pid = await process.started()
        except TimeoutError:
            who = "srun" if self._launcher.in_step else "its guard"
            words = "; Slurm's message is in the log of the supervisor" if self._launcher.in_step else ""
            message = f"{component.label} did not begin: {who} has not started it after {limit_s:g} s{words}"
            return self._cause(component, CauseKind.START_TIMEOUT, message)
        return None

    async def _became_ready(self, component: Component, ended: asyncio.Task[End], launched: float) -> Cause | None:
        """Probe until the replica is ready or ends; return the cause if the deadline passes first.

        Parameters
        ----------
        launched:
            Time at which it was launched (monotonic).
        """
        prober = Prober(
            component.group.ready,
            address=component.address,
            ready_file=ready_path(self._run, self._attempt, component.role.value, component.replica),
            credentials=self._credentials,
        )
        probing = asyncio.create_task(prober.wait())
        deadline_s = component.group.start_timeout_s
        left_s = max(0.0, launched + deadline_s - time.monotonic())
        await asyncio.wait({probing, ended}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and probing.done():
            probing.result()
            if component.stop_asked_at_s is None:
                component.ready()
            return None
        probing.cancel()
        await asyncio.wait({probing})
        if not probing.cancelled():
            probing.result()
        if ended.done() or component.stop_asked_at_s is not None:
            return None
        why = f"was not ready after {deadline_s:g} s: {prober.problem}; its log is {component.log}"
        cause = self._cause(component, CauseKind.START_TIMEOUT, f"{component.label} {why}")
        return await self._with_stacks(component, cause)

    async def end_hung(
        self, component: Component, problem: str, still_hangs: Callable[[Component], Awaitable[bool]]
    ) -> None:
        """Take the stacks of a replica without progress, then kill it: `live` returns with this as its cause.

        If it makes progress meanwhile (``still_hangs`` is false) it is left alone.
        """
        cause = self._cause(component, CauseKind.HUNG, f"{component.label} hangs: {problem}")
        component.verdict, process = cause, component.process
        assert process is not None
        component.verdict = await self._with_stacks(component, cause)
        if component.process is not process or component.state is not ComponentState.READY:
            return
        if await still_hangs(component):
            process.kill()
        elif component.process is process:
            component.verdict = None
            self._board.emit("component.went_on", role=component.role, replica=component.replica, problem=problem)

    async def _with_stacks(self, component: Component, cause: Cause) -> Cause:
        """Dump the stacks of the replica's processes now; return the cause with them."""
        began = time.monotonic()
        directory = self._run.attempt_dir(self._attempt) / "dumps"
        with contextlib.suppress(OSError):  # the guard says that it could not write
            directory.mkdir(exist_ok=True)
        ends = component.restarts.count
        name = f"{component.role}-{component.replica}" + (f".{ends}" if ends else "")
        assert component.process is not None
        dump = await component.process.dump(str(directory / name), timeout_s=_DUMP_S)
        message = cause.message
        if dump.stopped:
            message += f"; stopped by a signal: pid {', '.join(map(str, dump.stopped))}"
        if dump.problem:
            message += f"; no stacks: {dump.problem}"
        paths = [os.path.relpath(path, self._run.path) for path in dump.paths]
        self._board.emit(
            "component.hung",
            role=component.role,
            replica=component.replica,
            problem=message,
            dumps=paths,
            frames=dump.frames,
            seconds=time.monotonic() - began,
        )
        return msgspec.structs.replace(cause, message=message, dump=paths[0] if paths else "", frames=dump.frames)

    def _cause(self, component: Component, kind: CauseKind, message: str) -> Cause:
        return Cause(
            kind=kind, time_s=time.time(), message=message, role=component.role.value, replica=component.replica
        )

    def end_stale(self, component: Component, message: str, kind: CauseKind = CauseKind.STALE) -> None:
        """Kill a replica that another role has complained about."""
        component.verdict = self._cause(component, kind, f"{component.label} {message}")
        if component.process is not None and component.state is ComponentState.READY:
            component.process.kill()

    def spec(self, component: Component) -> ProcessSpec:
        """Return the process specification for the guard of a replica."""
        group, replica = component.group, component.replica
        values = {
            "python": group.python or self._plan.python or sys.executable,
            "run_dir": str(self._run.path),
            "replica": str(replica),
            "host": component.address.host,
            "port": str(component.address.port),
        }
        writer = f"guard-{component.role}-{replica}"
        return ProcessSpec(
            role=component.role.value,
            replica=replica,
            attempt=self._attempt,
            command=fill_placeholders(group.command, values),
            env=role_environment(
                group,
                replica,
                run=self._run,
                run_id=self._run_id,
                attempt=self._attempt,
                # in a step the role inherits the environment of its node instead
                inherited={} if self._launcher.in_step else os.environ,
            ),
            cwd=os.getcwd(),
            logs=[
                str(self._run.log_path(self._attempt, component.role.value, replica, rank))
                for rank in range(0, group.ranks, group.ranks_per_node)
            ],
            in_step=self._launcher.in_step,
            hosts=component.address.hosts,
            interfaces=component.address.interfaces,
            grace_s=group.policy.stop_timeout_s,
            events_path=str(self._run.events_dir / f"{self._attempt:04d}-{writer}.jsonl"),
            events_writer=writer,
            restart=component.restarts.count,
            scratch=self._plan.scratch or "",
            secrets=group.secrets,
        )
