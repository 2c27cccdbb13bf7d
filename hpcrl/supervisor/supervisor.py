"""The supervisor: starts the roles of a run in order, watches them, and ends all when one of them decides it.

One task a replica drives it from PENDING to its end. The first of them that decides the run (a clean end of a
role that ends it, or a failure), a signal, the time limit or the loss of our parent gives the verdict. Then the
rest is drained in order, and the cause is chosen among all that was seen until then: the first, not the loudest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

from hpcrl import procfs
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import HpcrlError
from hpcrl.runs.cause import Cause, CauseKind, choose_cause
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import Endpoints, FailureRecord, ready_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState
from hpcrl.supervisor.attempts import exhausted, newest_checkpoint, save_now
from hpcrl.supervisor.board import Board
from hpcrl.supervisor.commands import fill_placeholders, role_environment
from hpcrl.supervisor.component import Component
from hpcrl.supervisor.explain import explain_end
from hpcrl.supervisor.graph import check_graph, drain_stages, startable
from hpcrl.supervisor.launcher import End, Launcher, ProcessSpec
from hpcrl.supervisor.probes import Prober

__all__ = ["Supervisor"]

_TICK_S = 0.25
_LAST_WORD_S = 2.0
"""A role that wrote a failure record has this long to end before the run is failed in its name: a launcher of
ranks may wait half a minute for ranks that hang."""
_LEAVE_S = 45.0
"""Of the time between Slurm's warning and the end this much is kept for ending the roles and the requeue."""
_LEAST_SAVE_S = 5.0
_LEAST_GRACE_S = 1.0
"""What a role gets between SIGTERM and SIGKILL even if roles before it used the time up."""


