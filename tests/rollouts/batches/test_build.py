"""What a batch says of its rollouts, against plain arithmetic; and what undoing a step gives back."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import make_recipe

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.wire import ReferencedShard, decode_answer
from hpcrl.rollouts.batches.build import Batch, build_batch
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group, StoredRollout, Turn
from hpcrl.rollouts.environments.data_order import GroupTask
from hpcrl.rollouts.ledger.taken import TakenStep, TakenSteps

STEP = 7
LOCATION = Location("/dev/shm/x", "10.0.0.1", 9)


def stored(member: int, reward: float, **changes: Any) -> StoredRollout:
    values = {
        "parts": {},
        "seconds": 1.23456,
        "ended_s": 99.87654,
        "turns": [Turn(3, 4, 0.5, 0.25)],
        "tokens": 10 + member,
        "sampled_tokens": 4 + member,
        "first_version": 5,
        "last_version": 6,
        "place": PayloadPlace("file", 100 * member, 10, "x"),
        **changes,
    }
    return StoredRollout(member=member, reward=reward, **values)


GROUPS = [
    Group(
        index=3,
        environment="b",
        prompt_index=30,
        rollouts=[
            stored(0, 1.0, parts={"exact": 1.0, "short": 0.5}, first_version=4),
            stored(2, 0.0, parts={"exact": 0.0}, first_version=6, counts_as=6),
        ],
    ),
    Group(
        index=8,
        environment="a",
        prompt_index=80,
        rollouts=[stored(1, 0.5, parts={"exact": 0.25}), stored(3, 0.25, tokens=200), stored(4, 0.75)],
    ),
]
ROLLOUTS = [(group, rollout) for group in GROUPS for rollout in group.rollouts]


def built(groups: Sequence[Group] = GROUPS, **changes: Any) -> Batch:
    recipe = make_recipe(Path("/model"), algorithm={"advantage": "mean_baseline"})
    values: dict[str, Any] = {
        "step": STEP,
        "world_size": 2,
        "recipe": recipe,
        "counters": {"finished": 5.0, "share": float("nan"), "most": float("inf")},
        "text": lambda place: f"text at {place.offset}",
        "cost": float,
        "location": LOCATION,
        "payload_dir": Path("/payload"),
        **changes,
    }
    return build_batch(groups, **values)


def shards(batch: Batch) -> list[ReferencedShard]:
    found = [decode_answer(shard) for shard in batch.shards]
    assert all(isinstance(each, ReferencedShard) for each in found)
    return found  # type: ignore[return-value]


def test_the_statistics_are_those_of_its_rollouts() -> None:
    for shard in shards(built()):
        stats = shard.stats
        rewards = [rollout.reward for _, rollout in ROLLOUTS]
        assert stats.reward_mean == pytest.approx(statistics.fmean(rewards))
        assert stats.reward_std == pytest.approx(statistics.pstdev(rewards))
        assert (stats.reward_by_env, stats.reward_count_by_env) == ({"a": 0.5, "b": 0.5}, {"a": 3, "b": 2})
        assert stats.reward_parts == {"a/exact": 0.25, "b/exact": 0.5, "b/short": 0.5}
        assert stats.reward_count_by_part == {"a/exact": 1, "b/exact": 2, "b/short": 1}
        assert stats.reward_count == 5
        # how old the version of the first token is for a trainer that makes step 7 from version 6
        lags = [STEP - 1 - rollout.first_version for _, rollout in ROLLOUTS]
        assert stats.staleness_mean == pytest.approx(statistics.fmean(lags))
        assert (stats.staleness_max, stats.staleness_histogram) == (2, {"0": 1, "1": 3, "2": 1})
        assert {int(lag): count for lag, count in stats.staleness_histogram.items()} == Counter(lags)
        assert stats.total_tokens == sum(rollout.tokens for _, rollout in ROLLOUTS)
        assert stats.total_sampled_tokens == sum(rollout.sampled_tokens for _, rollout in ROLLOUTS)
        assert stats.rollouts == {"finished": 5.0}  # a number that is none is not reported
        assert stats.environments == {"a": [8], "b": [3]}
        assert stats.environment_numbers() == {8: 0, 3: 1}
        assert (stats.model_flops, stats.wait_for_policy_s) == (None, None)


def test_the_operations_are_those_of_all_sequences() -> None:
    """Attention costs more than in proportion to length: two branches of ten tokens are cheaper than one of twenty."""
    branched = msgspec.structs.replace(GROUPS[0].rollouts[0], tokens=20, lengths=[12, 8])
    groups = [msgspec.structs.replace(GROUPS[0], rollouts=[branched, GROUPS[0].rollouts[1]])]
    for shard in shards(built(groups, flops=lambda tokens: float(tokens**2), wait_for_policy_s=0.5)):
        assert shard.stats.model_flops == 12**2 + 8**2 + GROUPS[0].rollouts[1].tokens ** 2
        assert shard.stats.wait_for_policy_s == 0.5


def test_each_rollout_is_in_one_micro_batch_with_its_advantage_and_its_place() -> None:
    found = shards(built())
    assert [(shard.step, shard.rank, shard.world_size) for shard in found] == [(STEP, 0, 2), (STEP, 1, 2)]
    assert all((shard.location, shard.payload_dir) == (LOCATION, "/payload") for shard in found)
    samples = [sample for shard in found for micro_batch in shard.micro_batches for sample in micro_batch]
    wanted = []
    for group in GROUPS:
        mean = statistics.fmean(rollout.reward for rollout in group.rollouts)
        for rollout in group.rollouts:
            said = (rollout.tokens, rollout.place, rollout.counts_as)
            wanted.append((group.index, rollout.member, pytest.approx(rollout.reward - mean), *said))
    key = lambda entry: (entry[0], entry[1])  # noqa: E731
    assert (
        sorted(((s.group, s.member, s.advantage, s.tokens, s.place, s.counts_as) for s in samples), key=key) == wanted
    )
    # no more tokens in a micro-batch than the recipe allows, each of them there once
    assert all(sum(s.tokens for s in each) <= 256 for shard in found for each in shard.micro_batches)


def test_sequences_of_a_rollout_are_packed_each_by_itself() -> None:
    """Each has the advantage of the rollout, and no micro-batch has more tokens than the recipe allows."""
    branched = stored(5, 2.0, tokens=420, lengths=[200, 150, 70], repeated_tokens=90, sampled_tokens=50)
    group = msgspec.structs.replace(GROUPS[1], rollouts=[*GROUPS[1].rollouts, branched])
    found = shards(built([GROUPS[0], group]))
    samples = [sample for shard in found for micro_batch in shard.micro_batches for sample in micro_batch]
    own = sorted((s for s in samples if s.member == 5), key=lambda s: s.sequence)
    assert [(s.sequence, s.begin, s.tokens, s.rollout_tokens) for s in own] == [
        (0, 0, 200, 420),
        (1, 200, 150, 420),
        (2, 350, 70, 420),
    ]
    mean = statistics.fmean(rollout.reward for rollout in group.rollouts)
    assert {(s.group, s.advantage, s.place) for s in own} == {(8, 2.0 - mean, branched.place)}
    assert all(sum(s.tokens for s in each) <= 256 for shard in found for each in shard.micro_batches)
    assert len(samples) == 5 + 3
    for shard in found:
        stats = shard.stats
        assert (stats.branches_mean, stats.branches_max, stats.prefix_repeated_tokens) == (8 / 6, 3, 90)
        assert (stats.reward_count, stats.total_tokens) == (6, sum(s.tokens for s in samples))


def test_the_lines_are_for_people() -> None:
    lines = [json.loads(line) for line in built().lines.splitlines()]
    assert [(line["group"], line["member"]) for line in lines] == [(3, 0), (3, 2), (8, 1), (8, 3), (8, 4)]
    assert lines[0] == {
        "group": 3,
        "member": 0,
        "environment": "b",
        "prompt_index": 30,
        "reward": 1.0,
        "parts": {"exact": 1.0, "short": 0.5},
        "advantage": 0.5,
        "staleness": 2,
        "first_version": 4,
        "last_version": 6,
        "tokens": 10,
        "sampled_tokens": 4,
        "seconds": 1.235,
        "ended_s": 99.877,
        "branches": 1,
        "turns": [[3, 4, 0.5, 0.25, 0, 0, 0]],
        "text": "text at 0",
    }
    assert [line["text"] for line in lines] == [f"text at {rollout.place.offset}" for _, rollout in ROLLOUTS]
    assert [line["staleness"] for line in lines] == [2, 0, 1, 1, 1]


def test_equal_input_gives_equal_bytes() -> None:
    assert built() == built()


# -- undone steps


def group(index: int) -> Group:
    return Group(index=index, environment="a", prompt_index=index, rollouts=[stored(0, 1.0)])


def task(index: int) -> GroupTask:
    return GroupTask(index, None, index)  # type: ignore[arg-type]


def taken(step: int, *groups: int, stale: tuple[int, ...] = (), cancelled: tuple[int, ...] = ()) -> TakenStep:
    return TakenStep(
        step,
        [group(index) for index in groups],
        stale=[group(index) for index in stale],
        cancelled=[task(index) for index in cancelled],
        consumed=10 * step,
        dropped_stale=step,
        cancelled_stale=100 * step,
    )


@pytest.fixture
def steps() -> TakenSteps:
    steps = TakenSteps()
    for each in (taken(4, 1, 2), taken(5, 9, 3, stale=(5,), cancelled=(7,)), taken(6, 8, cancelled=(4,))):
        steps.add(each)
    return steps


def undone(steps: TakenSteps, step: int, *, last: int = 6) -> tuple[list[int], list[int], tuple[float, ...]] | None:
    counters = Counters(consumed=1000, dropped_stale=50, cancelled_stale=5000)
    pending = steps.undo(
        step, last=last, restart=[task(20), task(6)], finished=[group(21), group(0)], counters=counters
    )
    assert (counters.consumed, counters.dropped_stale, counters.cancelled_stale) == (1000, 50, 5000)
    if pending is None:
        return None
    own = pending.counters
    indices = [each.index for each in pending.restart], [each.index for each in pending.finished]
    return *indices, (own.consumed, own.dropped_stale, own.cancelled_stale)


def test_undoing_steps_gives_all_of_them_back_in_order(steps: TakenSteps) -> None:
    assert undone(steps, 6) == ([6, 20], [0, 21], (1000, 50, 5000))
    assert undone(steps, 5) == ([4, 6, 20], [0, 8, 21], (940, 44, 4400))
    assert undone(steps, 4) == ([4, 6, 7, 20], [0, 3, 5, 8, 9, 21], (890, 39, 3900))
    assert undone(steps, 3) == ([4, 6, 7, 20], [0, 1, 2, 3, 5, 8, 9, 21], (850, 35, 3500))


def test_a_step_that_is_trained_or_was_not_begun_cannot_be_undone(steps: TakenSteps) -> None:
    assert undone(steps, 2) is None  # step 3 is trained
    assert undone(steps, 7) is None
    steps.settle(4)
    assert (steps.find(4), steps.find(5) is not None) == (None, True)
    assert undone(steps, 3) is None
    assert undone(steps, 4) is not None
    steps.settle(6)
    assert undone(steps, 5) is None
    assert undone(steps, 6) == ([6, 20], [0, 21], (1000, 50, 5000))
