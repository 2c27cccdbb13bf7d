"""Maximum values of an engine's answer: its size, its tokens, its log-probabilities, its rows of experts.

A faulty engine, a proxy or damaged memory may send anything. Each number is compared with its bounds before it is
used to allocate memory, and before it is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTROL_BYTES = 64 << 20
"""Maximum size of an answer that has neither tokens nor rows of experts."""
MAX_VERSION = 2**31 - 1
"""Maximum number of a policy version: versions of tokens are int32."""
_LOWEST_LOGPROB = -9999.0
"""Number that engines write for minus infinity, which JSON cannot represent. Tokens of probability 0 are never sampled.
"""
_HIGHEST_LOGPROB = 1e-3
"""Maximum log-probability: a probability is at most 1, and the margin exceeds the rounding of a float32 log-softmax."""
_FIXED_BYTES = 1 << 20
_TOKEN_BYTES = 4096
"""Maximum size of one token with its log-probability as text; JSON of vLLM takes some hundred bytes."""
_ROW_BYTES = 1 << 16
"""Maximum size in bytes of a token's row of experts where the model is unknown."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Bounds of the answers of an engine.

    Attributes
    ----------
    vocab_size:
        Vocabulary size of the model; None where it is unknown.
    routes:
        ``(layers, experts per token, experts to choose from)`` of the model; None where they are not known.
    """

    vocab_size: int | None = None
    routes: tuple[int, int, int] | None = None

    def answer_bytes(self, *, tokens: int, rows: int) -> int:
        """Return the maximum size of an answer with ``tokens`` tokens and ``rows`` rows of experts, in any encoding."""
        return _FIXED_BYTES + tokens * _TOKEN_BYTES + self.rows_bytes(rows)

    def rows_bytes(self, rows: int) -> int:
        """Return the maximum size of ``rows`` rows of experts, as base64 of eight-byte numbers."""
        row = _ROW_BYTES if self.routes is None else self.routes[0] * self.routes[1] * 11
        return _FIXED_BYTES + rows * row

    def checked(
        self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return tokens ``[T]`` and their log-probabilities ``[L]`` in the types that are kept.

        Raises
        ------
        ValueError
            A token is outside of the vocabulary, or a log-probability is none of a sampled token.
        """
        end = 2**31 if self.vocab_size is None else self.vocab_size
        if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < end:
            wrong = int(token_ids.min()) if int(token_ids.min()) < 0 else int(token_ids.max())
            raise ValueError(f"token {wrong} is outside of the vocabulary of {end}")
        check_logprobs(logprobs)
        return token_ids, logprobs.astype(np.float32)

    def check_rows(self, rows: NDArray[Any]) -> None:
        """Refuse rows ``[rows, layers, experts per token]`` that the model cannot have chosen (ValueError)."""
        if self.routes is None:
            return
        layers, width, experts = self.routes
        if rows.shape[1:] != (layers, width):
            found = "x".join(map(str, rows.shape[1:]))
            raise ValueError(
                f"routed experts are of {found} (layers x experts per token), the model has {layers}x{width}"
            )
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < experts:
            wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise ValueError(f"expert {wrong} is not one of the model's {experts}")


def check_logprobs(logprobs: NDArray[np.float64]) -> None:
    """Refuse log-probabilities that no token of a working model has (ValueError)."""
    # a comparison with NaN is false
    good = (logprobs > _LOWEST_LOGPROB) & (logprobs <= _HIGHEST_LOGPROB)
    if not good.all():
        wrong = float(logprobs[~good][0])
        raise ValueError(
            f"a log-probability is {wrong:g}, and that of a token is a finite number above {_LOWEST_LOGPROB:g} and at "
            "most 0: the engine's weights or its answer are damaged"
        )
