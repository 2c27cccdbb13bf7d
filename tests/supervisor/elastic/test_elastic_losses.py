"""Replicas with jobs of their own that are lost: by their process, their nodes, their job, or Slurm's word."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_scene import Scene

from hpcrl.runs.cause import CauseKind
from hpcrl.runs.status import ComponentState
from hpcrl.slurm.states import JobState


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


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


async def test_a_replica_that_ended_in_a_job_that_continues_is_started_there_again(scene: Scene) -> None:
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


async def test_replacements_of_jobs_are_limited(tmp_path: Path) -> None:
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
