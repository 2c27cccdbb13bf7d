"""The arrays and the text of a conversation that grows, against plain lists."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from hpcrl.rollouts.core.token_sequence import TokenSequence


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.mark.parametrize("seed", range(10))
def test_what_was_appended_is_there_however_long_it_grows(seed: int) -> None:
    """In pieces of nothing to thousands; what was there is moved more than once."""
    rng = random.Random(seed)
    tokens, wanted = TokenSequence(), []
    for number in range(24):
        piece = [rng.randrange(1 << 20) for _ in range(rng.choice([0, 1, 7, 300, 1024, 3000]))]
        if number % 2:
            logprobs = [-rng.random() for _ in piece]
            versions = [rng.randrange(9) for _ in piece]
            tokens.append_sampled(ids(*piece), logprobs, versions)
            wanted += [
                (token, 1, logprob, version) for token, logprob, version in zip(piece, logprobs, versions, strict=True)
            ]
        else:
            tokens.append_said(ids(*piece))
            wanted += [(token, 0, 0.0, 0) for token in piece]
        assert len(tokens) == len(wanted)
        if rng.random() < 0.5:  # a request in between
            assert msgspec.json.decode(bytes(tokens.encoded.raw)) == [entry[0] for entry in wanted]
    for end in (0, 1, len(wanted) // 2, len(wanted)):
        found = [array.tolist() for array in tokens.arrays(end)]
        assert found[0] == [entry[0] for entry in wanted[:end]]
        assert found[1] == [entry[1] for entry in wanted[:end]]
        assert found[2] == np.asarray([entry[2] for entry in wanted[:end]], np.float32).tolist()
        assert found[3] == [entry[3] for entry in wanted[:end]]
    assert [array.dtype for array in tokens.arrays(1)] == [np.int32, np.uint8, np.float32, np.int32]


def test_what_was_handed_out_stays_as_it_was() -> None:
    tokens = TokenSequence()
    tokens.append_said(ids(5, 6))
    first, request = tokens.arrays(2), tokens.encoded
    tokens.append_sampled(ids(7), -0.5, 3)
    assert bytes(request.raw) == b"[5,6]"
    assert bytes(tokens.encoded.raw) == b"[5,6,7]"
    assert bytes(request.raw) == b"[5,6]"
    tokens.arrays(3)[0][:] = 0
    assert first[0].tolist() == [5, 6]
    assert tokens.arrays(3)[0].tolist() == [5, 6, 7]


def test_one_number_stands_for_all_tokens_of_a_reply() -> None:
    tokens = TokenSequence()
    assert tokens.end_of_sampled() == 0
    tokens.append_said(ids(1, 2))
    assert tokens.end_of_sampled() == 0
    tokens.append_sampled(ids(3, 4), -0.25, 9)
    tokens.append_said(ids(5))
    assert tokens.end_of_sampled() == 4
    assert [array.tolist() for array in tokens.arrays(4)] == [
        [1, 2, 3, 4],
        [0, 0, 1, 1],
        [0.0, 0.0, -0.25, -0.25],
        [0, 0, 9, 9],
    ]
