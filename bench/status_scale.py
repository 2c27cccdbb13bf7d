"""How much ``hpcrl ls`` costs where 100 runs have jobs: seconds, and commands of Slurm that it ran.

All runs are jobs of a real Slurm on virtual nodes: one runs, the others wait. Compared with the bare ``squeue`` that
any tool would need.
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

from harness import ROOT, record, scratch

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.devcluster.cluster import DevCluster
from hpcrl.devcluster.settings import ClusterSettings
from hpcrl.jobplan import absolute_paths, absolute_site_paths, make_plan
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    arguments = parser.parse_args()
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
