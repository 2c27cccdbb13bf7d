"""A run with a teacher that an embedded engine serves: every rollout of every step has its scores."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import start_models
from free_ports import free_port
from lab import ROOT, Lab, steps
from patience import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
LENGTH = 256


@pytest.fixture
def teacher(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded engine with the quickstart's own start model; the URL of it."""
    port, url = free_port(), ""
    url = f"http://127.0.0.1:{port}"
    model = start_models.taught_model(tmp_path_factory)
    command = [sys.executable, "-m", "hpcrl.inference.embedded.server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", str(LENGTH + 1), "--max-num-seqs", "64", "--dtype", "float32"]
    with (tmp_path / "teacher.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def healthy() -> bool:
        assert server.poll() is None, (tmp_path / "teacher.log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(healthy, 60.0, "a teacher that answers")
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def student_lab(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose start model has seen a third of what the teacher has."""
    return Lab(tmp_path, start_models.start_model(tmp_path_factory, "student", settings=("model.warmup.steps=300",)))


def test_a_teacher_scores_every_rollout_of_a_run(student_lab: Lab, teacher: str) -> None:
    run = student_lab.submit(
        "distilled",
        f"algorithm.distillation={{teacher: {{url: '{teacher}'}}, reward_weight: 0.0}}",
        f"engine.max_model_len={LENGTH}",
        f"trainer.steps={STEPS}",
        "trainer.optimizer={learning_rate: 5e-4, schedule: constant}",
        "rollouts.max_off_policy_steps=1",
        "evaluation.every_steps=0",
        to_end=True,
    )
    found = [steps(run)[step].teacher_kl for step in range(1, STEPS + 1)]
    assert all(kl is not None and 0.0 < kl < 20.0 for kl in found)
    counters = steps(run)[STEPS].rollouts
    assert counters["teacher_requests"] >= counters["finished"]
    assert counters["dropped_environment"] == 0
