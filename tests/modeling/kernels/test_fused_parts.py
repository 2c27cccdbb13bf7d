"""Into which calls the fused kernel divides attention: as few as may be, with as little padding, and in place."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from hpcrl.modeling.kernels import fused
from hpcrl.modeling.kernels.fused import _mask, _Padded, _Part, _Row
from hpcrl.modeling.kernels.kernel import Segments


def causal(*lengths: int, window: int | None = None) -> Segments:
    starts = tuple(accumulate(lengths, initial=0))
    return Segments(starts, starts, causal=True, window=window)


def parts(segments: Segments) -> tuple[_Part, ...]:
    # results are kept by their arguments, not by the sizes that tests change
    made = fused._parts.__wrapped__ if hasattr(fused._parts, "__wrapped__") else fused._parts
    found: tuple[_Part, ...] = made(segments)
    return found


def rows(segments: Segments) -> list[tuple[int, int, int]]:
    """First token, last token and number of sequences of each call, all of which are in place and causal."""
    found = []
    for part in parts(segments):
        assert isinstance(part.queries, _Row)
        assert (part.keys, part.causal, part.mask) == (part.queries, True, None)
        found.append((part.queries.tokens.start, part.queries.tokens.stop, part.queries.sequences))
    return found


def test_neighbours_of_one_length_are_one_call_in_place() -> None:
    assert rows(causal(5)) == [(0, 5, 1)]
    assert rows(causal(5, 5, 5)) == [(0, 15, 3)]
    assert parts(causal()) == ()


def test_empty_sequences_have_no_call() -> None:
    assert rows(causal(0, 4, 0, 0)) == [(0, 4, 1)]


def test_sequences_of_unlike_lengths_have_a_call_each() -> None:
    # the longest first
    assert rows(causal(3, 9, 5)) == [(3, 12, 1), (12, 17, 1), (0, 3, 1)]


@pytest.mark.parametrize(("short", "together"), [(8, True), (7, True), (6, True), (5, False)])
def test_a_third_of_padding_is_the_most(short: int, together: bool) -> None:
    assert len(parts(causal(8, short))) == (1 if together else 2)


def test_a_padded_call_repeats_the_last_token_of_each_sequence() -> None:
    (part,) = parts(causal(3, 4, 4))
    where = part.queries
    assert isinstance(where, _Padded)
    assert part.keys is where
    assert (part.causal, part.mask) == (True, None)
    # the longest first: the tokens 3 to 6, 7 to 10, and 0 to 2
    assert where.places.tolist() == [[3, 4, 5, 6], [7, 8, 9, 10], [0, 1, 2, 2]]
    assert where.real.tolist() == list(range(11))
    assert where.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2]


def test_sequences_of_one_length_that_lie_apart_are_collected() -> None:
    (first, second) = parts(causal(4, 9, 4))
    assert isinstance(first.queries, _Row)
    assert isinstance(second.queries, _Padded)
    assert second.queries.places.tolist() == [[0, 1, 2, 3], [13, 14, 15, 16]]


def test_a_call_has_no_more_tokens_than_a_long_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_LONG", 12)
    # three of four tokens, and what is left
    assert rows(causal(4, 4, 4, 4, 4)) == [(0, 12, 3), (12, 20, 2)]
    # two of five: 15 would be too many
    assert rows(causal(5, 5, 5)) == [(0, 10, 2), (10, 15, 1)]
    # a call of one
    assert rows(causal(7, 7)) == [(0, 7, 1), (7, 14, 1)]
    # longer ones, by themselves, come before all others
    assert rows(causal(11, 12, 30)) == [(11, 23, 1), (23, 53, 1), (0, 11, 1)]


def test_queries_of_other_tokens_are_one_call_for_each_segment() -> None:
    found = parts(Segments((0, 2, 2, 5), (0, 7, 9, 10), causal=False))
    # the second segment has no query
    assert found == (
        _Part(_Row(slice(0, 2), 1), _Row(slice(0, 7), 1), causal=False),
        _Part(_Row(slice(2, 5), 1), _Row(slice(9, 10), 1), causal=False),
    )


def windows(*lengths: int, window: int) -> list[tuple[slice, slice]]:
    found = []
    for part in parts(causal(*lengths, window=window)):
        assert isinstance(part.queries, _Row)
        assert isinstance(part.keys, _Row)
        assert part.mask is not None
        assert not part.causal
        queries, keys = part.queries.tokens, part.keys.tokens
        assert tuple(part.mask.shape) == (queries.stop - queries.start, keys.stop - keys.start)
        # each query sees itself and the keys before it, as many as the window has
        for query in range(queries.start, queries.stop):
            seen = [
                key for key in range(keys.start, keys.stop) if part.mask[query - queries.start, key - keys.start] == 0
            ]
            begin = max(sum(lengths[: sequence_of(query, lengths)]), query - window + 1)
            assert seen == list(range(begin, query + 1))
        found.append((queries, keys))
    return found


def sequence_of(token: int, lengths: tuple[int, ...]) -> int:
    return next(i for i, end in enumerate(accumulate(lengths)) if token < end)


def test_pieces_of_a_windowed_sequence_have_the_keys_that_any_of_them_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_WINDOW_STEP", 4)
    assert windows(10, window=3) == [
        (slice(0, 4), slice(0, 4)),
        (slice(4, 8), slice(2, 8)),
        (slice(8, 10), slice(6, 10)),
    ]
    # no key of the sequence before
    assert windows(5, 9, window=4) == [
        (slice(0, 4), slice(0, 4)),
        (slice(4, 5), slice(1, 5)),
        (slice(5, 9), slice(5, 9)),
        (slice(9, 13), slice(6, 13)),
        (slice(13, 14), slice(10, 14)),
    ]


def test_a_window_that_has_room_for_all_is_none() -> None:
    assert rows(causal(5, 5, window=5)) == [(0, 10, 2)]
    assert len(windows(6, window=5)) == 1


def test_what_is_not_seen_is_minus_infinity() -> None:
    assert _mask(2, 4, 2).tolist() == [[-torch.inf, 0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, 0.0, 0.0]]
    assert _mask(2, 2, 9).tolist() == [[0.0, -torch.inf], [0.0, 0.0]]
    assert _mask(1, 1, 1).dtype == torch.float32
