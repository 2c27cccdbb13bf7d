"""Run directories written by hand, as roles and a supervisor would have left them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcrl.config.cluster import LocalCluster, PathsConfig
from hpcrl.config.plan import FileProbe, HttpProbe, Plan, Role, RoleGroup, RolePolicy
from hpcrl.config.recipe import ModelConfig, Recipe, TrainerConfig, WordsEnv
from hpcrl.processes import procfs
from hpcrl.runs.cause import Cause
from hpcrl.runs.events import Event
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState, RunStatus

#: a process that was there once and never will be again
GONE = ProcessId(host=procfs.hostname(), boot_id=procfs.boot_id(), pid=2**22 + 1, start_ticks=1)
START_S = 1_790_000_000.0
Hpcrl = Callable[..., tuple[int, str, str]]
"""Runs a command line in this process; returns its exit code and what it wrote to stdout and stderr."""


def make_run(root: Path, name: str = "run-1", *, steps: int = 40, submitted: bool = True) -> RunDir:
    """A run that was submitted, with an engine and a trainer in its plan; nobody has started it."""
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    policy = RolePolicy(stop_timeout_s=5.0)
    common = {"replicas": 1, "ranks": 1, "command": ("true",), "start_timeout_s": 60.0}
    plan = Plan(
        run=name,
        recipe="words",
        cluster="local",
        run_dir=run.path,
        groups=(
            RoleGroup(role=Role.ENGINE, ready=HttpProbe(path="/health"), policy=policy, **common),
            RoleGroup(role=Role.TRAINER, ready=FileProbe(), policy=policy, **common),
        ),
        first_port=20000,
        last_port=20009,
        time_limit_s=3600.0,
    )
    recipe = Recipe(
        name="words",
        model=ModelConfig(path="/model"),
        environments=(WordsEnv(name="words", kind="words"),),
        trainer=TrainerConfig(steps=steps),
    )
    cluster = LocalCluster(name="local", kind="local", paths=PathsConfig(runs_root=str(root)))
    run.write_configuration(recipe, cluster, plan)
    record = msgspec.structs.replace(
        RunRecord.new(run, name=name, provenance={"trainer.steps": "--set"}), run_id="f" * 32, created_at_s=START_S
    )
    if submitted:
        record = record.with_submission(
            Submission(
                submitted_at_s=START_S + 1, executor="local", job_id="1", folder="/f", after_attempt=0, process=GONE
            )
        )
    record.write(run)
    return run


def write_status(
    run: RunDir,
    state: RunState,
    *,
    supervisor: ProcessId = GONE,
    cause: Cause | None = None,
    component_state: ComponentState = ComponentState.READY,
) -> int:
    """A new attempt whose supervisor has last written ``state``; returns its number."""
    attempt = run.start_attempt()
    components = [
        ComponentStatus(
            role=role,
            replica=0,
            state=component_state,
            pid=100 + i,
            guard_pid=200 + i,
            host="127.0.0.1",
            port=20000 + i,
            started_at_s=START_S + 10,
            ready_at_s=START_S + 12,
            log=f"attempts/{attempt:04d}/logs/{role}/0-0.log",
        )
        for i, role in enumerate(("engine", "trainer"))
    ]
    RunStatus(
        run_id="f" * 32,
        attempt=attempt,
        state=state,
        supervisor=supervisor,
        started_at_s=START_S + 9,
        heartbeat_s=START_S + 100,
        ended_at_s=START_S + 101 if state.ended else None,
        cause=cause,
        components=components,
    ).write(run)
    return attempt


def write_event(
    run: RunDir, kind: str, *, time_s: float, attempt: int = 1, writer: str = "test", **data: object
) -> None:
    run.events_dir.mkdir(exist_ok=True)
    event = Event(time_s=time_s, attempt=attempt, writer=writer, kind=kind, data=data)
    with (run.events_dir / f"{attempt:04d}-{writer}.jsonl").open("ab") as stream:
        stream.write(msgspec.json.encode(event) + b"\n")


def write_log(
    run: RunDir, text: str, *, role: str = "engine", replica: int = 0, rank: int = 0, attempt: int = 1
) -> Path:
    path = run.log_path(attempt, role, replica, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def step_record(step: int, *, attempt: int = 1, seed: int = 0, total: int = 40) -> StepRecord:
    """A step of a run that learns."""
    noise = random.Random(seed * 100_003 + step)
    reward = 0.15 + 0.65 / (1 + math.exp(-8 * (step / total - 0.45))) + noise.gauss(0, 0.03)
    reward = round(reward, 4)  # golden files must not depend on the last bits of exp
    waiting = max(0.05, noise.gauss(0.5, 0.25))
    phases = {
        "wait_batch": waiting,
        "forward_backward": noise.gauss(1.6, 0.08),
        "optimizer": 0.08,
        "publish": noise.gauss(0.2, 0.03),
        "checkpoint": 0.6 if step % 10 == 0 else 0.0,
        "other": 0.05,
    }
    phases = {name: round(seconds, 4) for name, seconds in phases.items()}
    return StepRecord(
        time_s=START_S + 20 + 2.5 * step,
        attempt=attempt,
        step=step,
        reward_mean=reward,
        reward_std=0.3,
        reward_by_env={"words": reward},
        reward_parts={"words/exact": reward},
        loss=round(0.01 * noise.gauss(0, 1), 6),
        entropy=1.2 - step / total,
        mismatch_kl=1e-6,
        mismatch_kl_by_lag={"0": 1e-7, "1": 1e-5},
        masked_share=0.01,
        ess=0.97,
        staleness_mean=round(1.0 + noise.random(), 3),
        staleness_max=2 + (step % 3 == 0),
        staleness_histogram={"0": 20, "1": 30, "2": 14},
        tokens=2048,
        sampled_tokens=1024,
        tokens_per_s=round(2048 / sum(phases.values()), 1),
        grad_norm=0.5,
        learning_rate=1e-3,
        phases_s=phases,
        rollouts={"finished": 64.0 * step},
    )


def write_steps(run: RunDir, steps: int, *, attempt: int = 1, total: int = 40) -> None:
    writer = MetricsWriter(run, attempt)
    for step in range(1, steps + 1):
        writer.write(step_record(step, attempt=attempt, total=total))
    writer.close()
    for version in range(0, steps + 1, 10):
        reward = round(0.12 + 0.62 / (1 + math.exp(-8 * (version / total - 0.45))), 4)
        write_event(
            run,
            "evaluation",
            time_s=START_S + 20 + 2.5 * version,
            attempt=attempt,
            writer="orchestrator-0",
            version=version,
            reward=reward,
            by_env={"words": reward},
            parts={"words/exact": reward},
            prompts=64,
        )
