"""A run that learns from a teacher alone, which an embedded engine serves: it comes near to it, and does its task."""

from __future__ import annotations

import math
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

from hpcrl.runs.events import read_events

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20
LENGTH = 256


@pytest.fixture
def teacher(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded engine with a model that has seen right answers alone; the URL of it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    model = start_models.start_model(tmp_path_factory, "teacher", settings=("model.warmup.correct_share=1.0",))
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
    """A lab whose start model has mostly seen wrong answers."""
    return Lab(tmp_path, start_models.taught_model(tmp_path_factory))


def test_the_policy_comes_near_to_its_teacher(student_lab: Lab, teacher: str) -> None:
    run = student_lab.submit(
        "distilled",
        f"algorithm.distillation={{teacher: {{url: '{teacher}'}}, reward_weight: 0.0}}",
        # one task: with two, of which a step has random shares, steps are not as far from the teacher as each other
        "environments=[{name: calculator, kind: calculator}]",
        f"engine.max_model_len={LENGTH}",
        f"trainer.steps={STEPS}",
        "trainer.optimizer={learning_rate: 7e-4, schedule: constant}",
        "rollouts.max_off_policy_steps=1",
        f"evaluation.every_steps={STEPS}",
        to_end=True,
    )
    found = [steps(run)[step].teacher_kl or math.nan for step in range(1, STEPS + 1)]
    assert all(-20.0 < kl < 20.0 for kl in found), found
    assert sum(found[-5:]) / 5 < 0.5 * sum(found[:2]) / 2, found
    rewards = [event.data["reward"] for event in read_events(run, kind="evaluation")]
    assert rewards[-1] - rewards[0] > 0.4, rewards
    # every rollout has scores
    counters = steps(run)[STEPS].rollouts
    assert counters["teacher_requests"] >= counters["finished"]
    assert counters["dropped_environment"] == 0
