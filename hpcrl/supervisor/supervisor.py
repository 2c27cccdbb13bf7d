"""The supervisor: starts the roles of a run in order, watches them, and ends all when one of them decides it.

One task per replica drives it from PENDING to its end. The first event that decides the run (a clean end of a role
that ends it, or a failure), a signal, the time limit or the loss of the parent process ends the attempt. Then the
rest is drained in order, and the cause is chosen among all that was seen until then: the first, not the loudest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hpcrl.config.plan import Plan, Role, RoleGroup
from hpcrl.errors import HpcrlError
from hpcrl.network.credentials import Credentials
from hpcrl.processes import procfs
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.reserve import keep_reserve
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.storage.retry import retry_transient
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.attempt.changes import say_changes
from hpcrl.supervisor.attempt.drain import Drain
from hpcrl.supervisor.attempt.ending import Ending
from hpcrl.supervisor.attempt.endpoints_file import EndpointsFile
from hpcrl.supervisor.attempt.monitor import AttemptMonitor
from hpcrl.supervisor.attempt.replica import ReplicaEnd, ReplicaRunner
from hpcrl.supervisor.attempt.signal_handler import SignalHandler
from hpcrl.supervisor.elastic.keeper import ElasticReplicas
from hpcrl.supervisor.launch.replica_launcher import Address, Launcher
from hpcrl.supervisor.launch.survey import NodesSilentError
from hpcrl.supervisor.outlets import Outlets
from hpcrl.supervisor.process.guarded import End
from hpcrl.supervisor.recovery.attempts import begin_attempt, exhausted, newest_checkpoint
from hpcrl.supervisor.recovery.graph import check_graph, startable
from hpcrl.supervisor.recovery.node_faults import NodeFaults
from hpcrl.supervisor.recovery.space_watch import SpaceWatch
from hpcrl.supervisor.recovery.verdict import broken_nodes, current_records, first_cause
from hpcrl.supervisor.recovery.watchdog import Watchdog
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.replicas.explain import name_lost_rank
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)

_START_LIMIT_S = 60.0
"""Timeout in seconds of retries when a filesystem refuses what an attempt begins with."""
_RECORDS_S = 5.0
"""Timeout in seconds for reading the failure records of roles, at the end of an attempt."""
_NODE_SIGNS = frozenset({CauseKind.CANCELLED, CauseKind.GUARD_LOST, CauseKind.NODE_FAIL, CauseKind.NO_STEP})
"""Ends of a step that the loss of a node may have caused."""


class Supervisor:
    """One attempt of a run.

    Parameters
    ----------
    run:
        Directory of the run, with the plan and the record.
    run_id:
        Id of the run, from its record.
    plan:
        Plan of the roles to start.
    launcher:
        Launcher of the roles.
    started:
        Time at which the time limit began to run (monotonic); now by default.
    elastic:
        Makes the keeper of replicas with jobs of their own, where the plan has such.

    Attributes
    ----------
    again:
        After `run`: the attempt failed, and the next one is to begin at once.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        run_id: str,
        plan: Plan,
        launcher: Launcher,
        started: float | None = None,
        elastic: Callable[[Supervisor], ElasticReplicas] | None = None,
    ) -> None:
        self._run, self._run_id, self._plan, self._launcher = run, run_id, plan, launcher
        self._components: list[Component] = []
        self._drives: dict[Component, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._dumping: set[asyncio.Task[None]] = set()
        self._started = time.monotonic() if started is None else started
        self.again = False
        self._elastic = None if elastic is None else elastic(self)

    async def run(self) -> tuple[RunState, Cause | None]:
        """Run the attempt to its end; returns COMPLETED, FAILED or CANCELLED, and why; or REQUEUED."""
        self.attempt, self._start_limit_s = begin_attempt(self._run, limit_s=_START_LIMIT_S)
        self._board = StatusWriter(self._run, run_id=self._run_id, attempt=self.attempt)
        self._state = AttemptState(self._board)
        self._endpoints = EndpointsFile(self._run, self.attempt)
        self._assemble()
        procfs.adopt_orphans()
        self._notices.listen()
        self._board.enter(self._state.state)
        watch = self._begin(self._lookout.run(), "watch")
        watchdog = self._begin(self._watchdog.run(), "watchdog")
        space = self._begin(self._space.run(), "space")
        keeper: asyncio.Task[None] | None = None
        try:
            await self._prepare()
            await self._outlets.start()
            for component in self._components:
                self.drive(component)
            if self._elastic is not None:
                keeper = self._begin(self._elastic.run(), "replicas")
            await self._state.wait_decided()
        except NodesSilentError as error:
            # looks like steps that were ended: whether a node went down, or Slurm did it, is asked before the verdict
            self.fail(CauseKind.GUARD_LOST, f"no role could be started: {error}")
        except (HpcrlError, ValueError, OSError) as error:
            self.fail(CauseKind.SUPERVISOR_ERROR, f"the supervisor could not start the roles: {error}")
        if keeper is not None:
            keeper.cancel()
        await self._notices.settle()
        stopped_at_s = time.time()
        cause = await self._first_cause(stopped_at_s)
        self._state.stop(cause)
        if self._launcher.in_step and cause is not None and not self._state.cancelled_by_person:
            self._node_faults.investigate(cause)  # before the roles end: Slurm may not leave time for both
        watchdog.cancel()
        await self._ending.end_roles()
        watch.cancel()
        space.cancel()
        cause = await self._explained_cause(stopped_at_s)
        requeued = self._state.requeue or self._state.moves
        await self._outlets.end_sinks(left_s=self._state.left_s, requeued=requeued, end=self._ending.outlook(cause))
        self.again = self._ending.conclude(cause)
        await self._outlets.notify(self._state.state, cause, left_s=self._state.left_s, again=self.again)
        await self._ending.last_words()
        return self._state.state, cause

    async def _explained_cause(self, stopped_at_s: float) -> Cause | None:
        """Return the first cause with what ranks, nodes and the space on disk say about it."""
        cause = await self._first_cause(stopped_at_s)
        if cause is not None and cause.secondary:
            cause = await asyncio.to_thread(self._name_lost_rank, cause)
        if cause is not None and not self._state.cancelled_by_person:
            cause, moves = await self._node_faults.judge(cause, self._state.broken, began_at=self._state.began_at)
            self._state.moves |= moves
            self._state.replaced = self._node_faults.replace()
        if cause is not None:
            cause = await self._space.explain(cause)
        return cause

    def _assemble(self) -> None:
        run, plan, launcher = self._run, self._plan, self._launcher
        self._node_faults = NodeFaults(run, attempt=self.attempt, plan=plan, launcher=launcher, board=self._board)
        self._replicas = ReplicaRunner(
            run,
            run_id=self._run_id,
            attempt=self.attempt,
            plan=plan,
            launcher=launcher,
            board=self._board,
            on_node_down=lambda component, nodes: self._node_faults.saw(nodes, ours=not plan.own_jobs(component.group)),
        )
        self._watchdog = Watchdog(
            run, attempt=self.attempt, policy=plan.watch, components=self._components, on_hung=self._on_hung
        )
        self._notices = SignalHandler(
            run,
            attempt=self.attempt,
            plan=plan,
            board=self._board,
            components=self._components,
            state=self._state,
            on_bug=self._report_bug,
            in_step=launcher.in_step,
            taken=launcher.taken,
        )
        self._space = SpaceWatch(run, board=self._board)
        self._lookout = AttemptMonitor(
            run,
            attempt=self.attempt,
            plan=plan,
            started=self._started,
            board=self._board,
            replicas=self._replicas,
            notices=self._notices,
            components=self._components,
            state=self._state,
            on_bug=self._report_bug,
        )
        self._outlets = Outlets(run, plan=plan, attempt=self.attempt, board=self._board)
        self._drain = Drain(
            run,
            run_id=self._run_id,
            plan=plan,
            launcher=launcher,
            board=self._board,
            components=self._components,
            drives=self._drives,
            hurry=self._state.hurry,
            spared=self._outlets.pids,
        )
        self._ending = Ending(run, plan=plan, state=self._state, drain=self._drain, board=self._board)

    # -- start -------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """End what an earlier attempt left here, choose ports, write them down before anyone needs them."""
        if why := exhausted(self._run, self._plan, self.attempt):
            self.fail(CauseKind.NO_PROGRESS, f"the run ends without another attempt: {why}")
            return
        await asyncio.to_thread(
            retry_transient, self._look_at_files, limit_s=self._start_limit_s, what="the files that an attempt needs"
        )
        if changes := await asyncio.to_thread(say_changes, self._run, self._plan, self._board):
            self.fail(CauseKind.CHANGED, f"it would run other code or environments than were submitted: {changes}")
            return
        self._state.began_at = newest_checkpoint(self._run)
        self._board.emit("attempt.started", checkpoint_step=self._state.began_at)
        found = await asyncio.to_thread(self._launcher.sweep, self._run_id)
        if found:
            self._board.emit("supervisor.swept", pids=found)
        check_graph(self._plan)
        addresses = await asyncio.to_thread(self._launcher.place, self._plan)
        self._node_faults.placed()
        self._board.note_clocks(self._launcher.clocks)
        for group in self._plan.groups:
            for replica in range(0 if self._plan.own_jobs(group) else group.replicas):
                address = addresses[group.role, replica]
                self._endpoints.add(group.role, address)
                self.register(group, replica, address)
        self.publish()
        await self._endpoints.wait_written()
        self._board.components = self._components
        self._board.write()

    def _look_at_files(self) -> None:
        keep_reserve(self._run)
        Credentials.of_run(self._run.path)  # a file that others may read must not be trusted by any role

    # -- what the keeper of elastic replicas needs (`hpcrl.supervisor.elastic.needs.ReplicaHost`) -----------------

    def register(self, group: RoleGroup, replica: int, address: Address) -> Component:
        """Add a new component in the state PENDING to the run and its status; return it."""
        log = self._run.log_path(self.attempt, group.role.value, replica)
        with contextlib.suppress(OSError):  # the guard says that it cannot open the log
            log.parent.mkdir(parents=True, exist_ok=True)
        relative = str(log.relative_to(self._run.path))
        component = Component(group, replica, address=address, log=relative, on_change=self._component_changed)
        self._components.append(component)
        return component

    def drive(self, component: Component) -> None:
        """Start a component as soon as the roles before it are ready, and watch it until it ends."""
        self._board.note_clocks(self._launcher.clocks)  # its nodes may be new
        self._drives[component] = self._begin(self._drive(component), component.label)

    def unregister(self, component: Component) -> None:
        """Remove a component from the run."""
        self._components.remove(component)
        self._drives.pop(component, None)
        self._board.changed()

    def publish(self) -> None:
        """Write the current endpoints after elastic members have changed; never waits or fails."""
        self._endpoints.write({} if self._elastic is None else self._elastic.members)

    def changed(self) -> None:
        """Write the status soon."""
        self._board.changed()

    def fail(self, kind: CauseKind, message: str, component: Component | None = None) -> None:
        """Add a cause that is not the end of a role, and end the run."""
        where = {} if component is None else {"role": component.role.value, "replica": component.replica}
        self._state.fail(Cause(kind=kind, time_s=time.time(), message=message, **where))  # type: ignore[arg-type]

    def emit(self, kind: str, **data: object) -> None:
        """Append an event."""
        self._board.emit(kind, **data)

    def _component_changed(self, component: Component) -> None:
        self._board.component_changed(component)
        self._changed.set()
        self._changed = asyncio.Event()  # one event a change: every waiter sees each of them
        if self._elastic is not None and self._elastic.has(component):
            self._elastic.on_change()
        if self._ready_roles() >= {g.role for g in self._plan.groups}:
            self._state.running()

    async def _drive(self, component: Component) -> None:
        """Take one replica from PENDING to its end, through as many starts as its policy allows."""
        while not startable(component.group, self._ready_roles()):
            await self._changed.wait()
        while True:
            end = await self._replicas.run(component)
            if end.cause is None:
                self._on_good_end(component, end.end)
                return
            if self._elastic is not None and self._elastic.replaces(component, end.cause):
                component.ended(end.end, as_it_should=False)
                self._node_faults.suspect(component.address.nodes)
                self._elastic.on_end(component, end.cause.message)
                return
            if end.cause.kind in _NODE_SIGNS and self._launcher.in_step:
                self._node_faults.suspect()
            pause_s = component.restarts.pause_s(end.cause)
            if pause_s is None or self._state.is_decided():
                await self._ending.save_first(end.cause, component, self._components)
                self._lose(component, end)
                return
            component.restarting()
            facts: dict[str, object] = {"role": component.role, "replica": component.replica, "pause_s": pause_s}
            facts |= {"restart": component.restarts.count, "cause": end.cause.message, "cause_kind": end.cause.kind}
            self._board.emit("component.restarting", **facts)
            await self._replicas.leave_nothing(component)
            if end.end.guard_lost:
                await self._drain.orphans()
            await asyncio.sleep(pause_s)
            if self._state.is_decided():
                return

    def _ready_roles(self) -> set[Role]:
        """Return the roles that later roles need not wait for: all their remaining replicas are ready."""
        return {group.role for group in self._plan.groups if self._is_ready(group)}

    def _is_ready(self, group: RoleGroup) -> bool:
        if self._elastic is not None and self._plan.own_jobs(group):
            return self._elastic.enough(group)
        members = [c for c in self._components if c.group is group and not c.given_up]
        return bool(members) and all(c.ready_at_s is not None for c in members)

    # -- verdict -----------------------------------------------------------------------------------------------

    def _on_good_end(self, component: Component, end: End) -> None:
        if self._elastic is not None and self._elastic.has(component):
            self._elastic.on_end(component, "")
            return
        if component.stop_asked_at_s is None and end.clean and component.group.policy.ends_run:
            sisters = [c for c in self._components if c.group is component.group]
            if all(c.end is not None and c.end.clean for c in sisters):
                self._state.complete()

    def _lose(self, component: Component, end: ReplicaEnd) -> None:
        """Give up a replica: the run ends, or continues without it."""
        assert end.cause is not None
        component.given_up = True
        component.ended(end.end, as_it_should=False)
        others = [c for c in self._components if c.group is component.group and not c.given_up]
        self._state.add_node_faults(broken_nodes(component, end.cause, self._replicas.spec(component).logs))
        if self._launcher.nodes is not None and end.cause.kind is CauseKind.NODE_FAIL:
            self._state.fail(end.cause)  # a spare node takes it, or the requeue that Slurm does not ask for here
        elif component.group.policy.critical or not others:
            self._state.fail(component.restarts.first_error())
        else:
            self._board.emit("component.lost", role=component.role, replica=component.replica, cause=end.cause.message)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._report_bug)
        return task

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(CauseKind.SUPERVISOR_ERROR, f"the supervisor failed ({task.get_name()}): {error!r}")

    async def _first_cause(self, stopped_at_s: float) -> Cause | None:
        records: list[FailureRecord] = []
        try:
            async with asyncio.timeout(_RECORDS_S):
                records = await asyncio.to_thread(current_records, self._run, self.attempt, list(self._components))
        except (TimeoutError, OSError) as error:
            _log.warning("the failure records of roles cannot be read: %s", error or "no answer in time")
        clocks = self._launcher.clocks
        return first_cause(self._state.ends, records, self._components, stopped_at_s=stopped_at_s, clocks=clocks)

    def _name_lost_rank(self, cause: Cause) -> Cause:
        for component in self._components:
            if (component.role.value, component.replica) == (cause.role, cause.replica) and component.group.ranks > 1:
                logs = [Path(log) for log in self._replicas.spec(component).logs]
                return name_lost_rank(cause, component, logs)
        return cause

    def _on_hung(self, component: Component, problem: str) -> None:
        ending = self._replicas.end_hung(component, problem, self._watchdog.still_hangs)
        task = self._begin(ending, f"stacks of {component.label}")
        self._dumping.add(task)
        task.add_done_callback(self._dumping.discard)
