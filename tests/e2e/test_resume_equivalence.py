"""A run that is killed at a random step and resumed on another number of ranks is the run that was never killed."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from lab import SMALL_RUN, Lab, events, processes, steps, wait_step
from patience import wait_for
from test_run_faults import processes_of_tree

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 10
SYNCHRONOUS = (
    f"trainer.steps={STEPS}",
    "trainer.ranks=2",
    "rollouts.max_off_policy_steps=0",
    # log-probs move by up to 1e-5 with what else is in a batch of the engine, which is a matter of timing: among some
    # thousand tokens, one may then be sampled otherwise
    "engine.max_num_seqs=1",
    *SMALL_RUN,
)
#: of the loss, relative: sums over ranks are taken in another order. Measured: 2e-7 on 2 ranks, 2e-6 on 1 and 4
RESHARDED = 1e-4


def kill_all(run: RunDir) -> None:
    """kill -9 of every process of a run, the supervisor and the guards included."""
    marked = {process.pid for process in processes(run)}
    tree = processes_of_tree(run)
    # stopped first: the supervisor must not see the death of another before its own
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                # of their ancestors only those that submitit started for this run
                if process.pid in marked or str(run.path) in " ".join(process.cmdline()):
                    process.send_signal(number)
    wait_for(lambda: not processes(run), 20.0, "end of all processes")


def consumed(run: RunDir) -> Counter[tuple[int, int]]:
    """How often each rollout (group, member) was trained on."""
    lines = [line for path in run.rollouts_dir.glob("*.jsonl") for line in path.read_text().splitlines()]
    return Counter((rollout["group"], rollout["member"]) for rollout in map(json.loads, lines))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> dict[int, StepRecord]:
    """The run that is not interrupted."""
    run = Lab(tmp_path_factory.mktemp("whole"), small_model).submit("whole", *SYNCHRONOUS, follow=True)
    return steps(run)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_killed_on_two_ranks_and_resumed(lab: Lab, whole: dict[int, StepRecord], ranks: int) -> None:
    run = lab.submit("broken", "checkpoint.every_steps=2", *SYNCHRONOUS)
    # the save of the step before the last one may be under way
    last = random.randint(4, STEPS - 2)
    wait_step(run, last)
    kill_all(run)
    assert lab.wait_end(run, 20.0).upper() == "LOST"
    saved = CheckpointLedger(run.checkpoints_dir).newest_verified()
    assert saved.entry is not None
    assert not saved.skipped
    assert saved.entry.step >= last - 3  # at most the save that was under way is lost

    lab.hpcrl("resume", run.name, "--set", f"trainer.ranks={ranks}", "--follow")
    records = steps(run)
    assert list(records) == list(range(1, STEPS + 1))
    (restored,) = events(run, "trainer.restored")
    assert (restored.data["step"], restored.data["saved_by_ranks"], restored.data["ranks"]) == (
        saved.entry.step,
        2,
        ranks,
    )
    errors = {step: abs(records[step].loss - r.loss) / max(abs(r.loss), 1e-3) for step, r in whole.items()}
    worst = max(errors.values())
    print(f"killed after step {last}, resumed at {saved.entry.step} on {ranks} ranks: largest difference {worst:.2g}")
    assert max(errors.values()) <= (RESHARDED if ranks != 2 else 1e-5), errors
    for step, record in whole.items():
        assert records[step].reward_mean == record.reward_mean, step
        assert records[step].learning_rate == record.learning_rate, step

    # synchronous: all groups in order, each rollout once, over both attempts
    groups = STEPS * 16 // 4
    assert consumed(run) == {(group, member): 1 for group in range(groups) for member in range(4)}


def test_finished_rollouts_survive_and_none_is_used_twice(lab: Lab) -> None:
    """Asynchronous: rollouts that wait in the dock are in the checkpoint, and those in flight start again."""
    run = lab.submit(
        "ahead",
        f"trainer.steps={STEPS}",
        "checkpoint.every_steps=1",
        "rollouts.max_off_policy_steps=8",
        *(setting for setting in SMALL_RUN if not setting.startswith("rollouts.max_in_flight")),
        "rollouts.max_in_flight=64",
    )
    wait_step(run, random.randint(3, 5))
    kill_all(run)
    lab.wait_end(run, 20.0)
    entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    assert entry is not None
    shown = lab.json("checkpoint", "show", run.name, str(entry.step))["orchestrator"]
    lab.hpcrl("resume", run.name, "--follow")
    (started,) = [event for event in events(run, "orchestrator.started") if event.attempt == 2]
    assert started.data["finished_groups"] == shown["finished_groups"]
    used = consumed(run)
    assert max(used.values()) == 1
    assert len(used) == STEPS * 16
    # what was not used by the end had been started too late, or was dropped and counted
    last = steps(run)[STEPS].rollouts
    assert last["consumed"] == len(used)
    assert last["finished"] >= last["consumed"]
