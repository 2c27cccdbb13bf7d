"""An evaluation that a person asks a run for: by its own engines, at their version, beside its rollouts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from harness import CALCULATOR, WORDS, make_run, running
from stub_engine import StubEngine

from hpcrl.errors import UsageError
from hpcrl.rollouts import asked_evaluations
from hpcrl.rollouts.batches.server import ConflictError
from hpcrl.rollouts.sampling import held_out
from hpcrl.runs import running_evaluation
from hpcrl.runs.running_evaluation import evaluate_on_engines
from hpcrl.runs.status import RunState

KEYS = ["0" * 32, "1" * 32]


def a_set(**changes: Any) -> str:
    return json.dumps({"name": "eval", "samples": 3, "prompts": 4, "sampling": {"temperature": 1.0}, **changes})


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[RunState]:
    """The state in which the run is seen, without a supervisor."""
    states = [RunState.RUNNING]

    class Seen:
        state = RunState.RUNNING

    def observe(run: object) -> Any:
        Seen.state = states[0]
        return Seen

    monkeypatch.setattr(running_evaluation, "observe", observe)
    return states


async def test_a_run_that_trains_evaluates_on_its_engines(tmp_path: Path, observed: list[RunState]) -> None:
    run = make_run(tmp_path, environments=[WORDS, CALCULATOR])
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        found = await asyncio.to_thread(evaluate_on_engines, run, json.loads(a_set()), seed=5)
        assert (found["version"], found["last_version"], found["due"]) == (2, 2, 2)
        assert (found["prompts"], found["samples"], found["samples_per_prompt"]) == (4, 12, 3)
        assert list(found["by_env"]) == ["words", "calculator"]
        (event,) = loop.events("evaluation.asked")
        assert event.data == found
        # sets of the recipe do not count it, and training goes on
        assert loop.events("evaluation.set") == []
        await loop.train(3, 3)
    observed[0] = RunState.COMPLETED
    with pytest.raises(UsageError, match=f"does not train now, its state is {RunState.COMPLETED.value}"):
        evaluate_on_engines(run, json.loads(a_set()), seed=5)
    observed[0] = RunState.RUNNING
    with pytest.raises(UsageError, match=r"(?s)cannot be reached.*hint: without --on-engines"):
        evaluate_on_engines(run, json.loads(a_set()), seed=5)


async def test_one_at_a_time_and_few_rollouts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    gate, at_once, most = asyncio.Event(), 0, 0
    really = held_out.roll_out

    async def held(*arguments: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await gate.wait()
        at_once -= 1
        return await really(*arguments)

    async with running(run, StubEngine()) as loop:
        await loop.batch(1)
        await loop.until(lambda: not loop.parts.evaluator.busy)
        monkeypatch.setattr(held_out, "roll_out", held)
        orchestrator = loop.orchestrator
        assert await orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=0.05) is None
        with pytest.raises(ConflictError, match="another evaluation that was asked for is running"):
            await orchestrator.evaluate(KEYS[1], a_set(), seed=1, wait_s=0.0)
        gate.set()
        first = await orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=30.0)
        assert first is not None
        # places for a share of rollouts.max_in_flight
        assert most == 32 // asked_evaluations._SHARE
        # the result is kept for who asks again, and another name begins another one
        assert await orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=0.0) == first
        assert await orchestrator.evaluate(KEYS[1], a_set(prompts=2), seed=1, wait_s=30.0) != first
        assert len(loop.events("evaluation.asked")) == 2


async def test_what_cannot_be_evaluated_is_refused_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_run(tmp_path), StubEngine(), publish=None) as loop:
        await loop.until(loop.is_restored)
        with pytest.raises(ConflictError, match="serve no version yet"):
            await loop.orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=1.0)
        await loop.publish(0)
        await loop.batch(1)
        orchestrator, recipe = loop.orchestrator, loop.orchestrator._recipe
        for section, change, words in (
            ("engine", {"placement": "colocated"}, "take turns on their GPUs"),
            ("rollouts", {"order": "deterministic"}, "the run is deterministic"),
        ):
            changed = getattr(recipe, section).model_copy(update=change)
            orchestrator._recipe = recipe.model_copy(update={section: changed})
            with pytest.raises(ConflictError, match=words):
                await orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=1.0)
        orchestrator._recipe = recipe
        with pytest.raises(ValueError, match="no environment 'other'"):
            await loop.orchestrator.evaluate(KEYS[0], a_set(environments=["other"]), seed=1, wait_s=1.0)
        with pytest.raises(ValueError, match="samples"):
            await loop.orchestrator.evaluate(KEYS[0], a_set(samples=0), seed=1, wait_s=1.0)

        async def fail(*_: Any) -> Any:
            raise RuntimeError("this was not foreseen")

        with monkeypatch.context() as patch:
            patch.setattr(held_out, "roll_out", fail)
            with pytest.raises(ConflictError, match="the evaluation failed: this was not foreseen"):
                await loop.orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=30.0)
        assert await loop.orchestrator.evaluate(KEYS[1], a_set(), seed=1, wait_s=30.0) is not None
        await loop.ask("finish", 0)
        with pytest.raises(ConflictError, match="has trained its last step"):
            await loop.orchestrator.evaluate(KEYS[0], a_set(), seed=1, wait_s=1.0)
