"""How long the planner takes on one core: ``hpcrl plan`` of the reference run, and a search over 20 to 40 nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

from harness import ROOT, record

from planning.case_files import read_cases

RECIPE = ("glm5_swe", "--cluster", "h200-28", "--set", "job.payload=probe")
CODE = "import sys; sys.argv = ['hpcrl', *sys.argv[1:]]; from hpcrl.cli.main import main; main()"


def timed(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall and CPU seconds of one command on one core."""
    before = os.times()
    started = time.monotonic()
    command = [sys.executable, "-c", CODE, *arguments]
    # with compiled modules, as users have them, also in images of containers that ask Python not to keep any
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, preexec_fn=_one_core)
    after = os.times()
    cpu = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return time.monotonic() - started, cpu


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what this part takes."""
    parser.add_argument("--repeat", type=int, default=5)


def run(arguments: argparse.Namespace) -> None:
    """Time, print and record."""
    figures = {}
    for name, case in read_cases("commands").items():
        command, goal = (*case["arguments"], *RECIPE), case.get("goal_s")
        # the first one compiles what is not compiled yet
        times = [timed(command) for _ in range(arguments.repeat + 1)][1:]
        wall, cpu = median(t[0] for t in times), median(t[1] for t in times)
        figures[name] = {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3), "goal_s": goal}
        print(f"{name:<24}{wall:>8.2f} s wall {cpu:>8.2f} s CPU   goal {goal or '-'}")
    record("planner_speed", {"commands": figures, "repeat": arguments.repeat})
