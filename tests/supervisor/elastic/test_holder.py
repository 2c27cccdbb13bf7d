"""When the holder of a replica's nodes gives them back, and when not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.jobplan import make_plan
from hpcrl.runs import job_facts
from hpcrl.runs.elastic import HeldNodes, Wanted, wanted_replicas
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.records import HetComponent, Job, Node
from hpcrl.slurm.states import JobState
from hpcrl.supervisor.elastic import holder
from hpcrl.supervisor.elastic.holder import Holder, held_from_env


class Slurm(SlurmClient):
    """One whose trainer's job 7 waits, as does one of two replicas; the trainer's node was away for a moment."""

    def __init__(self) -> None:
        self.told: list[str] = []
        super().__init__(run=self._note)

    def _note(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        self.told.append(" ".join(argv))
        return CommandResult(0, "", "")

    def of_run(self, run_id: str) -> dict[int, tuple[str, Job]]:
        states = {7: ("main", JobState.PENDING), 8: ("engine-1", JobState.RUNNING), 9: ("engine-0", JobState.PENDING)}
        return {
            job_id: (
                f"{run_id}:{part}",
                Job.of([HetComponent(job_id=job_id, leader_id=job_id, offset=0, state=state, source="squeue")]),
            )
            for job_id, (part, state) in states.items()
        }

    def nodes(self, names: Collection[str] | None = None) -> list[Node]:
        found = [f"n{i}" for i in range(1, 9)] if names is None else sorted(names)
        shape = {"cpus": 8, "memory_mib": 2000, "gres": "", "partitions": ("gpu",), "reason": ""}
        return [
            Node(
                name=name,
                address=name,
                states=frozenset({"IDLE"}),
                daemon_since_s=5.0 if name == "n1" else 0.5,
                **shape,
            )
            for name in found
        ]

    def details(self, job_id: int) -> list[dict[str, str]]:
        return [{"JobId": str(job_id)}]


class Scene:
    """A run whose supervisor and job are what a test says; time is the test's."""

    def __init__(self, root: Path) -> None:
        recipe = load_recipe("quickstart", ("job.layout=elastic", "engine.replicas=2")).value
        cluster = load_cluster("devcluster").value
        assert isinstance(cluster, SlurmCluster)
        self.run = RunDir(root / "run")
        self.run.path.mkdir()
        self.run.write_configuration(recipe, cluster, make_plan(recipe, cluster, "run", self.run.path))
        self.record = RunRecord.new(self.run, name="run", provenance={}).with_submission(self.submission())
        self.record.write(self.run)
        self.fact = JobFact(job_id="7", state="RUNNING", holding=True)
        self.slurm = Slurm()
        self.asked = 0
        self.now = 1000.0
        held = HeldNodes(role="engine", replica=1, submission=1, job_id=8, restart=0, nodes=["n2"], since_s=0.0)
        self.holder = Holder(self.run, held, clock=lambda: self.now)

    @staticmethod
    def submission() -> Submission:
        return Submission(submitted_at_s=0.0, executor="slurm", job_id="7", folder="/f", after_attempt=0, requeues=True)

    def look_up(self, submissions: object) -> dict[str, JobFact]:
        self.asked += 1
        return {"7": self.fact}

    def beat(self, state: RunState = RunState.RUNNING) -> None:
        self.run.attempt_dir(1).mkdir(parents=True, exist_ok=True)
        myself = ProcessId.of(os.getpid())
        assert myself is not None
        # of another machine: only its heartbeat says that it lives
        other = msgspec.structs.replace(myself, host="elsewhere")
        trainer = ComponentStatus(role="trainer", replica=0, state=ComponentState.READY, nodes=["n1"])
        RunStatus(
            run_id="r",
            attempt=1,
            state=state,
            supervisor=other,
            started_at_s=1.0,
            heartbeat_s=self.now,
            components=[trainer],
        ).write(self.run)

    def passes(self, seconds: float, *, beating: bool) -> str:
        """Look every two seconds; the first reason to end."""
        for _ in range(int(seconds / 2)):
            self.now += 2.0
            if beating:
                self.beat()
            if why := self.holder.why_end():
                return why
        return ""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene, before = Scene(tmp_path), list(job_facts._sources)
    monkeypatch.setattr(holder, "slurm_client_of", lambda submission: scene.slurm)
    job_facts.set_job_query(scene.look_up)
    yield scene
    job_facts._sources[:] = before


