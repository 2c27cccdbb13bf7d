"""Text from tokens as they come: nothing is shown before it is certain, stop strings end where they begin."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from hpcrl.inference.embedded.serving.text import TextStream
from hpcrl.models.tokenizer import ChatTokenizer


class Bytes:
    """A tokenizer whose tokens are bytes: characters span tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


TOKENIZER = cast(ChatTokenizer, Bytes())
TEXT = "naïve ☕ 日本語 — 🎉 fin"


def pieces(text: str, seed: int) -> list[list[int]]:
    data, rng, out = list(text.encode()), random.Random(seed), []
    while data:
        n = rng.randint(1, 3)
        out.append(data[:n])
        data = data[n:]
    return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stop", [[], ["zzz", "no such"]])
def test_pieces_are_the_whole(seed: int, stop: list[str]) -> None:
    stream, shown = TextStream(TOKENIZER, stop=stop), ""
    for piece in pieces(TEXT, seed):
        assert stream.push(piece) == len(piece)
        shown += stream.take(final=False)
        assert "\ufffd" not in shown
        assert TEXT.startswith(shown)
    assert shown + stream.take(final=True) == TEXT


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    stream.push("日".encode()[:2])
    assert stream.take(final=False) == ""
    assert stream.take(final=True) == "\ufffd"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("stop", "kept", "by"), [
    (["本"], "naïve ☕ 日", "本"), (["語 —", "☕"], "naïve ", "☕"), (["n", "na"], "", "n"),
    ([" fin"], TEXT[:-4], " fin"),
])  # fmt: skip
def test_stop_strings(seed: int, stop: list[str], kept: str, by: str) -> None:
    for include in (False, True):
        stream, shown, taken = TextStream(TOKENIZER, stop=stop, include_stop=include), "", 0
        for piece in pieces(TEXT, seed):
            taken += stream.push(piece)
            shown += stream.take(final=False)
            assert (kept + by).startswith(shown)
            if stream.has_stopped():
                break
        assert shown + stream.take(final=True) == (kept + by if include else kept)
        assert stream.stopped_by == by
        # the token that completes the stop string is the last
        assert taken == len((kept + by).encode())


def test_stop_strings_wait_for_the_minimum() -> None:
    stream = TextStream(TOKENIZER, stop=["a"], min_tokens=4)
    assert stream.push(list(b"abcdefa")) == 7
    assert stream.take(final=True) == "abcdef"


def test_text_held_back_is_never_lost() -> None:
    stream: Any = TextStream(TOKENIZER, stop=["abcdef"])
    stream.push(list(b"xxabcde"))
    assert stream.take(final=False) == "xx"
    stream.push(list(b"g"))
    assert stream.take(final=False) + stream.take(final=True) == "abcdeg"
