"""Rows of running sequences: what a request brings in, what it takes out, and that nothing stays behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.engine.rows import Rows

VOCAB, LENGTH, BLOCK = 50, 20, 4


def request(prompt: int = 5, **params: Any) -> EngineRequest:
    own = SamplingParams(**{"max_tokens": 6, **params})
    return EngineRequest("r", list(range(10, 10 + prompt)), own, lambda output: None)


def occupied(own: EngineRequest) -> tuple[Rows, int]:
    rows = Rows(2, LENGTH, BLOCK)
    return rows, rows.occupy(own, [7, 3], 4, 99, VOCAB)


def test_rows_are_given_from_the_first_and_given_again() -> None:
    rows = Rows(3, LENGTH, BLOCK)
    assert (rows.num_free, rows.max_blocks) == (3, 5)
    requests = [request() for _ in range(3)]
    assert [rows.occupy(each, [], 0, 1, VOCAB) for each in requests] == [0, 1, 2]
    assert [each.row for each in requests] == [0, 1, 2]
    assert [rows.request(row) for row in range(3)] == requests
    assert rows.num_free == 0
    rows.vacate(1)
    assert (rows.num_free, requests[1].row) == (1, None)
    another = request()
    assert rows.occupy(another, [], 0, 1, VOCAB) == another.row == 1
    assert rows.request(1) is another


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_sequence_of_maximal_length_has_blocks_for_all_its_tokens(length: int, blocks: int) -> None:
    assert Rows(1, length, 4).max_blocks == blocks


def test_an_empty_row_has_no_request() -> None:
    rows, row = occupied(request())
    rows.vacate(row)
    for empty in (0, 1):
        with pytest.raises(AssertionError, match=f"row {empty} is empty"):
            rows.request(empty)


def test_tokens_and_blocks_of_a_request_are_those_of_its_row() -> None:
    rows, row = occupied(request())
    assert rows.tokens[row, :5].tolist() == [10, 11, 12, 13, 14]
    assert (rows.num_tokens[row], rows.num_prompt[row], rows.num_computed[row]) == (5, 5, 4)
    assert rows.blocks(row) == [7, 3]
    rows.append_blocks(row, [9, 8])
    rows.append_blocks(row, [])
    rows.append_blocks(row, [1])
    assert rows.blocks(row) == [7, 3, 9, 8, 1]
    assert rows.output_length(row) == 0


def test_what_was_sampled_goes_with_the_request_into_its_next_row() -> None:
    own = request()
    rows, row = occupied(own)
    rows.tokens[row, 5:7], rows.logprobs[row, 5:7], rows.ranks[row, 5:7] = [21, 22], [-1.0, -2.0], [1, 3]
    rows.num_tokens[row] = 7
    assert rows.output_length(row) == 2
    rows.vacate(row)
    rows.tokens[:], rows.logprobs[:], rows.ranks[:] = 0, 0.0, 0  # of others, meanwhile
    assert own.tokens.tolist() == [10, 11, 12, 13, 14, 21, 22]
    assert (own.logprobs.tolist(), own.ranks.tolist()) == ([-1.0, -2.0], [1, 3])
    row = rows.occupy(own, [2], 0, 99, VOCAB)
    assert rows.tokens[row, :7].tolist() == own.tokens.tolist()
    assert (rows.logprobs[row, 5:7].tolist(), rows.ranks[row, 5:7].tolist()) == ([-1.0, -2.0], [1, 3])
    assert (rows.num_tokens[row], rows.num_prompt[row], rows.output_length(row)) == (7, 5, 2)
    assert rows.blocks(row) == [2]


@pytest.mark.parametrize(("max_tokens", "limit"), [(1, 6), (15, 20), (16, 20), (2**53, 20)])
def test_a_sequence_ends_with_its_tokens_or_with_what_the_model_takes(max_tokens: int, limit: int) -> None:
    rows, row = occupied(request(max_tokens=max_tokens))
    assert rows.length_limit[row] == limit


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, (1.0, VOCAB, 1.0, 0.0)),
        ({"temperature": 0.5, "top_k": 1, "top_p": 0.5, "min_p": 0.25}, (0.5, 1, 0.5, 0.25)),
        ({"top_k": -1}, (1.0, VOCAB, 1.0, 0.0)),
        # a greedy choice is that of the model's own distribution
        ({"temperature": 0.0, "top_k": 1, "top_p": 0.5, "min_p": 0.25}, (0.0, VOCAB, 1.0, 0.0)),
        ({"temperature": 9e-6, "top_k": 1, "top_p": 0.5, "min_p": 0.25}, (0.0, VOCAB, 1.0, 0.0)),
    ],
)
def test_restrictions_of_a_request(params: dict[str, Any], expected: tuple[float, int, float, float]) -> None:
    rows, row = occupied(request(**params))
    assert (rows.temperature[row], rows.top_k[row], rows.top_p[row], rows.min_p[row]) == pytest.approx(expected)


def test_ends_of_a_request() -> None:
    rows, row = occupied(request(min_tokens=3, eos_token_id=2, stop_token_ids=frozenset({4})))
    assert (rows.eos_token_id[row], rows.has_stop_tokens[row], rows.suppress_until[row]) == (2, True, 0)
    rows, row = occupied(request(min_tokens=3, suppressed_token_ids=frozenset({2})))
    assert (rows.eos_token_id[row], rows.has_stop_tokens[row], rows.suppress_until[row]) == (-1, False, 5 + 3)


@pytest.mark.parametrize(("wanted", "top", "wants"), [(None, 0, False), (0, 0, True), (3, 3, True), (-1, VOCAB, True)])
def test_log_probabilities_of_a_request(wanted: int | None, top: int, wants: bool) -> None:
    rows, row = occupied(request(logprobs=wanted))
    assert (rows.num_top[row], rows.wants_logprobs[row], rows.wants_prompt_logprobs[row]) == (top, wants, False)
    rows, row = occupied(request(prompt_logprobs=wanted))
    assert (rows.num_top[row], rows.wants_logprobs[row], rows.wants_prompt_logprobs[row]) == (0, False, wants)


def test_a_row_of_another_request_keeps_nothing_of_the_one_before() -> None:
    busy = request(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, eos_token_id=2, stop_token_ids=frozenset({4}), min_tokens=2,
        suppressed_token_ids=frozenset({2}), logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    rows, row = occupied(busy)
    rows.append_blocks(row, [5, 6])
    rows.vacate(row)
    assert rows.occupy(request(3), [1], 0, 5, VOCAB) == row
    fresh = Rows(2, LENGTH, BLOCK)
    fresh.occupy(request(3), [1], 0, 5, VOCAB)
    for name, value in vars(fresh).items():
        if isinstance(value, np.ndarray) and value.ndim == 1:
            assert getattr(rows, name)[row] == value[0], name
    assert rows.blocks(row) == [1]


def test_a_request_whose_numbers_do_not_fit_leaves_its_row_free() -> None:
    rows, wrong = Rows(1, LENGTH, BLOCK), request()
    with pytest.raises(OverflowError):
        rows.occupy(wrong, [], 0, 2**70, VOCAB)
    assert (rows.num_free, wrong.row) == (1, None)
    assert rows.occupy(request(), [], 0, 1, VOCAB) == 0
