"""The promise of the README: one command, and the reward rises."""

from __future__ import annotations

import contextlib
import json
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import start_models
from lab import Lab, events, processes, steps

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def quickstart_lab(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path, start_models.taught_model(tmp_path_factory))


@contextlib.contextmanager
def watched_command_lines(run: Path) -> Iterator[set[str]]:
    """What everybody sees of the processes of a run, and the environments that they are started with."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for process in processes(RunDir(run)):
                with contextlib.suppress(psutil.Error):
                    seen.add(" ".join([*process.cmdline(), *map("=".join, process.environ().items())]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def check_token_is_nowhere(run: RunDir, command_lines: set[str]) -> None:
    """The run's token is in its own file, and in no other, and no process shows it."""
    file = run.path / "token"
    token = file.read_text()
    assert (len(token), stat.S_IMODE(file.stat().st_mode)) == (64, 0o600)
    for role in ("hpcrl.inference.embedded.server", "hpcrl.rollouts", "hpcrl.trainer"):
        assert any(role in line for line in command_lines), role
    assert not [line for line in command_lines if token in line]
    found = [path for path in run.path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert found == [file]


def test_quickstart_learns_and_shows_it(quickstart_lab: Lab) -> None:
    lab = quickstart_lab
    with watched_command_lines(lab.runs_root / "first") as seen:
        run = lab.submit("first", follow=True)
    check_token_is_nowhere(run, seen)

    evaluations = [event.data for event in events(run, "evaluation")]
    before, after = evaluations[0]["reward"], evaluations[-1]["reward"]
    assert after - before >= 0.2
    assert after >= 2 * before
    records = steps(run)
    total = run.recipe().trainer.steps
    assert list(records) == list(range(1, total + 1))
    assert evaluations[0]["version"] == 0
    assert evaluations[-1]["version"] == total
    assert max(r.staleness_max for r in records.values()) <= run.recipe().rollouts.max_off_policy_steps

    # tokens of the current version agree with the trainer; rollouts that crossed an update say so
    fresh = [r.mismatch_kl_by_lag["0"] for r in records.values() if "0" in r.mismatch_kl_by_lag]
    assert fresh
    assert max(fresh) < 1e-5
    assert events(run, "engine.weights_updated")
    rollouts = [json.loads(line) for path in run.rollouts_dir.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(rollouts) == total * run.recipe().rollouts.rollouts_per_step
    assert any(rollout["first_version"] < rollout["last_version"] for rollout in rollouts)

    assert processes(run) == []
    status = lab.json("status", run.name)
    assert status["state"].upper() == "COMPLETED"
    assert any(row["name"] == run.name for row in lab.json("ls")["runs"])
    assert "completed" in lab.hpcrl("why", run.name, "--events").stdout.lower()
    logs = lab.hpcrl("logs", run.name, "--role", "trainer").stdout
    assert re.search(rf"step={total}\b", logs)
    assert CheckpointLedger(run.checkpoints_dir).steps()[-1] == total
    lab.hpcrl("report", run.name)
    assert (run.path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    # the name is taken now: refused, with a hint
    again = lab.hpcrl("submit", "quickstart", "--name", run.name, "--set", f"model.path={lab.model}", check=False)
    assert again.returncode == 2
    assert "resume" in again.stderr
