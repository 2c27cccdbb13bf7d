"""Which tokens run in the next step: budget, order, prefix cache, and who gives its blocks back where they run out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hpcrl.inference.embedded.engine.blocks import BlockPool
from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.engine.rows import Rows
from hpcrl.inference.embedded.engine.scheduler import Scheduler, Step

BLOCK, LENGTH, VOCAB = 4, 32, 50


class Batches:
    """A scheduler, and a model that takes no time: each step samples a token for each sequence that is computed."""

    def __init__(self, *, rows: int = 4, blocks: int = 32, budget: int = 8) -> None:
        self.rows, self.pool = Rows(rows, LENGTH, BLOCK), BlockPool(blocks)
        self.loaded: list[tuple[bytes, bytes]] = []
        self.seeds = itertools.count(100)
        self.scheduler = Scheduler(
            self.rows,
            self.pool,
            load_blocks=self.load,
            max_num_batched_tokens=budget,
            vocab_size=VOCAB,
            draw_seed=lambda: next(self.seeds),
        )

    def load(self, keys: list[bytes], contents: list[bytes]) -> list[int]:
        self.loaded += zip(keys, contents, strict=True)
        blocks = self.pool.allocate(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            self.pool.register(block, key)
        return blocks

    def add(self, name: str, prompt: int | list[int], **more: Any) -> EngineRequest:
        params = SamplingParams(**{"max_tokens": 8, **more.pop("params", {})})
        own = EngineRequest(
            name, list(range(prompt)) if isinstance(prompt, int) else prompt, params, lambda _: None, **more
        )
        self.scheduler.add(own)
        return own

    def choose(self, *, only_preempted: bool = False, alone: EngineRequest | None = None) -> Step | None:
        return self.scheduler.schedule(only_preempted=only_preempted, alone=alone)

    def counts(self, step: Step | None) -> dict[str, int]:
        """Tokens of each request, in the order of the step."""
        if step is None:
            return {}
        names = [self.rows.request(row).request_id for row in step.rows.tolist()]
        return dict(zip(names, step.counts.tolist(), strict=True))

    def step(self, **choice: Any) -> dict[str, int]:
        """Choose a step and run it."""
        step = self.choose(**choice)
        found = self.counts(step)
        if step is not None:
            self.scheduler.advance(step)
            for row in step.rows.tolist():
                if self.rows.num_computed[row] == self.rows.num_tokens[row]:
                    self.rows.tokens[row, self.rows.num_tokens[row]] = 7
                    self.rows.num_tokens[row] += 1
        return found

    @property
    def held(self) -> int:
        return self.pool.num_blocks - self.pool.num_free


def test_a_long_prompt_is_computed_in_parts_while_others_decode() -> None:
    batches = Batches(budget=8)
    batches.add("short", 3)
    batches.add("long", list(range(20, 34)))
    assert batches.step() == {"short": 3, "long": 5}
    assert batches.step() == {"short": 1, "long": 7}
    assert batches.step() == {"short": 1, "long": 2}
    step = batches.choose()
    assert batches.counts(step) == {"short": 1, "long": 1}
    assert step is not None
    assert (step.num_single, step.admitted) == (2, [])


def test_rows_with_one_token_come_first() -> None:
    batches = Batches(budget=12)
    long = batches.add("long", 20)
    batches.step()
    short = batches.add("short", [40])
    step = batches.choose()
    assert batches.counts(step) == {"short": 1, "long": 8}
    assert step is not None
    assert (step.num_single, step.admitted) == (1, [short])
    assert long.row != short.row


def test_a_step_has_no_more_tokens_than_the_budget() -> None:
    batches = Batches(budget=8)
    for name, prompt in (("a", 5), ("b", 5), ("c", 9)):
        batches.add(name, [ord(name)] * prompt)
    assert batches.step() == {"a": 5, "b": 3}
    assert batches.step() == {"a": 1, "b": 2, "c": 5}
    assert batches.step() == {"a": 1, "b": 1, "c": 4}
    assert batches.step() == {"a": 1, "b": 1, "c": 1}


def test_those_of_a_lower_number_start_first_and_then_those_that_came_first() -> None:
    batches = Batches(rows=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        batches.add(name, [1], priority=priority)
    served = []
    while batches.scheduler.has_requests:
        served += batches.step()
        batches.scheduler.remove(batches.rows.request(0))
    assert served == ["urgent", "first", "second", "late"]
    assert batches.choose() is None


def test_who_has_arrived_has_a_number_in_the_order_of_arrival() -> None:
    """A request without one is not in the engine yet."""
    batches = Batches()
    assert EngineRequest("x", [1], SamplingParams(max_tokens=1), lambda _: None).sequence_number == 0
    numbers = [batches.add(name, [1]).sequence_number for name in "abc"]
    assert 0 < numbers[0] < numbers[1] < numbers[2]


def test_a_sequence_starts_when_all_of_it_fits_and_none_overtakes_it() -> None:
    batches = Batches(blocks=8, budget=64)
    first = batches.add("first", 20)  # five blocks, and one more for the next token
    batches.step()
    big, small = batches.add("big", [30] * 13), batches.add("small", [31])
    assert batches.step() == {"first": 1}
    assert (big.row, small.row) == (None, None)
    batches.scheduler.remove(first)
    assert batches.held == 0
    assert batches.step() == {"small": 1, "big": 13}


def test_where_blocks_run_out_who_was_to_be_served_last_gives_its_own_back() -> None:
    batches = Batches(blocks=8, budget=64)
    first, second, third = (
        batches.add(name, [ord(name[0])] * count) for name, count in (("a", 8), ("b", 11), ("c", 7))
    )
    # two, three and two blocks; the token behind them wants one more of "a", and later of "c" and "b"
    assert batches.step() == {"a": 8, "b": 11, "c": 7}
    assert batches.held == 7
    assert batches.step() == {"a": 1, "b": 1, "c": 1}
    assert batches.held == 8
    waits = batches.add("d", [1])
    assert batches.step() == {"a": 1, "b": 1}, "the last one was put back, and nobody started in its place"
    assert (first.row, second.row, third.row, waits.row) == (0, 1, None, None)
    assert third.num_preemptions == batches.scheduler.num_preemptions == 1
    assert batches.scheduler.has_preempted
    assert batches.scheduler.waiting == [third, waits]
    assert third.tokens.tolist() == [ord("c")] * 7 + [7, 7]
    batches.scheduler.remove(first)
    batches.scheduler.remove(second)
    # its first block was found again
    assert batches.step() == {"d": 1, "c": 9 - BLOCK}
    assert not batches.scheduler.has_preempted


def test_who_came_first_gives_its_blocks_to_one_of_a_lower_number() -> None:
    batches = Batches(blocks=8, budget=64)
    early = batches.add("early", [1] * 15, priority=1)
    batches.step()
    urgent = batches.add("urgent", [2] * 15)
    assert batches.step() == {"early": 1, "urgent": 15}
    assert batches.held == 8
    assert batches.step() == {"urgent": 1}
    assert (early.row, early.num_preemptions, urgent.row, urgent.num_preemptions) == (None, 1, 1, 0)
    assert batches.step() == {"urgent": 1}, "who was put back waits until all of it fits"


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    batches = Batches(budget=64)
    one = batches.add("one", 9)
    batches.step()
    # the first eight tokens are two full blocks; of the second prompt the last token is computed in any case
    two, three = batches.add("two", 8), batches.add("three", 13)
    assert batches.step() == {"one": 1, "two": 4, "three": 5}
    assert (one.num_cached_tokens, two.num_cached_tokens, three.num_cached_tokens) == (0, 4, 8)
    assert two.row is not None
    assert one.row is not None
    assert batches.rows.blocks(two.row)[0] == batches.rows.blocks(one.row)[0]
    assert (batches.scheduler.prefix_queries, batches.scheduler.prefix_hits) == (9 + 8 + 13, 4 + 8)


def test_another_salt_and_a_prompt_whose_log_probabilities_are_wanted_find_nothing() -> None:
    batches = Batches(budget=64)
    batches.add("one", 9, cache_salt="1")
    batches.step()
    other = batches.add("other", 9, cache_salt="2")
    whole = batches.add("whole", 9, cache_salt="1", params={"prompt_logprobs": 0})
    assert batches.step() == {"one": 1, "other": 9, "whole": 9}
    assert (other.num_cached_tokens, whole.num_cached_tokens) == (0, 0)


def test_only_full_blocks_are_found_and_those_with_a_salt_are_offered_to_others() -> None:
    batches = Batches(budget=64)
    plain, salted = batches.add("plain", 7), batches.add("salted", [40] * 7, cache_salt="1")
    batches.step()
    assert (len(plain.hashes), len(salted.hashes), batches.pool.num_cached) == (1, 1, 2)
    assert salted.row is not None
    assert batches.scheduler.filled == [(batches.rows.blocks(salted.row)[0], salted.hashes[0])]
    batches.step()  # the eighth token fills the second block
    assert batches.pool.num_cached == 4
    assert [key for _, key in batches.scheduler.filled] == salted.hashes[:2]
    assert len(salted.hashes) == 2


def test_blocks_of_other_engines_are_used_as_far_as_they_go_on_from_our_own() -> None:
    batches = Batches(budget=64)
    batches.add("one", 5)
    batches.step()
    two = batches.add("two", 21)
    two.extend_hashes(two.tokens, BLOCK)
    key = two.hashes
    two.fetched = {key[1]: b"b", key[2]: b"c", key[4]: b"e"}
    # one block is ours, two came, the fourth is missing
    assert batches.step() == {"one": 1, "two": 21 - 12}
    assert batches.loaded == [(key[1], b"b"), (key[2], b"c")]
    assert (two.num_cached_tokens, two.num_fetched_tokens, two.fetched) == (12, 8, {})
    assert batches.scheduler.prefix_hits == 4


def test_a_request_that_cannot_be_started_costs_itself_alone() -> None:
    batches = Batches(budget=64)
    failure = ValueError("KV of another size")

    def fail(keys: list[bytes], contents: list[bytes]) -> list[int]:
        if keys:
            raise failure
        return []

    batches.scheduler._load_blocks = fail
    batches.add("one", 5)
    batches.step()
    bad, good = batches.add("bad", 9), batches.add("good", [41])
    bad.extend_hashes(bad.tokens, BLOCK)
    bad.fetched = {bad.hashes[1]: b"x"}
    held = batches.held
    assert batches.step() == {"one": 1, "good": 1}
    assert batches.scheduler.refused == [(bad, failure)]
    assert (bad.row, batches.scheduler.waiting) == (None, [])
    assert list(batches.scheduler.requests()) == list(batches.scheduler.requests_running())
    assert batches.held == held + 1, "only the good one has taken a block"
    assert good.row is not None


def test_a_seed_is_drawn_once_where_a_request_has_none() -> None:
    batches = Batches(budget=64)
    drawn, own = batches.add("drawn", 5), batches.add("own", [3] * 5, params={"seed": 9})
    batches.step()
    assert drawn.row is not None
    assert own.row is not None
    assert (batches.rows.seed[drawn.row], batches.rows.seed[own.row]) == (100, 9)
    batches.scheduler.preempt_all()
    batches.step()
    assert (batches.rows.seed[drawn.row], batches.rows.seed[own.row]) == (100, 9)
    assert next(batches.seeds) == 101


def test_of_those_that_wait_only_who_had_started_continues_where_that_is_wanted() -> None:
    batches = Batches(budget=64)
    started = batches.add("started", 3)
    batches.step()
    batches.scheduler.put_back(started)
    batches.add("urgent", [40], priority=-1)
    assert batches.step(only_preempted=True) == {"started": 4}
    assert batches.step(only_preempted=True) == {"started": 1}
    assert batches.step() == {"started": 1, "urgent": 1}


def test_one_runs_alone_where_that_is_wanted() -> None:
    batches = Batches(budget=64)
    _, two = batches.add("one", 3), batches.add("two", [40] * 3)
    assert batches.step(alone=two) == {"two": 3}
    assert batches.step(alone=two) == {"two": 1}
    assert batches.step() == {"two": 1, "one": 3}


def test_a_request_leaves_from_wherever_it_is() -> None:
    batches = Batches(rows=1, budget=64)
    running, waiting = batches.add("running", 5), batches.add("waiting", [40] * 5)
    batches.step()
    assert list(batches.scheduler.requests()) == [waiting, running]
    assert list(batches.scheduler.requests_running()) == [running]
    batches.scheduler.remove(waiting)
    assert batches.scheduler.waiting == []
    assert batches.scheduler.has_requests
    batches.scheduler.remove(running)
    assert not batches.scheduler.has_requests
    assert (batches.held, batches.rows.num_free, running.row) == (0, 1, None)
    assert running.tokens.tolist() == [0, 1, 2, 3, 4, 7]


def test_all_are_put_back_where_weights_change_with_what_others_computed() -> None:
    batches = Batches(rows=2, budget=64)
    one, two, three = (batches.add(name, [ord(name)] * 5) for name in "abc")
    batches.step()
    three.fetched = {b"key": b"of old weights"}
    two.prompt_logprobs.append(None)  # type: ignore[arg-type]
    batches.scheduler.preempt_all()
    assert batches.scheduler.waiting == [one, two, three]
    assert (batches.scheduler.running, batches.held, three.fetched, two.prompt_logprobs) == ([], 0, {}, [])
    assert [each.num_preemptions for each in (one, two, three)] == [1, 1, 0]
    batches.scheduler.put_back(three)  # it holds nothing
    assert three.num_preemptions == 0
    # statistics of the prefix cache count a sequence once
    before = batches.scheduler.prefix_queries
    batches.step()
    assert batches.scheduler.prefix_queries == before


def test_untrusted_kv_is_never_found() -> None:
    batches = Batches(budget=64)
    one, waits = batches.add("one", 9), EngineRequest("x", [1], SamplingParams(max_tokens=1), lambda _: None)
    batches.step()
    batches.scheduler.distrust(waits)  # it holds nothing
    assert batches.pool.num_cached == 2
    batches.scheduler.distrust(one)
    assert batches.pool.num_cached == 0
    two = batches.add("two", 9)
    assert batches.step() == {"one": 1, "two": 9}
    assert two.num_cached_tokens == 0


def test_a_pool_holds_a_sequence_of_maximal_length() -> None:
    Batches(blocks=LENGTH // BLOCK)
    with pytest.raises(AssertionError):
        Batches(blocks=LENGTH // BLOCK - 1)
