"""kill -9 of anything in a real run: it ends within ten seconds, says why, leaves nothing, and can be resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from lab import SLOW_RUN, Lab, SharedRun, processes, rank_number, steps, wait_gone
from patience import wait_for
from process_words import variables_of, words_of

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def victim(run: RunDir, role: str) -> psutil.Process:
    """The process that does the work of ``role``."""
    if role == "supervisor":
        found = [p for p in processes_of_tree(run) if "hpcrl.slurm.batch" in words_of(p)]
    else:
        module = {
            "engine": "hpcrl.inference.embedded.server",
            "orchestrator": "hpcrl.rollouts",
            "trainer": "hpcrl.trainer.launcher",
            "trainer worker": "hpcrl.trainer.launcher",
        }[role]
        of_role = [p for p in processes(run) if variables_of(p).get("HPCRL_ROLE") == role.split(maxsplit=1)[0]]
        found = [p for p in of_role if module in words_of(p) and "hpcrl.supervisor.process.guard" not in words_of(p)]
        if role.startswith("trainer"):
            found = [p for p in found if rank_number(p) == (1 if role == "trainer worker" else None)]
    assert len(found) == 1, f"{role}: {[words_of(p) for p in processes(run)]}"
    return found[0]


def processes_of_tree(run: RunDir) -> list[psutil.Process]:
    """Ancestors of the run's processes too: the supervisor may not carry the mark."""
    found = {p.pid: p for p in processes(run)}
    for process in list(found.values()):
        for parent in process.parents():
            found[parent.pid] = parent
    return list(found.values())


@pytest.fixture(scope="module")
def shared(shared_lab: Lab) -> SharedRun:
    return SharedRun(shared_lab, "checkpoint.every_steps=2", "trainer.ranks=2", *SLOW_RUN)


@pytest.fixture
def run(shared: SharedRun, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A run with some steps behind it, which the tests of this file share."""
    yield from shared.taken(request)


@pytest.mark.parametrize(
    "role",
    [
        "trainer",
        "supervisor",
        pytest.param("orchestrator", marks=pytest.mark.campaign),
        pytest.param("trainer worker", marks=pytest.mark.campaign),
    ],
)
def test_killed_role_ends_the_run_and_resume_continues(run: RunDir, shared_lab: Lab, role: str) -> None:
    attempt = run.attempts()[-1]
    os.kill(victim(run, role).pid, signal.SIGKILL)
    state = shared_lab.wait_end(run, 10.0)
    wait_gone(run)
    assert state.upper() == ("LOST" if role == "supervisor" else "FAILED")
    why = shared_lab.hpcrl("why", run.name, "--events").stdout
    assert role.split(maxsplit=1)[0] in why
    assert "SIGKILL" in why or role == "supervisor"

    saved = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    assert saved is not None
    shared_lab.hpcrl("resume", run.name)
    wait_for(lambda: steps_of(run, attempt + 1), 120, "a step of the next attempt")
    assert min(steps_of(run, attempt + 1)) == saved.step + 1
    records = steps(run)
    assert list(records) == list(range(1, max(records) + 1))


def test_a_shell_is_on_the_node_of_its_role_and_harms_nothing(run: RunDir, shared_lab: Lab) -> None:
    attempt, reached = run.attempts()[-1], max(steps(run))
    found = shared_lab.hpcrl("shell", run.name, "--role", "engine/0", "--", "sh", "-c", "env; exit 4", check=False)
    assert found.returncode == 4, found.stderr
    own = victim(run, "engine").environ()
    seen = dict(line.split("=", 1) for line in found.stdout.splitlines() if "=" in line)
    left_out = {"HPCRL_RUN_ID", "HPCRL_PROCESS", "_", "PWD", "OLDPWD", "SHLVL", "TERM"}
    assert {name for name, value in own.items() if seen.get(name) != value} <= left_out
    wait_for(lambda: max(steps(run)) > reached + 1, 60, "more steps")
    assert run.attempts()[-1] == attempt
    assert shared_lab.state(run).upper() == "RUNNING"


def test_cancel_leaves_nothing_and_a_resumed_run_completes(run: RunDir, shared_lab: Lab) -> None:
    shared_lab.hpcrl("cancel", run.name, "-y")
    assert shared_lab.wait_end(run, 10.0).upper() == "CANCELLED"
    wait_gone(run)
    attempt, total = run.attempts()[-1], max(steps(run)) + 3
    saved = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    assert saved is not None
    shared_lab.hpcrl("resume", run.name, "--set", f"trainer.steps={total}", "--follow")
    assert shared_lab.state(run).upper() == "COMPLETED"
    assert list(steps(run)) == list(range(1, total + 1))
    assert min(steps_of(run, attempt + 1)) == saved.step + 1
    wait_gone(run)


def steps_of(run: RunDir, attempt: int) -> list[int]:
    return [step for step, record in steps(run).items() if record.attempt == attempt]
