"""What tests of sinks and notifiers share: steps on record, and the supervisor's part that starts them."""

from __future__ import annotations

import asyncio
from typing import Any

from patience import patience

from hpcrl.config.outlets import SinkConfig
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.outlets import Outlets


class EventBoard:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **data: Any) -> None:
        self.events.append((kind, data))


def record(step: int, attempt: int = 1, reward: float = 0.5) -> StepRecord:
    return StepRecord(
        time_s=1.7e9,
        attempt=attempt,
        step=step,
        reward_mean=reward,
        reward_std=0.1,
        reward_by_env={"words": reward},
        reward_parts={},
        loss=float("nan"),
        entropy=1.0,
        mismatch_kl=0.0,
        mismatch_kl_by_lag={},
        masked_share=0.0,
        ess=1.0,
        staleness_mean=0.0,
        staleness_max=0,
        staleness_histogram={},
        tokens=10,
        sampled_tokens=5,
        tokens_per_s=1.0,
        grad_norm=0.5,
        learning_rate=1e-3,
        phases_s={"wait_batch": 0.25},
        rollouts={},
        loss_metrics={"gain": 2.0},
    )


def write_steps(run: RunDir, steps: range, attempt: int = 1, reward: float = 0.5) -> None:
    writer = MetricsWriter(run, attempt)
    for step in steps:
        writer.write(record(step, attempt, reward))
    writer.close()


def outlets(
    run: RunDir,
    board: EventBoard,
    sinks: tuple[SinkConfig, ...] = (),
    notify: tuple[Any, ...] = (),
    *,
    attempt: int = 1,
) -> Outlets:
    plan = run.plan().model_copy(update={"sinks": sinks, "notify": notify})
    return Outlets(run, plan=plan, attempt=attempt, board=board, pause_s=0.05)  # type: ignore[arg-type]


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(30.0 * patience()):
        while not condition():
            await asyncio.sleep(0.05)
