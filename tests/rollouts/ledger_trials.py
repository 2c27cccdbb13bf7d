"""Runs that are killed at random moments, again and again; what must hold after each kill.

A process of its own has the orchestrator, an engine and a trainer that only asks, publishes and saves. It writes down
the rollouts of each batch before it counts them as trained, so that the ledger can be compared with what happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from harness import make_run, running
from stub_engine import StubEngine, coin

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.dock.ledger.entries import read_entries
from hpcrl.dock.ledger.replay import Replay, State
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import verify_rollouts

BOUND, SAVE_EVERY = 3, 3
_DEADLINE_S = 60.0
CHANGES = {"rollouts": {"max_off_policy_steps": BOUND}, "trainer": {"steps": 1 << 20, "micro_batch_tokens": 256}}


def new_run(path: Path) -> RunDir:
    """A run without an attempt that has begun."""
    return make_run(path, **CHANGES)


async def _live(run: RunDir, seed: int) -> None:
    """One attempt, until it is killed."""
    newest = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    step = 0 if newest is None else newest.step
    engine = StubEngine()
    engine.request_s = lambda number: 0.02 * coin(seed * 1000 + number).random()
    with (run.path / "trained.jsonl").open("ab", buffering=0) as trained:
        trained.write(json.dumps({"restored": step}).encode() + b"\n")
        async with running(run, engine, publish=step) as loop:
            while True:
                step += 1
                batch = await loop.batch(step)
                ids = [list(rollout) for micro in batch.micro_batches for rollout in micro.rollouts]
                trained.write(json.dumps({"step": step, "rollouts": ids}).encode() + b"\n")
                await loop.publish(step)
                if step % SAVE_EVERY == 0:
                    await loop.checkpoint(step)


def _trained(run: RunDir) -> dict[int, list[tuple[int, int]]]:
    """What was trained, by the trainer's own words: the steps of the branch that goes on."""
    steps: dict[int, list[tuple[int, int]]] = {}
    text = (run.path / "trained.jsonl").read_bytes()
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        entry = json.loads(line)
        if "restored" in entry:
            steps = {step: ids for step, ids in steps.items() if step <= entry["restored"]}
        else:
            steps[entry["step"]] = [tuple(each) for each in entry["rollouts"]]
    return steps


def problems_of(run: RunDir) -> list[str]:
    """What a kill has broken: nothing."""
    verdict = verify_rollouts(run)
    problems = list(verdict.problems)
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    by_step: dict[int, set[tuple[int, int]]] = {}
    for held in replay.rollouts:
        if held.state is State.TRAINED and held.step is not None:
            by_step.setdefault(held.step, set()).add(held.id)
    told = _trained(run)
    seen: Counter[tuple[int, int]] = Counter()
    for step, ids in told.items():
        seen.update(ids)
        if set(ids) != by_step.get(step):
            problems.append(f"the trainer had {sorted(ids)} in step {step}, the ledger {sorted(by_step.get(step, ()))}")
    problems += [f"{each} was trained {count} times" for each, count in seen.items() if count > 1]
    # the ledger may be ahead: by a batch that was asked for, or because it has not heard of a restore yet
    if told and replay.step < max(told):
        problems.append(f"the trainer is at step {max(told)}, the ledger at {replay.step}")
    problems += [f"dropped for {held.why}" for held in replay.gone if held.why != "too old after a restore"]
    return problems


def killed_attempt(run: RunDir, seed: int, *, steps: int, extra_s: float) -> None:
    """One attempt in a process of its own, which gets SIGKILL so many seconds after it has trained so many steps."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            asyncio.run(_live(run, seed))
        finally:
            os._exit(1)
    path, deadline = run.path / "trained.jsonl", time.monotonic() + _DEADLINE_S
    before = path.stat().st_size if path.exists() else 0

    def trained() -> int:
        if not path.exists():
            return 0
        with path.open("rb") as stream:
            stream.seek(before)
            return stream.read().count(b"step")

    while trained() < steps:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            raise AssertionError(f"an attempt ended by itself with status {status}")
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise AssertionError(f"an attempt did not train {steps} steps within {_DEADLINE_S:g} s")
        time.sleep(0.002)
    time.sleep(extra_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run_trials(path: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill a run so many times; returns what it came to, with ``problems`` after all kills."""
    rng, run, counts = random.Random(seed), new_run(path), Counter[str]()
    for number in range(kills):
        if number:
            run.start_attempt()
        # every third before its first step: while it starts, restores, or rolls out for the first time
        steps = 0 if number % 3 == 2 else rng.randint(1, 5)
        killed_attempt(run, seed + number, steps=steps, extra_s=rng.uniform(0.0, 0.1 if steps else 0.6))
        found = problems_of(run) if list((run.rollouts_dir / "ledger").glob("*.jsonl")) else []
        for problem in found:
            print(f"seed {seed}, kill {number}: {problem}")
        counts["kills"] += 1
        counts["problems"] += len(found)
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    counts["steps"], counts["rollouts"] = replay.step, len(replay.rollouts)
    counts["started again"] = len(replay.gone)
    return dict(counts)
