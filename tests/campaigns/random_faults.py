"""Random faults in real small runs, on this machine or (``--slurm``) on a virtual cluster, and what came of each.

Processes of the run are killed or stopped at a random moment; files of the run directory cannot be written or are
stale for some seconds; under Slurm nodes also go down, jobs are cancelled or preempted, srun hangs, guards do not
answer, slurmctld is away for three minutes, and in every second run the clock of one node is off (libfaketime).
Environments give no usable rewards or raise, engines answer damaged, lose connections in an update or hold other
weights than they say, reads of weights hang for longer than an update may take, strangers send to ports. After each
fault: did the run do what its policy says (`fault_trials/policies.py`), does ``hpcrl why`` name the cause, how
many steps were lost, is anything left over, and how long did it take. A run that ended is resumed. After its last
fault each run must reach its last step.

Counts go to ``bench/results/random_faults.json``, local and Slurm side by side. ``--seed`` fixes the choice, not the
moment. A long campaign is made in parts: with ``--append`` the faults are added to those of parts before, also by
several parts at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from campaign_paths import ROOT
from fault_trials.checks import check_end
from fault_trials.places import Lab, Skew, SlurmLab, Switches, laboratory, processes
from fault_trials.policies import FLOOR_S, LOCAL, SLURM, UPDATE_S, Fault
from fault_trials.trial import Trial
from fault_trials.watching import LIMIT_S, ready_for_fault, status, wait_for
from harness import record, scratch, warmup
from lab import SMALL_RUN
from start_models import SMALL_MODEL

from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

RESULT = ROOT / "bench/results/random_faults.json"
SETTINGS = (
    "checkpoint.every_steps=2",
    "trainer.ranks=2",
    "engine.replicas=2",
    f"supervision.hang_floor_s={FLOOR_S:g}",
    "supervision.engine.max_restarts=50",
    f"handoff.update_timeout_s={UPDATE_S:g}",
)
STEPS_OF_A_FAULT = 120
"""A run that has no more left gets no fault: one takes up to a minute, and runs do up to two steps a second."""
ENVIRONMENTS = (
    "environments=[{name: reverse, kind: custom, factory: 'fault_trial_words:Words'}, "
    "{name: calculator, kind: calculator}]"
)


class Bench:
    """Runs with faults, until there were enough of them or the time is over."""

    def __init__(self, lab: Lab | SlurmLab, switches: Switches, arguments: argparse.Namespace) -> None:
        self.lab, self.switches, self.arguments = lab, switches, arguments
        self.slurm = isinstance(lab, SlurmLab)
        self.rng = random.Random(arguments.seed)
        self.results: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.deadline = time.monotonic() + 60.0 * arguments.minutes
        self.deck: list[Fault] = []
        self.result: Path = arguments.result
        self.kind = "slurm" if self.slurm else "local"
        if not arguments.append:
            self._record(lambda section: section.clear())

    @property
    def more(self) -> bool:
        return len(self.results) < self.arguments.faults and time.monotonic() < self.deadline

    def draw(self) -> Fault:
        """Every kind once before any comes again."""
        if not self.deck:
            self.deck = list(SLURM if self.slurm else LOCAL)
            if self.arguments.only:
                self.deck = [fault for fault in self.deck if re.search(self.arguments.only, fault.name)]
            self.rng.shuffle(self.deck)
        return self.deck.pop()

    def go(self) -> None:
        """All runs."""
        while self.more:
            self.one_run(f"faults-{len(self.ends)}")

    def one_run(self, name: str) -> None:
        """A run with as many faults as its steps have room for, to its last step."""
        retries = self.slurm or self.rng.random() < 0.5
        settings = [f"trainer.steps={self.arguments.steps}", *SETTINGS, ENVIRONMENTS]
        settings += [] if self.slurm else [*SMALL_RUN, f"job.retry_failures={9 if retries else 0}"]
        # nodes come back: with too many of the few avoided for hours, the run would wait for one
        slurm = ["job.layout=hetjob", "job.retry_failures=9", "job.exclude_failed_nodes_h=0.05"]
        settings += slurm if self.slurm else []
        skew = self.switches.skew
        if self.slurm and skew.possible() and self.rng.random() < 0.5:
            skew.choose(self.rng, [node.name for node in self.lab.cluster.record().nodes])
        run = self.lab.submit(name, *settings)
        wait_for(lambda: RunStatus.read(run))
        while self.more and wait_for(lambda: ready_for_fault(run) or self.over(run)) and not self.over(run):
            if read_metrics(run)[-1].step > self.arguments.steps - STEPS_OF_A_FAULT:
                break
            time.sleep(self.rng.uniform(0.0, 3.0))
            if not self.one_fault(run, retries=retries):
                break
        self.finish(run)
        skew.clear()

    def one_fault(self, run: RunDir, *, retries: bool) -> bool:
        """Whether the run went on afterwards, in whatever way."""
        trial = Trial(self.lab, self.switches, run, self.draw(), self.rng, retries=retries)
        print(f"{run.name} step {read_metrics(run)[-1].step}: {trial.fault.name}", flush=True)
        try:
            result = trial.go()
        except (AssertionError, StopIteration, psutil.Error, subprocess.SubprocessError) as error:
            result = {"fault": trial.fault.name, "outcome": f"the bench failed: {error!r}", "as_policy_says": False}
        finally:
            if trial.fault.how == "node" and isinstance(self.lab, SlurmLab):
                self.lab.cluster.revive_node(trial.target.node)
        print(f"    {result}", flush=True)
        self.results.append(result | {"seed": self.arguments.seed})
        self._record(lambda section: section.setdefault("trials", []).append(self.results[-1]))
        return result.get("again_s") is not None

    @staticmethod
    def over(run: RunDir) -> bool:
        return status(run).state.ended

    def finish(self, run: RunDir) -> None:
        """The run must do all its steps; then nothing may be left."""
        seconds = max(60.0, min(LIMIT_S, self.deadline - time.monotonic() + 120.0))
        wait_for(lambda: self.over(run), seconds)
        state = status(run).state.value
        if not self.over(run):
            self.lab.hpcrl("cancel", run.name, "--yes", check=False)
            state = "not at its last step in time"
        time.sleep(5.0)
        steps = [s.step for s in read_metrics(run)]
        end = {"run": run.name, "end": state, "steps": len(steps), "attempts": len(run.attempts())}
        end["every_step_once"] = sorted(set(steps)) == list(range(1, (steps[-1] if steps else 0) + 1))
        end["left"] = len(processes(run))
        end["problems"] = check_end(self.lab, run, self.switches.root)
        skew = self.switches.skew
        if skew.node:
            measured = [
                e.data["nodes"][skew.node]
                for e in read_events(run, kind="nodes.clocks")
                if skew.node in e.data["nodes"]
            ]
            end["skew"] = {"node": skew.node, "seconds": skew.seconds, "measured": measured[-1] if measured else None}
        print(f"end of {end}", flush=True)
        self.ends.append(end | {"seed": self.arguments.seed})
        self._record(lambda section: section.setdefault("runs", []).append(self.ends[-1]))

    # -- figures -------------------------------------------------------------------------------------------------

    def _record(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change what was recorded of this kind of run; parts that go on at a time wait for each other."""
        directory = os.open(self.result.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            found: dict[str, Any] = json.loads(self.result.read_text()) if self.result.is_file() else {}
            sections = {kind: found.get(kind, {}) for kind in ("local", "slurm")}
            change(sections[self.kind])
            figures = {kind: summary(section) for kind, section in sections.items() if section}
            # trials that showed a defect, which was mended: told, and not counted
            mended = {"mended": found["mended"]} if "mended" in found else {}
            record("random_faults", together(figures) | mended | figures, self.result)
        finally:
            os.close(directory)


def summary(section: dict[str, Any]) -> dict[str, Any]:
    """Counts and times of all parts."""
    results = section.get("trials", [])
    good = [r for r in results if r.get("again_s") is not None]
    return counts(results) | {
        "hang_floor_s": FLOOR_S,
        "left_over": sum(r.get("left", 0) for r in results),
        "lost_steps_most": max((r["lost_steps"] for r in good), default=None),
        "outcomes": dict(Counter(r["outcome"] for r in results)),
        "detected_s_median": median(r["detected_s"] for r in good),
        "again_s_median": median(r["again_s"] for r in good),
        "runs": section.get("runs", []),
        "trials": results,
    }


def counts(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What was as it should be."""
    by_kind: dict[str, list[int]] = {}
    for r in results:
        made = by_kind.setdefault(kind_of(r["fault"]), [0, 0])
        made[0] += 1
        made[1] += r["as_policy_says"]
    return {
        "faults": len(results),
        "as_policy_says": sum(r["as_policy_says"] for r in results),
        "as_policy_says_by_kind": {kind: f"{right} of {made}" for kind, (made, right) in sorted(by_kind.items())},
        "why_asked": sum(r.get("why") is not None for r in results),
        "why_right": sum(bool(r.get("why")) for r in results),
    }


def kind_of(fault: str) -> str:
    """What was done, and of a file also how it failed."""
    words = fault.split()
    if words[0] == "file":
        return f"file {words[2]}"
    return words[0] if words[0] not in ("print", "copy", "share", "cut", "stranger", "squeue", "weights") else fault


def together(figures: dict[str, Any]) -> dict[str, Any]:
    """Counts of both kinds of run, and what missed."""
    results = [r for section in figures.values() for r in section["trials"]]
    missed = [r for r in results if not r["as_policy_says"] or r.get("why") is False]
    return {"together": counts(results), "missed": missed}


def median(values: Iterable[float | None]) -> float | None:
    """Median of what is known."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def table(results: list[dict[str, Any]]) -> None:
    """Print one line a fault."""
    print(f"{'fault':42} {'outcome':14} {'policy':6} {'why':5} {'lost':>4} {'left':>4} {'detected':>9} {'again':>8}")
    for r in results:
        cells = (r.get("lost_steps"), r.get("left"), r.get("detected_s"), r.get("again_s"))
        lost, left, detected, again = ("-" if cell is None else str(cell) for cell in cells)
        policy = "yes" if r["as_policy_says"] else "NO"
        why = {None: "-", True: "yes", False: "NO"}[r.get("why")]
        print(f"{r['fault']:42} {r['outcome'][:14]:14} {policy:6} {why:5} {lost:>4} {left:>4} {detected:>9} {again:>8}")


def main() -> None:
    """Make the faults, print the table, and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm", action="store_true", help="on a virtual cluster")
    parser.add_argument("--faults", type=int, default=40, help="how many, all runs together")
    parser.add_argument("--minutes", type=float, default=30.0)
    # a run must not end before its last fault is found
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true", help="add to the faults that were recorded before")
    parser.add_argument("--only", help="faults whose name matches this pattern")
    parser.add_argument("--model", type=Path, help="a start model; made where not given")
    parser.add_argument("--result", type=Path, default=RESULT, help="where figures go")
    arguments = parser.parse_args()
    if arguments.slurm and not Skew.possible():
        print("clocks stay right: libfaketime is not installed\n    hint: apt-get install faketime", file=sys.stderr)
    root = scratch("random-faults")
    model = arguments.model or root / "model"
    if arguments.model is None:
        warmup("quickstart", model, *SMALL_MODEL)
    with laboratory(root, model, slurm=arguments.slurm) as (lab, switches):
        bench = Bench(lab, switches, arguments)
        bench.go()
    table(bench.results)
    good = all(r["as_policy_says"] and r.get("why") is not False and not r.get("left") for r in bench.results)
    if not good:
        sys.exit(f"not all as it should be; the runs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
