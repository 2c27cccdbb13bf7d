"""How long the planner takes on one core: ``hpcrl plan`` of the reference run, and a search over 20 to 40 nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

from harness import ROOT, record

RECIPE = ("glm5_swe", "--cluster", "h200-28", "--set", "job.payload=probe")
CODE = "import sys; sys.argv = ['hpcrl', *sys.argv[1:]]; from hpcrl.cli.main import main; main()"
COMMANDS = {
    "plan": ("plan", *RECIPE),
    "plan_explain": ("plan", *RECIPE, "--explain"),
    "search_20_to_40_nodes": ("plan", "search", *RECIPE, "--nodes", "20..40"),
}
#: goals of the issue, in seconds
GOALS = {"plan": 1.0, "search_20_to_40_nodes": 30.0}


def run(arguments: tuple[str, ...]) -> tuple[float, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    figures = {}
    for name, arguments in COMMANDS.items():
        # the first one compiles what is not compiled yet
        times = [run(arguments) for _ in range(repeat + 1)][1:]
        wall, cpu = median(t[0] for t in times), median(t[1] for t in times)
        figures[name] = {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3), "goal_s": GOALS.get(name)}
        print(f"{name:<24}{wall:>8.2f} s wall {cpu:>8.2f} s CPU   goal {GOALS.get(name, '-')}")
    record("planner_speed", {"commands": figures, "repeat": repeat})


if __name__ == "__main__":
    main()
