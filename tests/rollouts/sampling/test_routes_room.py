"""Memory for routed experts of rollouts in flight: a bound that holds, and that nobody waits at for ever."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Loop, make_recipe, make_run, running
from numpy.typing import NDArray
from stub_engine import StubEngine

from hpcrl.models.arch import Qwen3MoeArch
from hpcrl.rollouts.core.staleness import StalenessAccount
from hpcrl.rollouts.sampling.policy import GroupAdmission
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings
from hpcrl.rollouts.sampling.routed_experts_budget import RoutedExpertsBudget
from hpcrl.storage.files import write_json

GIB = 1 << 30
ROUTES = RoutedExpertsSettings(layers=3, width=2, experts=8)
ARCH = Qwen3MoeArch(
    vocab_size=103,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)


def told(places: int, gib: float) -> None:
    pytest.fail(f"{places} places, {gib} GiB")


def test_a_rollout_counts_as_the_longest_that_there_can_be(caplog: pytest.LogCaptureFixture) -> None:
    recipe = make_recipe(Path(), engine={"max_model_len": 1000}, rollouts={"routes_in_flight_gib": 90_000 / GIB})
    room = RoutedExpertsBudget.of(recipe, ROUTES, on_full=told)
    assert (room.rollout_bytes, room.places) == (3 * 1000 * 3 * 2, 5)
    assert (room.bound(128, 4), room.bound(4, 4), room.bound(128, 8)) == (5, 4, 8)
    assert RoutedExpertsBudget.of(recipe, None, on_full=told).bound(128, 4) == 128
    assert not caplog.records
    small = make_recipe(Path(), engine={"max_model_len": 10_000}, rollouts={"routes_in_flight_gib": 90_000 / GIB})
    assert RoutedExpertsBudget.of(small, ROUTES, on_full=told).places == 1
    assert (
        "rollouts run one after the other\n    hint: raise rollouts.routes_in_flight_gib, or lower engine.max_model_len"
        in caplog.text
    )


def test_without_a_setting_the_memory_of_the_node_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 2000 * GIB

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    reference = RoutedExpertsSettings(layers=78, width=8, experts=256)
    recipe = make_recipe(Path(), engine={"max_model_len": 131_072})
    room = RoutedExpertsBudget.of(recipe, reference, on_full=told)
    assert room.limit_bytes == 500 * GIB
    assert room.places >= 2048  # what recipes/glm5_swe.yaml has in flight


def test_it_is_reported_once_that_this_limit_holds_rollouts_back(caplog: pytest.LogCaptureFixture) -> None:
    said: list[tuple[int, float]] = []
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=2)
    policy = GroupAdmission(account, group_size=4, groups_per_step=2, zero_variance="keep")
    room = RoutedExpertsBudget(GIB, 6 * GIB, on_full=lambda places, gib: said.append((places, gib)))
    assert room.may_start(policy, 0, 8, 4)
    assert not room.may_start(policy, 8, 8, 4)  # another limit
    assert said == []
    for _ in range(3):
        assert not room.may_start(policy, 4, 8, 4)
    assert said == [(6, 6.0)]
    assert "hint: a larger rollouts.routes_in_flight_gib" in caplog.text


async def test_places_go_on_when_their_holders_are_cancelled() -> None:
    room, began = RoutedExpertsBudget(2, 2), list[int]()

    async def one(number: int) -> None:
        async with room.place():
            began.append(number)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    for number, task in enumerate(tasks):
        while len(began) <= number:
            await asyncio.sleep(0)
        assert began == list(range(number + 1))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def experts_of(token_ids: list[int]) -> NDArray[np.uint8]:
    return np.zeros((len(token_ids), 3, 2), np.uint8)


@pytest.mark.parametrize("places", [1, 6])
async def test_a_run_keeps_the_limit_and_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, places: int
) -> None:
    """Less than a group has room: its members run one after the other, and groups start all the same."""
    length = 128
    limits: dict[str, Any] = {"routes_in_flight_gib": places * 3 * length * 6 / GIB, "max_off_policy_steps": 3}
    run = make_run(
        tmp_path,
        engine={"return_routed_experts": True, "max_model_len": length},
        rollouts=limits,
    )
    write_json(tmp_path / "model" / "config.json", ARCH.to_hf_config())
    stub = StubEngine()
    stub.experts, stub.request_s = experts_of, 0.01
    with caplog.at_level(logging.WARNING):
        async with running(run, stub) as loop:
            await train(loop)
            # whole groups begin: of six places four are taken
            assert stub.most_in_flight == min(places, 4)
            scheduler = loop.parts.scheduler
            shown = loop.parts.gauges()["in_flight_limit"]
            assert shown == scheduler.places == max(places, 4) < scheduler.limit
            (event,) = loop.events("rollouts.routes_full")
            assert event.data["rollouts"] == places


async def train(loop: Loop) -> None:
    for shard in await loop.train(1, 3):
        rollouts = shard.stats.rollouts
        assert rollouts["finished"] >= 16
        # of 3 layers and 2 experts a token
        assert rollouts["routes_bytes"] >= 6 * shard.stats.total_tokens
        assert rollouts["routes_bytes"] % 6 == 0
