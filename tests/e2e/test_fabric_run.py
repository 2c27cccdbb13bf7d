"""A run whose engines pull weights from the trainer's memory, and what happens when that fails on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import SMALL_RUN, Lab, events, newest_counters

import hpcrl
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore

pytest.importorskip("mooncake.engine", reason="the extra store is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def faulty(lab: Lab) -> Lab:
    """A lab whose runs find `fabric_faults`."""
    here = Path(__file__).parent
    lab.env["PYTHONPATH"] = os.pathsep.join((str(here), str(Path(hpcrl.__file__).parents[1])))
    return lab


def published(run: RunDir) -> set[int]:
    return {event.data["version"] for event in events(run, "trainer.version_published")}


def test_a_run_continues_by_the_share_where_the_fabric_fails(faulty: Lab) -> None:
    lab = faulty
    run = lab.submit(
        "fabric",
        *SMALL_RUN,
        "trainer.steps=6",
        "trainer.optimizer.warmup_steps=1",
        "engine.replicas=2",
        # each version is loaded
        "rollouts.max_off_policy_steps=0",
        "handoff.transport=fabric",
        "handoff.fabric_timeout_s=8.0",
        "handoff.sync={factory: 'fabric_faults:FaultySync', parameters: {gone: 2, stopped: 4}}",
        to_end=True,
    )
    assert [record.step for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    updates = [event.data for event in events(run, "engine.weights_updated")]
    failed = {event.data["version"]: event.data for event in events(run, "engine.fabric_failed")}
    # whatever way they came: every engine computes with the bits of the version
    assert all(update["proved"] for update in updates)
    # on a busy machine a pull of another version may come too late as well
    assert {2, 4} <= set(failed)
    assert "did not give" in failed[2]["why"] or "does not serve" in failed[2]["why"]
    assert "did not come within 8 s" in failed[4]["why"]
    by_version: dict[int, dict[str, float]] = {}
    for update in updates:
        ways = by_version.setdefault(update["version"], {"fabric_bytes": 0, "share_bytes": 0})
        for way in ways:
            ways[way] += update[way]
    for version, ways in by_version.items():
        if version in failed:
            # that of the process that stood still may have been pulled later
            assert ways["share_bytes"] > 0 or version == 4, version
        else:
            assert ways["fabric_bytes"] > 0, version
            assert ways["share_bytes"] == 0, version
    assert {0, 6} <= set(by_version)
    assert set(by_version) - set(failed), "no version came whole over the fabric"
    assert not events(run, "trainer.fabric_failed")
    why = lab.hpcrl("why", str(run.path)).stdout
    assert "did not pull version" in why
    counters = newest_counters(run)
    assert counters["weights_fabric_failures"] >= 2
    assert counters["weights_fabric_bytes"] > 0
    assert counters["weights_share_bytes"] > 0


def test_only_some_versions_are_written_and_those_that_engines_cannot_pull(faulty: Lab) -> None:
    run = faulty.submit(
        "some",
        *SMALL_RUN,
        "trainer.steps=7",
        "trainer.optimizer.warmup_steps=1",
        "engine.replicas=2",
        "checkpoint.every_steps=0",
        # each version is loaded, and no step begins before: a version that no engine could have would end the run
        "rollouts.max_off_policy_steps=0",
        "handoff.transport=fabric",
        "handoff.durable_every=3",
        "handoff.keep_last=10",
        "handoff.fabric_timeout_s=8.0",
        "handoff.sync={factory: 'fabric_faults:FaultySync', parameters: {gone: 2, stopped: 5}}",
        to_end=True,
    )
    assert [record.step for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6, 7]
    updates = [event.data for event in events(run, "engine.weights_updated")]
    assert all(update["proved"] for update in updates)
    skipped = {event.data["version"] for event in events(run, "engine.version_skipped")}
    announced = {event.data["version"] for event in events(run, "trainer.version_announced")}
    assert announced == set(range(8))
    # those whose number 3 divides, the last one, and those that an engine has asked for
    assert {0, 2, 3, 6, 7} <= published(run)
    assert published(run) - {0, 3, 6, 7} <= skipped
    assert 2 in skipped
    # version 2 came from the share after all, and others without it
    assert {update["version"] for update in updates} == set(range(8))
    assert sum(update["share_bytes"] for update in updates if update["version"] == 2) > 0
    never = announced - published(run)
    assert never
    assert sum(update["share_bytes"] for update in updates if update["version"] in never) == 0
    assert not events(run, "engine.away")
    store = HandoffStore(run.weights_dir)
    assert set(store.versions()) == published(run)
    store.open(7).verify(content=True)
    listed = {item["number"]: item["durable"] for item in faulty.json("weights", "ls", "some")["items"]}
    assert listed == dict.fromkeys(sorted(published(run)), True)


def test_a_version_that_is_lost_with_the_trainer_costs_its_rollouts_nothing(faulty: Lab) -> None:
    run = faulty.submit(
        "lost",
        *SMALL_RUN,
        "trainer.steps=8",
        "trainer.optimizer.warmup_steps=1",
        "checkpoint.every_steps=3",
        "rollouts.max_off_policy_steps=2",
        "job.requeue=never",
        "handoff.transport=fabric",
        "handoff.durable_every=4",
        "handoff.sync={factory: 'fabric_faults:FaultySync', parameters: {killed: 5}}",
    )
    faulty.wait_end(run, 240.0)
    # 4 was due, 3 is that of the checkpoint; engines served 5, which is nowhere now
    assert HandoffStore(run.weights_dir).versions()[-2:] == [3, 4]
    listed = faulty.json("weights", "ls", "lost")["items"]
    assert [(item["number"], item["durable"]) for item in listed][-2:] == [(4, True), (5, False)]
    assert "announced, not durable" in faulty.hpcrl("weights", "verify", "lost").stdout
    assert "nothing was lost" in faulty.hpcrl("rollouts", "verify", "lost").stdout
    faulty.hpcrl("resume", "lost", "--follow")
    assert faulty.state(run).upper() == "COMPLETED"
    assert events(run, "trainer.restored")[-1].data["step"] == 3
    assert [record.step for record in read_metrics(run)] == list(range(1, 9))
    verdict = faulty.json("rollouts", "verify", "lost")
    assert verdict["problems"] == []
    assert verdict["finished"] == verdict["trained"] + sum(verdict["dropped"].values()) + verdict["waiting"]
    assert HandoffStore(run.weights_dir).newest() == 8
