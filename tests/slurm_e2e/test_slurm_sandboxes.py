"""Hostile policies, a killed daemon of sandboxes, killed workers and a lost node, on a real Slurm of virtual nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from exercise_tasks import make_exercises
from patience import patience, wait_for
from rollout_lines import rollouts_of
from sandbox_groups import groups_of
from scripted_swe import FORK_BOMB, FULL_DISK, RIGHT
from slurm_lab import ONE_NODE_EACH, ROOT, SlurmLab, events, wait_saved, wait_step

from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus, RunStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

TESTS = Path(__file__).resolve().parents[1]
ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
STEPS = 14
#: right, a fork bomb, a full disk, and three bribes
SCRIPTS = range(6)
#: four workers, two on a node
WORKERS = "environment_workers={count: 4, per_node: 2, cpus: 2, memory_gib: 0.5}"


def workers(run: RunDir) -> dict[int, ComponentStatus]:
    status = RunStatus.read(run)
    return {c.replica: c for c in status.components if c.role == "env"} if status is not None else {}


def daemons(run: RunDir) -> dict[int, psutil.Process]:
    """The daemon of sandboxes below each worker that has one."""
    found = {}
    for replica, worker in workers(run).items():
        try:
            below = psutil.Process(worker.pid).children(recursive=True) if worker.pid is not None else []
            own = [each for each in below if "hpcrl.sandboxes.daemon" in each.cmdline()]
        except psutil.Error:
            continue
        if own:
            found[replica] = own[0]
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Started:
    """Daemons that were seen, and what they had started then."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.daemons: set[psutil.Process] = set()
        self._all: set[psutil.Process] = set()

    def look(self) -> dict[int, psutil.Process]:
        """Return the daemon of each worker now, and remember all of them."""
        now = daemons(self._run)
        for each in now.values():
            self.daemons.add(each)
            try:
                self._all |= {each, *each.children(recursive=True)}
            except psutil.Error:
                continue
        return now

    def left(self) -> list[psutil.Process]:
        return [each for each in self._all if lives(each)]


def test_hostile_policies_killed_daemons_and_workers_and_a_lost_node(
    slurm_lab: SlurmLab, tmp_path: Path, capsys: Any
) -> None:
    lab, tasks = slurm_lab, make_exercises(tmp_path, tasks=32)
    lab.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS)])
    scripted = {"name": "scripted", "kind": "custom", "factory": "scripted_swe:ScriptedSwe"}
    environment = {**scripted, "args": {"tasks": str(tasks)}, "turn_timeout_s": 600.0}
    run = lab.submit(
        "hostile",
        *ONE_NODE_EACH,
        f"environments={json.dumps([environment])}",
        WORKERS,
        f"trainer.steps={STEPS}",
        "checkpoint.every_steps=2",
    )
    lab.wait_state(run, ["RUNNING", *ENDS])
    wait_step(run, 1, 240.0 * patience())
    started = Started(run)
    before = wait_for(lambda: now if len(now := started.look()) == 4 else None, 120.0, "a daemon at each worker")
    assert len({node for worker in workers(run).values() for node in worker.nodes}) == 2

    # a daemon, and two workers of different nodes with all that they have started
    fault_s = time.time()
    before[0].send_signal(signal.SIGKILL)
    for replica in (1, 2):
        os.kill(workers(run)[replica].pid or 0, signal.SIGKILL)
    lost = wait_for(lambda: found if len(found := events(run, "env.lost")) == 2 else None, 10.0, "env.lost")
    wait_for(lambda: len(events(run, "env.back")) == 2, 15.0, "env.back")
    wait_for(lambda: not [each for each in before.values() if each.pid != before[3].pid and lives(each)], 60.0, "ends")
    again = wait_for(lambda: now if len(now := started.look()) == 4 else None, 120.0 * patience(), "other daemons")
    with capsys.disabled():
        print(f"\na daemon and two workers killed: all have daemons again after {time.time() - fault_s:.1f} s")
    assert {event.data["replica"] for event in lost} == {1, 2}
    assert {replica for replica in again if again[replica].pid != before[replica].pid} >= {0, 1, 2}
    restarts = {replica: worker.restarts for replica, worker in workers(run).items()}
    assert restarts == {0: 0, 1: 1, 2: 1, 3: 0}
    assert run.attempts() == [1]

    # and a whole node of workers
    wait_saved(run, max(record.step for record in read_metrics(run)) + 1, 300.0 * patience())
    (node,) = workers(run)[2].nodes
    started.look()
    lab.cluster.kill_node(node)
    try:
        lab.wait_state(run, ["REQUEUED", "PENDING", "STARTING"], 60)
        wait_for(lambda: not started.left(), 60.0, "the end of all sandboxes of the attempt")
        status_now = lab.wait_state(run, ["RUNNING", *ENDS], 120)
    finally:
        lab.cluster.revive_node(node)
    assert (status_now["state"], status_now["attempt"]) == ("RUNNING", 2)
    assert node not in {name for c in status_now["components"] for name in c["nodes"]}
    wait_for(lambda: len(started.look()) == 4, 240.0 * patience(), "daemons of the second attempt")
    ended = lab.wait_state(run, ENDS, timeout_s=400 * patience())
    assert ended["state"] == "COMPLETED", lab.hpcrl("why", run.name, "--events").stdout

    assert sorted({record.step for record in read_metrics(run)}) == list(range(1, STEPS + 1))
    rollouts = rollouts_of(run)
    assert {rollout["parts"]["script"] for rollout in rollouts} == set(SCRIPTS) > {RIGHT, FORK_BOMB, FULL_DISK}
    assert all((rollout["reward"] == 1.0) == (rollout["parts"]["script"] == RIGHT) for rollout in rollouts)
    assert "nothing was lost, and nothing trained twice" in lab.hpcrl("rollouts", "verify", run.name).stdout

    # nothing is left: no job, no process, no control group, no directory
    lab.wait_empty()
    wait_for(lambda: not started.left(), 30.0, "the end of all sandboxes")
    assert not [path for each in started.daemons for path in groups_of(each.pid)]
    assert not list(Path("/tmp").glob(f"hpcrl-{RunRecord.read(run).run_id[:12]}*"))
