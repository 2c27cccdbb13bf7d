"""The ends of long texts are those of the whole text, and cost what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.batches.excerpt import excerpt

KEPT = 400


def by_bytes() -> Tokenizer:
    """Each byte is a token, as what GPT-2's tokenizers have not merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def by_fallback() -> Tokenizer:
    """Letters are tokens, everything else is bytes that are decoded as a whole, as SentencePiece's do."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefghijklmnop"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def text_of(seed: int, length: int) -> str:
    numbers = np.random.default_rng(seed)
    return "".join(numbers.choice(list("aabcdefghiéß語🦜"), length))


@pytest.mark.parametrize("make", [by_bytes, by_fallback])
@pytest.mark.parametrize(
    "text", [*(text_of(seed, 3000) for seed in range(40)), "🦜" * 2000, f"a{'🦜' * 2000}a", "é" * 2000, "", "a" * KEPT]
)
def test_ends_are_those_of_the_whole(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    token_ids = np.asarray(tokenizer.encode(text).ids, np.int32)
    whole = tokenizer.decode(token_ids.tolist())
    wanted = whole if len(whole) <= KEPT else f"{whole[: KEPT // 2]} … {whole[-KEPT // 2 :]}"
    assert excerpt(token_ids, tokenizer.decode, KEPT) == wanted


@pytest.mark.parametrize("tokens", [10_000, 100_000, 1_000_000])
def test_it_costs_what_is_kept(tokens: int) -> None:
    given = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal given
        given += len(token_ids)
        return "".join(chr(97 + number % 26) for number in token_ids)

    token_ids = np.arange(tokens, dtype=np.int32)
    assert len(excerpt(token_ids, decode, KEPT)) == KEPT + 3
    assert given <= 4 * KEPT


@pytest.mark.parametrize("letters", [(1, 4), (2, 5), (11, 16), (3, 4), (1, 1), (3, 1)])
def test_no_more_is_decoded_than_four_times_what_is_kept(letters: tuple[int, int]) -> None:
    """Of tokens that have so many letters, one with another, of so many tokens."""
    given = 0
    written, of = letters

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal given
        given += len(token_ids)
        return "a" * (len(token_ids) * written // of)

    assert excerpt(np.zeros(50_000, np.int32), decode, KEPT) == f"{'a' * (KEPT // 2)} … {'a' * (KEPT // 2)}"
    needed = (KEPT // 2 + 8) * of / written  # with what is not looked at
    assert given <= 2 * 4 * max(needed, KEPT // 4)


@pytest.mark.parametrize("tokens", [60, 5000])
def test_bytes_that_are_no_text_end_too(tokens: int) -> None:
    """No cut reads better than another."""
    token_ids = np.full(tokens, 200, np.int32)
    whole = by_fallback().decode(token_ids.tolist())
    assert set(whole) == {"\ufffd"}
    found = excerpt(token_ids, by_fallback().decode, KEPT)
    assert found == (whole if len(whole) <= KEPT else f"{whole[: KEPT // 2]} … {whole[-KEPT // 2 :]}")


def test_columns_that_cannot_be_read_are_no_reason_to_fail(tmp_path: Path) -> None:
    columns = RolloutColumns(tmp_path, lambda: None, decode=by_bytes().decode)
    said = columns.text(PayloadPlace("nowhere", 0, 8, ""))
    assert said.startswith("(cannot be read: ")
    assert "nowhere" in said
    assert columns.location is None
