"""What the benches share: run a recipe by the command line, read what it measured, record the figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir

__all__ = ["ROOT", "RunResult", "record", "run_recipe", "scratch", "warmup"]

ROOT = Path(__file__).resolve().parent.parent
HPCRL = Path(sys.executable).with_name("hpcrl")


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    run: RunDir
    wall_s: float
    steps: list[StepRecord]
    evaluations: list[dict[str, Any]]

    @property
    def heldout_before(self) -> float:
        return float(self.evaluations[0]["reward"])

    @property
    def heldout_after(self) -> float:
        return float(self.evaluations[-1]["reward"])


def scratch(name: str) -> Path:
    """An empty directory for a bench."""
    return Path(tempfile.mkdtemp(prefix=f"hpcrl-{name}-"))


def warmup(recipe: str, output: Path, *settings: str) -> float:
    """Make a start model; returns seconds."""
    started = time.monotonic()
    subprocess.run([HPCRL, "warmup", recipe, "--output", output, *_sets(settings)], check=True, cwd=ROOT)
    return time.monotonic() - started


def run_recipe(recipe: str, runs_root: Path, name: str, *settings: str) -> RunResult:
    """Submit a recipe, follow it to its end, and read its records (CalledProcessError where it failed)."""
    env = {**os.environ, "HPCRL_RUNS_ROOT": str(runs_root)}
    started = time.monotonic()
    command = [HPCRL, "submit", recipe, "--name", name, "--follow", *_sets(settings)]
    subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    run = RunDir(runs_root / name)
    evaluations = [event.data for event in read_events(run) if event.kind == "evaluation"]
    return RunResult(run, time.monotonic() - started, read_metrics(run), evaluations)


def record(name: str, figures: dict[str, Any]) -> None:
    """Write ``bench/results/<name>.json`` with the machine and the time."""
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    value = {"date": time.strftime("%Y-%m-%d"), "machine": machine, **figures}
    path = ROOT / "bench/results" / f"{name}.json"
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


def _sets(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
