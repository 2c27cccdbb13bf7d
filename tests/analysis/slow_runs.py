"""Runs in which one cause was made slow, played by a loop of its own: files as roles write them.

The loop knows nothing of how waits are attributed. Groups are single rollouts. Rollouts begin when fewer than `places`
are in flight and the bound of staleness permits, and the trainer takes the first `batch` of them that have ended.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from runs_testing import START_S, make_run, step_record, write_event, write_status

from hpcrl.config.environments import CalculatorEnv
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState


@dataclass
class Pace:
    """Seconds of everything, each multiplied by 0.8 to 1.2; and the sizes of the loop."""

    reply: float = 0.2
    tool: float = 0.02
    judge: float = 0.02
    forward_backward: float = 0.3
    optimizer: float = 0.02
    publish: float = 0.03
    checkpoint: float = 0.05
    write: float = 0.02
    load: float = 0.02
    batch: int = 8
    places: int = 16
    bound: int = 4
    steps: int = 24
    environment: str = "words"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def play(root: Path, name: str, pace: Pace) -> RunDir:
    """Play the loop and write its files."""
    run = _configured(root, name, pace)
    noise = random.Random(pace.seed)

    def some(seconds: float) -> float:
        return seconds * noise.uniform(0.8, 1.2)

    now = START_S
    served: list[tuple[float, int]] = [(START_S, 0)]  # since when which version is served
    ended: list[tuple[float, dict[str, Any]]] = []  # a heap by their ends
    ready: list[dict[str, Any]] = []
    free = [START_S] * pace.places
    begun = taken = number = 0
    writer = MetricsWriter(run, 1)
    run.rollouts_dir.mkdir(exist_ok=True)
    for step in range(1, pace.steps + 1):
        wait_begin = now
        while len(ready) < pace.batch:
            # at most so many rollouts that are not consumed, of versions that the bound permits
            while free and begun - taken < (pace.bound + 1) * pace.batch:
                begin = max(heapq.heappop(free), served[-1][0] if pace.bound == 0 else START_S)
                number += 1
                begun += 1
                end, line = _rollout(number, begin, pace, some)
                heapq.heappush(ended, (end, number, line))  # type: ignore[misc]
            end, _, line = heapq.heappop(ended)  # type: ignore[misc]
            heapq.heappush(free, end)
            now = max(now, end)
            ready.append(line)
        batch, ready = ready[: pace.batch], ready[pace.batch :]
        taken += len(batch)
        wait_end = now
        path = run.rollouts_dir / f"step-{step:06d}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in batch))
        phases = {
            "wait_batch": wait_end - wait_begin,
            "forward_backward": some(pace.forward_backward),
            "optimizer": some(pace.optimizer),
            "publish": some(pace.publish),
            "checkpoint": some(pace.checkpoint) if step % 4 == 0 else 0.0,
            "other": 0.001,
        }
        copied = wait_end + sum(phases[name] for name in ("forward_backward", "optimizer", "publish"))
        now = wait_end + sum(phases.values()) - phases["wait_batch"]
        published = copied + some(pace.write)
        loaded = published + some(pace.load)
        served.append((loaded, step))
        free = sorted(max(time, loaded) if pace.bound == 0 else time for time in free)
        write_event(run, "trainer.version_published", time_s=published, writer="trainer-0", version=step)
        update = {"engine": "engine-0", "version": step, "seconds": loaded - published, "pause_s": 0.0}
        write_event(run, "engine.weights_updated", time_s=loaded, writer="orchestrator-0", **update)
        counters = {"started": float(begun), "finished": float(taken + len(ready)), "consumed": float(taken)}
        counters |= {"engine_requests": 2.0 * begun, "cpu_s": 0.001 * begun, "children_cpu_s": 0.0}
        record = step_record(step)
        writer.write(msgspec.structs.replace(record, time_s=now, phases_s=phases, rollouts=counters))
    writer.close()
    write_event(run, "run.state", time_s=START_S, writer="supervisor", state="STARTING")
    write_event(run, "run.state", time_s=now, writer="supervisor", state="COMPLETED")
    return run


def _configured(root: Path, name: str, pace: Pace) -> RunDir:
    """Return a run with the settings of a pace."""
    run = make_run(root, name, steps=pace.steps)
    recipe = run.recipe()
    environments = recipe.environments
    if pace.environment == "calculator":
        environments = (CalculatorEnv(name="calculator", kind="calculator"),)
    rollouts = recipe.rollouts.model_copy(
        update={
            "rollouts_per_step": pace.batch,
            "group_size": 4,
            "max_in_flight": pace.places,
            "max_off_policy_steps": pace.bound,
        }
    )
    changed = recipe.model_copy(update={"environments": environments, "rollouts": rollouts, **pace.extra})
    run.write_configuration(changed, run.cluster(), run.plan())
    write_status(run, RunState.COMPLETED)
    return run


def _rollout(number: int, begin: float, pace: Pace, some: Any) -> tuple[float, dict[str, Any]]:
    """Return the end and the line of a rollout of two requests with a tool between them."""
    replies = [some(pace.reply / 2), some(pace.reply / 2)]
    tool, judge = some(pace.tool), some(pace.judge)
    seconds = sum(replies) + tool + judge
    line = {
        "group": number,
        "member": 0,
        "environment": pace.environment,
        "reward": 0.5,
        "tokens": 60,
        "sampled_tokens": 20,
        "first_version": 0,
        "last_version": 0,
        "seconds": seconds,
        "ended_s": begin + seconds,
        "turns": [[20, 10, 0.0, replies[0], 0, 0], [20, 10, tool, replies[1], 0, 0]],
    }
    return begin + seconds, line
