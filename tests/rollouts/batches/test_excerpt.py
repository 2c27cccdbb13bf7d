"""The ends of long texts are those of the whole text, and cost what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
