"""What foreign code says or raises costs its own rollout, and is told in words that can be written down."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import make_recipe
from hostile_environment import BAD_MESSAGES, BAD_OUTCOMES, BAD_PARTS, BAD_REWARDS, GOOD_REWARDS, RAISED
from patience import patience
from test_hosted_environments import Script, custom

from hpcrl.rollouts.environments import Environment, EnvironmentRaisedError, build_environments, hosted, prompt_of
from hpcrl.rollouts.environments.outcomes import MAX_PARTS
from hpcrl.rollouts.sampling.failures import FailureCount, describe_failure

FUZZ_S = 40.0


@pytest.fixture
async def hostile(tmp_path: Path) -> AsyncIterator[Environment]:
    config = custom("hostile_environment:Hostile", name="hostile", turn_timeout_s=2.0)
    (environment,) = build_environments(make_recipe(tmp_path, environments=[config]))
    yield environment
    for each in hosted([environment]):
        await each.aclose()


async def roll_out(environment: Environment, *orders: str) -> Any:
    prompt = await prompt_of(environment, "train", 0)
    async with asyncio.timeout(20.0 * patience()):
        return await environment.rollout(prompt, Script(*orders, "more", "more"))


def process_of(environment: Environment) -> int:
    (process,) = hosted([environment])
    return process._child.pid


async def test_exceptions_of_all_kinds_cost_one_rollout_and_not_the_process(hostile: Environment) -> None:
    await roll_out(hostile, "well")
    pid = process_of(hostile)
    for name, make in RAISED.items():
        with pytest.raises(EnvironmentRaisedError) as caught:
            await roll_out(hostile, f"raise: {name}")
        cause, first = describe_failure(caught.value)
        kind = type(make()).__name__
        # a coroutine that raises this is ended by Python itself with another one
        assert kind in first.what or name == "stop", first
        assert cause == ("evicted" if name == "evicted" else "raised")
        assert "hostile_environment.py:" in first.where or kind in first.what
        msgspec.json.encode(first)
        assert len(first.what) < 1000
    assert (await roll_out(hostile, "well")).reward == 1.0
    assert process_of(hostile) == pid


async def test_bad_rewards_are_named_with_the_place_and_bad_parts_left_out(hostile: Environment) -> None:
    for name in BAD_REWARDS:
        with pytest.raises(EnvironmentRaisedError, match="unusable rollout: its reward is") as caught:
            await roll_out(hostile, f"reward: {name}")
        cause, first = describe_failure(caught.value)
        assert cause == "unusable"
        assert first.what.startswith("its reward is")
        assert "hostile_environment.py:" in first.where
        assert first.where.endswith("in rollout")
    for name, (_, wanted) in GOOD_REWARDS.items():
        assert (await roll_out(hostile, f"good: {name}")).reward == wanted
    for name in BAD_PARTS:
        outcome = await roll_out(hostile, f"part: {name}")
        assert (outcome.reward, dict(outcome.parts), list(outcome.refused)) == (0.5, {"good": 1.0}, ["bad"])
    for name in BAD_OUTCOMES:
        with pytest.raises(EnvironmentRaisedError, match="which is not an Outcome"):
            await roll_out(hostile, f"outcome: {name}")
    for name, kept in (("odd", 0), ("list", 0), ("many", MAX_PARTS), ("none", 0), ("keys", 4)):
        outcome = await roll_out(hostile, f"parts: {name}")
        assert (outcome.reward, len(outcome.parts)) == (0.5, kept)
        msgspec.json.encode([dict(outcome.parts), dict(outcome.refused)])


async def test_bad_messages_and_silence_cost_one_rollout(hostile: Environment) -> None:
    for name in BAD_MESSAGES:
        with pytest.raises(EnvironmentRaisedError):
            await roll_out(hostile, f"message: {name}")
    with pytest.raises(EnvironmentRaisedError, match="no answer within 2 s") as caught:
        await roll_out(hostile, "hang: for ever")
    assert describe_failure(caught.value)[0] == "timeout"
    assert (await roll_out(hostile, "well")).reward == 1.0


@pytest.mark.campaign
async def test_whatever_foreign_code_does_each_rollout_ends_and_is_counted_once(hostile: Environment) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", str(random.SystemRandom().randrange(1 << 32))))
    print(f"seed {seed} (HPCRL_FUZZ_SEED)")
    rng, count = random.Random(seed), FailureCount()
    tables: dict[str, list[str]] = {
        "reward": list(BAD_REWARDS),
        "good": list(GOOD_REWARDS),
        "part": list(BAD_PARTS),
        "parts": ["odd", "list", "many", "none", "keys", "unknown"],
        "outcome": list(BAD_OUTCOMES),
        "raise": list(RAISED),
        "message": list(BAD_MESSAGES),
        "much": ["0", "10", "100000", "20000000", "no number"],
        "hang": [""],
        "well": [""],
    }
    wanted = {"reward": False, "good": True, "part": True, "outcome": False, "raise": False, "well": True}
    done = ended = 0
    until = time.monotonic() + FUZZ_S

    async def one(kind: str, name: str) -> None:
        nonlocal ended
        counted = count.begin("hostile")
        good = True
        try:
            outcome = await roll_out(hostile, f"{kind}: {name}")
        except EnvironmentRaisedError as error:
            good = False
            count.failed(error, counted)
        else:
            assert -1e9 <= outcome.reward <= 1e9
            assert all(abs(value) < float("inf") for value in outcome.parts.values())
            msgspec.json.encode([outcome.reward, dict(outcome.parts), dict(outcome.refused)])
            count.finished(counted, outcome.refused)
        assert good == wanted.get(kind, good), (kind, name)
        ended += 1

    while time.monotonic() < until:
        # some at once: what one does must not reach the others
        kinds = rng.choices(list(tables), weights=[0.2 if kind == "hang" else 1.0 for kind in tables], k=8)
        chosen = [(kind, rng.choice(tables[kind])) for kind in kinds]
        done += len(chosen)
        await asyncio.gather(*(one(kind, name) for kind, name in chosen))
    (found,) = count.report()
    assert len(msgspec.json.encode(found)) < 50_000
    assert ended == done == found.started == found.finished + found.total > 50
    assert (await roll_out(hostile, "well")).reward == 1.0
