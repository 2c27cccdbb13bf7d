"""Runs that earlier versions began are read by the commands of this version, and resumed.

Each archive of ``earlier/`` has a run of 12 steps that was cancelled after 6: one finished group waits for the trainer,
and of other groups only some rollouts or turns are in the ledger. `earlier_run` describes how it was made.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from earlier_run import unpack
from lab import Lab, events, processes, steps

from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ARCHIVES = sorted((Path(__file__).parent / "earlier").glob("*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_run_of_an_earlier_version_is_read_and_resumed(archive: Path, tmp_path: Path) -> None:
    run = RunDir(unpack(archive, tmp_path))
    lab = Lab(tmp_path, tmp_path / "model")
    check_commands_read_it(lab, run)
    waiting = rollouts_by_state(lab, run)["waiting"]
    try:
        lab.hpcrl("resume", run.name)
        lab.complete(run)
    finally:
        for process in processes(run):
            process.send_signal(signal.SIGKILL)
    check_it_continued(lab, run, waiting)


def check_commands_read_it(lab: Lab, run: RunDir) -> None:
    (listed,) = lab.json("ls", "--runs-root", str(lab.runs_root))["runs"]
    assert (listed["name"], listed["state"], listed["steps"]) == ("earlier", "CANCELLED", 6)
    status = lab.json("status", run.name)
    assert (status["attempts"], status["cause"]["kind"]) == (1, "cancelled")
    assert "hpcrl resume earlier    # from step 6" in lab.hpcrl("why", run.name).stdout
    states = rollouts_by_state(lab, run)
    assert (len(states["trained"]), len(states["dropped"])) == (48, 3)
    assert "@ROOT@" not in lab.hpcrl("rollouts", "show", run.name, "13/0").stdout
    (saved,) = lab.json("checkpoint", "ls", run.name)["items"]
    assert (saved["step"], saved["problem"]) == (6, "")
    # settings that the earlier version wrote for all losses, and one that a person changed
    loss = run.recipe().algorithm.loss
    assert loss.model_dump(include={"kind", "mask_low"}) == {"kind": "masked_ratio", "mask_low": 0.3}
    lab.hpcrl("recipe", "check", str(run.recipe_path))


def check_it_continued(lab: Lab, run: RunDir, waiting: set[str]) -> None:
    records = steps(run)
    assert [(step, record.attempt) for step, record in sorted(records.items())] == [
        (step, 1 if step <= 6 else 2) for step in range(1, 13)
    ]
    assert [(event.attempt, event.data["step"]) for event in events(run, "trainer.restored")] == [(2, 6)]
    # turns of unfinished rollouts are taken from its ledger, and finished groups are trained or too old
    assert records[12].rollouts["turns_recalled"] > 0
    states = rollouts_by_state(lab, run)
    assert finished_groups(waiting)
    assert not finished_groups(waiting) & states["waiting"]
    assert len(states["trained"]) == 96


def finished_groups(rollouts: set[str]) -> set[str]:
    """Those whose whole group of four has finished."""
    groups = [rollout.partition("/")[0] for rollout in rollouts]
    return {rollout for rollout in rollouts if groups.count(rollout.partition("/")[0]) == 4}


def rollouts_by_state(lab: Lab, run: RunDir) -> dict[str, set[str]]:
    states: dict[str, set[str]] = {"waiting": set(), "trained": set(), "dropped": set()}
    for item in lab.json("rollouts", "ls", run.name, "-n", "0")["rollouts"]:
        states[item["state"]].add(item["id"])
    return states
