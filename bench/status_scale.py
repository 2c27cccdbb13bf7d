"""How much ``hpcrl ls`` costs where 100 runs have jobs: seconds, and commands of Slurm that it ran.

All runs are jobs of a real Slurm on virtual nodes: one runs, the others wait. Compared with the bare ``squeue`` that
any tool would need.

With ``--local RUNS`` instead: what `ls`, `status`, `logs` and `report` cost next to so many local runs of ``--steps``
steps, without Slurm; and the CPU seconds of it, which a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from harness import ROOT, record, scratch

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.devcluster.settings import ClusterSettings
from hpcrl.jobplan import absolute_paths, absolute_site_paths, make_plan
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.submit.submission import create_run, submit_attempt

HPCRL = Path(sys.executable).with_name("hpcrl")
REPEATS = 5


def count_commands(directory: Path) -> tuple[Path, Path]:
    """A directory for ``PATH`` whose commands note their call and then are Slurm's own; and the notes."""
    notes = directory / "calls"
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        real = shutil.which(name)
        shim = directory / name
        shim.write_text(f'#!/bin/sh\necho {name} >> "{notes}"\nexec {real} "$@"\n')
        shim.chmod(0o755)
    return directory, notes


def submit_runs(root: Path, count: int) -> None:
    loaded, site = load_recipe("quickstart", ["job.payload=probe", "engine.replicas=1"]), load_cluster("devcluster")
    recipe, profile = absolute_paths(loaded.value, ROOT), absolute_site_paths(site.value, ROOT)
    for i in range(count):
        plan = make_plan(recipe, profile, f"run-{i:03d}", root / f"run-{i:03d}")
        submit_attempt(create_run(recipe, profile, plan))


def measure(command: list[str], env: dict[str, str], notes: Path) -> tuple[float, list[str]]:
    """Median seconds of a command, and what of Slurm it called in one go."""
    seconds = []
    for _ in range(REPEATS):
        notes.unlink(missing_ok=True)
        started = time.monotonic()
        subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds), notes.read_text().split() if notes.exists() else []


def make_local_runs(root: Path, count: int, steps: int) -> None:
    """Runs that have ended, as their processes would have left them; all have the measurements of the first."""
    recipe, cluster = load_recipe("quickstart").value, load_cluster("local").value
    first = create_run(recipe, cluster, make_plan(recipe, cluster, "run-0000", root / "run-0000")).run
    attempt = first.start_attempt()
    numbers = dict.fromkeys((f.name for f in msgspec.structs.fields(StepRecord) if f.type is float), 0.5)
    tables = {f.name: {"words": 0.5} for f in msgspec.structs.fields(StepRecord) if f.type == dict[str, float]}
    writer = MetricsWriter(first, attempt)
    for step in range(1, steps + 1):
        counts = {"attempt": attempt, "step": step, "staleness_max": 3, "tokens": 2048, "sampled_tokens": 1024}
        record = {**numbers, **tables, **counts, "staleness_histogram": {"0": 64}, "phases_s": {"other": 1.0}}
        writer.write(msgspec.convert(record, StepRecord))
    writer.close(60.0)
    first.log_path(attempt, "trainer", 0).parent.mkdir(parents=True)
    first.log_path(attempt, "trainer", 0).write_text("2026-01-31 12:00:00,100 step 1\n" * steps)
    for i in range(1, count):
        copy = shutil.copytree(first.path, root / f"run-{i:04d}", symlinks=True)
        for name in ("run.json", "plan.json"):
            (copy / name).write_text((copy / name).read_text().replace("run-0000", copy.name))


def measure_local(count: int, steps: int) -> None:
    """The reading commands with many runs of many steps and no Slurm."""
    root = scratch("status-local")
    make_local_runs(root, count, steps)
    env = {**os.environ, "HPCRL_RUNS_ROOT": str(root), "XDG_STATE_HOME": str(scratch("status-state"))}
    # with compiled modules beside the sources, as pip installs them
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPYCACHEPREFIX"] = str(scratch("status-compiled"))
    figures: dict[str, object] = {"runs": count, "steps": steps}
    commands = (["--version"], ["ls"], ["ls", "-n", "20"], ["status"], ["logs"], ["report", "run-0000"])
    for command in commands:
        before = os.times()
        seconds, _ = measure([str(HPCRL), *command], env, root / "no-notes")
        after = os.times()
        cpu_s = (after.children_user + after.children_system - before.children_user - before.children_system) / REPEATS
        figures["hpcrl " + " ".join(command)] = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu_s, 2)}
    for name, value in figures.items():
        print(f"{name:24} {value}")
    record("status_scale_local", figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--local", type=int, metavar="RUNS", default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.local:
        measure_local(arguments.local, arguments.steps)
        return
    root = scratch("status")
    cluster = DevCluster.named("status", Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp")))
    cluster.up(ClusterSettings(name="status", nodes=2))
    try:
        os.environ |= cluster.environment()
        submit_runs(root, arguments.runs)
        shims, notes = count_commands(scratch("shims"))
        env = {**os.environ, "HPCRL_RUNS_ROOT": str(root), "PATH": f"{shims}:{os.environ['PATH']}"}
        python_s, _ = measure([sys.executable, "-c", "import hpcrl.cli.main"], env, notes)
        squeue_s, _ = measure(["squeue", "--all"], env, notes)
        figures: dict[str, object] = {"runs": arguments.runs, "squeue_s": squeue_s, "import_s": python_s}
        for command in (["ls"], ["status", "--all"], ["status", "--json"]):
            seconds, calls = measure([str(HPCRL), *command], env, notes)
            figures["hpcrl " + " ".join(command)] = {"seconds": round(seconds, 3), "slurm_commands": calls}
        subprocess.run(["scancel", "--me"], check=False)
    finally:
        cluster.down()
    for name, value in figures.items():
        print(f"{name:24} {value}")
    record("status_scale", figures)


if __name__ == "__main__":
    main()
