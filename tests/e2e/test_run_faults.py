"""kill -9 of anything in a real run: it ends within ten seconds, says why, leaves nothing, and can be resumed."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from lab import SMALL_RUN, Lab, processes, steps, wait_step
from patience import wait_for

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def victim(run: RunDir, role: str) -> psutil.Process:
    """The process that does the work of ``role``."""
    if role == "supervisor":
        found = [p for p in processes_of_tree(run) if "hpcrl.slurm.batch" in p.cmdline()]
    else:
        module = {
            "engine": "hpcrl.inference.embedded.server",
            "orchestrator": "hpcrl.rollouts",
            "trainer": "torch.distributed.run",
            "trainer worker": "hpcrl.trainer",
        }[role]
        of_role = [p for p in processes(run) if p.environ().get("HPCRL_ROLE") == role.split(maxsplit=1)[0]]
        found = [p for p in of_role if module in p.cmdline() and "hpcrl.supervisor.process.guard" not in p.cmdline()]
        if role == "trainer worker":
            found = [p for p in found if "torch.distributed.run" not in p.cmdline()]
    assert len(found) == 1, f"{role}: {[p.cmdline() for p in processes(run)]}"
    return found[0]


def processes_of_tree(run: RunDir) -> list[psutil.Process]:
    """Ancestors of the run's processes too: the supervisor may not carry the mark."""
    found = {p.pid: p for p in processes(run)}
    for process in list(found.values()):
        for parent in process.parents():
            found[parent.pid] = parent
    return list(found.values())


@pytest.mark.parametrize("role", ["orchestrator", "trainer", "trainer worker", "supervisor"])
def test_killed_role_ends_the_run_and_resume_goes_on(lab: Lab, role: str) -> None:
    run = lab.submit("victim", "trainer.steps=14", "checkpoint.every_steps=2", *SMALL_RUN)
    wait_step(run, 4)
    os.kill(victim(run, role).pid, signal.SIGKILL)
    killed = time.monotonic()
    state = lab.wait_end(run, 10.0)
    wait_for(lambda: not processes(run), 10.0 - (time.monotonic() - killed), "end of all processes")
    assert state.upper() == ("LOST" if role == "supervisor" else "FAILED")
    why = lab.hpcrl("why", run.name, "--events").stdout
    assert role.split(maxsplit=1)[0] in why
    assert "SIGKILL" in why or role == "supervisor"

    saved = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    assert saved is not None
    lab.hpcrl("resume", run.name, "--follow")
    assert lab.state(run).upper() == "COMPLETED"
    records = steps(run)
    assert list(records) == list(range(1, 15))
    first_again = min(step for step, record in records.items() if record.attempt == 2)
    assert first_again == saved.step + 1
    assert processes(run) == []


def test_cancel_leaves_nothing(lab: Lab) -> None:
    run = lab.submit("unwanted", "trainer.steps=1000", *SMALL_RUN)
    wait_step(run, 2)
    lab.hpcrl("cancel", run.name, "-y")
    assert lab.wait_end(run, 10.0).upper() == "CANCELLED"
    assert processes(run) == []
