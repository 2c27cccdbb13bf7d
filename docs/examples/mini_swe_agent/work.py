"""Lets mini-swe-agent work on the files of a task, and prints what it has changed. See docs/swe.md, "Programs"."""

import json
import os
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

HERE, TRAJECTORY = Path(__file__).parent, Path("/tmp/trajectory.json")

task = json.load(sys.stdin)
found = task["row"]["files"]
for path, text in found.items():
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
mini = [sys.executable, "-m", "minisweagent.run.mini", "-c", HERE / "mini.yaml", "-m", os.environ["OPENAI_MODEL"]]
ended = subprocess.run(
    [*mini, "-t", task["prompt"], "-o", TRAJECTORY], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
)
if not TRAJECTORY.exists():  # it has not begun: that is no result
    sys.exit(f"mini-swe-agent ended with {ended.returncode} before its first turn")
for path, text in found.items():
    now = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
    print(*unified_diff(text.splitlines(True), now.splitlines(True), f"a/{path}", f"b/{path}"), sep="", end="")
