"""A run in turns that loses a process in each turn."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from lab import SLOW_RUN, Lab, events, processes, rank_number, steps, wait_step
from patience import wait_for
from process_words import variables_of, words_of

from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.recovery.attempts import may_retry

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]


@pytest.fixture
def turn_run(lab: Lab) -> RunDir:
    """A run in turns whose attempts follow each other."""
    settings = (
        "checkpoint.every_steps=2",
        "job.retry_failures=9",
        "job.max_attempts=12",
        "rollouts.max_off_policy_steps=1",
    )
    run = lab.submit("turns", "trainer.ranks=2", *SLOW_RUN, *settings, recipe="quickstart_colocated")
    wait_step(run, 3)
    return run


def rank_of(run: RunDir, rank: int) -> psutil.Process:
    """A rank of the trainer's newest attempt."""
    attempt = str(run.attempts()[-1])
    found = []
    for process in processes(run):
        if rank_number(process) == rank and process.environ().get("HPCRL_ATTEMPT") == attempt:
            found.append(process)
    return found[0]


def wait_turn(run: RunDir, turn: str) -> None:
    """Wait until the trainer of the newest attempt says that it is in a turn."""
    path = progress_path(run, run.attempts()[-1], "trainer", 0)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        progress = RoleProgress.read(path)
        if progress is not None and progress.phase.startswith(turn):
            return
        time.sleep(0.001)
    raise TimeoutError(f"no {turn} in 120 s")


def has_saved(run: RunDir) -> bool:
    """Whether the newest attempt has made a joint checkpoint."""
    return may_retry(run, run.plan(), began_at=events(run, "attempt.started")[-1].data["checkpoint_step"])


def goes_on(run: RunDir, lab: Lab, attempt: int) -> bool:
    """Whether another attempt has followed this one; a run that has ended instead says why."""
    followed = run.attempts()[-1] > attempt
    assert followed or lab.state(run).upper() != "FAILED", lab.hpcrl("why", run.name, check=False).stdout
    return followed


def test_a_process_is_lost_in_each_turn_and_nothing_with_it(turn_run: RunDir, lab: Lab) -> None:
    run = turn_run
    shown = wait_for(lambda: lab.hpcrl("status", run.name).stdout, 60, "a status")
    assert any(turn in shown for turn in ("generate", "swap", "train ("))
    for turn, victim in (("generate", "trainer"), ("swap", "trainer"), ("train", "trainer"), ("generate", "engine")):
        attempt, before = run.attempts()[-1], max(steps(run))
        if victim == "trainer":
            rank = rank_of(run, 1)
        else:
            (rank,) = [
                p
                for p in processes(run)
                if "hpcrl.inference.embedded.server" in words_of(p)
                and variables_of(p).get("HPCRL_ROLE") == "engine"
                and variables_of(p).get("HPCRL_ATTEMPT") == str(attempt)
                and "hpcrl.supervisor" not in " ".join(words_of(p))
            ][-1:]
        # an attempt that has saved nothing is not made again, and saves may take longer than some steps
        wait_for(lambda: has_saved(run), 120, f"checkpoint of attempt {attempt}")
        wait_turn(run, turn)
        os.kill(rank.pid, signal.SIGKILL)
        wait_for(lambda was=attempt: goes_on(run, lab, was), 120, f"another attempt after {victim} in {turn}")
        wait_step(run, before + 3)
    records = steps(run)
    assert list(records) == list(range(1, max(records) + 1))
    # each rollout that finished was trained once, or dropped for a reason that the ledger has
    lab.hpcrl("cancel", run.name, "--yes", check=False)
    lab.wait_end(run, 120)
    verified = lab.hpcrl("rollouts", "verify", run.name, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
