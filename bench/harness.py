"""What the benches share: run a recipe by the command line, read what it measured, record the figures."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir

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


class OtherLoad:
    """The share of the CPUs that processes of others took inside the context (Linux).

    Ours are those with ``mark`` in their environment, and this one; they are looked at four times a second.

    Attributes
    ----------
    share:
        0 to 1, after the end.
    """

    def __init__(self, mark: str) -> None:
        self._mark, self.share = mark.encode(), 0.0
        self._own: dict[str, bool] = {str(os.getpid()): True}
        self._seen: dict[tuple[str, str], _Ticks] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OtherLoad:
        self._look()
        self._before, self._busy, self._began_s = self._total(), _busy_ticks(), time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        own = self._total() - self._before
        available = (time.monotonic() - self._began_s) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        self.share = max(0.0, _busy_ticks() - self._busy - own) / available

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            self._look()

    def _look(self) -> None:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if pid not in self._own:
                    self._own[pid] = self._mark in Path(f"/proc/{pid}/environ").read_bytes()
                if self._own[pid]:
                    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                    own, reaped = (sum(map(int, fields[i : i + 2])) for i in (11, 13))
                    self._seen[pid, fields[19]] = _Ticks(fields[1], own, reaped)

    def _total(self) -> int:
        """Of all that were seen, and of children that came and went between two looks."""
        by_parent: dict[str, int] = defaultdict(int)
        for ticks in self._seen.values():
            by_parent[ticks.parent] += ticks.own + ticks.reaped
        return sum(
            ticks.own + max(0, ticks.reaped - by_parent[pid] if pid in by_parent else ticks.reaped)
            for (pid, _), ticks in self._seen.items()
        )


class _Ticks(NamedTuple):
    """CPU time of a process, and of children that it has waited for."""

    parent: str
    own: int
    reaped: int


def _busy_ticks() -> int:
    """Of all CPUs, neither idle nor waiting for a disk."""
    values = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return sum(values) - values[3] - values[4]


def record(name: str, figures: dict[str, Any], path: Path | None = None) -> None:
    """Write ``bench/results/<name>.json``, or ``path``, with the machine and the time."""
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    value = {"date": time.strftime("%Y-%m-%d"), "machine": machine, **figures}
    path = path or ROOT / "bench/results" / f"{name}.json"
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {os.path.relpath(path, ROOT)}")


def _sets(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
