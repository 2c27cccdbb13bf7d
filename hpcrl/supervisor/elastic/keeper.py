"""Replicas with jobs of their own (layout ``elastic``): each starts when Slurm gives it nodes, and is replaced if lost.

Every second the keeper checks what is wanted (plan, or `hpcrl scale`), which jobs Slurm knows, and which nodes their
holders report. A replica with nodes is started as a step of its job; one whose job has ended gets a new job; an
unwanted one is removed. If Slurm does not answer, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from hpcrl.config.plan import Plan, RoleGroup
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.elastic import HeldNodes, wanted_replicas
from hpcrl.runs.role import Member
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ReplicaJob
from hpcrl.slurm.errors import SlurmError, SlurmRejectedError
from hpcrl.slurm.launch_arguments import Allocation
from hpcrl.slurm.replica_jobs import LivingJob, ReplicaJobs
from hpcrl.slurm.states import JobState
from hpcrl.supervisor.elastic.needs import PlacesReplicas, ReplicaHost
from hpcrl.supervisor.elastic.slots import Slot
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.launch.survey import NodesSilentError
from hpcrl.supervisor.replicas.component import Component

_log = logging.getLogger(__name__)
_ROUND_S = 1.0
_ASK_SOON_S = 2.0
"""Seconds between two requests to Slurm while a replica is missing."""
_ASK_S = 10.0
"""Seconds between two requests to Slurm while no replica is missing."""
_DRAIN_S = 5.0
"""Seconds in which a replica that leaves gets no new requests before it is asked to stop."""
_MAX_ENDS = 5
"""Maximum consecutive losses in a job that is still running; then the job is cancelled and replaced."""
_OUTSIDE = frozenset(
    {CauseKind.CANCELLED, CauseKind.GUARD_LOST, CauseKind.NODE_FAIL, CauseKind.SPAWN, CauseKind.NO_STEP}
)
"""Ends that the replica's job or node may have caused."""
_SETTLED_S = 300.0
"""Seconds ready after which earlier ends are forgotten."""
_SETTLE_S = 2.0
_LONGEST_PAUSE_S = 60.0
"""Maximum seconds between a replica's end and its next start in the same job; doubled from a few seconds."""


