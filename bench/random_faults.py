"""Random faults in real small runs, on this machine or (``--slurm``) on a virtual cluster, and what came of each.

Processes of the run are killed or stopped at a random moment; under Slurm nodes also go down, jobs are cancelled or
preempted. After each fault: did the run do what its policy says (go on, begin the next attempt, or end), does
``hpcrl why`` name the cause, how many steps were lost, is anything left over, and how long did it take. A run that
ended is resumed. After its last fault each run must reach its last step. Counts go to
``bench/results/random_faults.json``, local and Slurm side by side. ``--seed`` fixes the choice, not the moment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from harness import ROOT, record, scratch, warmup

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.devcluster.cluster import DevCluster
from hpcrl.devcluster.settings import ClusterSettings
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus, RunState, RunStatus

sys.path[:0] = [str(ROOT / "tests" / part) for part in (".", "e2e", "slurm_e2e")]
from lab import SMALL_RUN, Lab, processes  # noqa: E402
from slurm_lab import SlurmLab, job_id  # noqa: E402
from start_models import SMALL_MODEL  # noqa: E402

RESULT = ROOT / "bench/results/random_faults.json"
FLOOR_S = 20.0
SETTINGS = (
    "checkpoint.every_steps=2",
    "trainer.ranks=2",
    "engine.replicas=2",
    f"supervision.hang_floor_s={FLOOR_S:g}",
    "supervision.engine.max_restarts=20",
)
OVER = ("COMPLETED", "FAILED", "LOST", "CANCELLED")
#: events by which somebody notices a fault
NOTICED = ("component.hung", "component.restarting", "guard.supervisor_lost", "supervisor.warned")
LIMIT_S = 300.0
"""Longest wait for any one consequence."""


class Fault(NamedTuple):
    """What is done to what.

    Attributes
    ----------
    how, what:
        ``kill`` or ``stop`` a process of a role, or an order to Slurm.
    policy:
        What must follow: ``restart``, ``attempt`` (the next one, where failures are retried; else the end),
        ``end``, ``requeue`` or ``nothing``.
    why:
        Pattern of what ``hpcrl why`` must say.
    """

    how: str
    what: str
    policy: str
    why: str

    @property
    def name(self) -> str:
        return f"{self.how} {self.what}"


LOCAL = (
    Fault("kill", "engine", "restart", r"{role} {replica} was killed by SIGKILL"),
    Fault("stop", "engine", "restart", r"{role} {replica} hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "trainer rank", "attempt", r"trainer 0.* was killed by SIGKILL"),
    Fault("stop", "trainer rank", "attempt", r"trainer 0 hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "orchestrator", "attempt", r"orchestrator 0 was killed by SIGKILL"),
    Fault("stop", "orchestrator", "attempt", r"orchestrator 0 hangs: .*stopped by a signal: pid .*{pid}"),
    Fault("kill", "guard of engine", "restart", r"guard of {role} {replica}|{role} {replica}.*guard"),
    Fault("kill", "guard of trainer", "attempt", r"guard of trainer 0|trainer 0.*guard"),
    Fault("stop", "guard of engine", "nothing", ""),
    Fault("kill", "supervisor", "end", r"supervisor"),
    Fault("stop", "supervisor", "nothing", ""),
)
SLURM = (
    Fault("node", "of engine", "requeue", r"node {node} went down"),
    Fault("node", "of trainer", "requeue", r"node {node} went down"),
    Fault("scancel", "job", "end", r"(?i)cancelled|ended by Slurm"),
    Fault("preempt", "job", "requeue", r"(?i)preempt"),
)


class Target(NamedTuple):
    """What a fault hits."""

    role: str = ""
    replica: int = 0
    process: psutil.Process | None = None
    node: str = ""


class Trial:
    """One fault in a living run.

    Parameters
    ----------
    lab:
        Commands, on this machine or on a cluster.
    retries:
        Whether the recipe retries failed attempts.
    """

    def __init__(self, lab: Lab | SlurmLab, run: RunDir, fault: Fault, rng: random.Random, *, retries: bool) -> None:
        self.lab, self.run, self.fault, self.rng, self.retries = lab, run, fault, rng, retries

    def go(self) -> dict[str, Any]:
        """Make the fault and look at all that follows."""
        before = status(self.run)
        self.attempt, self.target = before.attempt, self._choose(before)
        self.began_s, self.step = time.time(), read_metrics(self.run)[-1].step
        self._strike()
        result: dict[str, Any] = {"fault": self.fault.name, "attempt": self.attempt, "step": self.step}
        outcome = self._outcome(before)
        result |= {"outcome": outcome, "detected_s": self._detected_s()}
        result["as_policy_says"] = outcome == self._expected()
        result["why"] = self._why() if self.fault.why else None
        result["left"] = self._left(ended=outcome in OVER)
        if outcome in OVER:
            self.lab.hpcrl("resume", self.run.name)
        result["again_s"], result["lost_steps"] = self._again(outcome)
        return result

    # -- the fault -----------------------------------------------------------------------------------------------

    def _choose(self, before: RunStatus) -> Target:
        what, of = self.fault.what, self.fault.what.removeprefix("guard ").removeprefix("of ").split()[0]
        if what == "supervisor":
            return Target("supervisor", 0, psutil.Process(before.supervisor.pid))
        if what == "job":
            return Target()
        component = self.rng.choice([c for c in before.components if c.role == of])
        assert component.pid is not None
        process: psutil.Process | None = psutil.Process(component.pid)
        if what.startswith("guard"):
            process = psutil.Process(component.pid).parent()
        elif what == "trainer rank":
            process = self.rng.choice([p for p in processes(self.run) if is_rank(p)])
        return Target(component.role, component.replica, process, next(iter(component.nodes), ""))

    def _strike(self) -> None:
        if self.fault.how == "kill":
            assert self.target.process is not None
            self.target.process.kill()
        elif self.fault.how == "stop":
            assert self.target.process is not None
            self.target.process.suspend()
        else:
            assert isinstance(self.lab, SlurmLab)
            if self.fault.how == "node":
                self.lab.cluster.kill_node(self.target.node)
            elif self.fault.how == "scancel":
                self.lab.client().cancel(job_id(self.run))
            else:
                self.lab.preempt()
        if self.fault.policy == "nothing":
            # long enough for an alarm, were it one; then it goes on
            time.sleep(1.5 * FLOOR_S)
            assert self.target.process is not None
            self.target.process.resume()

    # -- what follows --------------------------------------------------------------------------------------------

    def _expected(self) -> str:
        end = {"supervisor": "LOST", "job": "CANCELLED"}.get(self.fault.what, "FAILED")
        following = {"restart": "restarted", "requeue": "next attempt", "nothing": "went on", "end": end}
        return following.get(self.fault.policy) or ("next attempt" if self.retries else end)

    def _outcome(self, before: RunStatus) -> str:
        victim = (self.target.role, self.target.replica)
        restarts = sum(c.restarts for c in before.components)

        def seen() -> str:
            now = status(self.run)
            if now.attempt > self.attempt:
                return "next attempt"
            if now.state.ended:
                return now.state.value
            if now.supervisor.alive() is False and now.state is not RunState.REQUEUED:
                state = str(self.lab.json("status", self.run.name)["state"])
                return state if state in OVER else ""
            if self.fault.policy == "nothing":
                if sum(c.restarts for c in now.components) > restarts:
                    return "restarted"
                return "went on" if read_metrics(self.run)[-1].step >= self.step + 3 and self._later(5.0) else ""
            ready = [c for c in now.components if (c.role, c.replica) == victim and c.state == "READY"]
            return "restarted" if any((c.ready_at_s or 0.0) > self.began_s for c in ready) else ""

        return wait_for(seen) or "nothing within the limit"

    def _later(self, seconds: float) -> bool:
        return time.time() > self.began_s + 1.5 * FLOOR_S + seconds

    def _detected_s(self) -> float | None:
        noticed = [event.time_s for event in self._events() if event.kind in NOTICED or is_end(event)]
        return round(min(noticed) - self.began_s, 2) if noticed else None

    def _events(self) -> list[Event]:
        return [event for event in read_events(self.run) if event.time_s > self.began_s]

    def _why(self) -> bool:
        why = self.lab.json("why", self.run.name)
        said = [why["sentence"], *(c["what"] for c in why["consequences"]), *why["earlier"].values()]
        pid = "" if self.target.process is None else str(self.target.process.pid)
        pattern = self.fault.why.format(
            role=self.target.role, replica=self.target.replica, pid=pid, node=self.target.node
        )
        good = any(re.search(pattern, text) for text in said)
        if not good:
            print(f"    why says: {said}")
        return good

    def _left(self, *, ended: bool) -> int:
        """Processes that should be gone after 15 s: all after an end; else those of what was replaced."""
        jobs: Callable[[], list[str]] = self.lab.alive_jobs if isinstance(self.lab, SlurmLab) else list
        deadline = time.monotonic() + 15.0
        while True:
            left = [process for process in processes(self.run) if ended or self._replaced(process)]
            queue = jobs() if ended else []
            if not left and not queue:
                return 0
            if time.monotonic() > deadline:
                print(f"    left: {[p.cmdline() for p in left]} {queue}")
                return len(left) + len(queue)
            time.sleep(0.5)

    def _replaced(self, process: psutil.Process) -> bool:
        try:
            marks, born_s = process.environ(), process.create_time()
        except psutil.Error:
            return False
        if "HPCRL_ROLE" not in marks:
            return False
        hit = self.fault.policy == "restart"
        hit &= (marks["HPCRL_ROLE"], marks.get("HPCRL_REPLICA")) == (self.target.role, str(self.target.replica))
        # the kernel gives start times in ticks
        return int(marks["HPCRL_ATTEMPT"]) < status(self.run).attempt or (hit and born_s < self.began_s - 1.0)

    def _again(self, outcome: str) -> tuple[float | None, int | None]:
        """Seconds from the fault to the first step after it, by what serves then; and steps that are done twice."""
        same = outcome in ("restarted", "went on")

        def first() -> list[Any]:
            after = read_metrics(self.run)
            return [s for s in after if (s.step > self.step if same else s.attempt > self.attempt)]

        steps = wait_for(first)
        if not steps:
            return None, None
        if outcome == "restarted":
            component = find(status(self.run), self.target)
            return round((component.ready_at_s or 0.0) - self.began_s, 2), 0
        restored = [e.data["step"] for e in self._events() if e.kind == "trainer.restored"]
        again_s = min(s.time_s for s in steps) - self.began_s
        old = [e.data["step"] for e in read_events(self.run, attempt=self.attempt, kind="step")]
        return round(again_s, 2), 0 if same else max(old, default=self.step) - (restored[0] if restored else 0)


def find(now: RunStatus, target: Target) -> ComponentStatus:
    """The component that was hit."""
    return next(c for c in now.components if (c.role, c.replica) == (target.role, target.replica))


def is_end(event: Event) -> bool:
    """Whether an event says that something ended which was not to."""
    if event.kind == "component.state":
        return bool(event.data["state"] == "FAILED")
    return event.kind == "run.state" and event.data["state"] == "STOPPING"


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a worker of the trainer, not its launcher."""
    try:
        return "RANK" in process.environ() and "hpcrl.trainer" in process.cmdline()
    except psutil.Error:
        return False


