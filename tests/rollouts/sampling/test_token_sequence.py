"""Tokens of a conversation that outgrows its arrays, several times over."""

from __future__ import annotations

import numpy as np

from hpcrl.rollouts.core.token_sequence import TokenSequence


def test_nothing_is_lost_when_arrays_grow() -> None:
    sequence, ids, sampled, logprobs, versions = TokenSequence(), [], [], [], []
    random = np.random.default_rng(0)
    for turn in range(40):
        said = random.integers(0, 2**31 - 1, 97, dtype=np.int32)
        answer = random.integers(0, 2**31 - 1, 211, dtype=np.int32)
        of_answer = -random.random(211, np.float32)
        sequence.append_said(said)
        sequence.append_sampled(answer, of_answer, turn + 1)
        ids += [*said, *answer]
        sampled += [0] * 97 + [1] * 211
        logprobs += [0.0] * 97 + [*of_answer]
        versions += [0] * 97 + [turn + 1] * 211
    found = sequence.arrays(len(sequence))
    for array, wanted, dtype in zip(
        found, (ids, sampled, logprobs, versions), (np.int32, np.uint8, np.float32, np.int32), strict=True
    ):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, np.array(wanted, dtype))
    assert len(sequence) == sequence.end_of_sampled() == 40 * 308
