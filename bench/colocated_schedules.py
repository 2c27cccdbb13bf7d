"""Both schedules of ``bench/colocated.py`` train the quickstart, one after the other."""

from __future__ import annotations

import statistics
import threading
import time
import urllib.request
from pathlib import Path

from harness import RunResult, run_recipe, scratch, warmup

from hpcrl.errors import HpcrlError
from hpcrl.network.credentials import Credentials
from hpcrl.runs.events import read_events
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir

SCHEDULES = {"synchronous": 0, "one step behind": 1}
RECIPE = "recipes/quickstart_colocated.yaml"
LATE = "{median_s: 0.3, tail_share: 0.1, tail_factor: 10}"
WORKLOADS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "a long tail": tuple(f"environments.{i}.latency={LATE}" for i in range(2)),
}
LOOK_S = 0.05


class BatchWatch(threading.Thread):
    """How many sequences are in the batch of a run's engine, by the time at which it was asked."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(daemon=True)
        self._run, self._ended = run, threading.Event()
        self.seen: list[tuple[float, float]] = []

    def run(self) -> None:
        """Look until `end`; what cannot be asked yet, or any more, is not seen."""
        while not self._ended.wait(LOOK_S):
            try:
                (member,) = Endpoints.read(self._run, 1).fixed("engine")
                headers = Credentials.of_run(self._run.path, 1).headers
                request = urllib.request.Request(f"{member.url}/metrics", headers=headers)
                with urllib.request.urlopen(request, timeout=2) as answer:
                    lines = answer.read().decode().splitlines()
            except (OSError, ValueError, HpcrlError):
                continue
            running = [line for line in lines if line.startswith("vllm:num_requests_running")]
            self.seen.append((time.time(), float(running[0].rpartition(" ")[2])))

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()

    def idle_share(self, turns: list[tuple[float, float]]) -> float:
        """Of all looks in these stretches of time, those that saw no sequence."""
        seen = [running for at, running in self.seen if any(begin <= at < end for begin, end in turns)]
        return sum(running == 0 for running in seen) / len(seen)


def steps_of(result: RunResult, watch: BatchWatch, skip: int) -> dict[str, float]:
    """Medians of all steps but the first ``skip`` and the last, which saves a checkpoint, and shares of their time."""
    handed = {e.data["version"]: e.data["seconds"] for e in read_events(result.run, kind="trainer.handed_over")}
    rows, turns = [], []
    steps = result.steps[skip:-1]
    for step in steps:
        phases, total = step.phases_s, sum(step.phases_s.values())
        parts = {
            "generate_s": phases["wait_batch"],
            "take_back_s": phases["swap"] - handed[step.step],
            "train_s": phases["forward_backward"] + phases["optimizer"],
            "hand_over_s": handed[step.step],
        }
        rows.append({"step_s": total, **parts, "rest_s": total - sum(parts.values())})
        turns.append((step.time_s - total, step.time_s - total + phases["wait_batch"]))
    sums = {name: sum(row[name] for row in rows) for name in rows[0]}
    empty = watch.idle_share(turns)
    computing_s = (1 - empty) * sums["generate_s"] + sums["train_s"]
    figures = {
        **{name: statistics.median(row[name] for row in rows) for name in sums},
        "swap_share": (sums["take_back_s"] + sums["hand_over_s"]) / sums["step_s"],
        "empty_share_of_generate": empty,
        "idle_share": 1 - computing_s / sums["step_s"],
        "sampled_tokens_per_s": sum(step.sampled_tokens for step in steps) / sums["step_s"],
        "staleness_mean": statistics.mean(step.staleness_mean for step in steps),
        "staleness_max": max(step.staleness_max for step in steps),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def schedules(steps: int, skip: int, model: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """The second part: figures by workload and schedule."""
    directory = scratch("schedules")
    if model is None:
        warmup(RECIPE, model := directory / "model")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for number, (workload, settings) in enumerate(WORKLOADS.items()):
        for schedule, bound in SCHEDULES.items():
            name = f"run-{number}-{bound}"
            watch = BatchWatch(RunDir(directory / name))
            watch.start()
            own = (f"model.path={model}", f"trainer.steps={steps}", f"rollouts.max_off_policy_steps={bound}")
            none = ("evaluation.every_steps=0", "evaluation.prompts=8", "checkpoint.every_steps=0")
            result = run_recipe(RECIPE, directory, name, *own, *none, *settings)
            watch.end()
            found.setdefault(workload, {})[schedule] = steps_of(result, watch, skip)
    return found