def status(run: RunDir) -> RunStatus:
    """What the supervisor says."""
    found = RunStatus.read(run)
    assert found is not None
    return found


def wait_for(probe: Callable[[], Any]) -> Any:
    """Poll until ``probe`` gives something; None after `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := probe()):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.25)
    return value


def ready_for_fault(run: RunDir) -> bool:
    """Running, with steps and a checkpoint of its own: a failure before that is rightly not retried."""
    now = status(run)
    started = read_events(run, attempt=now.attempt, kind="attempt.started")
    if now.state is not RunState.RUNNING or not started or any(c.state != "READY" for c in now.components):
        return False
    began_at = started[0].data["checkpoint_step"] or 0
    steps = [s.step for s in read_metrics(run) if s.attempt == now.attempt]
    return len(steps) > 3 and max(CheckpointLedger(run.checkpoints_dir).steps(), default=0) > began_at


@contextmanager
def laboratory(root: Path, model: Path, *, slurm: bool) -> Iterator[Lab | SlurmLab]:
    """Where runs are made; all of it is ended afterwards."""
    if not slurm:
        lab = Lab(root, model)
        try:
            yield lab
        finally:
            for path in lab.runs_root.iterdir() if lab.runs_root.is_dir() else ():
                for process in processes(RunDir(path)):
                    process.send_signal(signal.SIGKILL)
        return
    cluster = DevCluster.named("faults", Path(f"/tmp/hpcrl-faults-{os.getpid()}"))  # sockets need short paths
    cluster.up(ClusterSettings(name="faults", nodes=7, grace_s=30))
    try:
        yield SlurmLab(root, model, cluster)
    finally:
        subprocess.run(["scancel", "--me"], env={**os.environ, **cluster.environment()}, check=False)
        cluster.down()
        cluster.paths.root.parent.rmdir()


class Bench:
    """Runs with faults, until there were enough of them or the time is over."""

    def __init__(self, lab: Lab | SlurmLab, arguments: argparse.Namespace) -> None:
        self.lab, self.arguments = lab, arguments
        self.slurm = isinstance(lab, SlurmLab)
        self.rng = random.Random(arguments.seed)
        self.results: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.deadline = time.monotonic() + 60.0 * arguments.minutes
        self.deck: list[Fault] = []

    @property
    def more(self) -> bool:
        return len(self.results) < self.arguments.faults and time.monotonic() < self.deadline

    def draw(self) -> Fault:
        """Every kind once before any comes again."""
        if not self.deck:
            self.deck = list(LOCAL + SLURM if self.slurm else LOCAL)
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
        settings = [f"trainer.steps={self.arguments.steps}", *SETTINGS]
        settings += [] if self.slurm else [*SMALL_RUN, f"job.retry_failures={9 if retries else 0}"]
        settings += ["job.layout=hetjob", "job.retry_failures=9"] if self.slurm else []
        run = self.lab.submit(name, *settings)
        wait_for(lambda: RunStatus.read(run))
        while self.more and wait_for(lambda: ready_for_fault(run) or self.over(run)) and not self.over(run):
            if read_metrics(run)[-1].step > self.arguments.steps - 10:
                break
            time.sleep(self.rng.uniform(0.0, 3.0))
            trial = Trial(self.lab, run, self.draw(), self.rng, retries=retries)
            print(f"{name} step {read_metrics(run)[-1].step}: {trial.fault.name}", flush=True)
            try:
                result = trial.go()
            except (AssertionError, StopIteration, psutil.Error, subprocess.SubprocessError) as error:
                result = {"fault": trial.fault.name, "outcome": f"the bench failed: {error!r}", "as_policy_says": False}
            finally:
                if trial.fault.how == "node" and isinstance(self.lab, SlurmLab):
                    self.lab.cluster.revive_node(trial.target.node)
            print(f"    {result}", flush=True)
            self.results.append(result)
            self.save()
            if result.get("again_s") is None:
                break
        self.finish(run)

    @staticmethod
    def over(run: RunDir) -> bool:
        return status(run).state.ended

    def finish(self, run: RunDir) -> None:
        """The run must do all its steps; then nothing may be left."""
        seconds = max(60.0, min(LIMIT_S, self.deadline - time.monotonic() + 120.0))
        deadline = time.monotonic() + seconds
        while not self.over(run) and time.monotonic() < deadline:
            time.sleep(0.5)
        state = status(run).state.value
        if not self.over(run):
            self.lab.hpcrl("cancel", run.name, "--yes", check=False)
            state = "not at its last step in time"
        time.sleep(5.0)
        steps = [s.step for s in read_metrics(run)]
        end = {"run": run.name, "end": state, "steps": len(steps), "attempts": len(run.attempts())}
        end["every_step_once"] = sorted(set(steps)) == list(range(1, (steps[-1] if steps else 0) + 1))
        end["left"] = len(processes(run))
        print(f"end of {end}", flush=True)
        self.ends.append(end)
        self.save()

    def save(self) -> None:
        """Record what there is so far, beside the figures of the other kind of run."""
        before = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
        kept = {key: before[key] for key in ("local", "slurm") if key in before}
        record("random_faults", kept | {"slurm" if self.slurm else "local": self.summary()})

    def summary(self) -> dict[str, Any]:
        """Counts and times."""
        good = [r for r in self.results if r.get("again_s") is not None]
        return {
            "seed": self.arguments.seed,
            "hang_floor_s": FLOOR_S,
            "load_average": round(os.getloadavg()[0], 1),
            "faults": len(self.results),
            "as_policy_says": sum(r["as_policy_says"] for r in self.results),
            "why_right": sum(bool(r.get("why")) for r in self.results),
            "why_asked": sum(r.get("why") is not None for r in self.results),
            "left_over": sum(r.get("left", 0) for r in self.results),
            "lost_steps_most": max((r["lost_steps"] for r in good), default=None),
            "outcomes": dict(Counter(r["outcome"] for r in self.results)),
            "detected_s_median": median(r["detected_s"] for r in good),
            "again_s_median": median(r["again_s"] for r in good),
            "runs": self.ends,
            "trials": self.results,
        }


def median(values: Iterator[float | None]) -> float | None:
    """Median of what is known."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def table(results: list[dict[str, Any]]) -> None:
    """Print one line a fault."""
    print(f"{'fault':24} {'outcome':14} {'policy':6} {'why':5} {'lost':>4} {'left':>4} {'detected':>9} {'again':>8}")
    for r in results:
        cells = (r.get("lost_steps"), r.get("left"), r.get("detected_s"), r.get("again_s"))
        lost, left, detected, again = ("-" if cell is None else str(cell) for cell in cells)
        policy = "yes" if r["as_policy_says"] else "NO"
        why = {None: "-", True: "yes", False: "NO"}[r.get("why")]
        print(f"{r['fault']:24} {r['outcome'][:14]:14} {policy:6} {why:5} {lost:>4} {left:>4} {detected:>9} {again:>8}")


def main() -> None:
    """Make the faults, print the table, and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm", action="store_true", help="on a virtual cluster")
    parser.add_argument("--faults", type=int, default=22)
    parser.add_argument("--minutes", type=float, default=30.0)
    # a run must not end before its last fault is found
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="faults whose name matches this pattern")
    parser.add_argument("--model", type=Path, help="a start model; made where not given")
    arguments = parser.parse_args()
    root = scratch("random-faults")
    model = arguments.model or root / "model"
    if arguments.model is None:
        warmup("quickstart", model, *SMALL_MODEL)
    with laboratory(root, model, slurm=arguments.slurm) as lab:
        bench = Bench(lab, arguments)
        bench.go()
    table(bench.results)
    good = all(r["as_policy_says"] and r.get("why") is not False and not r.get("left") for r in bench.results)
    if not good:
        sys.exit(f"not all as it should be; the runs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
