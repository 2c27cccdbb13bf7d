"""Sequences of a rollout as they grow: numbers, shared prefixes, rows of experts, and what a ledger makes of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.sequences import own_tokens, sequence_lengths, turn_places
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout, Turn, decode_rollout, encode_rollout
from hpcrl.rollouts.sampling.branches import Branches, TooManyBranchesError
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings

LAYERS, WIDTH = 2, 2
ROUTES = RoutedExpertsSettings(LAYERS, WIDTH, 200)


def ids(text: str) -> NDArray[np.int32]:
    return np.array([ord(letter) for letter in text], np.int32)


def rows_of(text: str) -> NDArray[np.uint8]:
    """Rows by token and position, none of them zero."""
    first = np.array([ord(letter) + at for at, letter in enumerate(text)], np.int64)
    return (first[:, None, None] % 150 + 1 + np.arange(LAYERS)[:, None] + 10 * np.arange(WIDTH)).astype(np.uint8)


class Tree:
    """Branches whose tokens are letters; sampled ones are told apart by their log-probabilities."""

    def __init__(self, *, routes: RoutedExpertsSettings | None = None, store: KnownRows | None = None) -> None:
        self.branches = Branches(max_branches=4, routes=routes, store=store)

    def text(self, sequence: int = -1) -> str:
        return "".join(map(chr, self.branches.tokens(sequence).token_ids.tolist()))

    def say(self, text: str, sequence: int = -1, *, rows: bool = True) -> None:
        own = self.branches.rows(sequence)
        experts = None
        if own is not None and rows:
            prompt = self.text(sequence)
            experts = own.examined(rows_of(prompt + text)[own.start(len(prompt)) : -1], None)
        turn = self.branches.turn(sampled=len(text), wait_s=1.0, reply_s=2.0, sequence=sequence)
        logprobs = np.full(len(text), -0.5, np.float32)
        self.branches.sampled(turn, ids(text), logprobs, np.full(len(text), 4, np.int32), experts=experts)

    async def rollout(self) -> Rollout:
        found = await self.branches.rollout(
            2, reward=1.0, parts={"exact": 1.0}, seconds=3.0, ended_s=9.0, context_version=3
        )
        assert found is not None
        return found


def texts(rollout: Rollout) -> list[str]:
    return ["".join(map(chr, part.tolist())) for part in rollout.sequences]


def marked(rollout: Rollout) -> list[str]:
    """Sequences with what was sampled in capitals."""
    parts = np.split(rollout.sampled, np.cumsum(rollout.lengths)[:-1])
    return [
        "".join(letter.upper() if flag else letter for letter, flag in zip(text, flags, strict=True))
        for text, flags in zip(texts(rollout), parts, strict=True)
    ]


async def test_a_conversation_that_only_grows_is_one_sequence() -> None:
    tree = Tree()
    tree.branches.begin(ids("ask"))
    tree.say("one")
    tree.branches.said(ids("more"))
    tree.say("two")
    tree.branches.said(ids("ignored"))
    rollout = await tree.rollout()
    assert (marked(rollout), rollout.starts, rollout.shared) == (["askONEmoreTWO"], None, None)
    assert [(turn.said, turn.sampled) for turn in rollout.turns] == [(3, 3), (4, 3)]


async def test_sequences_share_what_is_equal_and_what_was_sampled_counts_once() -> None:
    tree = Tree()
    assert tree.branches.begin(ids("ask")) == 0
    tree.say("one")
    # the history without the end of the answer; then the longest beginning is that of the second sequence
    assert tree.branches.begin(ids("askon-but")) == 1
    tree.say("two")
    assert tree.branches.begin(ids("askon-bye")) == 2
    tree.say("six")
    tree.branches.said(ids("go"), 1)
    # a sequence shares with its first turn alone, which is what a turn that was kept is compared with
    later = tree.branches.turn(sampled=3, wait_s=0.0, reply_s=0.0, sequence=1)
    assert (later.sequence, later.shared, later.said) == (1, 0, 2)
    tree.say("ten", 1)
    rollout = await tree.rollout()
    assert marked(rollout) == ["askONE", "askon-butTWOgoTEN", "askon-byeSIX"]
    assert rollout.starts is not None
    assert rollout.shared is not None
    assert (rollout.starts.tolist(), rollout.shared.tolist()) == ([0, 6, 23], [0, 5, 7])
    assert rollout.lengths == [6, 17, 12]
    assert (rollout.sampled_tokens, rollout.repeated_tokens) == (12, 12)
    assert np.all(rollout.logprobs == np.where(rollout.sampled, np.float32(-0.5), 0))
    assert np.all(rollout.versions == np.where(rollout.sampled, 4, 3))
    assert [(turn.sequence, turn.shared, turn.said) for turn in rollout.turns] == [
        (0, 0, 3),
        (1, 5, 4),
        (2, 7, 2),
        (1, 0, 2),
    ]
    letters = "".join(texts(rollout))
    places = turn_places(map(msgspec.structs.astuple, rollout.turns), rollout.starts)
    assert [letters[at.said : at.sampled] for at in places] == ["ask", "-but", "ye", "go"]
    assert [letters[at.sampled : at.end] for at in places] == ["one", "two", "six", "ten"]
    assert [at.begin for at in places] == [0, 6, 23, 6]
    own = own_tokens({"token_ids": rollout.token_ids, "starts": rollout.starts, "shared": rollout.shared})
    assert "".join(map(chr, own.tolist())) == "askone-buttwogotenyesix"
    assert rollout.last_token == ord("n")  # of the last turn


async def test_a_prompt_again_is_a_branch_of_which_only_the_prompt_is_shared() -> None:
    tree = Tree()
    for answer in ("one", "odd"):
        tree.branches.begin(ids("ask"))
        tree.say(answer)
    rollout = await tree.rollout()
    assert marked(rollout) == ["askONE", "askODD"]
    assert [(turn.said, turn.shared) for turn in rollout.turns] == [(3, 0), (0, 3)]


async def test_a_sequence_without_an_answer_is_left_out_and_others_share_what_is_kept() -> None:
    tree = Tree(routes=ROUTES)
    tree.branches.begin(ids("ask"))
    tree.say("one")
    tree.branches.said(ids("and"))  # no answer came
    tree.branches.begin(ids("asXlost"))  # nor here
    tree.branches.begin(ids("asXlonger"))
    tree.say("two")
    tree.branches.begin(ids("askoneandso"))
    tree.say("six")
    rollout = await tree.rollout()
    assert marked(rollout) == ["askONE", "asXlongerTWO", "askoneandsoSIX"]
    assert rollout.shared is not None
    assert rollout.shared.tolist() == [0, 2, 6]
    assert [(turn.sequence, turn.said, turn.shared) for turn in rollout.turns] == [(0, 3, 0), (1, 7, 2), (2, 5, 6)]
    assert_rows(rollout, unknown=[5, 5 + 12, 5 + 12 + 14])


def assert_rows(rollout: Rollout, *, unknown: list[int]) -> None:
    assert rollout.routed_experts is not None
    known = rollout.routed_experts.known
    assert np.flatnonzero(~known).tolist() == unknown
    expected = np.concatenate([rows_of(text) for text in texts(rollout)])
    assert np.array_equal(rollout.routed_experts.experts[known], expected[known])


async def test_a_request_of_a_branch_asks_for_rows_from_where_there_are_none() -> None:
    counters = Counters()
    store = KnownRows(counters, block=4, limit_bytes=1 << 20, keep_versions=1)
    tree = Tree(routes=ROUTES, store=store)
    tree.branches.begin(ids("question"))
    tree.say("answer")
    tree.branches.begin(ids("questionanswermore"))
    rows = tree.branches.rows()
    assert rows is not None
    # of the last sampled token of before nobody has said it
    assert rows.start(18) == 13
    tree.say("yes")
    tree.branches.begin(ids("questions"))
    rows = tree.branches.rows()
    assert rows is not None
    assert rows.start(9) == 8
    tree.say("no", rows=False)
    rollout = await tree.rollout()
    assert marked(rollout) == ["questionANSWER", "questionanswermoreYES", "questionsNO"]
    # what nobody said stays unknown, and is no expert 0
    assert_rows(rollout, unknown=[13, 14 + 20, 35 + 8, 35 + 9, 35 + 10])
    # each token once: a row that was copied is of the answer that had it first, and last tokens are not counted
    assert (counters.rows_answer, counters.rows_shared_prefix, counters.rows_unknown) == (13 + 6, 0, 2)


async def test_rows_from_a_store_are_copied_into_branches() -> None:
    counters = Counters()
    store = KnownRows(counters, block=4, limit_bytes=1 << 20, keep_versions=1)
    pooled = RoutedExpertsSettings(LAYERS, WIDTH, 200, gaps=True)
    opening = (3, ids("question"))
    whole, part = Tree(routes=pooled, store=store), Tree(routes=pooled, store=store)
    for tree, missing in ((whole, 0), (part, 4)):
        tree.branches.begin(ids("question"))
        answer = rows_of("questionanswer")[:-1].copy()
        answer[:missing] = 0
        rows = tree.branches.rows()
        assert rows is not None
        turn = tree.branches.turn(sampled=6, wait_s=0.0, reply_s=0.0)
        versions = np.full(6, 3, np.int32)
        experts = rows.examined(answer, opening)
        tree.branches.sampled(turn, ids("answer"), np.zeros(6, np.float32), versions, experts=experts)
    part.branches.begin(ids("questionable"))
    part.say("yes")
    await whole.rollout()
    assert_rows(await part.rollout(), unknown=[13, 14 + 14])
    assert counters.rows_shared_prefix == 4


def test_there_are_no_more_sequences_than_there_may_be() -> None:
    tree = Tree()
    for number in range(4):
        tree.branches.begin(ids(f"ask{number}"))
    with pytest.raises(TooManyBranchesError, match=r"more than 4 sequences \(rollouts\.max_branches\)"):
        tree.branches.begin(ids("again"))


# -- in the ledger


async def branched(**settings: Any) -> Rollout:
    tree = Tree(**settings)
    tree.branches.begin(ids("ask"))
    tree.say("one")
    tree.branches.begin(ids("askon-but"))
    tree.say("two")
    return await tree.rollout()


def block_of(rollout: Rollout) -> bytes:
    return b"".join(bytes(piece) for piece in encode_columns(*encode_rollout(rollout)))


@pytest.mark.parametrize("routes", [None, ROUTES])
async def test_a_block_of_columns_gives_the_rollout_back(routes: RoutedExpertsSettings | None) -> None:
    rollout = await branched(routes=routes)
    found = decode_rollout(block_of(rollout))
    assert found.turns == rollout.turns
    assert marked(found) == ["askONE", "askon-butTWO"]
    for name in ("starts", "shared", "token_ids", "sampled", "logprobs", "versions"):
        assert np.array_equal(getattr(found, name), getattr(rollout, name)), name
    if routes is not None:
        assert_rows(found, unknown=[5, 17])


class _Before(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier versions wrote beside arrays."""

    member: int
    reward: float
    parts: dict[str, float]
    seconds: float
    ended_s: float
    turns: list[tuple[int, int, float, float]]


