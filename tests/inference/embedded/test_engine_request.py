"""One sequence of an engine: names of its blocks, versions of its tokens, its place in the queue, and who fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcrl.inference.embedded.engine.blocks import block_hash, root_hash
from hpcrl.inference.embedded.engine.params import MAX_COUNT, SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest, VersionSpan
from hpcrl.inference.embedded.engine.suspects import Suspects


def request(prompt: int = 5, **keywords: Any) -> EngineRequest:
    return EngineRequest("r", list(range(prompt)), SamplingParams(max_tokens=6), lambda output: None, **keywords)


def test_full_blocks_are_named_by_all_tokens_up_to_their_end() -> None:
    own, tokens = request(cache_salt="7"), np.arange(11, dtype=np.int32)
    first = block_hash(root_hash("7"), tokens[:4].tobytes())
    second = block_hash(first, tokens[4:8].tobytes())
    own.extend_hashes(tokens[:3], 4)
    assert own.hashes == []
    own.extend_hashes(tokens[:4], 4)
    assert own.hashes == [first]
    own.extend_hashes(tokens, 4)
    own.extend_hashes(tokens, 4)
    assert own.hashes == [first, second]


def test_only_a_request_with_a_salt_shares_with_other_engines() -> None:
    assert request(cache_salt="7").salted
    assert request(cache_salt="").salted
    assert not request().salted


def test_a_lower_priority_number_and_an_earlier_arrival_come_first() -> None:
    keys = []
    for priority, arrival in ((1, 1), (0, 3), (0, 2), (-1, 9)):
        own = request(priority=priority)
        own.sequence_number = arrival
        keys.append(own.sort_key)
    assert sorted(keys) == [(-1, 9), (0, 2), (0, 3), (1, 1)]


def test_only_streams_report_on_the_way() -> None:
    assert request(stream=True, stream_interval=3).stream_interval == 3
    assert request(stream=False, stream_interval=3).stream_interval == 0


def test_versions_cover_the_tokens_that_were_sampled_under_them() -> None:
    own = request()
    assert own.version_spans(0) == []
    own.note_version("1", 0)
    assert own.version_spans(3) == [VersionSpan("1", 0, 3)]
    own.note_version("1", 3)  # it goes on as it was
    own.note_version("2", 5)  # nothing is sampled under this one
    own.note_version("3", 5)
    own.note_version("4", 8)
    assert own.version_spans(9) == [VersionSpan("1", 0, 5), VersionSpan("3", 5, 8), VersionSpan("4", 8, 9)]
    # a version that begins behind the last token has none
    assert own.version_spans(8) == [VersionSpan("1", 0, 5), VersionSpan("3", 5, 8)]
    assert own.version_spans(0) == []


def test_weights_that_are_taken_back_before_a_token_leave_no_span() -> None:
    own = request()
    own.note_version("1", 0)
    own.note_version("2", 4)
    own.note_version("1", 4)
    assert own.version_spans(6) == [VersionSpan("1", 0, 6)]


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [
        (5, 0, 5),
        (5, 3, 8),
        (-1, 1, 0),
        (2**63 - 1, 0, 2**63 - 1),
        (2**63 - 1, 1, -(2**63)),
        (2**63 - 2, 3, -(2**63) + 1),
        (-(2**63), 2, -(2**63) + 2),
        (None, 3, None),
    ],
)
def test_seeds_of_several_choices_follow_each_other_and_begin_anew(
    seed: int | None, index: int, expected: int | None
) -> None:
    params = SamplingParams(max_tokens=3, seed=seed, top_k=4)
    assert params.nth(index) == SamplingParams(max_tokens=3, seed=expected, top_k=4)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9.9e-6, True), (1e-5, False), (1.0, False)])
def test_temperatures_next_to_zero_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(max_tokens=1, temperature=temperature).greedy == greedy


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": MAX_COUNT},
        {"max_tokens": 1},
        {"max_tokens": MAX_COUNT},
        {"min_tokens": 8},
        {"logprobs": -1},
        {"logprobs": 0},
        {"logprobs": 10},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 10},
        {"stop_token_ids": frozenset({0, 9})},
        {"suppressed_token_ids": frozenset(range(9))},
        {"suppressed_token_ids": frozenset([*range(9), 10, -1])},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"routed_experts_prompt_start": 0},
        {"routed_experts_prompt_start": 5},
    ],
)
def test_bounds_of_parameters_are_taken(changes: dict[str, Any]) -> None:
    SamplingParams(**{"max_tokens": 8, **changes}).check(vocab_size=10, prompt_length=5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 2.0000001}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"min_p": -1e-9}, "min_p"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": MAX_COUNT + 1}, f"at most {MAX_COUNT}"),
        ({"max_tokens": MAX_COUNT + 1}, f"at most {MAX_COUNT}"),
        ({"min_tokens": 9}, r"min_tokens must be between 0 and max_tokens \(8\), not 9"),
        ({"logprobs": 11}, "^logprobs must be"),
        ({"prompt_logprobs": 11}, "^prompt_logprobs must be"),
        ({"prompt_logprobs": -2}, "^prompt_logprobs must be"),
        ({"stop_token_ids": frozenset({3, 10, -1})}, r"stop_token_ids \[-1, 10\] are outside the vocabulary of 10"),
        ({"suppressed_token_ids": frozenset(range(10))}, "leaves no token"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"routed_experts_prompt_start": 6}, r"prompt length \(5\), not 6"),
    ],
)
def test_what_lies_behind_a_bound_is_refused_and_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**{"max_tokens": 8, **changes}).check(vocab_size=10, prompt_length=5)


def test_prompts_whose_log_probabilities_are_wanted_are_computed_whole() -> None:
    assert SamplingParams(max_tokens=1, prompt_logprobs=0).skip_reading_prefix_cache
    assert not SamplingParams(max_tokens=1, logprobs=0).skip_reading_prefix_cache


def test_suspects_run_alone_one_after_the_other_until_each_has_a_token() -> None:
    suspects, one, two = Suspects(), request(5), request(7)
    assert suspects.current is None
    suspects.begin([one, two])
    assert suspects.current is one
    assert not suspects.passes(5)
    assert suspects.current is one
    assert suspects.passes(6)
    assert suspects.current is two
    assert not suspects.passes(7)
    assert suspects.passes(8)
    assert suspects.current is None


def test_a_suspect_that_has_ended_is_passed_over() -> None:
    suspects, one, two = Suspects(), request(), request()
    suspects.begin([one, two])
    one.ended = True
    assert suspects.current is two
    two.ended = True
    assert suspects.passes(5)  # it was the one that ran
    assert suspects.current is None


def test_an_engine_is_broken_where_eight_failures_have_no_token_between_them() -> None:
    suspects = Suspects()
    assert [suspects.failed() for _ in range(7)] == [False] * 7
    suspects.worked()
    assert [suspects.failed() for _ in range(8)] == [False] * 7 + [True]


def test_an_engine_is_broken_where_three_steps_fail_whose_requests_work_alone() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.begin([request()])
        assert not suspects.failed()
        suspects.worked()
    suspects.begin([request()])
    assert suspects.failed()
    # one whose request was found says nothing of the engine
    suspects.found()
    suspects.worked()
    suspects.begin([request()])
    assert not suspects.failed()
