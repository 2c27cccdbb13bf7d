"""What a run wrote, as evidence of how long everything took: metrics, events, and the requests of each rollout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.recipe import CalculatorEnv, Recipe
from hpcrl.errors import UsageError
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation.inputs.timeline import Interval

__all__ = ["MIN_STEPS", "Evidence", "Recorded", "RecordedRequest", "TrainerWork", "Use", "read_evidence"]

_SKIPPED_STEPS = 3
"""First steps are slower: programs warm up."""
MIN_STEPS = 8
"""That a run must have beside them."""
_AFTER_WORK = ("checkpoint", "other")


@dataclass(slots=True)
class RecordedRequest:
    """One request of a recorded rollout.

    Attributes
    ----------
    at:
        From asking to the answer.
    wait_s:
        Of the environment before it; of a tool with few slots, without the time in its queue.
    """

    at: Interval
    said: int
    sampled: int
    wait_s: float


@dataclass(slots=True)
class Recorded:
    """A consumed rollout; ``judge_s`` are the seconds from its last reply to the reward."""

    environment: str
    judge_s: float
    requests: list[RecordedRequest] = field(default_factory=list)


class TrainerWork(NamedTuple):
    """When the trainer worked in a step: forward and backward, optimizer, copy and writing of a version."""

    forward_backward: Interval
    optimizer: Interval
    copy: Interval
    write: Interval


class Use(NamedTuple):
    """What the orchestrator counted: rollouts started for each that was consumed, and CPU seconds of its own work with
    a request and of a tool call (0 where the run did not record them)."""

    started_each: float
    request_cpu_s: float
    tool_cpu_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run says.

    Attributes
    ----------
    recipe, steps, rollouts:
        Of the run; steps without the first ones.
    tools:
        Tool calls: the request after each, and when it ran.
    updates, saves:
        Weight updates of engines; checkpoints that were completed.
    slots:
        Tool calls that can run at once, by environment.
    trainer, use:
        Its work in each step; what the orchestrator counted.
    batch_waits:
        Seconds in which the trainer waited for a batch whose rollouts had all ended, by step.
    cpus:
        That all roles share; 0 where they have nodes of their own.
    """

    recipe: Recipe
    steps: list[StepRecord]
    rollouts: list[Recorded]
    tools: list[tuple[RecordedRequest, Interval]]
    updates: list[Event]
    saves: list[Event]
    slots: dict[str, int]
    trainer: list[TrainerWork]
    use: Use
    batch_waits: list[float]
    cpus: float

    @property
    def requests(self) -> list[RecordedRequest]:
        """Give the requests of all rollouts."""
        return [request for rollout in self.rollouts for request in rollout.requests]


def read_evidence(run: RunDir) -> Evidence:
    """Read a run, finished or not (UsageError where it says too little)."""
    recipe, records = run.recipe(), read_metrics(run)
    steps = [record for record in records if record.step > _SKIPPED_STEPS and record.tokens > 0]
    if len(steps) < MIN_STEPS:
        raise UsageError(
            f"{run.name} has {len(records)} steps; durations are measured from {_SKIPPED_STEPS + MIN_STEPS} or more"
        )
    consumed = ConsumedRollouts(run.rollouts_dir)
    by_step = [list(_rollouts(consumed, step.step)) for step in steps]
    rollouts = [rollout for found in by_step for rollout in found]
    if not rollouts:
        raise UsageError(
            f"the rollouts of {run.name} do not say how long each request took\n"
            "    hint: measure a run of this version of hpcrl"
        )
    slots, updates = _tool_slots(run, recipe), _updates(run, steps)
    tools, saves = _tool_calls(rollouts, slots), list(read_events(run, kind="trainer.checkpoint_saved"))
    cpus = 0.0 if isinstance(run.cluster(), SlurmCluster) else float(os.cpu_count() or 1)
    return Evidence(
        recipe=recipe,
        steps=steps,
        rollouts=rollouts,
        tools=tools,
        updates=updates,
        saves=saves,
        slots=slots,
        trainer=_trainer_work(run, steps),
        use=_use(steps),
        batch_waits=[_batch_wait(step, found) for step, found in zip(steps, by_step, strict=True) if found],
        cpus=cpus,
    )


