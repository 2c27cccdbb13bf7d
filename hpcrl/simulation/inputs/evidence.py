"""Records of a run as evidence of durations: metrics, events, and the requests of each rollout."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import Any, NamedTuple

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import CalculatorEnv, Recipe
from hpcrl.errors import UsageError
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation.inputs.timeline import Interval

_SKIPPED_STEPS = 3
"""First steps are slower: programs warm up."""
MIN_STEPS = 8
"""Minimum number of steps of a run after these."""
_AFTER_WORK = ("checkpoint", "other")


@dataclass(slots=True)
class RecordedRequest:
    """Request of a recorded rollout.

    Attributes
    ----------
    at:
        From asking to the answer.
    kept:
        Tokens of the context that ``said`` was appended to; -1: all that there were.
    wait_s:
        Seconds of the environment before it; of a tool with few slots, without the time in its queue.
    """

    at: Interval
    said: int
    sampled: int
    wait_s: float
    kept: int = -1


@dataclass(slots=True)
class Recorded:
    """A consumed rollout; ``judge_s`` are the seconds from its last reply to the reward."""

    environment: str
    judge_s: float
    requests: list[RecordedRequest] = field(default_factory=list)


class TrainerWork(NamedTuple):
    """Times of the trainer's work in a step: forward and backward, optimizer, copy and writing of a version."""

    forward_backward: Interval
    optimizer: Interval
    copy: Interval
    write: Interval


class Use(NamedTuple):
    """Counts of the orchestrator.

    These are the rollouts started for each that was consumed, and CPU seconds of its own work with a request and of a
    tool call (0 where the run did not record them).
    """

    started_each: float
    request_cpu_s: float
    tool_cpu_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Records of one run that durations are derived from.

    Attributes
    ----------
    recipe, steps, rollouts:
        Records of the run; steps without the first ones.
    tools:
        Tool calls: the request after each, and the time when it ran.
    updates, saves:
        Weight updates of engines; checkpoints that were completed.
    slots:
        Tool calls that can run at once, by environment.
    trainer, use:
        The trainer's work in each step; the counts of the orchestrator.
    batch_waits:
        Seconds in which the trainer waited for a batch whose rollouts had all ended, by step.
    cpus:
        CPUs that all roles share; 0 where they have their own nodes.
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


def read_evidence(run: RunDir, *, newest: int | None = None) -> Evidence:
    """Read a run, finished or not (UsageError where it says too little); of a long one only the ``newest`` steps."""
    recipe, records = run.recipe(), read_metrics(run)
    steps = [record for record in records if record.step > _SKIPPED_STEPS and record.tokens > 0]
    steps = steps if newest is None else steps[-newest:]
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
    cpus = 0.0 if run.cluster().uses_slurm else float(os.cpu_count() or 1)
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
    try:
        lines = consumed.of(step)
    except OSError:
        return
    for line in lines:
        try:
            recorded = _recorded(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # the torn last line of a writer that was killed, or a number that is missing
        if recorded is not None:
            yield recorded


def _recorded(value: dict[str, Any]) -> Recorded | None:
    """Return a rollout by its line; None where that does not say when its requests were."""
    turns = value.get("turns")
    if not turns or not value.get("ended_s"):
        return None
    now = value["ended_s"] - value["seconds"]
    recorded = Recorded(value["environment"], 0.0)
    lengths: dict[int, int] = {}  # of the sequences so far
    last = 0
    for said, sampled, wait_s, reply_s, *branch in turns:
        sequence, shared = branch[:2] or (0, 0)
        at, context = Interval(now + wait_s, now + wait_s + reply_s), lengths.get(sequence, shared)
        kept = -1 if sequence == last else context
        recorded.requests.append(RecordedRequest(at, said, sampled, wait_s, kept))
        now, last, lengths[sequence] = at.end_s, sequence, context + said + sampled
    recorded.judge_s = max(0.0, value["ended_s"] - now)
    return recorded if math.isfinite(now) and math.isfinite(recorded.judge_s) else None


def _batch_wait(step: StepRecord, rollouts: Sequence[Recorded]) -> float:
    """Return the seconds that the trainer waited for a batch whose rollouts had all ended."""
    taken_s = step.time_s - sum(seconds for name, seconds in step.phases_s.items() if name != "wait_batch")
    ended_s = max(rollout.requests[-1].at.end_s + rollout.judge_s for rollout in rollouts)
    return max(0.0, min(step.phases_s["wait_batch"], taken_s - ended_s))


def _updates(run: RunDir, steps: Sequence[StepRecord]) -> list[Event]:
    first, last = steps[0].time_s - sum(steps[0].phases_s.values()), steps[-1].time_s
    return [event for event in read_events(run, kind="engine.weights_updated") if first <= event.time_s <= last]


def _trainer_work(run: RunDir, steps: Sequence[StepRecord]) -> list[TrainerWork]:
    """Return the phases of each step by the wall clock; the wait for the previous version is not part of the copy."""
    written = {e.data["version"]: e.time_s for e in read_events(run, kind="trainer.version_published")}
    # with a fabric engines can have a version before it is written
    announced = {e.data["version"]: e.time_s for e in read_events(run, kind="trainer.version_announced")}
    published = {**written, **announced}
    found = []
    for step in steps:
        phases = step.phases_s
        copied_s = step.time_s - sum(phases.get(name, 0.0) for name in _AFTER_WORK)
        stepped_s = copied_s - phases["publish"]
        trained_s = stepped_s - phases["optimizer"]
        free_s = min(copied_s, max(stepped_s, written.get(step.step - 1, 0.0)))
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
    """Return the counts of the orchestrator between the first and the last step."""
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
    """Return the number of programs that the calculator's tool runs at once, by environment: CPUs of its nodes."""
    cpus = _tool_cpus(recipe, run.cluster())
    return {e.name: cpus for e in recipe.environments if isinstance(e, CalculatorEnv)}


def _tool_cpus(recipe: Recipe, cluster: ClusterProfile) -> int:
    """Return the CPUs of the processes of environments: of all workers with their own nodes, or of one node."""
    workers = recipe.environment_workers
    if isinstance(cluster, SlurmCluster) and workers is not None and workers.apart:
        node_cpus = cluster.partitions[cluster.partition_name("env")].node.cpus
        return workers.count * (workers.cpus or max(1, node_cpus // workers.per_node))
    node = cluster.node_of("trainer")
    return (os.cpu_count() or 1) if node is None else node.cpus


def _tool_calls(rollouts: Sequence[Recorded], slots: dict[str, int]) -> list[tuple[RecordedRequest, Interval]]:
    """Return the tool calls as they ran, and subtract the time in the queue for a slot from their waits.

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
