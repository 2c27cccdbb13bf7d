"""A run of replicas with jobs of their own in which Slurm, holders, processes and time are what a test says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role, RoleGroup
from hpcrl.jobplan import make_plan
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.elastic import HeldNodes
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.launch_arguments import Allocation
from hpcrl.slurm.records import HetComponent, Job
from hpcrl.slurm.replica_jobs import LivingJob, ReplicaJobs
from hpcrl.slurm.states import JobState
from hpcrl.supervisor.elastic.keeper import ElasticReplicas
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.launch.survey import NodesSilentError
from hpcrl.supervisor.process.dumps import Dump
from hpcrl.supervisor.process.guarded import End
from hpcrl.supervisor.replicas.component import Component


class FakeProcess:
    guard_pid = 7

    def __init__(self) -> None:
        self.silent: list[int] = []

    async def started(self) -> int | None:
        return 8

    async def ended(self) -> End:
        return End(1.0, exit_code=0)

    async def gone(self) -> list[int]:
        return []

    async def dump(self, path: str, *, timeout_s: float) -> Dump:
        return Dump([], [], [], "no stacks")

    def stop(self, grace_s: float) -> None:
        pass

    def kill(self) -> None:
        pass

    def cut_off(self) -> None:
        pass


class FakeJobs:
    """Slurm as far as replicas see it: a table of jobs that a test writes."""

    def __init__(self) -> None:
        self.table: dict[int, LivingJob] = {}
        self.submitted: list[str] = []
        self.cancelled: list[int] = []
        self.error: SlurmError | OSError | None = None
        self.silence: SlurmError | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._next = 100

    def put(self, part: str, state: JobState, *, restarts: int = 0, submission: str = "now", job_id: int = 0) -> int:
        job_id = job_id or self._next
        self._next = max(self._next, job_id) + 1
        component = HetComponent(
            job_id=job_id, leader_id=job_id, offset=0, state=state, source="squeue", restarts=restarts
        )
        self.table[job_id] = LivingJob(submission, part, Job.of([component]))
        return job_id

    def living(self) -> list[LivingJob]:
        if self.silence is not None:
            raise self.silence
        answer = [self.table[job_id] for job_id in sorted(self.table)]
        self.meanwhile()
        return answer

    def submit(self, group: RoleGroup, replica: int) -> int:
        self.submitted.append(f"{group.role.value}-{replica}")
        if self.error is not None:
            raise self.error
        return self.put(f"{group.role.value}-{replica}", JobState.PENDING)

    def cancel(self, living: LivingJob) -> None:
        self.cancelled.append(living.job.job_id)
        self.table.pop(living.job.job_id, None)

    def last_word(self, job_id: int) -> str:
        return f"Slurm says that job {job_id} is PREEMPTED"

    def ours(self, living: LivingJob) -> bool:
        return living.submission == "now"


class Scene:
    """A run with two elastic engines; Slurm, holders, processes and time are what a test says."""

    def __init__(self, root: Path, *more: str) -> None:
        recipe = load_recipe("quickstart", ("job.layout=elastic", "engine.replicas=2", *more)).value
        cluster = load_cluster("devcluster").value
        assert isinstance(cluster, SlurmCluster)
        self.run = RunDir(root / "run")
        self.run.path.mkdir()
        plan = make_plan(recipe, cluster, "run", self.run.path)
        self.run.write_configuration(recipe, cluster, plan)
        self.group = plan.group(Role.ENGINE)
        self.now = 1000.0
        self.jobs = FakeJobs()
        self.components: list[Component] = []
        self.driven: list[Component] = []
        self.entered: list[tuple[int, Allocation]] = []
        self.cleared: list[Allocation] = []
        self.silent_nodes = False
        self.failures: list[tuple[CauseKind, str]] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.replicas = ElasticReplicas(
            self.run, plan, jobs=cast(ReplicaJobs, self.jobs), launcher=self, crew=self, clock=lambda: self.now
        )

    # the supervisor and the launcher

    def register(self, group: RoleGroup, replica: int, address: Address) -> Component:
        component = Component(group, replica, address=address, log="log", on_change=lambda _: None)
        self.components.append(component)
        return component

    def drive(self, component: Component) -> None:
        self.driven.append(component)
        component.starting(FakeProcess())

    def unregister(self, component: Component) -> None:
        self.components.remove(component)

    def publish(self) -> None:
        pass

    def changed(self) -> None:
        pass

    def fail(self, kind: CauseKind, message: str, component: Component | None = None) -> None:
        self.failures.append((kind, message))

    def emit(self, kind: str, **data: object) -> None:
        self.events.append((kind, data))

    def enter_job(self, group: RoleGroup, replica: int, allocation: Allocation) -> Address:
        self.entered.append((replica, allocation))
        if self.silent_nodes:
            raise NodesSilentError("1 of 1 nodes did not report an address within 5 s: n0\n    hint: none")
        return Address("h", 1, allocation.hosts)

    def clear_job(self, allocation: Allocation) -> None:
        self.cleared.append(allocation)

    # what a test does

    async def rounds(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            await self.replicas.round()
            self.now += 1.0

    def holds(self, replica: int, job_id: int, *, restart: int = 0, nodes: int | None = None) -> None:
        """The holder of a job says that it has its nodes."""
        count = self.group.nodes if nodes is None else nodes
        HeldNodes(
            role="engine",
            replica=replica,
            submission=1,
            job_id=job_id,
            restart=restart,
            nodes=[f"n{job_id}{i}" for i in range(count)],
            since_s=time.time() + 1.0,
        ).write(self.run)

    async def running(self) -> tuple[int, int]:
        """Both replicas run, each in its job; returns the jobs."""
        first, second = (self.jobs.put(f"engine-{i}", JobState.RUNNING) for i in range(2))
        self.holds(0, first)
        self.holds(1, second)
        await self.rounds(3)
        for component in self.driven:
            component.ready()
        assert len(self.driven) == 2
        assert self.jobs.submitted == []
        return first, second

    def lose(self, replica: int, why: str = "was lost") -> None:
        """The process of a replica ends, and nobody asked for it."""
        component = next(c for c in reversed(self.driven) if c.replica == replica)
        component.ended(End(time.time(), guard_lost=True), as_it_should=False)
        self.replicas.on_end(component, why)

    def shown(self, replica: int) -> str:
        component = next(c for c in self.components if c.replica == replica)
        assert component.job is not None
        return component.job.reason

    def seen(self, kind: str) -> list[dict[str, object]]:
        return [data for seen, data in self.events if seen == kind]
