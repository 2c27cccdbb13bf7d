"""A run whose policies are hostile and whose daemons of sandboxes are killed: it continues, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import Lab, component, events, processes, steps, wait_step
from patience import patience, wait_for
from process_words import words_of
from rollout_lines import rollouts_of
from sandbox_groups import groups_of
from scripted_swe import FORK_BOMB, FULL_DISK, RIGHT

from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

TESTS = Path(__file__).resolve().parents[1]
STEPS = 14
SETTINGS = (
    "environment_workers.count=2",
    "rollouts.rollouts_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=16",
    "evaluation.every_steps=0",
    "evaluation.prompts=2",
    "checkpoint.every_steps=0",
    f"trainer.steps={STEPS}",
)


def daemons(run: RunDir) -> dict[int, psutil.Process]:
    """The daemon of sandboxes below each worker that has one."""
    found = {}
    for replica in range(2):
        pid = component(run, "env", replica).pid
        below = psutil.Process(pid).children(recursive=True) if pid is not None else []
        for each in below:
            if "hpcrl.sandboxes.daemon" in words_of(each):
                found[replica] = each
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_run_survives_hostile_policies_and_killed_daemons(lab: Lab, exercises: Path, capsys: Any) -> None:
    lab.env["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripted = {"name": "scripted", "kind": "custom", "factory": "scripted_swe:ScriptedSwe"}
    environment = {**scripted, "args": {"tasks": str(exercises)}, "turn_timeout_s": 600.0}
    run = lab.submit("hostile", f"environments={json.dumps([environment])}", *SETTINGS)
    wait_step(run, 2, 300.0 * patience())
    before = wait_for(lambda: found if len(found := daemons(run)) == 2 else None, 60.0, "a daemon at each worker")
    below = {replica: daemon.children(recursive=True) for replica, daemon in before.items()}
    held = {replica: groups_of(daemon.pid) for replica, daemon in before.items()}
    fault_s = time.time()
    before[0].send_signal(signal.SIGKILL)
    wait_for(lambda: not [each for each in below[0] if lives(each)], 30.0, "the end of its sandboxes")

    def replaced() -> psutil.Process | None:
        now = daemons(run).get(0)
        return now if now is not None and now.pid != before[0].pid else None

    new = wait_for(replaced, 60.0 * patience(), "another daemon")
    with capsys.disabled():
        print(f"\ndaemon of sandboxes killed: another one after {time.time() - fault_s:.2f} s")
    assert new.is_running()
    lab.complete(run)

    assert list(steps(run)) == list(range(1, STEPS + 1))
    assert run.attempts() == [1]
    # the workers have lived through all of that
    assert [component(run, "env", replica).restarts for replica in range(2)] == [0, 0]
    assert not events(run, "env.lost")
    rollouts = rollouts_of(run)
    assert {rollout["parts"]["script"] for rollout in rollouts} >= {RIGHT, FORK_BOMB, FULL_DISK}
    assert all((rollout["reward"] == 1.0) == (rollout["parts"]["script"] == RIGHT) for rollout in rollouts)
    assert "nothing was lost, and nothing trained twice" in lab.hpcrl("rollouts", "verify", run.name).stdout

    # nothing is left: no process, no control group, no directory
    assert not processes(run)
    ended = [before[1], new, *below[1]]
    wait_for(lambda: not [each for each in ended if lives(each)], 30.0, "the end of sandboxes")
    left = [path for pid in (before[1].pid, new.pid) for path in groups_of(pid)] + [p for p in held[0] if p.exists()]
    assert not left
    scratch = Path(tempfile.gettempdir()) / f"hpcrl-{RunRecord.read(run).run_id[:12]}"
    assert not scratch.exists()