def test_a_beating_supervisor_costs_slurm_no_question(scene: Scene) -> None:
    assert scene.passes(600, beating=True) == ""
    assert scene.asked == 0


def test_silence_is_not_an_end_while_the_job_runs(scene: Scene) -> None:
    scene.passes(10, beating=True)
    assert scene.passes(3600, beating=False) == ""
    assert 1 < scene.asked < 300


def test_slurm_that_does_not_answer_is_not_an_end(scene: Scene) -> None:
    scene.fact = JobFact(job_id="7", state="UNKNOWN", warning="Slurm has not answered")
    assert scene.passes(3600, beating=False) == ""


def test_the_end_of_the_trainers_job_is_one(scene: Scene) -> None:
    scene.passes(10, beating=True)
    scene.fact = JobFact(job_id="7", state="NODE_FAIL", ended=True)
    assert "the run has ended" in scene.passes(120, beating=False)


def test_nodes_are_given_back_when_the_trainer_waits_for_long(scene: Scene) -> None:
    scene.passes(10, beating=True)
    scene.fact = JobFact(job_id="7", state="PENDING", waiting=True)
    assert scene.passes(800, beating=False) == ""
    assert "has waited for" in scene.passes(400, beating=False)


def test_nodes_that_come_while_the_trainer_waits_are_given_back_at_once(scene: Scene) -> None:
    """Slurm has requeued the trainer's job itself, and could give its nodes to replicas one after the other."""
    scene.beat()  # by a supervisor that has died since
    scene.fact = JobFact(job_id="7", state="PENDING", waiting=True)
    assert scene.passes(60, beating=False) == "the trainer's job waits, and its nodes come first"
    assert scene.slurm.told == []


def test_what_a_lost_supervisor_could_not_tell_slurm_a_holder_does(scene: Scene) -> None:
    scene.passes(10, beating=True)
    scene.beat()
    scene.fact = JobFact(job_id="7", state="PENDING", waiting=True)
    assert scene.passes(60, beating=False) == ""
    # once; the trainer's node is one that Slurm could give to the job again
    assert scene.slurm.told == [
        "scontrol update JobId=9 Dependency=after:7",
        "scontrol update JobId=7 ExcNodeList=n1",
    ]
    (entry,) = read_exclusions(scene.run, now_s=time.time())
    assert (entry.node, entry.attempt) == ("n1", 1)
    scene.passes(10, beating=True)  # the next attempt; and once more
    assert scene.passes(60, beating=False) == ""
    assert scene.slurm.told[2:] == scene.slurm.told[:2]


def test_a_later_submission_has_jobs_of_its_own(scene: Scene) -> None:
    scene.record.with_submission(scene.submission()).write(scene.run)
    assert scene.holder.why_end() == "the run was submitted again"


def test_what_is_not_wanted_is_left_to_a_live_supervisor(scene: Scene) -> None:
    Wanted.ask(scene.run, {"engine": 1}, user="ada")
    assert wanted_replicas(scene.run, scene.run.plan()) == {"engine": 1}
    assert scene.passes(100, beating=True) == ""
    assert scene.passes(100, beating=False) == "the run was scaled down"


def test_what_a_job_holds(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "3"}
    run, held = held_from_env([str(tmp_path), "engine", "4", "2"], environ)
    assert (held.job_id, held.restart, held.nodes, held.submission) == (12, 3, ["n1", "n2"], 2)
    held.write(run)
    (found,) = HeldNodes.read_all(run)
    assert found == held
    held.remove(run)
    assert HeldNodes.read_all(run) == []


def test_what_is_held_is_reported_once_the_filesystem_takes_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "_LOOK_S", 0.05)
    held = HeldNodes(role="engine", replica=0, submission=1, job_id=9, restart=0, nodes=["n3"], since_s=0.0)
    in_the_way = scene.run.path / "replicas"
    in_the_way.write_text("a file where the directory belongs")
    said = threading.Thread(target=holder._say_held, args=(scene.run, held, threading.Event()))
    said.start()
    said.join(0.2)
    assert said.is_alive()
    in_the_way.unlink()
    said.join(30)
    assert HeldNodes.read_all(scene.run) == [held]
