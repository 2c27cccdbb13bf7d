"""Answer in progress: tokens sampled before an engine was lost are kept, and another engine continues from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.core.prompts import EncodedTokens, PromptTokens
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.core.token_sequence import TokenSequence
from hpcrl.rollouts.engines.client import EngineProtocolError, Generation, SamplingParams
from hpcrl.rollouts.engines.rows import Rows, join_rows, rows_bytes


class PartialGeneration:
    """Answer collected over all attempts to get it.

    An engine reports only at the end of an answer which versions sampled it. In an answer without an end each token
    gets the version that was served when the tokens before it arrived: the oldest possible one.

    Experts of kept tokens are those of the engine that sampled them, where it sent them. Otherwise the next engine
    returns those that it chose when it recomputed these tokens.

    Attributes
    ----------
    tokens:
        Tokens kept of failed attempts.
    wants_rows:
        Whether rows of experts are wanted, where the parameters ask for them.
    """

    def __init__(self, prompt: PromptTokens, params: SamplingParams, *, rows: bool = True) -> None:
        self._prompt, self._params, self.wants_rows = prompt, params, rows
        self.tokens = TokenSequence()
        self._kept: list[Rows] = []
        self._part = TokenSequence()
        self._rows: list[Rows] = []
        self._served: Callable[[], int] = lambda: 0
        self._version = 0

    def request(self, served: Callable[[], int]) -> tuple[PromptTokens, SamplingParams]:
        """Return the tokens and parameters of the next attempt.

        It has a seed of its own: the same one would sample with noise that the kept tokens depend on.

        Parameters
        ----------
        served:
            Says which version the engine serves.
        """
        self._part = TokenSequence()
        self._rows.clear()
        self._served, self._version = served, served()
        if not len(self.tokens):
            return self._prompt, self._params
        kept, start = len(self.tokens), self._next_row()
        params = msgspec.structs.replace(
            self._params,
            max_tokens=self._params.max_tokens - kept,
            seed=stable_hash("rest of an answer", self._params.seed, kept),
            routed_experts_prompt_start=start,
        )
        token_ids = self.tokens.arrays(kept)[0].tolist()
        if isinstance(self._prompt, EncodedTokens):
            return self._prompt.followed_by(token_ids), params
        return [*self._prompt, *token_ids], params

    def wanted_rows(self, sampled: int) -> int:
        """Return how many rows of routed experts this attempt requested for ``sampled`` tokens; 0: none."""
        start = self._next_row()
        if not self.wants_rows or start is msgspec.UNSET:
            return 0
        return len(self._prompt) + len(self.tokens) + sampled - 1 - start

    def receive(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], experts: Rows | None = None) -> None:
        """Record tokens that arrived before the end of the answer, and their routed experts where included."""
        self._part.append_sampled(token_ids, logprobs, self._version)
        if experts is not None:
            self._rows.append(experts)
        self._version = max(self._version, self._served())

    def keep(self) -> int:
        """Continue from what arrived in the failed attempt; return the number of these tokens."""
        # at least one token is requested, because the end of an answer comes with its last token
        count = min(len(self._part), self._params.max_tokens - 1 - len(self.tokens))
        token_ids, _, logprobs, versions = self._part.arrays(count)
        self.tokens.append_sampled(token_ids, logprobs, versions)
        self._part = TokenSequence()
        self._keep_experts()
        self._rows.clear()
        return count

    def row_bytes(self, rest: Generation) -> int:
        """Return how many bytes of routed experts `whole` has to decode."""
        return rows_bytes([*self._kept, rest.experts]) if self._kept else 0

    def whole(self, rest: Generation) -> Generation:
        """Return the whole answer, of which the last engine has sampled ``rest``.

        Raises
        ------
        EngineProtocolError
            The routed experts cannot be read.
        """
        if not len(self.tokens):
            return rest
        token_ids, _, logprobs, versions = self.tokens.arrays(len(self.tokens))
        return Generation(
            token_ids=np.concatenate([token_ids, rest.token_ids]),
            logprobs=np.concatenate([logprobs, rest.logprobs]),
            versions=np.concatenate([versions, rest.versions]),
            finish_reason=rest.finish_reason,
            # without the rows of the rest, the tokens of the kept rows are undefined
            experts=None if rest.experts is None else _joined([*self._kept, rest.experts]),
        )

    def _next_row(self) -> int | msgspec.UnsetType:
        """Return the first token of the next request whose routed experts are wanted."""
        start = self._params.routed_experts_prompt_start
        if start is msgspec.UNSET:
            return start
        return start + sum(map(len, self._kept))

    def _keep_experts(self) -> None:
        """Keep the rows up to the last kept token, which the next engine computes in any case."""
        start = self._params.routed_experts_prompt_start
        if start is msgspec.UNSET or not len(self.tokens):
            return
        self._kept += self._rows
        left = len(self._prompt) + len(self.tokens) - 1 - start
        for number, piece in enumerate(self._kept):
            if len(piece) > left:
                whole = _joined([piece])
                assert whole is not None
                self._kept[number:] = [whole[:left]]
                break
            left -= len(piece)


def _joined(parts: Sequence[Rows | None]) -> NDArray[Any] | None:
    try:
        return join_rows(parts)
    except ValueError as error:
        raise EngineProtocolError(f"routed experts of an engine that was lost cannot be read: {error}") from error
