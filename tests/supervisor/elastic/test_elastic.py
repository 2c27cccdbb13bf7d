"""Replicas with jobs of their own, round by round: all orders in which Slurm, holders and replicas may speak."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elastic_scene import Scene

from hpcrl.config.plan import Role
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.elastic import HeldNodes, Wanted
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.slurm.errors import SlurmError, SlurmRejectedError, SlurmUnavailableError
from hpcrl.slurm.states import JobState
from hpcrl.supervisor.process.guarded import End


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# -- coming --------------------------------------------------------------------------------------------------------


async def test_each_replica_gets_one_job_however_long_it_waits(scene: Scene) -> None:
    await scene.rounds(120)
    assert scene.jobs.submitted == ["engine-0", "engine-1"]
    assert scene.driven == []


async def test_a_job_that_runs_is_not_a_replica_before_its_holder_speaks(scene: Scene) -> None:
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

    def read(run: RunDir) -> list[HeldNodes]:
        looks.append("look")
        if len(looks) <= 2:
            raise bad
        return []

    monkeypatch.setattr(HeldNodes, "read_all", staticmethod(read))
    monkeypatch.setattr("hpcrl.supervisor.elastic.keeper._ROUND_S", 0.01)
    keeper = asyncio.create_task(scene.replicas.run())
    while len(looks) < 4:
        assert not keeper.done()
        await asyncio.sleep(0.01)
    keeper.cancel()
    assert caplog.text.count("replicas cannot be checked now") == 1
    assert scene.failures == []


def test_a_status_with_a_refusal_can_be_read_again(scene: Scene) -> None:
    scene.jobs.error = SlurmRejectedError("sbatch: no")
    asyncio.run(scene.rounds(3))
    status = scene.components[0].status()
    assert msgspec.json.decode(msgspec.json.encode(status), type=type(status)) == status
