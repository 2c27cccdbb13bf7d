"""Rows of an answer that several engines made: those of kept tokens are of who sampled them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from routed_rows_testing import experts_of
from stub_engine import EOS

from hpcrl.rollouts.engines.client import Generation, SamplingParams
from hpcrl.rollouts.engines.partial_generation import PartialGeneration


def partial_generation_of(prompt: list[int], start: int) -> PartialGeneration:
    params = SamplingParams(
        temperature=1.0, max_tokens=10, seed=5, stop_token_ids=[EOS], routed_experts_prompt_start=start
    )
    return PartialGeneration(prompt, params)


def start_of(request: tuple[list[int], SamplingParams]) -> int:
    start = request[1].routed_experts_prompt_start
    assert isinstance(start, int)
    return start


PROMPT, ANSWER = [1, 2, 3, 4], [10, 11, 12, 13, EOS]
LOST, NEXT = experts_of([*PROMPT, *ANSWER]), experts_of([*PROMPT, *ANSWER], shift=1)


def rest_of(first: int, rows: NDArray[Any]) -> Generation:
    """The answer from its token ``first`` on."""
    count = len(ANSWER) - first
    return Generation(*sampled(ANSWER[first:]), np.full(count, 4, np.int32), "stop", rows)


def sampled(token_ids: list[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32)


def test_rows_of_kept_tokens_are_those_of_the_engine_that_sampled_them() -> None:
    draft = partial_generation_of(PROMPT, 2)
    assert start_of(draft.request(lambda: 3)) == 2
    draft.receive(*sampled([10]), LOST[2:4])
    draft.receive(*sampled([11, 12]), LOST[4:6])
    assert draft.keep() == 3
    assert draft.keep() == 0
    # the last kept token has not gone into the lost engine's model
    assert start_of(draft.request(lambda: 3)) == 6
    whole = draft.whole(rest_of(3, NEXT[6:8]))
    assert whole.experts is not None
    assert (whole.experts == np.concatenate([LOST[2:6], NEXT[6:8]])).all()


def test_rows_that_a_lost_engine_did_not_send_are_those_of_the_next_one() -> None:
    draft = partial_generation_of(PROMPT, 2)
    draft.request(lambda: 3)
    draft.receive(*sampled([10]))
    draft.keep()
    assert start_of(draft.request(lambda: 3)) == 2
    draft.receive(*sampled([11]), NEXT[2:5])
    draft.keep()
    assert start_of(draft.request(lambda: 3)) == 5
    whole = draft.whole(rest_of(2, LOST[5:8]))
    assert whole.experts is not None
    assert (whole.experts == np.concatenate([NEXT[2:5], LOST[5:8]])).all()


def test_without_the_rows_of_the_rest_those_of_kept_tokens_are_not_used() -> None:
    """Rows are placed from the end of an answer."""
    draft = partial_generation_of(PROMPT, 2)
    draft.request(lambda: 3)
    draft.receive([10, 11], [0.0, 0.0], LOST[2:5])
    assert draft.keep() == 2
    draft.request(lambda: 4)
    whole = draft.whole(msgspec.structs.replace(rest_of(2, NEXT), experts=None))
    assert whole.token_ids.tolist() == ANSWER
    assert whole.experts is None


def test_rows_of_an_attempt_that_is_not_kept_are_forgotten() -> None:
    draft = partial_generation_of(PROMPT, 0)
    draft.request(lambda: 3)
    draft.receive(*sampled([10]), LOST[:4])
    assert start_of(draft.request(lambda: 3)) == 0
    assert draft.whole(rest_of(0, NEXT[:8])).experts is not None


def test_rows_are_cut_with_their_tokens() -> None:
    """One token is always asked for: of ten that arrived nine are kept."""
    draft = partial_generation_of([1], 0)
    draft.request(lambda: 0)
    rows = experts_of([1, *range(10, 20)])
    draft.receive(*sampled(list(range(10, 20))), rows[:10])
    assert draft.keep() == 9
    whole = draft.whole(Generation(*sampled([]), np.zeros(0, np.int32), "length", rows[:0]))
    assert whole.experts is not None
    assert len(whole.experts) == 9
    assert start_of(draft.request(lambda: 0)) == 9
