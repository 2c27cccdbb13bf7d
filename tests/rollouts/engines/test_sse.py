"""Events out of pieces, wherever these are cut, in time that is linear in the size of one event."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from hpcrl.rollouts.engines.sse import EventSplitter, Pieces

PIECE = b"x" * (64 << 10)


@pytest.mark.parametrize("large", [1 << 18, 8])
def test_events_are_the_same_wherever_pieces_are_cut(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, and those that are large and stay in pieces."""
    monkeypatch.setattr("hpcrl.rollouts.engines.sse._LARGE_BYTES", large)
    stream = (
        b"data: one\n\n: a comment\n\ndata: two\nlines\n\ndata: \n\nevent: other\n\ndata: three\n\ndata: [DONE]\n\n"
    )
    wanted = [b"one", b"two\nlines", b"", b"three"]
    rng = random.Random(0)
    cuts = [[*range(len(stream) + 1)], [0, len(stream)]]
    cuts += [sorted({0, len(stream), *(rng.randrange(len(stream)) for _ in range(9))}) for _ in range(300)]
    for places in cuts:
        splitter = EventSplitter()
        pieces = [stream[a:b] for a, b in pairwise(places)]
        events = [event for piece in pieces for event in splitter.feed(piece)]
        assert all(isinstance(event, bytes) for event in events) or large == 8
        found = [bytes(event.joined()) if isinstance(event, Pieces) else event for event in events]
        assert [data for data in found if data != b"[DONE]"] == wanted, places


def test_an_event_that_has_not_ended_is_none() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: half of") == []
    assert splitter.feed(b" it\n") == []
    assert splitter.feed(b"\ndata: more") == [b"half of it"]


def seconds(*, events: int, pieces: int) -> float:
    """CPU time to split ``events`` of ``pieces`` each."""
    splitter = EventSplitter()
    began = time.process_time()
    for _ in range(events):
        splitter.feed(b"data: ")
        for _ in range(pieces):
            splitter.feed(PIECE)
        (event,) = splitter.feed(b"\n\n")
        assert len(event) == pieces * len(PIECE)
    return time.process_time() - began


def test_a_large_event_costs_no_more_than_many_small_ones() -> None:
    """The same bytes in the same pieces. Copying all with each piece would cost a hundred times as much."""
    few = min(seconds(events=1, pieces=256) for _ in range(3))
    many = min(seconds(events=256, pieces=1) for _ in range(3))
    assert few < 10 * many + 0.02, (few, many)


@pytest.mark.parametrize("size", [1, 7])
def test_many_small_events_in_one_piece(size: int) -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: " + b"y" * size + b"\n\n" + b"data: z\n\n" * 20000)[1:] == [b"z"] * 20000