def test_a_record_of_an_earlier_version_has_one_sequence() -> None:
    about = _Before(member=1, reward=0.5, parts={}, seconds=1.0, ended_s=2.0, turns=[(3, 3, 0.5, 0.25)])
    sampled = np.array([0, 0, 0, 1, 1, 1], np.uint8)
    arrays = {
        "token_ids": ids("askone"),
        "sampled": sampled,
        "logprobs": sampled.astype(np.float32),
        "versions": np.full(6, 3, np.int32),
    }
    found = decode_rollout(b"".join(map(bytes, encode_columns(msgspec.msgpack.encode(about), arrays))))
    assert (marked(found), found.starts, found.repeated_tokens) == (["askONE"], None, 0)
    assert found.turns == [Turn(3, 3, 0.5, 0.25, 0, 0)]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"starts": np.array([0, 30], np.int32)}, r"do not cut 18 tokens into sequences"),
        ({"starts": np.array([1, 6], np.int32)}, r"do not cut 18 tokens into sequences"),
        ({"starts": np.array([0.0, 6.0])}, r"whole numbers"),
        ({"shared": np.array([0], np.int32)}, r"does not say what they share"),
        ({"shared": None}, r"does not say what they share"),
    ],
)
async def test_a_record_whose_sequences_are_none_is_damaged(changes: dict[str, Any], what: str) -> None:
    about, arrays = encode_rollout(await branched())
    changed = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
    with pytest.raises(ValueError, match=what):
        decode_rollout(b"".join(map(bytes, encode_columns(about, changed))))


def test_turns_of_a_sequence_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="a turn is of sequence 2, and there are 2"):
        turn_places([(1, 1, 0.0, 0.0, 2, 0)], np.array([0, 4]))
    assert sequence_lengths(None, 7) == [7]
