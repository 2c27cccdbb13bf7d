"""Replicas with jobs of their own, round by round: all orders in which Slurm, holders and replicas may speak."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role, RoleGroup
from hpcrl.jobplan import make_plan
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.replicas import Held, Wanted
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.slurm.errors import SlurmError, SlurmRejectedError, SlurmUnavailableError
from hpcrl.slurm.launch import Allocation
from hpcrl.slurm.records import HetComponent, Job
from hpcrl.slurm.replicas import LivingJob, ReplicaJobs
from hpcrl.slurm.states import JobState
from hpcrl.supervisor.component import Component
from hpcrl.supervisor.elastic.keeper import ElasticReplicas
from hpcrl.supervisor.launch.launcher import Address
from hpcrl.supervisor.launch.survey import NodesSilentError
from hpcrl.supervisor.process.guarded import Dump, End


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

    def enlist(self, group: RoleGroup, replica: int, address: Address) -> Component:
        component = Component(group, replica, address=address, log="log", on_change=lambda _: None)
        self.components.append(component)
        return component

    def drive(self, component: Component) -> None:
        self.driven.append(component)
        component.starting(FakeProcess())

    def dismiss(self, component: Component) -> None:
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
            raise NodesSilentError("1 of 1 nodes did not say where they can be reached: n0\n    hint: none")
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
        Held(
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


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# -- coming --------------------------------------------------------------------------------------------------------


async def test_each_replica_gets_one_job_however_long_it_waits(scene: Scene) -> None:
    await scene.rounds(120)
    assert scene.jobs.submitted == ["engine-0", "engine-1"]
    assert scene.driven == []


async def test_a_job_that_runs_is_no_replica_before_its_holder_speaks(scene: Scene) -> None:
    job = scene.jobs.put("engine-0", JobState.RUNNING)
    await scene.rounds(10)
    assert scene.driven == []
    scene.holds(0, job)
    await scene.rounds(3)
    assert [component.replica for component in scene.driven] == [0]
    assert [entered for entered, _ in scene.entered] == [0]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (SlurmRejectedError("sbatch: Invalid qos specification"), "Slurm refuses its job: sbatch: Invalid qos"),
        (SlurmUnavailableError("sbatch gave no answer in 30 s"), "Slurm does not take its job"),
        (OSError(122, "Disk quota exceeded"), "its job cannot be written"),
    ],
)
async def test_a_job_that_is_not_taken_is_tried_ever_more_rarely(
    scene: Scene, error: SlurmError | OSError, word: str
) -> None:
    scene.jobs.error = error
    tries: list[float] = []
    before = 0
    for _ in range(600):
        await scene.rounds(1)
        count = scene.jobs.submitted.count("engine-0")
        tries += [scene.now] * (count - before)
        before = count
    pauses = [after - this for this, after in itertools.pairwise(tries)]
    # a second try follows soon; each pause is at least about twice the one before, and one replica asks ten times
    assert 5 < len(tries) < 11
    assert pauses[0] < 6
    assert all(longer >= 1.5 * shorter for shorter, longer in itertools.pairwise(pauses))
    assert word in scene.shown(0)
    assert f"{len(tries)} times in a row" in scene.shown(0)
    refused = [data for data in scene.seen("replica.refused") if data["replica"] == 0]
    assert [data["refusals"] for data in refused] == list(range(1, len(tries) + 1))
    # once Slurm takes it, nothing is left of that
    scene.jobs.error = None
    await scene.rounds(310)
    assert scene.jobs.submitted.count("engine-0") == len(tries) + 1
    assert scene.shown(0) == ""


async def test_the_refusal_is_in_the_cause_when_it_was_too_long(scene: Scene) -> None:
    scene.jobs.error = SlurmRejectedError("sbatch: Invalid account")
    await scene.rounds(2)
    scene.now += 10 * 3600.0
    await scene.rounds(1)
    kind, message = scene.failures[0]
    assert kind is CauseKind.START_TIMEOUT
    assert "Invalid account" in message


async def test_what_slurm_does_not_say_changes_nothing(scene: Scene) -> None:
    await scene.running()
    scene.jobs.silence = SlurmUnavailableError("squeue gave no answer in 30 s")
    scene.jobs.table.clear()
    scene.lose(0)
    await scene.rounds(300)
    assert scene.jobs.submitted == []
    assert scene.jobs.cancelled == []
    assert scene.shown(1) == "squeue gave no answer in 30 s"
    scene.jobs.silence = None
    await scene.rounds(3)
    assert scene.jobs.submitted == ["engine-0"]


# -- losing --------------------------------------------------------------------------------------------------------


async def test_a_replica_whose_job_ended_gets_another(scene: Scene) -> None:
    first, _ = await scene.running()
    del scene.jobs.table[first]
    scene.lose(0, "engine 0 was lost")
    await scene.rounds(5)
    assert scene.jobs.submitted == ["engine-0"]
    (sent,) = scene.seen("replica.submitted")
    assert sent["lost"] == f"engine 0 was lost: Slurm says that job {first} is PREEMPTED"
    component = next(c for c in scene.components if c.replica == 0)
    assert component.job is not None
    assert component.job.replaced == 1


async def test_an_answer_that_was_on_its_way_when_a_replica_ended_counts_for_nothing(scene: Scene) -> None:
    first, _ = await scene.running()

    def ends_while_slurm_answers() -> None:
        # the answer still has the job; the job and the replica end before it arrives
        scene.jobs.meanwhile = lambda: None
        scene.jobs.table.pop(first, None)
        scene.now += 5.0
        scene.lose(0)

    scene.now += 60.0
    scene.jobs.meanwhile = ends_while_slurm_answers
    await scene.rounds(1)
    assert scene.jobs.submitted == []
    assert len(scene.driven) == 2, "not started again in a job that is gone"
    await scene.rounds(3)
    assert scene.jobs.submitted == ["engine-0"]


async def test_a_replica_that_ended_in_a_job_that_goes_on_is_started_there_again(scene: Scene) -> None:
    await scene.running()
    scene.lose(0)
    await scene.rounds(2)
    assert len(scene.driven) == 2, "the job is given time to show that it has ended, too"
    await scene.rounds(20)
    assert [component.replica for component in scene.driven] == [0, 1, 0]
    assert scene.jobs.submitted == []
    assert scene.jobs.cancelled == []


async def test_a_job_in_which_a_replica_ends_again_and_again_is_replaced(scene: Scene) -> None:
    first, _ = await scene.running()
    for _ in range(6):
        scene.lose(0)
        await scene.rounds(70)
    assert scene.jobs.cancelled == [first]
    assert scene.jobs.submitted == ["engine-0"]


async def test_nodes_that_do_not_answer_are_asked_again_and_their_job_replaced_in_the_end(scene: Scene) -> None:
    scene.silent_nodes = True
    job = scene.jobs.put("engine-0", JobState.RUNNING)
    scene.jobs.put("engine-1", JobState.PENDING)
    scene.holds(0, job)
    await scene.rounds(2)
    assert (len(scene.entered), scene.driven, scene.failures) == (1, [], [])
    await scene.rounds(20)
    assert len(scene.entered) == 3, "ever more rarely"
    scene.silent_nodes = False
    await scene.rounds(40)
    assert [component.replica for component in scene.driven] == [0]
    scene.lose(0)
    scene.silent_nodes = True
    await scene.rounds(300)
    assert scene.jobs.cancelled == [job]
    assert scene.failures == []


async def test_a_requeued_job_is_another_start(scene: Scene) -> None:
    first, _ = await scene.running()
    scene.jobs.put("engine-0", JobState.PENDING, restarts=1, job_id=first)
    scene.lose(0)
    await scene.rounds(30)
    assert scene.jobs.submitted == []
    # it runs again, and what its holder said last is of the time before
    scene.jobs.put("engine-0", JobState.RUNNING, restarts=1, job_id=first)
    await scene.rounds(30)
    assert len(scene.driven) == 2
    scene.holds(0, first, restart=1)
    await scene.rounds(5)
    assert [component.replica for component in scene.driven] == [0, 1, 0]


async def test_jobs_are_not_replaced_for_ever(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "job.max_replica_resubmits=2")
    await scene.running()
    for _ in range(3):
        for job_id in [j for j, living in scene.jobs.table.items() if living.part == "engine-0"]:
            del scene.jobs.table[job_id]
        if any(c.replica == 0 and c.state is ComponentState.READY for c in scene.driven):
            scene.lose(0, "engine 0 was lost")
        await scene.rounds(15)
    assert scene.jobs.submitted == ["engine-0", "engine-0"]
    kind, message = scene.failures[0]
    assert kind is CauseKind.NODE_FAIL
    assert "lost 3 jobs" in message


# -- too many ------------------------------------------------------------------------------------------------------


async def test_a_second_job_of_a_replica_and_jobs_of_an_earlier_submission_are_cancelled(scene: Scene) -> None:
    first, _ = await scene.running()
    double = scene.jobs.put("engine-0", JobState.PENDING)
    old = scene.jobs.put("engine-1", JobState.RUNNING, submission="before")
    main = scene.jobs.put("main", JobState.RUNNING)
    scene.now += 60.0
    await scene.rounds(3)
    assert sorted(scene.jobs.cancelled) == [double, old]
    assert {first, main} < set(scene.jobs.table)


async def test_a_replica_that_leaves_stops_before_its_job_does(scene: Scene) -> None:
    _, second = await scene.running()
    Wanted.ask(scene.run, {"engine": 1}, user="me")
    await scene.rounds(3)
    assert scene.replicas.members["engine"][0].replica == 0
    assert len(scene.replicas.members["engine"]) == 1, "it gets nothing new from the first moment"
    assert scene.jobs.cancelled == []
    await scene.rounds(10)
    leaving = scene.driven[1]
    assert leaving.state is ComponentState.STOPPING
    assert scene.jobs.cancelled == [], "its process lives"
    leaving.ended(End(time.time(), exit_code=0), as_it_should=True)
    scene.replicas.on_end(leaving, "")
    await scene.rounds(5)
    assert scene.jobs.cancelled == [second]
    assert scene.seen("replica.left") == [{"role": Role.ENGINE, "replica": 1}]


async def test_who_is_wanted_again_while_it_leaves_comes_back_as_a_new_one(scene: Scene) -> None:
    _, second = await scene.running()
    Wanted.ask(scene.run, {"engine": 1}, user="me")
    await scene.rounds(2)
    Wanted.ask(scene.run, {"engine": 2}, user="me")
    await scene.rounds(10)
    leaving = scene.driven[1]
    leaving.ended(End(time.time(), exit_code=0), as_it_should=True)
    scene.replicas.on_end(leaving, "")
    await scene.rounds(10)
    assert scene.jobs.cancelled == [second]
    assert scene.jobs.submitted == ["engine-1"]
    assert sorted(component.replica for component in scene.components) == [0, 1]


async def test_scaling_down_what_still_waits_cancels_its_job(scene: Scene) -> None:
    await scene.rounds(3)
    Wanted.ask(scene.run, {"engine": 1}, user="me")
    await scene.rounds(10)
    assert [living.part for living in scene.jobs.table.values()] == ["engine-0"]
    assert [component.replica for component in scene.components] == [0]


async def test_a_job_with_another_number_of_nodes_ends_the_run(scene: Scene) -> None:
    job = scene.jobs.put("engine-0", JobState.RUNNING)
    scene.holds(0, job, nodes=scene.group.nodes + 1)
    await scene.rounds(3)
    assert scene.failures
    assert "nodes" in scene.failures[0][1]


# -- for the supervisor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [(CauseKind.GUARD_LOST, True), (CauseKind.CANCELLED, True), (CauseKind.EXIT, False), (CauseKind.HUNG, False)],
)
async def test_what_came_from_outside_is_a_loss(scene: Scene, kind: CauseKind, replaced: bool) -> None:
    await scene.running()
    cause = Cause(kind=kind, time_s=1.0, message="it ended")
    assert scene.replicas.replaces(scene.driven[0], cause) == replaced


async def test_files_that_cannot_be_read_end_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.running()
    bad: Any = OSError(116, "Stale file handle")
    looks: list[str] = []

    def read(run: RunDir) -> list[Held]:
        looks.append("look")
        if len(looks) <= 2:
            raise bad
        return []

    monkeypatch.setattr(Held, "read_all", staticmethod(read))
    monkeypatch.setattr("hpcrl.supervisor.elastic.keeper._ROUND_S", 0.01)
    keeper = asyncio.create_task(scene.replicas.run())
    while len(looks) < 4:
        assert not keeper.done()
        await asyncio.sleep(0.01)
    keeper.cancel()
    assert caplog.text.count("replicas are not looked at now") == 1
    assert scene.failures == []


def test_a_status_with_a_refusal_can_be_read_again(scene: Scene) -> None:
    scene.jobs.error = SlurmRejectedError("sbatch: no")
    asyncio.run(scene.rounds(3))
    status = scene.components[0].status()
    assert msgspec.json.decode(msgspec.json.encode(status), type=type(status)) == status