class Supervisor:
    """One attempt of a run.

    Parameters
    ----------
    run:
        Its directory; the plan and the record are in it.
    run_id:
        From its record.
    plan:
        What to start.
    launcher:
        How.
    """

    def __init__(self, run: RunDir, *, run_id: str, plan: Plan, launcher: Launcher) -> None:
        self._run, self._run_id, self._plan, self._launcher = run, run_id, plan, launcher
        self._components: list[Component] = []
        self._ends: list[Cause] = []
        self._drives: dict[Component, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._decided = asyncio.Event()
        self._requeue = False
        self._cancelled_by_person = False
        self._saving: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._parent = os.getppid()
        self._started = time.monotonic()

    async def run(self) -> tuple[RunState, Cause | None]:
        """Run the attempt to its end; returns COMPLETED, FAILED or CANCELLED, and why; or REQUEUED."""
        self.attempt = self._run.start_attempt()
        self._board = Board(self._run, run_id=self._run_id, attempt=self.attempt)
        procfs.adopt_orphans()
        self._listen()
        self._board.enter(RunState.STARTING)
        watch = asyncio.create_task(self._watch(), name="watch")
        watch.add_done_callback(self._report_bug)
        try:
            await self._prepare()
            for component in self._components:
                task = asyncio.create_task(self._drive(component), name=component.label)
                task.add_done_callback(self._report_bug)
                self._drives[component] = task
            await self._decided.wait()
        except (HpcrlError, ValueError, OSError) as error:
            self._fail(CauseKind.SUPERVISOR_ERROR, f"the supervisor could not start the roles: {error}")
        stopped_at_s = time.time()
        self._board.enter(RunState.STOPPING, self._first_cause(stopped_at_s))
        await self._drain()
        watch.cancel()
        cause = self._first_cause(stopped_at_s)
        if cause is not None and not self._cancelled_by_person:
            cause = await self._blame_nodes(cause)
        state = RunState.COMPLETED
        if self._requeue and (cause is None or cause.kind is CauseKind.NODE_FAIL):
            state = RunState.REQUEUED
        elif cause is not None:
            state = RunState.CANCELLED if cause.kind is CauseKind.CANCELLED else RunState.FAILED
        self._board.enter(state, cause)
        self._board.close()
        return state, cause

    async def _blame_nodes(self, cause: Cause) -> Cause:
        """A node that went down is the cause of what then happened to roles; Slurm requeues the job by itself."""
        down = await asyncio.to_thread(self._launcher.failed_nodes)
        if not down:
            return cause
        self._requeue = self._plan.attempts.requeue
        what = f"{'node' if len(down) == 1 else 'nodes'} {', '.join(down)} went down"
        # Slurm's SIGTERM to us is its way to requeue, and no event of its own
        then = "" if cause.kind is CauseKind.CANCELLED else f"; {cause.message}"
        return Cause(kind=CauseKind.NODE_FAIL, time_s=cause.time_s, message=what + then)

    # -- start -------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """End what an earlier attempt left here, choose ports, write them down before anyone needs them."""
        if why := exhausted(self._run, self._plan, self.attempt):
            self._fail(CauseKind.NO_PROGRESS, f"the run is given up: {why}")
            return
        self._board.emit("attempt.started", checkpoint_step=newest_checkpoint(self._run))
        found = await asyncio.to_thread(self._launcher.sweep, self._run_id)
        if found:
            self._board.emit("supervisor.swept", pids=found)
        check_graph(self._plan)
        addresses = await asyncio.to_thread(self._launcher.place, self._plan)
        urls: dict[str, list[str]] = {}
        for group in self._plan.groups:
            for replica in range(group.replicas):
                address = addresses[group.role, replica]
                urls.setdefault(group.role.value, []).append(address.url)
                log = self._run.log_path(self.attempt, group.role.value, replica)
                log.parent.mkdir(parents=True, exist_ok=True)
                component = Component(
                    group,
                    replica,
                    address=address,
                    log=str(log.relative_to(self._run.path)),
                    on_change=self._component_changed,
                )
                self._components.append(component)
        Endpoints(urls=urls).write(self._run, self.attempt)
        self._board.components = self._components
        self._board.write()

    def _component_changed(self, component: Component) -> None:
        self._board.component_changed(component)
        self._changed.set()
        self._changed = asyncio.Event()  # one event a change: every waiter sees each of them
        if self._board.state is RunState.STARTING and all(c.ready_at_s is not None for c in self._components):
            self._board.enter(RunState.RUNNING)

    async def _drive(self, component: Component) -> None:
        """Take one replica from PENDING to its end."""
        while not startable(component.group, self._ready_roles()):
            await self._changed.wait()
        process = await self._launcher.start(self._spec(component))
        component.starting(process)
        component.pid = await process.started()
        ended = asyncio.create_task(process.ended())
        if component.pid is not None and not await self._became_ready(component, ended):
            return
        self._on_end(component, await ended)

    def _ready_roles(self) -> set[Role]:
        return {
            group.role
            for group in self._plan.groups
            if all(c.ready_at_s is not None for c in self._components if c.group is group)
        }

    def _spec(self, component: Component) -> ProcessSpec:
        group, replica = component.group, component.replica
        values = {
            "python": self._plan.python or sys.executable,
            "run_dir": str(self._run.path),
            "replica": str(replica),
            "host": component.address.host,
            "port": str(component.address.port),
        }
        writer = f"guard-{component.role}-{replica}"
        ranks_per_task = group.ranks // (group.nodes * group.tasks_per_node)
        return ProcessSpec(
            role=component.role.value,
            replica=replica,
            attempt=self.attempt,
            command=fill_placeholders(group.command, values),
            env=role_environment(
                group,
                replica,
                run=self._run,
                run_id=self._run_id,
                attempt=self.attempt,
                # in a step the node's own environment is what a role inherits
                inherited={} if self._launcher.in_step else os.environ,
            ),
            cwd=os.getcwd(),
            logs=[
                str(self._run.log_path(self.attempt, component.role.value, replica, rank))
                for rank in range(0, group.ranks, ranks_per_task)
            ],
            in_step=self._launcher.in_step,
            grace_s=group.policy.stop_timeout_s,
            events_path=str(self._run.events_dir / f"{self.attempt:04d}-{writer}.jsonl"),
            events_writer=writer,
        )

    async def _became_ready(self, component: Component, ended: asyncio.Task[End]) -> bool:
        """Probe until ready, the end, or the deadline. False where the deadline came."""
        prober = Prober(
            component.group.ready,
            address=component.address,
            ready_file=ready_path(self._run, self.attempt, component.role.value, component.replica),
        )
        probing = asyncio.create_task(prober.wait())
        deadline_s = component.group.start_timeout_s
        await asyncio.wait({probing, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and probing.done():
            probing.result()
            if component.stop_asked_at_s is None:
                component.ready()
            return True
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing
        if ended.done() or component.stop_asked_at_s is not None:
            return True
        component.give_up()
        self._fail(
            CauseKind.START_TIMEOUT,
            f"{component.label} was not ready after {deadline_s:g} s: {prober.problem}; its log is {component.log}",
            component,
        )
        component.ended(await ended, as_it_should=False)
        return False

    # -- verdict -----------------------------------------------------------------------------------------------

    def _on_end(self, component: Component, end: End) -> None:
        asked = component.stop_asked_at_s is not None
        component.ended(end, as_it_should=end.clean and component.group.policy.ends_run)
        if asked:
            return
        if end.clean and component.group.policy.ends_run:
            sisters = [c for c in self._components if c.group is component.group]
            if all(c.end is not None and c.end.clean for c in sisters):
                self._decided.set()
        else:
            self._ends.append(explain_end(component, end, self._run.path / component.log))
            self._decided.set()

    def _fail(self, kind: CauseKind, message: str, component: Component | None = None) -> None:
        """Add a candidate that is no end of a role, and decide the run."""
        where = {} if component is None else {"role": component.role.value, "replica": component.replica}
        self._ends.append(Cause(kind=kind, time_s=time.time(), message=message, **where))  # type: ignore[arg-type]
        self._decided.set()

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(CauseKind.SUPERVISOR_ERROR, f"the supervisor failed ({task.get_name()}): {error!r}")

    def _first_cause(self, stopped_at_s: float) -> Cause | None:
        if not self._ends:
            return None
        limits = {(c.role.value, c.replica): c.stop_asked_at_s or stopped_at_s for c in self._components}
        records = [
            record
            for record in FailureRecord.read_all(self._run, self.attempt)
            # what a role says after it was asked to stop is no cause
            if record.time_s <= limits.get((record.role, record.replica), stopped_at_s)
        ]
        return choose_cause(self._ends, records)

    # -- watch -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._cancel, signum)
        loop.add_signal_handler(signal.SIGUSR2, self._warned)

    def _warned(self) -> None:
        """Slurm's early warning of the time limit or of a preemption: save, and go on in the next attempt."""
        self._board.emit("supervisor.warned")
        if self._saving is None and not self._decided.is_set():
            self._saving = asyncio.create_task(self._save_and_leave(), name="save")
            self._saving.add_done_callback(self._report_bug)

    async def _save_and_leave(self) -> None:
        trains = any(c.group.policy.ends_run and c.state is ComponentState.READY for c in self._components)
        step = None
        if trains and self._plan.attempts.saves:
            started = time.monotonic()
            timeout_s = max(self._plan.attempts.signal_lead_s - _LEAVE_S, _LEAST_SAVE_S)
            step = await save_now(self._run, self.attempt, timeout_s=timeout_s)
            self._board.emit("supervisor.saved", step=step, seconds=time.monotonic() - started)
        if self._decided.is_set():
            return
        if self._plan.attempts.requeue:
            self._requeue = True
            self._decided.set()
            return
        saved = "nothing could be saved" if step is None else f"the state of step {step} was saved"
        self._fail(CauseKind.TIME_LIMIT, f"Slurm warned that the job is about to end; {saved}")

    def _cancel(self, signum: int) -> None:
        """The first signal stops in order, the second at once."""
        if self._decided.is_set():
            self._hurry.set()
        else:
            submissions = RunRecord.read(self._run).submissions
            by = submissions[-1].cancelled_by if submissions else ""
            self._cancelled_by_person = by != ""
            # who asks through hpcrl says so in the record first; Slurm and kill do not
            who = f"by {by}" if by else f"by {signal.Signals(signum).name} to the supervisor"
            self._fail(CauseKind.CANCELLED, f"cancelled {who}")

    async def _watch(self) -> None:
        """Heartbeat, time limit, parent, words of roles that fail slowly."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._board.tick()
            if self._decided.is_set():
                continue
            if time.monotonic() - self._started > self._plan.time_limit_s:
                hours = self._plan.time_limit_s / 3600
                self._fail(CauseKind.TIME_LIMIT, f"the run took longer than its limit of {hours:.3g} h")
            if os.getppid() != self._parent:
                self._fail(CauseKind.LAUNCHER_LOST, f"the submitit controller (pid {self._parent}) went away")
            now_s = time.time()
            if any(now_s - record.time_s > _LAST_WORD_S for record in FailureRecord.read_all(self._run, self.attempt)):
                self._decided.set()
                self._ends.extend(self._slow_failures())

    def _slow_failures(self) -> list[Cause]:
        """Roles that said they failed, and have not ended since."""
        said = {(record.role, record.replica) for record in FailureRecord.read_all(self._run, self.attempt)}
        return [
            Cause(
                kind=CauseKind.EXIT,
                time_s=time.time(),
                message=f"{component.label} failed and did not end",
                role=component.role.value,
                replica=component.replica,
                secondary=True,
            )
            for component in self._components
            if (component.role.value, component.replica) in said and component.end is None
        ]

    # -- end ---------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Stop all roles in order; nothing is left when this returns."""
        impatience = asyncio.create_task(self._kill_on_hurry())
        if any(c.end is not None and c.end.guard_lost for c in self._components):
            await self._end_orphans()
        deadline = time.monotonic() + max((g.policy.stop_timeout_s for g in self._plan.groups), default=0.0)
        for stage in drain_stages(self._plan):
            members = [c for c in self._components if c.group in stage]
            grace_s = min(max(deadline - time.monotonic(), _LEAST_GRACE_S), max(g.policy.stop_timeout_s for g in stage))
            await asyncio.gather(*(self._stop(component, grace_s) for component in members))
        impatience.cancel()
        await self._end_orphans()

    async def _stop(self, component: Component, grace_s: float) -> None:
        drive = self._drives.get(component)
        if component.process is None and drive is not None:
            drive.cancel()  # a guard that was just being started sees its pipe close and goes
        component.ask_to_stop(min(grace_s, component.group.policy.stop_timeout_s))
        if component.process is not None:
            left = await component.process.gone()
            if left:
                self._board.emit("supervisor.left_behind", pids=left)
            if drive is not None:
                await asyncio.wait({drive})

    async def _kill_on_hurry(self) -> None:
        await self._hurry.wait()
        for component in self._components:
            if component.process is not None:
                component.process.kill()

    async def _end_orphans(self) -> None:
        lost = {c for c in self._components if c.end is not None and c.end.guard_lost}
        guards = {c.process.guard_pid for c in self._components if c.process is not None and c not in lost}
        orphans = await asyncio.to_thread(self._launcher.end_orphans, self._run_id, guards)
        if orphans:
            self._board.emit("supervisor.orphans", pids=orphans)