class ElasticReplicas:
    """All replicas with jobs of their own, in one attempt.

    Parameters
    ----------
    jobs:
        Client of the replicas' jobs.
    launcher, crew:
        See the protocols.
    clock:
        Monotonic seconds.
    """

    def __init__(
        self,
        run: RunDir,
        plan: Plan,
        *,
        jobs: ReplicaJobs,
        launcher: PlacesReplicas,
        crew: ReplicaHost,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._run, self._plan, self._jobs, self._launcher, self._crew = run, plan, jobs, launcher, crew
        self._policy = plan.elastic
        self._groups = {group.role.value: group for group in plan.groups if plan.own_jobs(group)}
        self._slots: dict[str, Slot] = {}
        self._wanted = {role: group.replicas for role, group in self._groups.items()}
        self._living: list[LivingJob] = []
        self._asked_at = float("-inf")
        self._answered_at = float("-inf")
        self._silent = ""
        self._published: dict[str, list[Member]] = {role: [] for role in self._groups}
        self._begun = False
        self._since = time.time()
        self._missing_since = self._clock()

    # -- for the supervisor --------------------------------------------------------------------------------------

    def has(self, component: Component) -> bool:
        """Return whether the component is an elastic replica."""
        return component.group.role.value in self._groups

    def enough(self, group: RoleGroup) -> bool:
        """Return whether enough replicas of a group are ready for other groups to start."""
        ready = sum(slot.ready for slot in self._slots.values() if slot.group is group)
        return ready >= min(self._policy.min_replicas, self._wanted.get(group.role.value, group.replicas))

    @property
    def members(self) -> dict[str, list[Member]]:
        """Return the ready replicas of each role for the endpoints file."""
        found: dict[str, list[Member]] = {role: [] for role in self._groups}
        for slot in self._slots.values():
            if slot.ready:
                address = slot.component.address
                member = Member(slot.replica, slot.starts, address.url, address.urls if address.servers else ())
                found[slot.group.role.value].append(member)
        return found

    def on_change(self) -> None:
        """Handle a change of a replica's state."""
        if self.members != self._published:
            self._published = self.members
            self._crew.publish()

    def replaces(self, component: Component, cause: Cause) -> bool:
        """Return whether an end counts as a lost replica, which does not end the run.

        The replica's restart policy handles ends that it caused itself, as in other layouts. A step that ended from
        outside (its job was cancelled, preempted, or lost a node) or could not be started again is a loss.
        """
        return self.has(component) and cause.kind in _OUTSIDE

    def on_end(self, component: Component, why: str) -> None:
        """Record the final end of a replica's process; ``why`` is empty if it was asked to end."""
        slot = next(slot for slot in self._slots.values() if slot.component is component)
        slot.driving, slot.ended_at, slot.suspect = False, self._clock(), slot.runs_in
        if component.started_at_s is not None and time.time() - component.started_at_s > _SETTLED_S:
            slot.ends = 0
        if why:
            slot.ends, slot.lost = slot.ends + 1, why
            self._crew.emit("replica.lost", role=component.role, replica=component.replica, why=why, job=component.job)
            _log.warning("%s was lost: %s", component.label, why)
        self.on_change()
        self._asked_at = float("-inf")

    async def run(self) -> None:
        """Keep the wanted replicas running; never returns."""
        blind = ""
        while True:
            try:
                await self.round()
                blind = ""
            except OSError as error:  # unreadable files change nothing, like Slurm's silence
                if str(error) != blind:
                    _log.warning("replicas cannot be checked now, the next check tries again: %s", error)
                blind = str(error)
            await asyncio.sleep(_ROUND_S)

    # -- one round -----------------------------------------------------------------------------------------------

    async def round(self) -> None:
        """Take one step for each replica towards the wanted state (OSError if files cannot be read now)."""
        self._wanted = wanted = await asyncio.to_thread(wanted_replicas, self._run, self._plan)
        self._open_slots(wanted)
        if self._clock() - self._asked_at >= (_ASK_S if self._complete() else _ASK_SOON_S):
            await self._ask()
        held = await asyncio.to_thread(HeldNodes.read_all, self._run)
        for slot in list(self._slots.values()):
            if slot.replica >= wanted[slot.group.role.value] or slot.leaving_since is not None:
                await self._leave(slot)
            elif not slot.driving:
                await self._fill(slot, held)
            self._show(slot)
        if not self._silent:
            await self._cancel_superfluous()
        self._check_deadline()

    def _open_slots(self, wanted: dict[str, int]) -> None:
        for role, count in wanted.items():
            group = self._groups[role]
            for replica in range(count):
                if f"{role}-{replica}" not in self._slots:
                    slot = Slot(group, replica, self._crew.register(group, replica, Address("", 0)))
                    self._slots[slot.part] = slot

    def _complete(self) -> bool:
        return all(slot.driving and slot.leaving_since is None for slot in self._slots.values())

    async def _ask(self) -> None:
        self._asked_at = self._clock()
        try:
            self._living = await asyncio.to_thread(self._jobs.living)
        except SlurmError as error:
            if not self._silent:
                _log.warning("Slurm does not say which jobs the run has: %s", error)
            self._silent = str(error).split("\n", 1)[0]
            return
        self._silent, self._answered_at = "", self._asked_at

    def _job_of(self, slot: Slot) -> LivingJob | None:
        """Return the current job of a replica; the oldest if two submitters were active at once."""
        return next((living for living in self._living if living.part == slot.part and self._jobs.ours(living)), None)

    # -- coming --------------------------------------------------------------------------------------------------

    async def _fill(self, slot: Slot, held: list[HeldNodes]) -> None:
        """Take one step towards a running replica."""
        if self._silent or self._answered_at <= slot.ended_at:
            return  # Slurm's answer is older than the end of the process
        living = self._job_of(slot)
        if living is None:
            await self._submit(slot)
            return
        slot.had_job = True
        job = living.job
        key = (job.job_id, job.leader.restarts or 0)
        if job.state is not JobState.RUNNING:
            slot.suspect = None
            return
        mine = [h for h in held if (h.job_id, h.restart, h.role, h.replica) == (*key, slot.group.role, slot.replica)]
        if slot.suspect == key:
            # the job is given time to show that it has ended, too: a lost node is noticed late
            if slot.ends > _MAX_ENDS:
                await self._cancel(living)
            elif self._clock() - slot.ended_at < min(_SETTLE_S * 2**slot.ends, _LONGEST_PAUSE_S):
                return
        if mine and slot.ends <= _MAX_ENDS:
            await self._start(slot, mine[0])

    async def _start(self, slot: Slot, held: HeldNodes) -> None:
        allocation = Allocation(tuple(held.nodes), str(held.job_id))
        if len(held.nodes) != slot.group.nodes:
            self._crew.fail(
                CauseKind.SUPERVISOR_ERROR,
                f"job {held.job_id} has {len(held.nodes)} nodes, {slot.component.label} needs {slot.group.nodes}",
            )
            return
        if held.since_s < self._since and slot.starts == 0:
            # an attempt before this one may have left a step there, which would keep the GPUs
            await asyncio.to_thread(self._launcher.clear_job, allocation)
        if slot.component.state is not ComponentState.PENDING:
            if slot.component.process is not None:
                await slot.component.process.gone()
            self._crew.unregister(slot.component)
            slot.component = self._crew.register(slot.group, slot.replica, Address("", 0))
        try:
            address = await asyncio.to_thread(self._launcher.enter_job, slot.group, slot.replica, allocation)
        except NodesSilentError as error:  # the job may be ending; if it is not, the replica is tried again
            slot.ended_at, slot.suspect = self._clock(), (held.job_id, held.restart)
            slot.ends, slot.lost = slot.ends + 1, str(error).split("\n", 1)[0]
            _log.warning("%s: %s", slot.component.label, error)
            return
        slot.component.address = address
        slot.runs_in = (held.job_id, held.restart)
        slot.starts += 1
        slot.driving, slot.suspect = True, None
        self._show(slot)
        self._crew.drive(slot.component)

    async def _submit(self, slot: Slot) -> None:
        """Submit a job for a replica that has none, according to Slurm's last answer."""
        if self._clock() < slot.not_before:
            return
        if slot.had_job and slot.replaced >= self._policy.max_resubmits:
            message = f"{slot.component.label} lost {slot.replaced + 1} jobs, job.max_replica_resubmits are reached"
            self._crew.fail(CauseKind.NODE_FAIL, f"{message}; the last: {slot.lost or 'its job ended'}", slot.component)
            return
        try:
            if slot.runs_in is not None and (word := await asyncio.to_thread(self._jobs.last_word, slot.runs_in[0])):
                slot.lost += f": {word}"
            slot.runs_in = None
            job_id = await asyncio.to_thread(self._jobs.submit, slot.group, slot.replica)
        except SlurmRejectedError as error:
            self._refused(slot, f"Slurm refuses its job: {str(error).splitlines()[0]}")
            return
        except SlurmError as error:
            self._silent = str(error).split("\n", 1)[0]
            self._refused(slot, f"Slurm does not take its job: {self._silent}")
            return
        except OSError as error:
            self._refused(slot, f"its job cannot be written: {error}")
            return
        slot.replaced += slot.had_job
        slot.accepted()
        self._crew.emit("replica.submitted", role=slot.group.role, replica=slot.replica, job_id=job_id, lost=slot.lost)
        self._asked_at = float("-inf")

    def _refused(self, slot: Slot, why: str) -> None:
        pause_s = slot.refuse(why, self._clock())
        who = {"role": slot.group.role, "replica": slot.replica}
        self._crew.emit("replica.refused", **who, why=why, refusals=slot.refusals, pause_s=pause_s)
        _log.warning("%s: %s", slot.component.label, slot.refused)

    # -- leaving -------------------------------------------------------------------------------------------------

    async def _leave(self, slot: Slot) -> None:
        """Take one step towards the removal of a replica and its job."""
        now = self._clock()
        if slot.leaving_since is None:
            slot.leaving_since = now
            self._crew.emit("replica.leaving", role=slot.group.role, replica=slot.replica)
            self.on_change()
        if slot.driving:
            if now - slot.leaving_since > _DRAIN_S:
                slot.component.ask_to_stop(slot.group.policy.stop_timeout_s)
            return
        if self._silent or self._answered_at <= max(slot.ended_at, slot.leaving_since):
            self._asked_at = float("-inf")
            return
        living = self._job_of(slot)
        if living is not None:
            await self._cancel(living)
            return
        self._crew.unregister(slot.component)
        del self._slots[slot.part]
        self._crew.emit("replica.left", role=slot.group.role, replica=slot.replica)

    async def _cancel_superfluous(self) -> None:
        """Cancel jobs of earlier submissions, of unwanted replicas, and second ones of the same replica."""
        for living in self._living:
            slot = self._slots.get(living.part)
            if living.part == "main" or (slot is not None and living is self._job_of(slot)):
                continue
            await self._cancel(living)

    async def _cancel(self, living: LivingJob) -> None:
        if living.job.state is JobState.COMPLETING:
            return
        try:
            await asyncio.to_thread(self._jobs.cancel, living)
        except SlurmError as error:
            _log.warning("job %d could not be cancelled: %s", living.job.job_id, error)
        self._asked_at = float("-inf")

    # -- words ---------------------------------------------------------------------------------------------------

    def _show(self, slot: Slot) -> None:
        """Update the state of the replica's job in the status."""
        living = self._job_of(slot)
        state = "" if living is None else living.job.state.value
        shown = ReplicaJob(
            job_id=None if living is None else living.job.job_id,
            state="UNKNOWN" if self._silent else state,
            reason=self._silent or slot.refused or ("" if living is None else living.job.reason),
            replaced=slot.replaced,
            lost=slot.lost,
        )
        if shown != slot.component.job:
            slot.component.job = shown
            self._crew.changed()

    def _check_deadline(self) -> None:
        """Fail the run if it had too few ready replicas for ``wait_s`` seconds."""
        self._begun = self._begun or all(self.enough(group) for group in self._groups.values())
        least = 1 if self._begun else self._policy.min_replicas
        now = self._clock()
        short = [
            role
            for role, group in self._groups.items()
            if sum(slot.ready for slot in self._slots.values() if slot.group is group) < least
        ]
        if not short:
            self._missing_since = now
        elif now - self._missing_since > self._policy.wait_s:
            ready = "no ready replica" if self._begun else f"fewer than {least} ready replicas (job.min_replicas)"
            why = "; ".join(sorted({slot.lost or slot.refused for slot in self._slots.values()} - {""}))
            self._crew.fail(
                CauseKind.START_TIMEOUT,
                f"there was {ready} of {', '.join(short)} for {self._policy.wait_s / 3600:.3g} h (job.replica_wait_h)"
                + (f": {why}" if why else ""),
            )
