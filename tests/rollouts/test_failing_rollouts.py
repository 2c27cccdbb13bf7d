"""Rollouts that fail, in a running orchestrator: what is written of them, and what they do to means, ledger and run."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from harness import consumed_dir, make_run, running
from patience import patience
from stub_engine import EOS, StubEngine, decode, encode

from hpcrl.dock.ledger.entries import Finished, read_entries
from hpcrl.errors import RolloutsFailedError
from hpcrl.rollouts.environments.outcomes import CheckedOutcome
from hpcrl.rollouts.sampling import scheduler
from hpcrl.rollouts.telemetry.metrics_text import render_metrics
from hpcrl.runs.rollout_failures import read_failures
from hpcrl.runs.run_progress import read_evaluations
from hpcrl.runs.views.failures import failure_lines

HOSTILE = {"name": "shop", "kind": "custom", "factory": "hostile_environment:Hostile"}


def saying(*orders: str, only_held_out: bool = False) -> StubEngine:
    """An engine whose answers are these orders to the environment, again and again; of an evaluation by its prompts."""
    numbers = itertools.count()

    def answer(token_ids: list[int], seed: int) -> list[int]:
        held_out = re.search(r"heldout (\d+)", decode(token_ids))
        number = int(held_out[1]) if held_out else next(numbers)
        return [*encode(orders[number % len(orders)] if held_out or not only_held_out else "well"), EOS]

    return StubEngine(answer=answer)


async def test_failures_are_written_by_environment_and_cause_and_cost_no_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, environments=[HOSTILE], rollouts={"failures": {"end_share": 0.9}})
    orders = ("well", "well", "raise: timeout", "well", "reward: nan", "part: nan", "well", "well")
    async with running(run, saying(*orders)) as loop:
        shards = await loop.train(1, 6)
        for shard in shards:
            stats = shard.stats
            assert all(map(math.isfinite, (stats.reward_mean, stats.reward_std, *stats.reward_parts.values())))
            assert stats.reward_count == sum(stats.reward_count_by_env.values())
            for micro in shard.micro_batches:
                assert all(map(math.isfinite, micro.advantages.tolist()))
        assert {part for shard in shards for part in shard.stats.reward_parts} == {"shop/well", "shop/good"}
        (failing,) = loop.events("rollouts.failing")
    (found,) = read_failures(run)
    assert found.environment == failing.data["environment"] == "shop"
    assert set(found.failed) == {"raised", "unusable"}
    assert found.first["raised"].what == "TimeoutError: the tests did not end"
    assert "hostile_environment.py:" in found.first["raised"].where
    assert found.first["unusable"].what == "its reward is nan, which is not finite"
    assert 0.15 < found.share < 0.35
    assert found.refused_parts.keys() == {"bad"}
    lines = b"".join(path.read_bytes() for path in consumed_dir(run).glob("step-*.jsonl"))
    assert b"null" not in lines
    assert b"NaN" not in lines


async def test_sandboxes_that_were_ended_for_all_of_a_node_are_counted_and_reported_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, environments=[HOSTILE], rollouts={"failures": {"end_share": 0.9}})
    async with running(run, saying("well", "well", "raise: evicted", "raise: timeout")) as loop:
        await loop.train(1, 4)
        (event,) = loop.events("sandboxes.evicted")
        counters = loop.parts.counters
        assert 0 < counters.sandboxes_evicted < counters.dropped_environment
        shown = render_metrics(counters.as_dict(), {}, {})
    assert re.search(r"^hpcrl_rollouts_sandboxes_evicted_total [1-9]", shown, re.MULTILINE)
    (found,) = read_failures(run)
    assert set(found.failed) == {"evicted", "raised"}
    what = "SandboxEvictedError: sandbox s-1 was ended: all sandboxes of the node together used too much"
    assert found.first["evicted"].what == what
    assert event.data == {"environment": "shop", "what": what}
    assert any(
        "lost their sandbox to the memory limit of all sandboxes, the first" in line for line in failure_lines([found])
    )


async def test_a_large_share_of_failures_ends_the_run(tmp_path: Path) -> None:
    failures = {"end_share": 0.4, "min_rollouts": 32}
    run = make_run(tmp_path, environments=[HOSTILE], rollouts={"failures": failures})
    async with running(run, saying("well", "raise: timeout")) as loop:
        assert loop.work is not None
        with pytest.raises(RolloutsFailedError, match=r"of the newest \d+ rollouts failed .*end_share is 0\.4"):
            await asyncio.wait_for(loop.train(1, 100), 30.0 * patience())
    assert read_failures(run)[0].failed["raised"] > 0


@pytest.mark.parametrize(("policy", "reward", "counted"), [("zero", 0.375, 8), ("exclude", 1.0, 3)])
async def test_held_out_failures_count_as_the_recipe_says(
    tmp_path: Path, policy: str, reward: float, counted: int
) -> None:
    orders = ("well", "raise: timeout", "reward: nan", "well", "raise: exit", "well", "outcome: a dict", "raise: mute")
    run = make_run(tmp_path, environments=[HOSTILE], evaluation={"prompts": 8, "failures": policy})
    async with running(run, saying(*orders, only_held_out=True)) as loop:
        await loop.until(lambda: loop.events("evaluation"))
    (found,) = read_evaluations(run)
    assert (found.reward, found.count, found.prompts, found.failed) == (reward, counted, 3, 5)
    assert (found.by_env, found.counted_by_env) == ({"shop": reward}, {"shop": counted})
    assert (found.parts, found.counted_by_part) == ({"shop/well": 1.0}, {"shop/well": 3})
    assert found.failed_by_cause == {"raised": 3, "unusable": 2}
    assert found.failures == policy
    assert found.first_failure is not None


async def test_a_poisoned_rollout_of_an_earlier_version_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger has null for the reward, and its columns have NaN: a resume must not train on them."""

    given = itertools.count()

    def unchecked(outcome: Any) -> Any:
        reward = math.nan if next(given) % 5 == 0 else outcome.reward
        return CheckedOutcome(reward, {**outcome.parts, "odd": math.inf}, {})

    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 8})
    with monkeypatch.context() as before:
        before.setattr(scheduler, "checked_outcome", unchecked)
        async with running(run, StubEngine()) as loop:
            await loop.until(lambda: loop.parts.counters.finished >= 16)
    entries = [entry for entry in read_entries(run.rollouts_dir / "ledger") if isinstance(entry, Finished)]
    assert any(entry.reward is None for entry in entries)
    assert len(entries) >= 16  # none hides those behind it
    run.start_attempt()
    async with running(run, StubEngine()) as loop:
        for shard in await loop.train(1, 4):
            assert math.isfinite(shard.stats.reward_mean)
            assert all(map(math.isfinite, shard.stats.reward_parts.values()))
            assert all(math.isfinite(a) for micro in shard.micro_batches for a in micro.advantages.tolist())