def _rollouts(consumed: ConsumedRollouts, step: int) -> Iterator[Recorded]:
    for line in consumed.of(step):
        value = json.loads(line)
        turns = value.get("turns")
        if not turns or not value.get("ended_s"):
            continue
        now = value["ended_s"] - value["seconds"]
        recorded = Recorded(value["environment"], 0.0)
        for said, sampled, wait_s, reply_s in turns:
            at = Interval(now + wait_s, now + wait_s + reply_s)
            recorded.requests.append(RecordedRequest(at, said, sampled, wait_s))
            now = at.end_s
        recorded.judge_s = max(0.0, value["ended_s"] - now)
        yield recorded


def _batch_wait(step: StepRecord, rollouts: Sequence[Recorded]) -> float:
    """From the moment when the trainer had asked and the last rollout of the batch had ended."""
    taken_s = step.time_s - sum(seconds for name, seconds in step.phases_s.items() if name != "wait_batch")
    ended_s = max(rollout.requests[-1].at.end_s + rollout.judge_s for rollout in rollouts)
    return max(0.0, min(step.phases_s["wait_batch"], taken_s - ended_s))


def _updates(run: RunDir, steps: Sequence[StepRecord]) -> list[Event]:
    first, last = steps[0].time_s - sum(steps[0].phases_s.values()), steps[-1].time_s
    return [event for event in read_events(run, kind="engine.weights_updated") if first <= event.time_s <= last]


def _trainer_work(run: RunDir, steps: Sequence[StepRecord]) -> list[TrainerWork]:
    """The phases of each step by the wall clock; waiting for the version before is no part of the copy."""
    published = {e.data["version"]: e.time_s for e in read_events(run, kind="trainer.version_published")}
    found = []
    for step in steps:
        phases = step.phases_s
        copied_s = step.time_s - sum(phases.get(name, 0.0) for name in _AFTER_WORK)
        stepped_s = copied_s - phases["publish"]
        trained_s = stepped_s - phases["optimizer"]
        free_s = min(copied_s, max(stepped_s, published.get(step.step - 1, 0.0)))
        found.append(
            TrainerWork(
                forward_backward=Interval(trained_s - phases["forward_backward"], trained_s),
                optimizer=Interval(trained_s, stepped_s),
                copy=Interval(free_s, copied_s),
                write=Interval(copied_s, max(copied_s, published.get(step.step, 0.0))),
            )
        )
    return found


def _use(steps: Sequence[StepRecord]) -> Use:
    """From what the orchestrator counted between the first and the last step."""
    first, last = steps[0].rollouts, steps[-1].rollouts

    def more(name: str) -> float:
        return max(0.0, last.get(name, 0.0) - first.get(name, 0.0))

    requests, started, consumed = more("engine_requests"), more("started"), more("consumed")
    # the first request of a rollout follows no tool
    calls = requests - started
    return Use(
        started_each=max(1.0, started / consumed) if consumed else 1.0,
        request_cpu_s=more("cpu_s") / requests if requests else 0.0,
        tool_cpu_s=more("children_cpu_s") / calls if calls > 0 else 0.0,
    )


def _tool_slots(run: RunDir, recipe: Recipe) -> dict[str, int]:
    """Programs that the calculator's tool runs at once, by environment: the CPUs of its node."""
    cluster = run.cluster()
    if isinstance(cluster, SlurmCluster):
        cpus = cluster.partitions[cluster.partition_name("trainer")].node.cpus
    else:
        cpus = os.cpu_count() or 1
    return {e.name: cpus for e in recipe.environments if isinstance(e, CalculatorEnv)}


def _tool_calls(rollouts: Sequence[Recorded], slots: dict[str, int]) -> list[tuple[RecordedRequest, Interval]]:
    """Tool calls as they ran; takes the time in the queue for a slot out of their waits.

    Calls begin in the order in which they were asked for, each when one of the slots is free.
    """
    calls: list[tuple[RecordedRequest, Interval]] = []
    for name in {rollout.environment for rollout in rollouts}:
        later = [request for r in rollouts if r.environment == name for request in r.requests[1:]]
        later.sort(key=lambda request: request.at.begin_s - request.wait_s)
        free_s = [0.0] * slots.get(name, 0)
        for request in later:
            done_s = request.at.begin_s
            begin_s = done_s - request.wait_s
            if free_s:
                begin_s = min(done_s, max(begin_s, free_s[0]))
                heapreplace(free_s, done_s)
            request.wait_s = done_s - begin_s
            calls.append((request, Interval(begin_s, done_s)))
    return calls
