"""One fault in a living run: it is made, and all that follows is judged by the fault's policy."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from fault_trials.checks import other_weights
from fault_trials.places import Lab, SlurmLab, Switches, processes
from fault_trials.policies import Fault, expected_outcomes
from fault_trials.strangers import disturb
from fault_trials.versions import damage_next_version
from fault_trials.watching import (
    ENDED,
    LIMIT_S,
    NOTICED,
    OVER,
    is_end,
    is_rank,
    is_sandboxd,
    status,
    wait_for,
)
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus, RunState, RunStatus

_PRINTED = b'Welcome, quota 80%\n{"a": 1}\n7\n\xff\xfe no text '
"""What others print into a step, the last of it without an end of line."""


HEALTH_S = 5.0
"""Longest time for an answer of a server that strangers disturb, on a machine that does much else."""
LOG_BYTES = 300_000
"""How much its log may grow by meanwhile."""
_ROLES = {
    "engine": ("engine", "prefill", "decode"),
    "sandboxd": ("env",),
    **{role: (role,) for role in ("prefill", "decode", "trainer", "orchestrator", "router", "store", "env")},
}
"""Words of a fault, and the roles of whose replicas one is chosen."""


class Target(NamedTuple):
    """What a fault hits."""

    role: str = ""
    replica: int = 0
    process: psutil.Process | None = None
    node: str = ""


class Pace(NamedTuple):
    """How fast a run does what is waited for."""

    limit_s: float = LIMIT_S
    """Longest wait for any one consequence."""
    steps: int = 3
    """A run that has done so many steps since the fault goes on."""


class Trial:
    """One fault in a living run.

    Parameters
    ----------
    lab, switches:
        Commands, on this machine or on a cluster; and how faults are made there.
    retries:
        Whether the recipe retries failed attempts.
    pace:
        How long consequences may take.
    """

    def __init__(
        self,
        lab: Lab | SlurmLab,
        switches: Switches,
        run: RunDir,
        fault: Fault,
        rng: random.Random,
        *,
        retries: bool,
        pace: Pace | None = None,
    ) -> None:
        self.lab, self.switches, self.run, self.fault, self.rng = lab, switches, run, fault, rng
        self.retries, self.pace = retries, pace or Pace()
        self._answer: subprocess.CompletedProcess[str] | None = None
        self.problems: list[str] = []
        self.said: list[str] = []
        self.damaged = ""

    def go(self) -> dict[str, Any]:
        """Make the fault and look at all that follows."""
        before = status(self.run)
        self.attempt, self.target = before.attempt, self._choose(before)
        self.counted = self._counter()
        self.began_s, self.step = time.time(), read_metrics(self.run)[-1].step
        result: dict[str, Any] = {"fault": self.fault.name, "attempt": self.attempt, "step": self.step}
        try:
            self._strike()
            outcome = self._outcome(before)
        finally:
            self._heal()
        result |= {"outcome": outcome, "detected_s": self._detected_s()}
        result["why"] = self._why(outcome)
        self._look_closer(outcome)
        result["as_policy_says"] = outcome in expected_outcomes(self.fault, retries=self.retries) and not self.problems
        if self.problems:
            result["problems"] = self.problems
        if self.said:
            result["said"] = self.said
        if self.damaged:
            result["damaged"] = self.damaged
        result["left"] = self._left(ended=outcome in ENDED, restarted=outcome == "restarted")
        if outcome in ENDED:
            self.lab.hpcrl("resume", self.run.name)
        result["again_s"], result["lost_steps"] = self._again(outcome)
        return result

    # -- the fault -----------------------------------------------------------------------------------------------

    def _choose(self, before: RunStatus) -> Target:
        what = {"": self.fault.what, "resume": "supervisor"}.get(self.fault.during) or self.fault.during
        what = what.removeprefix("kill ")
        names = re.findall("|".join(_ROLES), what)
        of = names[0] if names else ""
        if what == "supervisor":
            return Target("supervisor", 0, psutil.Process(before.supervisor.pid))
        if not of or (self.fault.how in ("file", "environment", "squeue") and not self.fault.during):
            return Target()
        component = self.rng.choice([c for c in before.components if c.role in _ROLES[of]])
        assert component.pid is not None
        process: psutil.Process | None = psutil.Process(component.pid)
        if what.startswith("guard"):
            process = psutil.Process(component.pid).parent()
        elif what == "trainer rank":
            process = self.rng.choice([p for p in processes(self.run) if is_rank(p)])
        elif what.startswith("sandboxd"):
            process = self.rng.choice([p for p in process.children(recursive=True) if is_sandboxd(p)])
        return Target(component.role, component.replica, process, next(iter(component.nodes), ""))

    def _strike(self) -> None:
        how = self.fault.how
        if how in ("file", "version"):
            self._strike_files()
        elif how == "kill":
            self._process.kill()
        elif how == "stop":
            self._process.suspend()
        elif how == "print":
            # the guard's own end of its pipe, as a TaskProlog or a wrapper of srun has it
            with open(f"/proc/{self._process.pid}/fd/1", "wb", buffering=0) as stream:
                stream.write(_PRINTED)
        elif how == "copy":
            self._strike_copy()
        elif how == "share":
            names = {"run": self.run.name, "role": self.target.role, "replica": self.target.replica}
            self.switches.fail_files(self.fault.spec.format(**names))
        elif how in ("environment", "answers", "cut", "weights"):
            pid = {} if how == "environment" else {"pid": self._process.pid}
            self.switches.order({**self.fault.order, **pid, "number": self.rng.randrange(1000)})
        elif how == "stranger":
            self._strike_stranger()
        elif how == "squeue":
            self._strike_squeue()
        elif how == "srun hangs":
            self.switches.hang_srun()
            self._process.kill()
        else:
            self._strike_cluster(how)
        if self.fault.seconds and how not in ("stranger", "squeue"):
            # long enough for an alarm, were it one; then it goes on
            time.sleep(self.fault.seconds)
            self._heal()

    def _strike_files(self) -> None:
        fault, spec = self.fault, self.fault.spec.format(run=self.run.name)
        if fault.how == "version":
            self.damaged = damage_next_version(self.run, self.rng, self.pace.limit_s)
        elif fault.during == "resume":
            self._process.kill()
            assert wait_for(lambda: self.lab.json("status", self.run.name)["state"] in OVER, 60.0)
            assert wait_for(lambda: not processes(self.run), 60.0)
            self.switches.fail_files(spec)
            self._answer = self.lab.hpcrl("resume", self.run.name, check=False)
        else:
            self.switches.fail_files(spec)
            if fault.during:
                self._process.kill()

    def _strike_copy(self) -> None:
        copy = self.run.path.with_name(f"{self.run.name}.bak")
        # files of a living run come and go
        subprocess.run(["cp", "-a", str(self.run.path), str(copy)], check=False, capture_output=True)
        cancelled = self.lab.hpcrl("cancel", str(copy), "--yes", check=False)
        assert "is a copy of" in cancelled.stderr, cancelled.stderr
        self.lab.hpcrl("rm", str(copy), "--yes")
        assert not copy.exists()

    def _strike_stranger(self) -> None:
        component = find(status(self.run), self.target)
        log = self.run.path / str(component.log)
        before = log.stat().st_size
        health_s = disturb(component.host or "127.0.0.1", component.port or 0, self.fault.seconds)
        if health_s > HEALTH_S:
            self.problems.append(f"/health took {health_s:.1f} s")
        if (grown := log.stat().st_size - before) > LOG_BYTES:
            self.problems.append(f"{log.name} grew by {grown:,} bytes")

    def _strike_squeue(self) -> None:
        """Ask as people do while squeue is wrong: nothing has ended, and nothing is submitted again."""
        self.switches.answer_squeue(self.fault.what)
        submissions = len(RunRecord.read(self.run).submissions)
        deadline = time.monotonic() + self.fault.seconds
        while time.monotonic() < deadline:
            if (state := self.lab.json("status", self.run.name)["state"]) in OVER:
                self.problems.append(f"status said {state} of a run that runs")
                break
            time.sleep(2.0)
        if self.lab.hpcrl("resume", self.run.name, check=False).returncode == 0:
            self.problems.append("resume was not refused")
        if len(RunRecord.read(self.run).submissions) != submissions:
            self.problems.append("another job was submitted")
        self._heal()

    def _strike_cluster(self, how: str) -> None:
        lab = self.lab
        assert isinstance(lab, SlurmLab)
        if how == "node":
            lab.cluster.kill_node(self.target.node)
        elif how == "scancel":
            lab.client().cancel(int(RunRecord.read(self.run).submissions[-1].job_id))
        elif how == "warn":
            lab.client().cancel(int(RunRecord.read(self.run).submissions[-1].job_id), signal="USR2", batch=True)
        elif how == "preempt":
            lab.preempt()
        elif how == "away":
            lab.cluster.pause_controller(kill=self.rng.random() < 0.5)
        else:
            assert how == "unreachable"
            self._stopped = [self._process, self._process.parent()]
            for process in self._stopped:
                process.suspend()
            lab.preempt()

    def _heal(self) -> None:
        """End what does not end by itself; may be called twice."""
        self.switches.heal()
        stopped = [self.target.process] if self.fault.how == "stop" else getattr(self, "_stopped", [])
        for process in stopped:
            try:
                process.resume()
            except psutil.Error:
                continue  # ended meanwhile, as it should be
        if self.fault.how == "away":
            assert isinstance(self.lab, SlurmLab)
            self.lab.cluster.resume_controller()

    @property
    def _process(self) -> psutil.Process:
        assert self.target.process is not None
        return self.target.process

    # -- what follows --------------------------------------------------------------------------------------------

    def _outcome(self, before: RunStatus) -> str:
        victim = (self.target.role, self.target.replica)
        restarts = sum(c.restarts for c in before.components)
        may_go_on = "nothing" in self.fault.policy.split("|")
        if self._answer is not None and self._answer.returncode != 0 and not processes(self.run):
            return "refused"

        def seen() -> str:
            now = status(self.run)
            if now.attempt > self.attempt:
                # where files failed at its start, too, it must come to a step
                begun = not self.fault.during or any(s.attempt > self.attempt for s in read_metrics(self.run))
                return now.state.value if now.state.ended else "next attempt" if begun else ""
            if now.state.ended and self._answer is None:
                return now.state.value
            if now.supervisor.alive() is False and now.state is not RunState.REQUEUED:
                return self._over()
            if may_go_on:
                if sum(c.restarts for c in now.components) > restarts:
                    return "restarted"
                newest = read_metrics(self.run)[-1].step
                on = newest >= self.step + self.pace.steps and now.state is RunState.RUNNING
                return "went on" if on and time.time() > self.began_s + self.fault.seconds + 5.0 else ""
            ready = [c for c in now.components if (c.role, c.replica) == victim and c.state == "READY"]
            return "restarted" if any((c.ready_at_s or 0.0) > self.began_s for c in ready) else ""

        return wait_for(seen, self.pace.limit_s) or "nothing within the limit"

    def _over(self) -> str:
        """The end that the tool sees, where the supervisor is gone; empty where another attempt is about to begin."""
        state = str(self.lab.json("status", self.run.name)["state"])
        return state if state in OVER else ""

    def _detected_s(self) -> float | None:
        noticed = [event.time_s for event in self._events() if event.kind in NOTICED or is_end(event)]
        return round(min(noticed) - self.began_s, 2) if noticed else None

    def _events(self) -> list[Event]:
        return [event for event in read_events(self.run) if event.time_s > self.began_s]

    def _counter(self) -> float:
        return float(read_metrics(self.run)[-1].rollouts.get(self.fault.counted, 0.0)) if self.fault.counted else 0.0

    def _look_closer(self, outcome: str) -> None:
        """What the fault must not have done, whatever came of the run."""
        counts = self.fault.counted and outcome == "went on"
        if counts and not wait_for(lambda: self._counter() > self.counted, 20.0):
            self.problems.append(f"{self.fault.counted} has not grown")
        if self.fault.how in ("share", "cut", "weights") and outcome in ("went on", "restarted"):
            for component in status(self.run).components:
                if component.role in _ROLES["engine"] and (other := other_weights(self.run, component)):
                    self.problems.append(other)

    def _shown(self, outcome: str) -> bool | None:
        """Whether people are told of what a run goes on with."""
        if not self.fault.said:
            return None

        def told() -> bool:
            self.said = [
                self.lab.hpcrl(*command).stdout for command in (("why", self.run.name), ("status", self.run.name))
            ]
            return any(re.search(self.fault.said, unwrapped(text)) for text in self.said)

        good = bool(wait_for(told, 15.0))
        self.said = [] if good else [text[-1500:] for text in self.said]
        return good

    def _why(self, outcome: str) -> bool | None:
        if outcome == "went on":
            return self._shown(outcome)
        if not self.fault.why:
            return None
        said = self._said(outcome)
        pid = "" if self.target.process is None else str(self.target.process.pid)
        pattern = self.fault.why.format(
            role=self.target.role, replica=self.target.replica, pid=pid, node=self.target.node
        )
        if self._answer is not None and self._answer.returncode == 0 and outcome == "next attempt":
            return None  # nothing has failed
        good = any(re.search(pattern, text) for text in said)
        if not good:
            self.said = said
        return good

    def _said(self, outcome: str) -> list[str]:
        if self._answer is not None and self._answer.returncode != 0:
            # for people: not a traceback
            said = self._answer.stdout + self._answer.stderr
            return ["a traceback"] if "Traceback" in said else [said]
        why = self.lab.json("why", self.run.name)
        details = "\n".join((why["cause"] or {}).get("details", []))
        rollouts = "\n".join(why["failed_rollouts"])
        earlier = (f"{cause}\n{rollouts}" for cause in why["earlier"].values())
        return [f"{why['sentence']}\n{details}", *(c["what"] for c in why["consequences"]), *earlier]

    def _left(self, *, ended: bool, restarted: bool) -> int:
        """Count processes that should be gone after 15 s: all after an end; else those of what was replaced."""
        jobs: Callable[[], list[str]] = self.lab.alive_jobs if isinstance(self.lab, SlurmLab) else list
        deadline = time.monotonic() + 15.0
        while True:
            left = [process for process in processes(self.run) if ended or self._replaced(process, restarted=restarted)]
            queue = jobs() if ended else []
            if not left and not queue:
                return 0
            if time.monotonic() > deadline:
                print(f"    left: {[p.cmdline() for p in left]} {queue}")
                return len(left) + len(queue)
            time.sleep(0.5)

    def _replaced(self, process: psutil.Process, *, restarted: bool) -> bool:
        try:
            marks, born_s = process.environ(), process.create_time()
        except psutil.Error:
            return False
        if "HPCRL_ROLE" not in marks:
            return False
        # where a policy allows both, the process may have gone on as it should
        hit = restarted
        hit &= (marks["HPCRL_ROLE"], marks.get("HPCRL_REPLICA")) == (self.target.role, str(self.target.replica))
        # the kernel gives start times in ticks
        return int(marks["HPCRL_ATTEMPT"]) < status(self.run).attempt or (hit and born_s < self.began_s - 1.0)

    def _again(self, outcome: str) -> tuple[float | None, int | None]:
        """Seconds from the fault to the first step after it, by what serves then; and steps that are done twice."""
        same = outcome in ("restarted", "went on")

        def first() -> list[Any]:
            after = read_metrics(self.run)
            return [s for s in after if (s.step > self.step if same else s.attempt > self.attempt)]

        steps = wait_for(first, self.pace.limit_s)
        if not steps:
            return None, None
        if outcome == "restarted" and self.target.role:
            component = find(status(self.run), self.target)
            return round((component.ready_at_s or 0.0) - self.began_s, 2), 0
        restored = [e.data["step"] for e in self._events() if e.kind == "trainer.restored"]
        again_s = min(s.time_s for s in steps) - self.began_s
        old = [e.data["step"] for e in read_events(self.run, attempt=self.attempt, kind="step")]
        return round(again_s, 2), 0 if same else max(old, default=self.step) - (restored[0] if restored else 0)


def unwrapped(text: str) -> str:
    """Join what a screen has cut into lines, and keep the lines as well."""
    return text + "\n" + " ".join(text.split())


def find(now: RunStatus, target: Target) -> ComponentStatus:
    """The component that was hit."""
    return next(c for c in now.components if (c.role, c.replica) == (target.role, target.replica))
