"""Blocks of KV that engines send each other: what is not whole, or not what was asked for, is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrl.inference.embedded.engine.blocks import block_hash, root_hash
from hpcrl.inference.embedded.kv.sealing import KEY_BYTES, BlockFormat

FORM = BlockFormat("bfloat16 16 keys0:512", 24)
KEYS = [bytes([number]) * KEY_BYTES for number in range(3)]
BLOCKS = [bytes([100 + number]) * FORM.block_bytes for number in range(3)]
SENT = b"".join(FORM.seal(key, block) for key, block in zip(KEYS, BLOCKS, strict=True))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_first_blocks_that_were_asked_for_are_opened(count: int) -> None:
    data = SENT[: count * FORM.sealed_bytes]
    assert FORM.open(KEYS, data) == BLOCKS[:count]
    assert FORM.open(KEYS, memoryview(data)) == BLOCKS[:count]


def test_a_block_on_its_way_has_a_seal_of_sixteen_bytes() -> None:
    assert FORM.sealed_bytes == 24 + 16
    assert len(FORM.seal(KEYS[0], BLOCKS[0])) == FORM.sealed_bytes
    assert FORM.seal(KEYS[0], BLOCKS[0]).startswith(BLOCKS[0])


def test_a_block_is_named_by_a_whole_hash() -> None:
    assert len(root_hash("7")) == len(block_hash(root_hash(None), b"tokens")) == KEY_BYTES


def test_more_blocks_than_were_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{3 * 40} bytes are not at most 2 whole blocks of 40 bytes"):
        FORM.open(KEYS[:2], SENT)
    with pytest.raises(ValueError, match="not at most 0 whole blocks"):
        FORM.open([], SENT[:40])


@pytest.mark.parametrize("size", [1, 39, 41, 79, 119, 121])
def test_blocks_that_are_cut_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes are not at most 3 whole blocks"):
        FORM.open(KEYS, (SENT + b"x")[:size])


@pytest.mark.parametrize("place", [0, 23, 24, 39, 40, 79, 80, 119])
def test_one_wrong_bit_anywhere_is_seen_and_its_block_named(place: int) -> None:
    damaged = bytearray(SENT)
    damaged[place] ^= 1
    with pytest.raises(ValueError, match=f"block {place // 40} of 3 is damaged"):
        FORM.open(KEYS, bytes(damaged))


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        (lambda: [KEYS[1], KEYS[0], KEYS[2]], FORM),
        (lambda: KEYS, FORM._replace(layout="float16 16 keys0:512")),
    ],
)
def test_blocks_of_other_tokens_or_of_another_layout_are_refused(
    keys: Callable[[], list[bytes]], form: BlockFormat
) -> None:
    with pytest.raises(ValueError, match="block 0 of 3 is damaged, or not the one that was asked for"):
        form.open(keys(), SENT)
