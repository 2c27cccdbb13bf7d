"""Does SmolLM2 learn the smallest software-engineering exercises? Held-out reward of the published model, after a
warm-up, and after a run.

The program of docs/examples/plain_text_agent shows one wrong function and the assertion that fails, the model writes a
line, and tests in a sandbox decide. The warm-up shows the form of a reply with a random operator. Where all together
takes longer than ``--minutes``, the run is cancelled, and the figures are those of its evaluations until then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import HPCRL, ROOT, OtherLoad, record, scratch

from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir

EXAMPLE = "docs/examples/plain_text_agent"
WARM_UP, RUN = "form", "learns"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2", help="what tools/smollm2.py made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=256, help="tasks to make; a quarter of them is held out")
    parser.add_argument("--minutes", type=float, default=25.0, help="limit of all together")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--cache", type=Path, help="files of pytest's packages; fetched anew without it")
    parser.add_argument(
        "--directory", type=Path, help="that of an interrupted call, with the evaluation and warm-up of it"
    )
    parser.add_argument("--output", type=Path, help="another file of figures")
    arguments = parser.parse_args()
    directory = arguments.directory or scratch("smollm2-swe")
    print(f"everything is in {directory}", flush=True)
    bench = SmallestExercises(directory, arguments)
    with OtherLoad(str(directory)) as others:
        figures = bench.figures()
    figures = {"seed": arguments.seed, "settings": arguments.set, **figures, "load_of_others": round(others.share, 2)}
    record("smollm2_swe", figures, arguments.output)


class SmallestExercises:
    """The tasks in a directory, and the runs on them."""

    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        self._directory, self._arguments = directory, arguments
        self._tasks = directory / "tasks"
        self._began = time.monotonic()
        self._minutes: dict[str, float] = {}

    def figures(self) -> dict[str, Any]:
        """Make the tasks, evaluate the model, warm it up and train it."""
        given = self._arguments
        common = [f"seed={given.seed}", f"model.path={given.model.absolute()}"]
        rows, tasks = self._tasks / "rows.jsonl", self._tasks / "tasks.jsonl"
        of_run = [*common, f"environments.0.path={rows}", f"environments.0.rewards.0.args.tasks={tasks}", *given.set]
        recipe, base = f"{EXAMPLE}/recipe.yaml", self._run("base")
        if not rows.exists():
            make = ["exercises", "-o", self._tasks, "--wrong-modules", 1, "-n", given.tasks, "--seed", given.seed]
            self._hpcrl("swe", *make, "--cache", given.cache or self._directory / "cache")
        if not base.path.exists():
            self._hpcrl("eval", recipe, "--name", "base", "--output", self._directory / "base.json", *_sets(of_run))
            self._took("published model evaluated")
        if not self._run(WARM_UP).path.exists():
            self._warm_up(rows, common)
            self._took("warm-up")
        # a name alone would be ambiguous after an earlier call of this bench
        self._hpcrl("submit", recipe, "--name", RUN, "--from", self._run(WARM_UP).path, *_sets(of_run))
        ended = self._wait()
        self._took("run")
        published = json.loads((self._directory / "base.json").read_text(encoding="utf-8"))
        return {
            "tasks": counts(rows),
            "published_model": {key: published[key] for key in ("prompts", "passed", "failed", "truncated")},
            "warm_up_loss": [round(step.loss, 4) for step in read_metrics(self._run(WARM_UP))],
            "ended": ended,
            "minutes": self._minutes,
            **measured(self._run(RUN)),
        }

    def _warm_up(self, rows: Path, settings: list[str]) -> None:
        """Train on a conversation of each training task, with a random operator."""
        talks = self._tasks / "conversations.jsonl"
        command = [sys.executable, f"{EXAMPLE}/conversations.py", rows]
        talks.write_bytes(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout)
        settings = _sets([*settings, f"sft.data={talks}"])
        self._hpcrl("sft", f"{EXAMPLE}/warmup.yaml", "--name", WARM_UP, "--follow", *settings)

    def _run(self, name: str) -> RunDir:
        return RunDir(self._directory / "runs" / name)

    def _took(self, what: str) -> None:
        """Note the minutes of what has just ended."""
        self._minutes[what] = round((time.monotonic() - self._began) / 60.0 - sum(self._minutes.values()), 2)
        print(f"{what}: {self._minutes[what]} min", flush=True)

    def _hpcrl(self, *arguments: Any) -> str:
        """Run a command and return its output (CalledProcessError where it failed)."""
        env = {**os.environ, "HPCRL_RUNS_ROOT": str(self._directory / "runs")}
        command = [HPCRL, *map(str, arguments)]
        return subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True).stdout

    def _wait(self) -> str:
        """Wait for the end of the run, and cancel it at the limit; returns its state."""
        shown, deadline = 0, self._began + 60.0 * self._arguments.minutes
        while True:
            state = observe(self._run(RUN)).state
            for event in [each for each in read_events(self._run(RUN)) if each.kind == "evaluation"][shown:]:
                shown += 1
                print(f"version {event.data['version']}: {event.data['reward']:.3f}", flush=True)
            if state.ended:
                return state.value
            if time.monotonic() > deadline:
                self._hpcrl("cancel", RUN, "--yes")
                deadline = float("inf")
            time.sleep(5.0)


def _sets(settings: list[str]) -> list[str]:
    return [part for each in settings for part in ("--set", each)]


def counts(path: Path) -> dict[str, int]:
    """Return how many tasks there are, and how many held-out functions are in a training task under another module."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    train, held_out = ([row for row in rows if row["split"] == name] for name in ("train", "heldout"))
    seen = {shown_function(row) for row in train}
    return {
        "train": len(train),
        "heldout": len(held_out),
        "heldout_functions_in_training": sum(shown_function(row) in seen for row in held_out),
    }


def shown_function(row: dict[str, Any]) -> str:
    """Return the function that the program shows, without the name of its module."""
    return str(row["files"][row["prompt"].removeprefix("mend ")])


def measured(run: RunDir) -> dict[str, Any]:
    """Return the figures of a run: held-out rewards, rewards of its steps, and what was said."""
    steps = read_metrics(run)
    evaluations = [event.data for event in read_events(run) if event.kind == "evaluation"]
    shown = ("version", "reward", "prompts", "failed")
    return {
        "heldout": [{key: each[key] for key in shown if key in each} for each in evaluations],
        "reward": [round(step.reward_mean, 4) for step in steps],
        "rollouts_a_step": [step.reward_count for step in steps],
        "step_s": [round(sum(step.phases_s.values()), 1) for step in steps],
        "mismatch_kl": [round(step.mismatch_kl, 5) for step in steps],
        "first_replies": replies(run, steps[0].step) if steps else [],
        "last_replies": replies(run, steps[-1].step) if steps else [],
    }


def replies(run: RunDir, step: int) -> list[list[Any]]:
    """Return the ten most frequent replies of the rollouts of a step, with their rewards and numbers."""
    path = run.path / "rollouts" / f"step-{step:06d}.jsonl"
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    said = Counter((line["text"].rpartition("<|im_start|>assistant\n")[2], line["reward"]) for line in lines)
    return [[text, reward, number] for (text, reward), number in said.most_common(10)]


if __name__ == "__main__":
    main()
